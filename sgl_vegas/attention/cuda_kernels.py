"""The attention paths on a GPU: split-KV kernels over page size 1 that need no plan on the host."""

from __future__ import annotations

from typing import Any

import torch
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    PagedAttention,
    ScoreCollector,
    Tables,
)

from sgl_vegas.attention.kernels import NewKV
from sgl_vegas.attention.torch_kernels import TorchKernels
from sgl_vegas.config import VegasConfig
from sgl_vegas.key_codes.step_ranking import StepRanking
from sgl_vegas.key_codes.words import WordCodes
from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.selection.refresh import RefreshPolicy
from sgl_vegas.tables.request_tables import RequestTables


class CudaWorkspace:
    """What the kernels own, made before SGLang sizes its KV pool."""

    def __init__(
        self,
        layers: list[Any],
        tables: RequestTables,
        config: VegasConfig,
        policy: SelectionPolicy,
        max_tokens: int,
        num_slots: int,
        dtype: torch.dtype,
    ) -> None:
        """Args:
        max_tokens: KV lengths of a batch, summed up, that scores are kept for, of one layer at a
            time; requests beyond them keep their tables.
        num_slots: most that the KV pool may have.
        """
        layer, device = layers[0], tables.counts.device
        num_heads, num_kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        max_batch, max_selected = len(tables.counts), tables.positions.shape[2]

        def attention(num_queries: int) -> PagedAttention:
            return PagedAttention(
                num_heads,
                num_kv_heads,
                layer.qk_head_dim,
                num_queries,
                max_batch,
                dtype,
                device,
            )

        self.score_capacity = max_tokens
        self.decode = attention(1)
        self.verify = attention(config.num_draft_tokens)
        self.scores: ScoreCollector | None = None
        if policy.makes_tables and config.selects_in_kernels:
            wanted = policy.table_config
            self.scores = ScoreCollector(
                num_layers=len(layers),
                num_rows=max_batch,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                capacity_tokens=max_tokens,
                max_batch=max_batch,
                ratio=wanted.sparsity_ratio,
                min_tokens=min(wanted.min_tokens, max_selected),
                max_tokens=min(wanted.max_tokens or max_selected, max_selected),
                device=device,
            )
        self.nbytes = self.decode.nbytes + self.verify.nbytes
        self.score_bytes = self.scores.nbytes if self.scores is not None else 0
        self.ranking: StepRanking | None = None
        if self.scores is not None and isinstance(policy, RefreshPolicy):
            codes = WordCodes.of(policy.basis)
            self.ranking = StepRanking(
                codes, tables, policy.candidates, num_heads, num_slots, max_batch
            )
        self.code_bytes = self.ranking.nbytes if self.ranking is not None else 0


