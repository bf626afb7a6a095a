"""The collect path: scores of a pass's first and last query, turned into tables layer by layer."""

from __future__ import annotations

import torch

from sgl_vegas.attention.torch_reference import query_scores
from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.tables.request_tables import RequestTable


class Collector:
    """Selects positions during one prefill or verify pass.

    Scores live for one layer and one request at a time; nothing of the size of batch x context
    is kept.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        req_to_token: torch.Tensor,
        rows: list[int],
        seq_lens: list[int],
        num_verified: int,
    ) -> None:
        """Args:
        req_to_token: (num_rows, max_context_len) int32.
        rows: request-pool row of each request.
        seq_lens: positions to choose from, for each request.
        num_verified: tokens that a verify pass adds behind them; 0 for a prefill.
        """
        self._policy = policy
        self._seq_lens = seq_lens
        self._num_verified = num_verified
        self._slots = [
            req_to_token[row, : seq_len + num_verified]
            for row, seq_len in zip(rows, seq_lens, strict=True)
        ]
        self._positions: list[list[torch.Tensor]] = [[] for _ in rows]

    def collect(
        self, layer: int, queries: torch.Tensor, k_cache: torch.Tensor, scale: float
    ) -> None:
        """Select for one layer.

        Args:
            queries: (batch_size, num_queries, num_heads, head_dim): the prompt's last query after
                a prefill, the first and the last of a verify pass.
            k_cache: (num_slots, num_kv_heads, head_dim).
        """
        for row, (seq_len, slots) in enumerate(zip(self._seq_lens, self._slots, strict=True)):
            scores = None
            if self._policy.needs_scores and self._policy.config.budget(seq_len) < seq_len:
                visible = (
                    torch.tensor([seq_len + 1, seq_len + self._num_verified])
                    if self._num_verified
                    else torch.tensor([seq_len])
                )
                scores = query_scores(
                    queries[row], k_cache[slots], visible.to(queries.device), scale
                )
            positions = self._policy.select(layer, scores, seq_len, queries.device)
            self._positions[row].append(positions.to(torch.int32))

    def tables(self) -> list[RequestTable]:
        """One table a request, after the last layer."""
        return [
            RequestTable(base=seq_len, positions=torch.stack(positions))
            for seq_len, positions in zip(self._seq_lens, self._positions, strict=True)
        ]
