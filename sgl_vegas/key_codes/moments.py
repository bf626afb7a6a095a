"""What a basis is fitted to: sums over the keys and queries of some texts."""

from __future__ import annotations

import torch


class Moments:
    """Sums over keys and queries, a layer and KV head; queries count for the head they read.

    Attributes:
        num_keys, num_queries: how many were added, of each layer and head.
        key_sum: (num_layers, num_kv_heads, head_dim) float64.
        key_square, query_square: (num_layers, num_kv_heads, head_dim, head_dim) float64, sums of
            outer products.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        shape = (num_layers, num_kv_heads, head_dim)
        self.num_keys = [0] * num_layers
        self.num_queries = [0] * num_layers
        self.key_sum = torch.zeros(shape, dtype=torch.float64)
        self.key_square = torch.zeros((*shape, head_dim), dtype=torch.float64)
        self.query_square = torch.zeros_like(self.key_square)

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        """Add some tokens' queries, (num_queries, num_heads, head_dim), and keys, (num_keys,
        num_kv_heads, head_dim), as attention sees them (after their rotary embedding)."""
        num_kv_heads = k.shape[1]
        keys = k.float().transpose(0, 1)
        queries = q.float().unflatten(1, (num_kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        self.num_keys[layer] += keys.shape[1]
        self.num_queries[layer] += queries.shape[1]
        self.key_sum[layer] += keys.sum(dim=1).double().cpu()
        self.key_square[layer] += (keys.mT @ keys).double().cpu()
        self.query_square[layer] += (queries.mT @ queries).double().cpu()