class CudaKernels:
    """Drafts and verify passes by CUDA kernels, which select too if the policy is `vegas`, or
    `vegas-refresh`, whose draft steps rank each layer's table before they attend.

    Other policies select in PyTorch, one request at a time, and can't be captured in a graph; those
    that select again at every draft step draft in PyTorch too. `dense` selects nothing.
    """

    name = "cuda"

    def __init__(
        self,
        workspace: CudaWorkspace,
        policy: SelectionPolicy,
        tables: RequestTables,
        req_to_token: torch.Tensor,
        num_draft_tokens: int,
    ) -> None:
        self._decode, self._verify = workspace.decode, workspace.verify
        self._scores = workspace.scores
        if self._scores is not None:
            # A layer's selection runs beside the matrix products that follow its attention.
            self._beside = torch.cuda.Stream(tables.counts.device)
            self._attended, self._selected = torch.cuda.Event(), torch.cuda.Event()
        self._last_layer = tables.positions.shape[0] - 1
        self._num_draft_tokens = num_draft_tokens
        self._req_to_token = req_to_token
        self._tables = tables
        no_rows = torch.zeros_like(tables.counts)
        self._no_tables = Tables(tables.positions, no_rows, no_rows)
        self._ranking = workspace.ranking
        if self._ranking is not None:
            self._ranked = Tables(self._ranking.positions, self._ranking.wanted, tables.bases)
        self._torch = None
        if (policy.makes_tables or policy.reselects) and self._scores is None:
            self._torch = TorchKernels(policy, tables, req_to_token, num_draft_tokens)
        self._drafts = self._torch if policy.reselects and self._ranking is None else None
        self.capturable = self._torch is None

    def begin_draft(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, step: int, dense: bool
    ) -> None:
        if self._drafts is not None:
            self._drafts.begin_draft(rows, seq_lens, step, dense)
            return
        self._rows = rows
        self._draft_ranking = None if dense else self._ranking
        self._draft_tables = self._no_tables if dense else self._tables
        if self._draft_ranking is not None:
            self._draft_tables = self._ranked
            if step == 0:
                self._draft_ranking.begin(rows)
        elif self._ranking is not None:
            self._new_slots = self._slots_from(rows, seq_lens + step, 1)
        self._decode.plan_sparse(seq_lens, rows, self._draft_tables, step)

    def draft(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        if self._drafts is not None:
            return self._drafts.draft(layer, q, new_kv, k_cache, v_cache, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._draft_ranking is not None:
            self._draft_ranking.choose(layer, q, self._rows, self._req_to_token, scale)
        self._decode.sparse(
            q,
            k_cache,
            v_cache,
            self._req_to_token,
            self._draft_tables,
            layer if self._draft_ranking is None else 0,
            scale,
            out,
            new_kv=new_kv,
        )
        # Of drafts the verify pass writes K again.
        if self._ranking is not None and self._draft_ranking is None:
            self._ranking.encode(layer, self._new_slots, k_cache)
        return out

    def begin_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._rows = rows
        self._verify.plan_dense(seq_lens, rows, self._num_draft_tokens)
        if self._ranking is not None:
            self._new_slots = self._slots_from(rows, seq_lens, self._num_draft_tokens)
        if self._scores is not None:
            self._scores.begin(seq_lens, rows, self._tables)
        elif self._torch is not None:
            self._torch.begin_verify(rows, seq_lens)

    def verify(
        self,
        layer: int,
        q: torch.Tensor,
        new_kv: NewKV,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._scores is not None and layer > 0:
            # It reads what this layer's attention overwrites.
            torch.cuda.current_stream().wait_event(self._selected)
        self._verify.dense(
            q,
            k_cache,
            v_cache,
            self._req_to_token,
            scale,
            out,
            scores=self._scores,
            layer=layer,
            new_kv=new_kv,
        )
        if self._scores is not None:
            self._attended.record()
            self._beside.wait_event(self._attended)
            with torch.cuda.stream(self._beside):
                self._scores.select(self._verify, layer, self._rows, self._tables)
                self._selected.record()
            if layer == self._last_layer:
                torch.cuda.current_stream().wait_event(self._selected)
        elif self._torch is not None:
            queries = q.unflatten(0, (-1, self._num_draft_tokens))
            self._torch.select_verified(layer, queries, k_cache, scale)
        if self._ranking is not None:
            self._ranking.encode(layer, self._new_slots, k_cache)
        return out

    def accepted(self, num_correct_drafts: torch.Tensor) -> None:
        assert self._torch is not None, "no such policy selects in kernels"
        self._torch.accepted(num_correct_drafts)

    def written(self, layer: int, slots: torch.Tensor, k_cache: torch.Tensor) -> None:
        if self._ranking is not None:
            self._ranking.encode(layer, slots, k_cache)

    def _slots_from(self, rows: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
        """(batch_size * count,) int64: the KV slots of positions from `starts` on."""
        places = starts[:, None] + torch.arange(count, device=starts.device)
        return self._req_to_token[rows[:, None], places].flatten().long()

    def begin_prefill(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._rows, self._seq_lens = rows, seq_lens
        if self._scores is not None:
            # Whoever doesn't fit into the collector's capacity keeps what the row has.
            self._tables.drop(rows)
            self._verify.plan_dense(seq_lens - 1, rows, 1)
            self._scores.begin(seq_lens, rows, self._tables)
        elif self._torch is not None:
            self._torch.begin_prefill(rows, seq_lens)
        else:
            self._tables.drop(rows)

    def prefill(
        self,
        layer: int,
        last_queries: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> None:
        if self._scores is not None:
            self._scores.prefill(
                self._verify,
                last_queries,
                k_cache,
                v_cache,
                self._req_to_token,
                self._rows,
                self._seq_lens,
                scale,
                self._tables,
                layer,
                torch.empty_like(last_queries),
            )
        elif self._torch is not None:
            self._torch.prefill(layer, last_queries, k_cache, v_cache, scale)
