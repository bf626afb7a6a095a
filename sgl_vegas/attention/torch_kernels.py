"""The attention paths in PyTorch: any device, any policy; what the CUDA kernels stand in for."""

from __future__ import annotations

import torch

from sgl_vegas.attention.kernels import NewKV
from sgl_vegas.attention.torch_reference import query_scores, sparse_decode, verify_attention
from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.tables.request_tables import RequestTables


class TorchKernels:
    """One request at a time, with lengths on the host.

    Scores live for one layer and one request at a time; nothing of the size of batch x context is
    kept.
    """

    name = "torch"
    capturable = False

    def __init__(
        self,
        policy: SelectionPolicy,
        tables: RequestTables,
        req_to_token: torch.Tensor,
        num_draft_tokens: int,
    ) -> None:
        """Args:
        req_to_token: (num_rows, max_context_len) int32, KV slot of each position.
        """
        self._policy = policy
        self._tables = tables
        self._req_to_token = req_to_token
        self._num_draft_tokens = num_draft_tokens

    def begin_draft(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, step: int, dense: bool
    ) -> None:
        self._begin(rows, seq_lens)
        num_layers = self._tables.positions.shape[0]
        self._draft_slots = []
        for row, seq_len in zip(self._rows, self._seq_lens, strict=True):
            end = seq_len + step
            positions = (
                torch.arange(end + 1, device=rows.device).expand(num_layers, -1)
                if dense
                else self._tables.draft_positions(row, end)
            )
            self._draft_slots.append(self._req_to_token[row][positions])

    def draft(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        slots = [of_all_layers[layer] for of_all_layers in self._draft_slots]
        self._write([of_request[-1:] for of_request in slots], new_kv, k_cache, v_cache)
        return sparse_decode(q, k_cache, v_cache, slots, scale)

    def begin_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._begin(rows, seq_lens)

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        width = self._num_draft_tokens
        queries = q.unflatten(0, (-1, width))
        outputs = []
        slots = [
            self._req_to_token[row, : seq_len + width]
            for row, seq_len in zip(self._rows, self._seq_lens, strict=True)
        ]
        self._write([of_request[-width:] for of_request in slots], new_kv, k_cache, v_cache)
        for i, used in enumerate(slots):
            outputs.append(verify_attention(queries[i], k_cache[used], v_cache[used], scale))
        self.select(layer, queries[:, [0, -1]], k_cache, scale, num_verified=width)
        return torch.cat(outputs)

    def begin_prefill(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._begin(rows, seq_lens)
        self._tables.drop(rows)

    def prefill(
        self,
        layer: int,
        last_queries: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> None:
        self.select(layer, last_queries.unsqueeze(1), k_cache, scale, num_verified=0)

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        k_cache: torch.Tensor,
        scale: float,
        num_verified: int,
    ) -> None:
        """Make one layer's tables.

        Args:
            queries: (batch_size, num_queries, num_heads, head_dim): the prompt's last query after
                a prefill, the first and the last of a verify pass.
            num_verified: tokens that the pass adds behind seq_lens; 0 for a prefill.
        """
        if not self._policy.makes_tables:
            return
        for i, (row, seq_len) in enumerate(zip(self._rows, self._seq_lens, strict=True)):
            scores = None
            if self._policy.needs_scores and self._policy.config.budget(seq_len) < seq_len:
                visible = (
                    torch.tensor([seq_len + 1, seq_len + num_verified])
                    if num_verified
                    else torch.tensor([seq_len])
                )
                slots = self._req_to_token[row, : seq_len + num_verified]
                scores = query_scores(queries[i], k_cache[slots], visible.to(slots.device), scale)
            positions = self._policy.select(layer, scores, seq_len, queries.device)
            self._tables.put(layer, row, seq_len, positions)

    def _write(
        self,
        slots: list[torch.Tensor],
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        if new_kv is not None:
            to = torch.cat(slots).long()
            k_cache[to], v_cache[to] = new_kv

    def _begin(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._rows: list[int] = rows.tolist()
        self._seq_lens: list[int] = seq_lens.tolist()
