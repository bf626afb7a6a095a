"""Dense and sparse attention over page-size-1 KV against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sgl_vegas_kernels import reference  # pyright: ignore[reportMissingImports]
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    PagedAttention,
    ScoreCollector,
    Tables,
)

from tests.kernel.paged_cases import DEVICE, POISON, Case, make_case, relative_error

pytestmark = pytest.mark.gpu

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOLERANCE = {BF16: 1e-2, FP16: 2e-3}
# Tiles are 64, 32 or 16 entries.
EDGES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 56, 57, 63, 64, 65, 120, 127, 128, 129, 1000, 2047]
# Of every group size, every number of queries and every instance at least one.
SHAPES = [
    # (head dim, KV heads, group, queries)
    *[(128, 2, 4, queries) for queries in range(1, 17)],
    *[(64, 2, 8, queries) for queries in range(1, 17)],
    *[
        (dim, 3, group, queries)
        for dim, group, queries in itertools.product((64, 128), (1, 2, 3, 5), (1, 7))
    ],
    *[(dim, 1, 16, queries) for dim, queries in itertools.product((64, 128), (1, 2, 8, 9, 16))],
    (128, 8, 4, 7),
    (64, 8, 8, 7),
]


def attention_for(case: Case, **changes: int) -> PagedAttention:
    values = {
        "num_heads": case.q.shape[1],
        "num_kv_heads": case.k_cache.shape[1],
        "head_dim": case.q.shape[2],
        "num_queries": case.num_queries,
        "max_batch": case.rows.shape[0],
        **changes,
    }
    return PagedAttention(**values, dtype=case.q.dtype, device=DEVICE, kv_dtype=case.k_cache.dtype)


def run_dense(attention: PagedAttention, case: Case, window: int = 0, **changes: Any) -> None:
    attention.plan_dense(case.seq_lens, case.rows, case.num_queries, window)
    attention.dense(
        *(case.q, case.k_cache, case.v_cache, case.req_to_token, case.scale, case.out), **changes
    )


def check_dense(
    attention: PagedAttention,
    case: Case,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    num_heads = case.q.shape[1]
    lse = attention.lse[: case.q.shape[0] * num_heads].view(-1, case.num_queries, num_heads)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        expected, expected_lse, _ = reference.dense(
            *(case.queries(request), case.k_cache, case.v_cache, case.slots(request)),
            *(seq_len, case.scale * k_scale, window, sinks),
        )
        error = relative_error(case.output(request), expected * v_scale)
        assert error < TOLERANCE[case.q.dtype], f"request {request}, {seq_len} tokens: {error:.2e}"
        torch.testing.assert_close(lse[request].double(), expected_lse, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group", "num_queries"), SHAPES)
def test_dense(head_dim, num_kv_heads, group, num_queries, dtype):
    if dtype == FP16 and num_queries not in (1, 7):
        pytest.skip("float16 differs from bfloat16 in two instructions")
    case = make_case(
        EDGES, num_queries, num_kv_heads * group, num_kv_heads, head_dim, dtype, sharpness=2.0
    )
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)
    assert case.out.isfinite().all()


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 8)])
@pytest.mark.parametrize(
    "lengths",
    [[20000], [70001, 3, 512], [5] * 64, list(range(37, 101)), [-1, 300, -1, -1, 0], [-1, -1]],
)
def test_dense_batches(head_dim, group, lengths):
    """One long request over all CTAs, long beside short, many, and padding among them."""
    case = make_case(lengths, 7, 2 * group, 2, head_dim, BF16, sharpness=3.0)
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)


def test_empty_requests_give_zeros():
    """No entry at all: one query and seq_lens - 1."""
    case = make_case([-1, 100, -1], 1, 8, 2, 128, BF16)
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)
    assert (case.output(0) == 0).all() and (case.output(2) == 0).all()
    assert attention.lse[:8].isinf().all()


def test_large_and_growing_scores():
    """Maxima that keep rising, and scores of several hundred."""
    case = make_case([3000, 777], 4, 8, 2, 128, BF16, sharpness=20.0)
    slots = case.req_to_token[case.rows[0], :3000].long()
    case.k_cache[slots] *= torch.linspace(0.01, 3.0, 3000, device=DEVICE).view(-1, 1, 1).to(BF16)
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)


# Every instance, by (head dim, KV heads, group, queries).
INSTANCES = [(128, 2, 4, 7), (128, 1, 16, 8), (128, 1, 16, 13), (128, 2, 4, 1)]
INSTANCES += [(64, 2, 8, 7), (64, 3, 8, 7), (64, 1, 16, 8), (64, 1, 16, 16), (64, 2, 8, 1)]


@pytest.mark.parametrize("window", [0, 1, 5, 64, 128, 1000])
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group", "num_queries"), INSTANCES)
def test_windows_and_sinks(head_dim, num_kv_heads, group, num_queries, window):
    num_heads = num_kv_heads * group
    lengths = [*EDGES, 20000, -1]
    case = make_case(lengths, num_queries, num_heads, num_kv_heads, head_dim, BF16, sharpness=2.0)
    sinks = torch.linspace(-3, 12, num_heads, device=DEVICE)
    attention = attention_for(case)
    for used in (None, sinks):
        case.out.fill_(POISON)
        run_dense(attention, case, window, sinks=used)
        check_dense(attention, case, window, used)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lengths", [EDGES, [70001, 3, 512], [-1, 300, -1]])
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "num_queries"),
    [(128, 2, 4, 7), (128, 1, 16, 8), (128, 2, 4, 1), (64, 2, 8, 7), (64, 3, 5, 16), (64, 1, 1, 1)],
)
def test_kv_of_8_bits(head_dim, num_kv_heads, group, num_queries, lengths, dtype):
    num_heads = num_kv_heads * group
    case = make_case(
        *(lengths, num_queries, num_heads, num_kv_heads, head_dim, dtype),
        sharpness=2.0,
        kv_dtype=FP8,
    )
    attention = attention_for(case)
    scales: dict[str, Any] = {"k_scale": 0.6, "v_scale": 3.0}
    run_dense(attention, case, **scales)
    check_dense(attention, case, **scales)
    with pytest.raises(ValueError, match="float8"):
        attention.dense(
            *(case.q, case.k_cache, case.v_cache, case.req_to_token, case.scale, case.out),
            new_kv=(case.q[:, :num_kv_heads], case.q[:, :num_kv_heads]),
        )


def test_every_e4m3():
    """One entry a request: the output is V itself."""
    values = torch.arange(256, device=DEVICE, dtype=torch.uint8).view(FP8)
    values = values[values.float().isfinite()]
    case = make_case([0] * 2, 1, 2, 2, 128, FP16, kv_dtype=FP8)
    padded = torch.zeros(4, 128, device=DEVICE, dtype=FP8)
    padded.view(-1)[: values.shape[0]] = values
    case.v_cache[case.req_to_token[case.rows, 0].long()] = padded.view(2, 2, 128)
    attention = attention_for(case)
    run_dense(attention, case)
    assert torch.equal(case.out.view(-1)[: values.shape[0]].float(), values.float())


def test_fewer_queries_and_smaller_batch_than_made_for():
    attention = PagedAttention(8, 2, 128, 16, 40, BF16, DEVICE)
    for lengths, num_queries in (([100, 2000, 64], 3), ([70, 900], 1)):
        case = make_case(lengths, num_queries, 8, 2, 128, BF16)
        run_dense(attention, case)
        check_dense(attention, case)


def random_tables(case: Case, num_layers: int, max_k: int, *, wild: bool = False) -> Tables:
    """Two thirds of the rows get distinct positions below a base; with `wild`, nonsense."""
    num_rows = case.req_to_token.shape[0]
    positions = torch.full((num_layers, num_rows, max_k), -7, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    bases = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        row = int(case.rows[request])
        if row == 0 or request % 3 == 2 or seq_len < 2:
            continue
        base = seq_len - request % 2 * min(seq_len - 1, 40)
        count = min(max_k, max(1, base // 3))
        bases[row], counts[row] = base, count
        for layer in range(num_layers):
            chosen = torch.randperm(base, device=DEVICE)[:count]
            positions[layer, row, :count] = chosen.int()
    if wild:
        limits = torch.iinfo(torch.int32)
        positions.random_(limits.min, limits.max)
        counts.random_(-100, 3 * max_k)
        bases[::2] += 1000
        bases[1::4] = -5
    return Tables(positions, counts, bases)


def check_sparse(
    case: Case, tables: Tables, layer: int, step: int, sinks: torch.Tensor | None = None
) -> None:
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        row = int(case.rows[request])
        positions = reference.list_positions(
            *(seq_len, step, tables.positions[layer, row]),
            *(int(tables.counts[row]), int(tables.bases[row])),
        )
        expected, _ = reference.sparse(
            *(case.q[request], case.k_cache, case.v_cache, case.slots(request)),
            *(positions, case.scale, sinks),
        )
        error = relative_error(case.out[request], expected)
        assert error < TOLERANCE[case.q.dtype], f"request {request}, {seq_len} tokens: {error:.2e}"


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, FP8)])
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group"), [(128, 2, 4), (64, 2, 8), (64, 3, 8), (64, 3, 1)]
)
@pytest.mark.parametrize("lengths", [EDGES, [9000, -1, 30000, 1, -1], [500] * 64])
def test_sparse(lengths, head_dim, num_kv_heads, group, dtype, kv_dtype, wild):
    torch.manual_seed(1)
    num_heads = num_kv_heads * group
    case = make_case(lengths, 1, num_heads, num_kv_heads, head_dim, dtype, kv_dtype=kv_dtype)
    sinks = torch.linspace(-3, 12, num_heads, device=DEVICE)
    tables = random_tables(case, num_layers=2, max_k=700, wild=wild)
    attention = attention_for(case)
    for step in (0, 3):
        attention.plan_sparse(case.seq_lens, case.rows, tables, step)
        for layer in range(2):
            case.out.fill_(POISON)
            options: dict[str, Any] = {"sinks": sinks} if layer else {}
            attention.sparse(
                *(case.q, case.k_cache, case.v_cache, case.req_to_token, tables),
                *(layer, case.scale, case.out),
                **options,
            )
            check_sparse(case, tables, layer, step, **options)


def take_out_new(case: Case, first: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of num_queries positions of each request, strided as in a qkv projection; in the
    caches there are NaNs in their places. Padding requests share a slot, which stays as it is."""
    taken = []
    for cache in (case.k_cache, case.v_cache):
        num_kv_heads, head_dim = cache.shape[1:]
        shape = (case.q.shape[0], num_kv_heads + 3, head_dim)
        wide = torch.full(shape, POISON, device=DEVICE, dtype=cache.dtype)
        for request, start in enumerate(first):
            for i in range(case.num_queries):
                slot = int(case.slots(request)[max(start + i, 0)])
                wide[request * case.num_queries + i, 1:-2] = cache[slot]
                if case.rows[request] != 0:
                    cache[slot] = POISON
        taken.append(wide[:, 1:-2])
    return taken[0], taken[1]


