"""The entries that a pass's queries give most weight: what vegas and its relatives share."""

from __future__ import annotations

import torch

from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.selection.scoring import rank_values


class RankedPolicy(SelectionPolicy):
    """One list a layer, shared by its heads: the top entries by the collected queries' ranking.

    Subclasses say which queries are collected; knobs are the budget's and `score_mode`. Unless one
    `reselects`, a draft step reads nothing but the list.
    """

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        size = self.table_size(seq_len)
        if size == seq_len:
            return torch.arange(seq_len, device=device)
        assert scores is not None
        values = rank_values(scores, seq_len, self.config.score_mode)
        return torch.topk(values, size, sorted=False).indices
