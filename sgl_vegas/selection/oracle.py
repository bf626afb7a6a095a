"""Exact top-k of every draft step's own query: what the budget could do. For research only."""

from __future__ import annotations

import functools

import torch

from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import SelectionPolicy


class OraclePolicy(SelectionPolicy):
    """One list a KV head, by the mean softmax weight over the head's group of query heads.

    Reads all keys at every draft step, which would cost more than it saves; its reads are counted
    as nothing, so that it bounds what any policy can reach with as many entries.
    """

    makes_tables = False
    reselects = True

    def __init__(self, config: VegasConfig) -> None:
        super().__init__(config)
        # The same for all layers and steps of a round of drafts.
        self._limits_of = functools.lru_cache(maxsize=1)(self._limits)

    def select_step(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        seq_lens: tuple[int, ...],
        budgets: tuple[int, ...],
        tables: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        lens, limits = self._limits_of(seq_lens, budgets, q.device)
        hidden = torch.arange(keys.shape[1], device=q.device) >= lens
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(dtype).unflatten(1, (keys.shape[2], -1))
        logits = queries @ keys.to(dtype).permute(0, 2, 3, 1) * scale
        weights = logits.masked_fill_(hidden[:, None], float("-inf")).softmax(dim=-1).mean(dim=2)
        # Below any weight that underflowed to 0.
        weights = weights.masked_fill_(hidden, -1.0)
        chosen = weights.topk(max(budgets)).indices
        surplus = torch.arange(chosen.shape[-1], device=q.device) >= limits
        return chosen.masked_fill_(surplus, -1)

    def _limits(
        self, seq_lens: tuple[int, ...], budgets: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch_size, 1, 1) int64 each: lengths and budgets."""
        lens, limits = torch.tensor([seq_lens, budgets], device=device)[..., None, None]
        return lens, limits