def own_slots(case: Case) -> None:
    """Requests share no slots, since they write."""
    width = case.req_to_token.shape[1]
    num_slots = case.rows.shape[0] * width + 2
    order = torch.randperm(num_slots - 2, device=DEVICE).int() + 1
    case.req_to_token[case.rows] = order.view(-1, width)
    case.req_to_token[0] = 0
    shape = (num_slots, *case.k_cache.shape[1:])
    case.k_cache = torch.randn(shape, device=DEVICE).to(case.q.dtype)
    case.v_cache = torch.randn(shape, device=DEVICE).to(case.q.dtype)


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "num_queries"),
    [(128, 2, 4, 7), (64, 2, 8, 7), (128, 1, 16, 8), (128, 2, 4, 1), (64, 3, 3, 16)],
)
# Of the second and third, fewer tiles than CTAs.
@pytest.mark.parametrize("lengths", [[*EDGES, -1, 5000], [5], [-1, 300, 0]])
@pytest.mark.parametrize(("dtype", "collects"), [(BF16, False), (BF16, True), (FP16, False)])
def test_new_kv_is_used_and_stored(
    head_dim, num_kv_heads, group, num_queries, lengths, dtype, collects
):
    torch.manual_seed(3)
    case = make_case(lengths, num_queries, num_kv_heads * group, num_kv_heads, head_dim, dtype)
    own_slots(case)
    attention = attention_for(case)
    before = [case.k_cache.clone(), case.v_cache.clone()]
    new = take_out_new(case, case.seq_lens.tolist())
    attention.plan_dense(case.seq_lens, case.rows, case.num_queries)
    scores = None
    if collects:
        num_rows = case.req_to_token.shape[0]
        tables = random_tables(case, num_layers=1, max_k=2048)
        scores = ScoreCollector(
            *(1, num_rows, num_kv_heads * group, num_kv_heads, 1 << 16, len(lengths)),
            *(0.07, 16, 2048, DEVICE),
        )
        scores.begin(case.seq_lens, case.rows, tables)
    attention.dense(
        *(case.q, case.k_cache, case.v_cache, case.req_to_token, case.scale, case.out),
        scores=scores,
        new_kv=new,
    )
    for cache, expected in zip((case.k_cache, case.v_cache), before, strict=True):
        assert torch.equal(cache[1:], expected[1:])
    check_dense(attention, case)


