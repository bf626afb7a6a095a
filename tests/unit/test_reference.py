"""The torch reference against slow float64 loops that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_vegas.attention.torch_reference import (
    query_scores,
    sparse_decode,
    verify_attention,
    visible_lens,
)

torch.set_num_threads(1)

# (query heads, KV heads): groups of 1 to 16.
HEADS = [(4, 4), (6, 3), (8, 2), (12, 1), (32, 2), (9, 3)]


def slow_scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """(queries, heads, kv) float64 logits, one dot product at a time over the heads."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], k.shape[0], dtype=torch.float64)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[i, h] = (k[:, h // group].double() * q[i, h].double()).sum(-1) * scale
    return out


def slow_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[int], scale: float
) -> torch.Tensor:
    """Softmax over the first `visible[i]` entries for query i, in float64."""
    group = q.shape[1] // k.shape[1]
    scores = slow_scores(q, k, scale)
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for i, length in enumerate(visible):
        for h in range(q.shape[1]):
            logits = scores[i, h, :length]
            weights = (logits - logits.max()).exp()
            out[i, h] = (weights / weights.sum()) @ v[:length, h // group].double()
    return out


def random_qkv(
    num_queries: int, kv_len: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        normal(num_queries, heads[0], dim),
        normal(kv_len, heads[1], dim),
        normal(kv_len, heads[1], dim),
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_query_scores(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    kv_len, visible = 37, torch.tensor([31, 37, 1])
    q, k, _ = random_qkv(3, kv_len, heads, dim, dtype, seed=dim + heads[0])
    scale = 0.7 / math.sqrt(dim)
    got = query_scores(q, k, visible, scale)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # bfloat16 inputs are exact in float32, so the tolerance is float32's for them too.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    expected = slow_scores(q, k, scale)
    for i, length in enumerate(visible.tolist()):
        torch.testing.assert_close(
            got[i, :, :length].double(), expected[i, :, :length], rtol=0, atol=tolerance
        )
        assert (got[i, :, length:] == float("-inf")).all()
        torch.testing.assert_close(
            got[i].double().logsumexp(-1),
            expected[i, :, :length].exp().sum(-1).log(),
            rtol=0,
            atol=tolerance,
        )


def test_scores_of_hidden_entries_are_masked_whatever_they_hold() -> None:
    q, k, _ = random_qkv(2, 12, (4, 2), 64, torch.float32, seed=1)
    k[9:] = float("nan")
    scores = query_scores(q, k, torch.tensor([9, 5]), 0.125)
    assert not scores.isnan().any()
    expected = slow_scores(q, k, 0.125)
    torch.testing.assert_close(scores[0, :, :9].double(), expected[0, :, :9], rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("num_queries", "kv_len"), [(1, 1), (1, 40), (7, 7), (7, 40)])
def test_verify_attention(heads: tuple[int, int], dim: int, num_queries: int, kv_len: int) -> None:
    q, k, v = random_qkv(num_queries, kv_len, heads, dim, torch.float32, seed=kv_len)
    q *= 3  # peaked weights, so that the mask and the scale matter
    scale = 1.3 / math.sqrt(dim)
    visible = [kv_len - num_queries + 1 + i for i in range(num_queries)]
    assert visible_lens(num_queries, kv_len, q.device).tolist() == visible
    got = verify_attention(q, k, v, scale)
    assert got.shape == q.shape
    torch.testing.assert_close(
        got.double(), slow_attention(q, k, v, visible, scale), rtol=0, atol=2e-5
    )


def test_verify_attention_keeps_the_dtype() -> None:
    q, k, v = random_qkv(3, 20, (4, 2), 64, torch.bfloat16, seed=3)
    got = verify_attention(q, k, v, 0.125)
    assert got.dtype == torch.bfloat16
    expected = slow_attention(q, k, v, [18, 19, 20], 0.125)
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [64, 128])
def test_sparse_decode(heads: tuple[int, int], dim: int) -> None:
    """Permuted slots, slots shared between and repeated within requests; no other slot is read."""
    generator = torch.Generator().manual_seed(heads[0] * dim)
    lengths, num_slots = [5, 1, 23, 9], 64
    q, k_cache, v_cache = random_qkv(len(lengths), num_slots, heads, dim, torch.float32, seed=dim)
    # Only some slots are used at all, so that lists of several requests overlap.
    used = torch.randperm(num_slots, generator=generator)[:30]
    lists = [used[torch.randperm(30, generator=generator)[:length]] for length in lengths]
    lists[3][4] = lists[3][0]  # an entry that is listed twice counts twice
    unused = torch.ones(num_slots, dtype=torch.bool)
    unused[torch.cat(lists)] = False
    assert unused.any()
    k_cache[unused] = v_cache[unused] = float("nan")
    scale = 1.1 / math.sqrt(dim)

    got = sparse_decode(q, k_cache, v_cache, [listed.int() for listed in lists], scale)
    for row, slots in enumerate(lists):
        k = torch.stack([k_cache[slot] for slot in slots.tolist()])
        v = torch.stack([v_cache[slot] for slot in slots.tolist()])
        expected = slow_attention(q[row : row + 1], k, v, [len(slots)], scale)
        torch.testing.assert_close(got[row].double(), expected[0], rtol=0, atol=2e-5)
