"""The attention backend: dense for prefill, collect for verify, sparse for drafts."""

from __future__ import annotations

from typing import Any

import torch

from sgl_vegas.attention.collector import Collector
from sgl_vegas.attention.draft_kernels import DraftKernel
from sgl_vegas.attention.torch_reference import verify_attention
from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.sglang_compat import (
    AttentionBackend,
    EagleVerifyInput,
    ForwardBatch,
    KVWriteLoc,
    RadixAttention,
)
from sgl_vegas.tables.request_tables import RequestTable


class VegasAttentionBackend(AttentionBackend):
    """Wraps the backend that SGLang chose, and takes its place on the target's model runner.

    - Prefill is SGLang's own attention; the prompt's last query is scored beside it.
    - Verify is SGLang's own attention where it can verify (every GPU backend that VEGAS admits),
      the torch reference where it can't (`torch_native`); its first and last query are scored.
    - Draft steps go to the sparse kernel.

    Everything else that SGLang asks of a backend is answered by the wrapped one.
    """

    def __init__(
        self,
        dense: AttentionBackend,
        draft_kernel: DraftKernel,
        policy: SelectionPolicy,
        req_to_token_pool: Any,
        token_to_kv_pool: Any,
        dense_can_verify: bool,
    ) -> None:
        super().__init__()
        self.dense = dense
        self.draft_kernel = draft_kernel
        self.policy = policy
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.dense_can_verify = dense_can_verify
        self.needs_cpu_seq_lens = dense.needs_cpu_seq_lens
        self.prefill_attention_backend_str = dense.prefill_attention_backend_str
        self.decode_attention_backend_str = dense.decode_attention_backend_str
        self._collector: Collector | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "dense":  # not set yet: don't recurse
            raise AttributeError(name)
        return getattr(self.dense, name)

    def support_triton(self) -> bool:
        return self.dense.support_triton()

    def take_tables(self) -> list[RequestTable] | None:
        """The tables of the last prefill or verify pass, in batch order; None if none were made."""
        collector, self._collector = self._collector, None
        return None if collector is None else collector.tables()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        spec_info: Any = forward_batch.spec_info
        if isinstance(spec_info, VegasDraftInput) and forward_batch.forward_mode.is_decode():
            assert spec_info.step_indices is not None
            self.draft_kernel.plan(spec_info.step_indices)
            return
        is_verify = isinstance(spec_info, EagleVerifyInput)
        if self.dense_can_verify or not is_verify:
            self.dense.init_forward_metadata(forward_batch)
        self._seq_lens = self._host_seq_lens(forward_batch)
        self._collector = None
        if self.policy.makes_tables and forward_batch.forward_mode.is_extend():
            self._collector = Collector(
                self.policy,
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices.tolist(),
                self._seq_lens,
                spec_info.draft_token_num if is_verify else 0,
            )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if save_kv_cache:
            self._write_kv(layer, forward_batch, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k_cache, v_cache = self._kv_cache(layer)
        output = self.draft_kernel.run(layer.layer_id, queries, k_cache, v_cache, layer.scaling)
        return output.reshape(q.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        is_verify = forward_batch.forward_mode.is_target_verify()
        if is_verify and not self.dense_can_verify:
            if save_kv_cache:
                self._write_kv(layer, forward_batch, k, v)
            output = self._verify(q, layer, forward_batch)
        else:
            output = self.dense.forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        if self._collector is not None:
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            if is_verify:
                rows = queries.unflatten(0, (len(self._seq_lens), -1))
                picked = rows[:, [0, -1]]
            else:
                extend_seq_lens: Any = forward_batch.extend_seq_lens
                picked = queries[extend_seq_lens.cumsum(0) - 1].unsqueeze(1)
            k_cache, _ = self._kv_cache(layer)
            self._collector.collect(layer.layer_id, picked, k_cache, layer.scaling)
        return output

    def _verify(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        spec_info: Any = forward_batch.spec_info
        assert isinstance(spec_info, EagleVerifyInput)
        k_cache, v_cache = self._kv_cache(layer)
        req_to_token = self.req_to_token_pool.req_to_token
        queries = q.view(
            len(self._seq_lens), spec_info.draft_token_num, layer.tp_q_head_num, layer.qk_head_dim
        )
        outputs = []
        for row, seq_len in enumerate(self._seq_lens):
            kv_len = seq_len + spec_info.draft_token_num
            slots = req_to_token[forward_batch.req_pool_indices[row], :kv_len]
            outputs.append(
                verify_attention(queries[row], k_cache[slots], v_cache[slots], layer.scaling)
            )
        return torch.cat(outputs).reshape(q.shape[0], -1)

    def _kv_cache(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )

    def _write_kv(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
        )

    @staticmethod
    def _host_seq_lens(forward_batch: ForwardBatch) -> list[int]:
        lengths = forward_batch.seq_lens_cpu
        return (forward_batch.seq_lens if lengths is None else lengths).tolist()