@pytest.mark.parametrize("lengths", [[*EDGES, -1, 9000], [70]])
def test_new_kv_of_drafts(lengths):
    torch.manual_seed(4)
    case = make_case(lengths, 1, 12, 3, 128, BF16)
    own_slots(case)
    tables = random_tables(case, num_layers=2, max_k=700)
    attention = attention_for(case)
    for step in (0, 3):
        before = [case.k_cache.clone(), case.v_cache.clone()]
        new = take_out_new(case, (case.seq_lens + step).tolist())
        attention.plan_sparse(case.seq_lens, case.rows, tables, step)
        case.out.fill_(POISON)
        attention.sparse(
            *(case.q, case.k_cache, case.v_cache, case.req_to_token, tables),
            *(1, case.scale, case.out),
            new_kv=new,
        )
        for cache, expected in zip((case.k_cache, case.v_cache), before, strict=True):
            assert torch.equal(cache[1:], expected[1:])
        check_sparse(case, tables, 1, step)


def test_graph_follows_lengths():
    """Captured once, replayed with other lengths and tables."""
    torch.manual_seed(2)
    case = make_case([900, 30, 2000, 1500], 5, 8, 2, 128, BF16)
    draft = make_case([900, 30, 2000, 1500], 1, 8, 2, 128, BF16)
    tables = random_tables(draft, num_layers=1, max_k=400)
    verify, drafts = attention_for(case), attention_for(draft)

    def run() -> None:
        run_dense(verify, case)
        drafts.plan_sparse(draft.seq_lens, draft.rows, tables, 2)
        drafts.sparse(
            *(draft.q, draft.k_cache, draft.v_cache, draft.req_to_token, tables),
            *(0, draft.scale, draft.out),
        )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([900, 30, 2000, 1500], [3, 29, 1999, 640], [0, 30, 1, 1500]):
        for one in (case, draft):
            one.seq_lens.copy_(torch.tensor(lengths, device=DEVICE))
            one.out.fill_(POISON)
        tables.bases.copy_(tables.bases * 2 // 3)
        tables.positions.random_(0, 1000)
        graph.replay()
        check_dense(verify, case)
        check_sparse(draft, tables, 0, 2)


def test_refuses_mistakes():
    case = make_case([100], 2, 8, 2, 128, BF16)
    attention = attention_for(case)
    with pytest.raises(ValueError, match="plan"):
        attention.dense(*(case.q, case.k_cache, case.v_cache, case.req_to_token, 1.0, case.out))
    with pytest.raises(ValueError, match="3 queries"):
        attention.plan_dense(case.seq_lens, case.rows, 3)
    with pytest.raises(ValueError, match="batch of 2"):
        attention.plan_dense(*torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), 1)
    with pytest.raises(ValueError, match="seq_lens"):
        attention.plan_dense(case.seq_lens.int(), case.rows, 1)
    attention.plan_dense(case.seq_lens, case.rows, 1)
    with pytest.raises(ValueError, match="q: expected shape"):
        attention.dense(*(case.q, case.k_cache, case.v_cache, case.req_to_token, 1.0, case.out))
    with pytest.raises(ValueError, match="head dim 96"):
        PagedAttention(8, 2, 96, 1, 1, BF16, DEVICE)
