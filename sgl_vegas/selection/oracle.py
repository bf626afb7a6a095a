"""Exact top-k of every draft step's own query: what the budget could do. For research only."""

from __future__ import annotations

import torch

from sgl_vegas.attention.torch_reference import query_scores
from sgl_vegas.selection.policy import SelectionPolicy


class OraclePolicy(SelectionPolicy):
    """One list a KV head, by the mean softmax weight over the head's group of query heads.

    Reads all keys at every draft step, which would cost more than it saves; its reads are counted
    as nothing, so that it bounds what any policy can reach with as many entries.
    """

    makes_tables = False
    reselects = True

    def select_step(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        table: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        kv_len, num_kv_heads, _ = keys.shape
        visible = torch.tensor([kv_len], device=q.device)
        weights = query_scores(q[None], keys, visible, scale)[0].softmax(dim=-1)
        of_kv_heads = weights.view(num_kv_heads, -1, kv_len).mean(dim=1)
        return of_kv_heads.topk(self.config.budget(kv_len), sorted=False).indices
