"""The attention paths in PyTorch: any device, any policy; what the CUDA kernels stand in for."""

from __future__ import annotations

import torch

from sgl_vegas.attention.kernels import NewKV
from sgl_vegas.attention.torch_reference import query_scores, sparse_decode, verify_attention
from sgl_vegas.selection.policy import Collected, SelectionPolicy
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
        # By layer, of a pass whose accepted counts aren't known yet: queries, keys, scale.
        self._undecided: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}

    def begin_draft(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, step: int, dense: bool
    ) -> None:
        self._begin(rows, seq_lens)
        self._step = step
        self._reselects = self._policy.reselects and not dense
        if self._reselects and step == 0:
            self._held: dict[tuple[int, int], torch.Tensor] = {}
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
        if self._reselects:
            slots = [
                self._reselected(layer, i, row, q[i], k_cache, scale)
                for i, row in enumerate(self._rows)
            ]
        return sparse_decode(q, k_cache, v_cache, slots, scale)

    def _reselected(
        self, layer: int, index: int, row: int, q: torch.Tensor, k_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Slots of what the policy selects at this step and of the recent tokens: (n,) for all KV
        heads or (n, num_kv_heads)."""
        seq_len, table = self._seq_lens[index], None
        base = seq_len
        if self._policy.makes_tables:
            base = min(int(self._tables.bases[row]), seq_len)
            table = self._tables.positions[layer, row, : int(self._tables.counts[row])].long()[None]
        of_row = self._req_to_token[row]
        recent = of_row[base : seq_len + self._step + 1]
        if base == 0:
            return recent
        keys = k_cache[of_row[:base].long()]
        selected = self._policy.select_step(
            *(layer, self._step, q[None], keys[None]),
            *((base,), (self._policy.attended(base),), table, scale),
        )
        if selected is not None:
            entries = selected[0].movedim(-1, 0)
            counts = (entries if entries.dim() == 1 else entries[:, 0]) >= 0
            self._held[layer, row] = entries[counts]
        chosen = of_row[self._held[layer, row].long()]
        if chosen.dim() == 2:
            recent = recent[:, None].expand(-1, chosen.shape[1])
        return torch.cat([chosen, recent])

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
        self.select_verified(layer, queries, k_cache, scale)
        return torch.cat(outputs)

    def select_verified(
        self, layer: int, queries: torch.Tensor, k_cache: torch.Tensor, scale: float
    ) -> None:
        """Make one layer's tables from a verify pass's queries, (batch_size, num_draft_tokens,
        num_heads, head_dim), or keep them until it is known which one counts."""
        if self._policy.collects is Collected.LAST_ACCEPTED:
            self._undecided[layer] = (queries, k_cache, scale)
        else:
            self._select_places(layer, queries, [0] * len(queries), k_cache, scale)

    def accepted(self, num_correct_drafts: torch.Tensor) -> None:
        counts = num_correct_drafts.tolist()
        for layer, (queries, k_cache, scale) in self._undecided.items():
            self._select_places(layer, queries, counts, k_cache, scale)
        self._undecided.clear()

    def _select_places(
        self,
        layer: int,
        queries: torch.Tensor,
        num_correct_drafts: list[int],
        k_cache: torch.Tensor,
        scale: float,
    ) -> None:
        width = self._num_draft_tokens
        picked = [self._policy.collects.places(width, count) for count in num_correct_drafts]
        collected = torch.stack([queries[i, places] for i, places in enumerate(picked)])
        self._select(layer, collected, picked, k_cache, scale, width)

    def written(self, layer: int, slots: torch.Tensor, k_cache: torch.Tensor) -> None:
        pass

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
        # The prompt's last token is the one before the first that could be verified.
        picked = [[-1]] * len(last_queries)
        self._select(layer, last_queries.unsqueeze(1), picked, k_cache, scale, num_verified=0)

    def _select(
        self,
        layer: int,
        queries: torch.Tensor,
        picked: list[list[int]],
        k_cache: torch.Tensor,
        scale: float,
        num_verified: int,
    ) -> None:
        """Make one layer's tables.

        Args:
            queries: (batch_size, num_queries, num_heads, head_dim), those collected.
            picked: of each request, their places behind seq_len.
            num_verified: tokens that the pass adds behind seq_lens; 0 for a prefill.
        """
        if not self._policy.makes_tables:
            return
        for i, (row, seq_len) in enumerate(zip(self._rows, self._seq_lens, strict=True)):
            scores = None
            if self._policy.needs_scores and self._policy.table_size(seq_len) < seq_len:
                slots = self._req_to_token[row, : seq_len + num_verified]
                visible = torch.tensor(picked[i], device=slots.device) + seq_len + 1
                scores = query_scores(queries[i], k_cache[slots], visible, scale)
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
