"""Vegas: rank by the attention of the verify pass's first and last query (paper section 3.2)."""

from __future__ import annotations

import torch

from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.selection.scoring import rank_values


class VegasPolicy(SelectionPolicy):
    """Collect-2-Query: one list a layer, shared by its heads."""

    needs_scores = True

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        budget = self.config.budget(seq_len)
        if budget == seq_len:
            return torch.arange(seq_len, device=device)
        assert scores is not None
        values = rank_values(scores, seq_len, self.config.score_mode)
        return torch.topk(values, budget, sorted=False).indices
