"""Random shapes, lengths, page tables and options against float64.

VEGAS_FUZZ_SEED=N moves all seeds, for other cases than the usual ones.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    PagedAttention,
)

from tests.kernel.paged_cases import DEVICE, POISON, Case, make_case
from tests.kernel.test_paged_attention import (
    BF16,
    FP8,
    FP16,
    attention_for,
    check_dense,
    check_sparse,
    random_tables,
    run_dense,
    take_out_new,
)
from tests.kernel.test_selection import Setup

pytestmark = pytest.mark.gpu

FIRST_SEED = int(os.environ.get("VEGAS_FUZZ_SEED", "0"))
LONGEST = 200_000
# Entries times KV heads of all requests: the reference's time.
MAX_WORK = 600_000
TILES = (16, 32, 64)


def random_length(choose: random.Random, longest: int) -> int:
    kind = choose.random()
    if kind < 0.1:
        return -1  # padding
    if kind < 0.2:
        return choose.randrange(3)
    length = int(longest ** choose.random())
    if kind < 0.6:
        tile = choose.choice(TILES)
        length = length // tile * tile + choose.randrange(-1, 2)
    return max(0, min(length, longest))


def random_lengths(choose: random.Random, num_kv_heads: int) -> list[int]:
    batch = int(256 ** choose.random() + 0.5)
    budget = MAX_WORK // num_kv_heads
    lengths = []
    for _ in range(batch):
        lengths.append(random_length(choose, min(LONGEST, max(budget, 2))))
        budget -= lengths[-1]
    choose.shuffle(lengths)
    return lengths


def share_prefixes(choose: random.Random, case: Case) -> None:
    """Some requests begin with others' slots, as with a radix cache."""
    lengths = case.seq_lens.tolist()
    for request in range(1, len(lengths)):
        other = choose.randrange(request)
        common = min(lengths[request], lengths[other])
        if common > 0 and choose.random() < 0.3:
            case.slots(request)[:common] = case.slots(other)[:common]


def separate_new_slots(case: Case) -> None:
    """The queries' own positions get slots that nobody else has, in longer caches."""
    first = case.k_cache.shape[0]
    count = case.q.shape[0]
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        more = torch.randn((count, *cache.shape[1:]), device=DEVICE).to(cache.dtype)
        setattr(case, name, torch.cat([cache, more]))
    new = torch.arange(first, first + count, device=DEVICE, dtype=torch.int32)
    for request, length in enumerate(case.seq_lens.tolist()):
        if case.rows[request] != 0:
            own = new[request * case.num_queries : (request + 1) * case.num_queries]
            case.slots(request)[length : length + case.num_queries] = own


@pytest.mark.parametrize("seed", range(120))
def test_random_verification(seed):
    choose = random.Random(FIRST_SEED + seed)
    torch.manual_seed(seed)
    head_dim, group = choose.choice((64, 128)), choose.randint(1, 16)
    num_kv_heads, num_queries = choose.choice((1, 2, 3, 8)), choose.randint(1, 16)
    num_heads, dtype = num_kv_heads * group, choose.choice((BF16, BF16, FP16))
    kv_dtype = choose.choice((dtype, dtype, FP8))
    capability = torch.cuda.get_device_capability()
    shape = (num_heads, num_kv_heads, head_dim, num_queries, dtype, capability)
    if PagedAttention.supports(*shape, kv_dtype) is not None:
        kv_dtype = dtype
    lengths = random_lengths(choose, num_kv_heads)
    case = make_case(
        *(lengths, num_queries, num_heads, num_kv_heads, head_dim, dtype),
        sharpness=choose.choice((0.0, 1.0, 3.0)),
        seed=seed,
        kv_dtype=kv_dtype,
    )
    share_prefixes(choose, case)
    window = choose.choice((0, 0, 0, choose.randint(1, 2000)))
    sinks = torch.randn(num_heads, device=DEVICE) * 4 if choose.random() < 0.3 else None
    attention = attention_for(case)
    new_kv = expected = None
    if kv_dtype == dtype and choose.random() < 0.5:
        separate_new_slots(case)
        expected = case.k_cache.clone(), case.v_cache.clone()
        new_kv = take_out_new(case, lengths)
    run_dense(attention, case, window, sinks=sinks, new_kv=new_kv)
    if expected is not None:
        for cache, before in zip((case.k_cache, case.v_cache), expected, strict=True):
            # Slot 0 is padding's; one holds NaNs.
            assert ((cache == before) | (cache.isnan() & before.isnan()))[1:].all()
    check_dense(attention, case, window, sinks)


@pytest.mark.parametrize("seed", range(60))
def test_random_drafts(seed):
    choose = random.Random(FIRST_SEED + 1000 + seed)
    torch.manual_seed(seed)
    head_dim, group = choose.choice((64, 128)), choose.randint(1, 16)
    num_kv_heads = choose.choice((1, 2, 3, 8))
    num_heads, dtype = num_kv_heads * group, choose.choice((BF16, BF16, FP16))
    lengths = random_lengths(choose, num_kv_heads)
    case = make_case(
        *(lengths, 1, num_heads, num_kv_heads, head_dim, dtype),
        sharpness=choose.choice((0.0, 1.0, 3.0)),
        seed=seed,
        kv_dtype=choose.choice((dtype, dtype, FP8)),
    )
    share_prefixes(choose, case)
    tables = random_tables(case, 1, choose.choice((1, 100, 4096)), wild=choose.random() < 0.3)
    sinks = torch.randn(num_heads, device=DEVICE) * 4 if choose.random() < 0.3 else None
    attention = attention_for(case)
    step = choose.randrange(16)
    attention.plan_sparse(case.seq_lens, case.rows, tables, step)
    attention.sparse(
        *(case.q, case.k_cache, case.v_cache, case.req_to_token, tables, 0, case.scale, case.out),
        sinks=sinks,
    )
    check_sparse(case, tables, 0, step, sinks)


@pytest.mark.parametrize("seed", range(40))
def test_random_selection(seed):
    """Verification with scores, twice, then the tables; outputs as without scores."""
    choose = random.Random(FIRST_SEED + 2000 + seed)
    head_dim, group = choose.choice((64, 128)), choose.randint(1, 16)
    num_kv_heads, num_queries = choose.choice((1, 2, 3, 8)), choose.randint(1, 16)
    lengths = random_lengths(choose, num_kv_heads)
    case = make_case(
        *(lengths, num_queries, num_kv_heads * group, num_kv_heads, head_dim, BF16),
        sharpness=3.0,  # with less, half of the heads could be missing unnoticed
        seed=seed,
    )
    share_prefixes(choose, case)
    setup = Setup(case, capacity=sum(max(length, 0) for length in lengths) + 1)
    for _ in range(2):
        case.out.fill_(POISON)
        setup.begin()
        setup.verify(0)
    check_dense(setup.attention, case)
    setup.check(0, kept_share=0.9)


@pytest.mark.parametrize(
    ("head_dim", "group", "num_queries"), [(128, 4, 7), (64, 8, 7), (64, 8, 1)]
)
@pytest.mark.parametrize("first", [0, 4000])
def test_every_length(head_dim, group, num_queries, first):
    """256 neighbouring lengths in one batch, so every place in a tile."""
    lengths = list(range(first, first + 256))
    case = make_case(lengths, num_queries, 2 * group, 2, head_dim, BF16, sharpness=2.0)
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)
