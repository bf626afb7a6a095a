"""FlashInfer's sparse decode, as drafts use it, against float64 attention over the same lists."""

from __future__ import annotations

import pytest
import torch

from sgl_vegas.attention.draft_kernels import FlashInferDraftKernel
from sgl_vegas.tables.draft_indices import StepIndices

pytestmark = pytest.mark.gpu
NUM_SLOTS = 6000


def exact_attention(q, k, v, scale):
    """(heads, dim), (kv_len, kv_heads, dim) -> (heads, dim), all float64."""
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) * scale, dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (8, 8)])
@pytest.mark.parametrize("lengths", [[1], [257, 1, 64], [4000, 3, 1025, 2047]])
def test_matches_float64(head_dim, num_heads, num_kv_heads, lengths):
    torch.manual_seed(sum(lengths) + head_dim + num_heads)
    device, dtype, num_layers = "cuda", torch.bfloat16, 2
    scale = head_dim**-0.5
    k_cache = torch.randn(NUM_SLOTS, num_kv_heads, head_dim, device=device, dtype=dtype)
    v_cache = torch.randn_like(k_cache)
    kv_indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    kv_indices = torch.stack(
        [
            torch.cat([torch.randperm(NUM_SLOTS)[:length] for length in lengths])
            for _ in range(num_layers)
        ]
    ).to(device, torch.int32)
    kernel = FlashInferDraftKernel(num_heads, num_kv_heads, head_dim, scale, dtype, dtype, device)
    kernel.plan(StepIndices(kv_indptr, kv_indices))
    for layer in range(num_layers):
        q = torch.randn(len(lengths), num_heads, head_dim, device=device, dtype=dtype)
        output = kernel.run(layer, q, k_cache, v_cache, scale).double()
        bounds = kv_indptr.tolist()
        for row in range(len(lengths)):
            slots = kv_indices[layer, bounds[row] : bounds[row + 1]].long()
            expected = exact_attention(
                q[row].double(), k_cache[slots].double(), v_cache[slots].double(), scale
            )
            error = (output[row] - expected).norm() / expected.norm()
            assert error < 1e-2, f"layer {layer}, request {row}: relative error {error:.2e}"
