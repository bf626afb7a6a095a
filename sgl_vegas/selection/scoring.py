"""From collected scores to one rank value a KV entry (paper section 3.2)."""

from __future__ import annotations

import torch


def rank_values(scores: torch.Tensor, seq_len: int, mode: str) -> torch.Tensor:
    """Rank value of each of the first `seq_len` KV entries, shared by all heads.

    `weight` is the entry's mean softmax weight over heads and queries,
    `mean_{h,i} exp(s_{h,i,t} - lse_{h,i})`, each query's softmax being over all that it may look
    at; `logit` is the mean of the scores themselves.

    Args:
        scores: (num_queries, num_heads, kv_len) float32, scaled logits, `-inf` where masked.
        seq_len: entries to rank, at most kv_len; none of them may be masked.

    Returns:
        (seq_len,) float32.
    """
    if mode == "logit":
        return scores[..., :seq_len].mean(dim=(0, 1))
    return torch.softmax(scores, dim=-1)[..., :seq_len].mean(dim=(0, 1))
