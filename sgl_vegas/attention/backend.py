"""The attention backend: SGLang's own for prefill, ours for drafts and verify passes."""

from __future__ import annotations

from typing import Any

import torch

from sgl_vegas.attention.kernels import AttentionKernels, NewKV
from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.sglang_compat import (
    AttentionBackend,
    ForwardBatch,
    RadixAttention,
)


class VegasAttentionBackend(AttentionBackend):
    """Wraps the backend that SGLang chose, and takes its place on the target's model runner.

    Prefill is the wrapped backend's, with the prompt's last query scored beside it; draft steps
    and verify passes are the kernels'. Everything else that SGLang asks of a backend is answered
    by the wrapped one.
    """

    def __init__(
        self,
        dense: AttentionBackend,
        kernels: AttentionKernels,
        req_to_token_pool: Any,
        token_to_kv_pool: Any,
    ) -> None:
        super().__init__()
        self.dense = dense
        self.kernels = kernels
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        # Of a prefill batch, the requests whose last query makes tables, (n,) int64; None: all.
        self.scored: torch.Tensor | None = None
        # The kernels of a GPU read lengths there; what the wrapped backend needs is for prefill,
        # where SGLang always has them on the host.
        self.needs_cpu_seq_lens = dense.needs_cpu_seq_lens and not kernels.capturable
        self.prefill_attention_backend_str = dense.prefill_attention_backend_str
        self.decode_attention_backend_str = dense.decode_attention_backend_str

    def __getattr__(self, name: str) -> Any:
        if name == "dense":  # not set yet: don't recurse
            raise AttributeError(name)
        return getattr(self.dense, name)

    def support_triton(self) -> bool:
        return self.dense.support_triton()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_target_verify():
            self.kernels.begin_verify(forward_batch.req_pool_indices, forward_batch.seq_lens)
            return
        self.dense.init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_extend():
            rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            if self.scored is not None:
                rows, seq_lens = rows[self.scored], seq_lens[self.scored]
            if len(rows) > 0:
                self.kernels.begin_prefill(rows, seq_lens)

    # SGLang captures verify passes only: nothing is kept outside the graph, since the kernels take
    # their plan from the static `seq_lens` and `req_pool_indices` inside it.
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            self.dense.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_target_verify():
            self.kernels.begin_verify(forward_batch.req_pool_indices, forward_batch.seq_lens)
        else:
            self.dense.init_forward_metadata_in_graph(forward_batch)

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
        if not isinstance(forward_batch.spec_info, VegasDraftInput):
            # SGLang's warm-up decodes before there is anything to draft from.
            return self.dense.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        new_kv = _new_kv(layer, k, v, save_kv_cache)
        output = self.kernels.draft(
            layer.layer_id, queries, new_kv, *self._caches(layer), layer.scaling
        )
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
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if forward_batch.forward_mode.is_target_verify():
            new_kv = _new_kv(layer, k, v, save_kv_cache)
            output = self.kernels.verify(
                layer.layer_id, queries, new_kv, *self._caches(layer), layer.scaling
            )
            return output.reshape(q.shape[0], -1)
        output = self.dense.forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )
        k_cache, v_cache = self._caches(layer)
        self.kernels.written(layer.layer_id, forward_batch.out_cache_loc, k_cache)
        extend_seq_lens: Any = forward_batch.extend_seq_lens
        last = extend_seq_lens.cumsum(0) - 1
        if self.scored is not None:
            last = last[self.scored]
        if len(last) > 0:
            self.kernels.prefill(layer.layer_id, queries[last], k_cache, v_cache, layer.scaling)
        return output

    def _caches(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )


def _new_kv(layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, save_kv_cache: bool) -> NewKV:
    if not save_kv_cache:
        return None
    return (
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
    )
