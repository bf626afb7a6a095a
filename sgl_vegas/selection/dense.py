"""No sparsity: drafts attend to everything. The upper bound of acceptance, and a debugging aid."""

from __future__ import annotations

import torch

from sgl_vegas.selection.policy import SelectionPolicy


class DensePolicy(SelectionPolicy):
    makes_tables = False

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        return torch.arange(seq_len, device=device)
