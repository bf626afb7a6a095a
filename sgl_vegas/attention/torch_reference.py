"""The attention paths in plain PyTorch: they run anywhere, and kernels are tested against them.

One request at a time, for clarity and because a paged gather of one request fits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def verify_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of a request's last queries over all its KV, causal among the queries.

    Args:
        q: (num_queries, num_heads, head_dim); query i sits at position kv_len - num_queries + i.
        k, v: (kv_len, num_kv_heads, head_dim).
        scale: factor of the logits.

    Returns:
        (num_queries, num_heads, head_dim), q's dtype.
    """
    num_queries, kv_len = q.shape[0], k.shape[0]
    mask = visible_lens(num_queries, kv_len, q.device).unsqueeze(1) > torch.arange(
        kv_len, device=q.device
    )
    return (
        scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        .squeeze(0)
        .transpose(0, 1)
    )


def visible_lens(num_queries: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """(num_queries,) int64: how many KV entries each of the last queries may look at."""
    return torch.arange(kv_len - num_queries + 1, kv_len + 1, device=device)


def query_scores(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Scaled pre-softmax logits of a few queries over all KV entries (paper section 3.2).

    Args:
        q: (num_queries, num_heads, head_dim).
        k: (kv_len, num_kv_heads, head_dim).
        visible: (num_queries,) int64, how many KV entries each query may look at.

    Returns:
        (num_queries, num_heads, kv_len) float32 (float64 if q is), `-inf` where masked.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_queries, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    grouped = q.to(dtype).view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    # (kv_heads, queries * group, head_dim) x (kv_heads, head_dim, kv_len)
    scores = torch.matmul(
        grouped.reshape(num_kv_heads, num_queries * group, head_dim),
        k.to(dtype).permute(1, 2, 0),
    )
    scores = scores.view(num_kv_heads, num_queries, group, kv_len).transpose(0, 1)
    scores = scores.reshape(num_queries, num_heads, kv_len) * scale
    hidden = torch.arange(kv_len, device=k.device) >= visible.view(-1, 1, 1)
    return scores.masked_fill(hidden, float("-inf"))


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: Sequence[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Decode attention over a list of KV slots a request, page size 1.

    Args:
        q: (batch_size, num_heads, head_dim).
        k_cache, v_cache: (num_slots, num_kv_heads, head_dim).
        slots: of each request (n,) integer, n > 0, or (n, num_kv_heads) where each KV head has
            slots of its own.

    Returns:
        (batch_size, num_heads, head_dim), q's dtype.
    """
    heads = torch.arange(k_cache.shape[1], device=q.device)
    outputs = []
    for row, listed in enumerate(slots):
        entries = listed if listed.dim() == 1 else (listed, heads)
        outputs.append(
            verify_attention(q[row : row + 1], k_cache[entries], v_cache[entries], scale)
        )
    return torch.cat(outputs)
