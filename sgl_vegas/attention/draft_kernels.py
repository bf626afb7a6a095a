"""Sparse decode for drafts: one interface, FlashInfer on a GPU, the torch reference elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sgl_vegas.attention.torch_reference import sparse_decode
from sgl_vegas.tables.draft_indices import StepIndices

FLASHINFER_WORKSPACE_BYTES = 128 << 20


class DraftKernel(Protocol):
    """Planned once a draft step, run once a layer."""

    name: str

    def plan(self, indices: StepIndices) -> None: ...

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """q (batch_size, num_heads, head_dim), caches (num_slots, num_kv_heads, head_dim);
        returns q's shape and dtype."""
        ...


class TorchDraftKernel:
    name = "torch"

    def plan(self, indices: StepIndices) -> None:
        self._indices = indices

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        kv_indices = self._indices.kv_indices[layer]
        return sparse_decode(q, k_cache, v_cache, self._indices.kv_indptr, kv_indices, scale)


class FlashInferDraftKernel:
    """FlashInfer's paged decode with page size 1.

    Every layer has its own indices and all share one plan, which only reads lengths: the layer's
    indices are copied into the buffer that was planned with.
    """

    name = "flashinfer"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._shape = (num_heads, num_kv_heads, head_dim)
        self._scale = scale
        self._dtypes = (q_dtype, kv_dtype)
        self._device = device
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            # The tensor-core template reads a KV head once for its whole query group.
            use_tensor_cores=num_heads > num_kv_heads,
        )

    def plan(self, indices: StepIndices) -> None:
        num_heads, num_kv_heads, head_dim = self._shape
        self._indices = indices
        self._planned = torch.empty_like(indices.kv_indices[0])
        self._wrapper.plan(
            indices.kv_indptr,
            self._planned,
            torch.ones(len(indices.kv_indptr) - 1, dtype=torch.int32),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size=1,
            sm_scale=self._scale,
            q_data_type=self._dtypes[0],
            kv_data_type=self._dtypes[1],
        )

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        if scale != self._scale:
            raise ValueError(f"planned with sm_scale {self._scale}, layer {layer} has {scale}")
        self._planned.copy_(self._indices.kv_indices[layer])
        return self._wrapper.run(q, (k_cache.unsqueeze(1), v_cache.unsqueeze(1)))


def build_draft_kernel(layer: Any, model_runner: Any) -> DraftKernel:
    """The kernel for a model whose attention layers all look like `layer`."""
    if model_runner.device == "cpu":
        return TorchDraftKernel()
    return FlashInferDraftKernel(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        layer.scaling,
        model_runner.dtype,
        model_runner.kv_cache_dtype,
        model_runner.device,
    )
