"""The attention of drafts and of verify passes: one interface, CUDA kernels or plain PyTorch."""

from __future__ import annotations

from typing import Protocol

import torch

# K and V of the queries' own positions, (num_queries, num_kv_heads, head_dim) each; None where the
# model has written them into the caches.
NewKV = tuple[torch.Tensor, torch.Tensor] | None


class AttentionKernels(Protocol):
    """Attention over a paged KV pool with page size 1, and the making of tables.

    Each `begin_*` is called once a forward pass, the method named like it once a layer after it.
    `rows` (batch_size,) int64 are request-pool rows, `seq_lens` (batch_size,) int64 committed
    lengths, both on the device; caches are (num_slots, num_kv_heads, head_dim).

    Attributes:
        name: for the log.
        capturable: whether all of it can be captured in CUDA graphs.
    """

    name: str
    capturable: bool

    def begin_draft(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, step: int, dense: bool
    ) -> None:
        """`step`: the draft is at position seq_len + step. `dense`: don't use the tables."""
        ...

    def draft(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Write new_kv into the caches and attend. q (batch_size, num_heads, head_dim), one query a
        request; returns q's shape and dtype."""
        ...

    def begin_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None: ...

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Write new_kv into the caches and attend: q (batch_size * num_draft_tokens, num_heads,
        head_dim), causal, over all KV. Makes the layer's tables from the first and the last query.
        Returns q's shape and dtype."""
        ...

    def accepted(self, num_correct_drafts: torch.Tensor) -> None:
        """Called after a verify pass whose policy collects the last accepted query:
        (batch_size,) int64, how many drafts of each request were accepted."""
        ...

    def written(self, layer: int, slots: torch.Tensor, k_cache: torch.Tensor) -> None:
        """Called for the KV of a prefill, `slots` (n,) int64, when SGLang has written it."""
        ...

    def begin_prefill(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """`seq_lens`: KV lengths after the prefill."""
        ...

    def prefill(
        self,
        layer: int,
        last_queries: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> None:
        """Make the layer's first tables from each prompt's last query, (batch_size, num_heads,
        head_dim). The prefill's own attention is SGLang's."""
        ...
