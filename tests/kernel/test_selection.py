"""Score collection and selection against exact softmax weights."""

from __future__ import annotations

import math

import pytest
import torch
from sgl_vegas_kernels import reference  # pyright: ignore[reportMissingImports]
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    PagedAttention,
    ScoreCollector,
    Tables,
)

from tests.kernel.paged_cases import DEVICE, Case, make_case

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# A score is the power of two next to a weight, from 2/3 to 4/3 of it; a key is within 1/128 octave.
# A sum is no further off than its worst term. Two weights may be off in opposite directions.
WORST_RATIO = (2 / 3) / (4 / 3) * 0.98
# Of the attention weight of the best k, what the chosen k have.
KEPT = 0.96
LAYERS, MAX_K = 2, 2048


class Setup:
    def __init__(self, case: Case, ratio=0.07, min_tokens=16, capacity=1 << 18) -> None:
        _, num_heads, head_dim = case.q.shape
        num_kv_heads, batch = case.k_cache.shape[1], case.rows.shape[0]
        num_rows = case.req_to_token.shape[0]
        self.case = case
        self.sizes = (ratio, min_tokens, MAX_K)
        self.attention = PagedAttention(
            *(num_heads, num_kv_heads, head_dim, case.num_queries, batch, case.q.dtype, DEVICE)
        )
        self.collector = ScoreCollector(
            *(LAYERS, num_rows, num_heads, num_kv_heads, capacity, batch),
            *(ratio, min_tokens, MAX_K, DEVICE),
        )

        def ints(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

        self.tables = Tables(
            ints(LAYERS, num_rows, MAX_K, value=-1),
            ints(num_rows, value=3),
            ints(num_rows, value=5),
        )

    def attend(self, layer: int, collect: bool = True) -> None:
        case = self.case
        self.attention.dense(
            *(case.q, case.k_cache, case.v_cache, case.req_to_token, case.scale),
            *(case.out, self.collector if collect else None, layer),
        )

    def begin(self) -> None:
        self.attention.plan_dense(self.case.seq_lens, self.case.rows, self.case.num_queries)
        self.collector.begin(self.case.seq_lens, self.case.rows, self.tables)

    def verify(self, layer: int) -> None:
        self.attend(layer)
        self.collector.select(self.attention, layer, self.case.rows, self.tables)

    def prefill(self, *layers: int) -> None:
        case = self.case
        self.attention.plan_dense(case.seq_lens - 1, case.rows, 1)
        self.collector.begin(case.seq_lens, case.rows, self.tables)
        for layer in layers:
            self.collector.prefill(
                *(self.attention, case.q, case.k_cache, case.v_cache, case.req_to_token),
                *(case.rows, case.seq_lens, case.scale, self.tables, layer, case.out),
            )

    def chosen(self, layer: int, request: int) -> torch.Tensor:
        row = int(self.case.rows[request])
        return self.tables.positions[layer, row, : int(self.tables.counts[row])].long()

    def weights(self, request: int, seq_len: int, rank_len: int) -> torch.Tensor:
        case = self.case
        _, _, weights = reference.dense(
            *(case.queries(request), case.k_cache, case.v_cache, case.slots(request)),
            *(seq_len, case.scale),
        )
        return reference.selection_weights(weights, rank_len)

    def unstored(self, k: int) -> float:
        """What a sum may lack: weights that are too small to be stored, of every head and query."""
        rows = 2 * self.case.q.shape[1]
        return rows * 1.5 * 2.0 ** (math.ceil(math.log2(rows / k)) + 3 - 15)

    def check(self, layer: int, prefill: bool = False, kept_share: float = KEPT) -> None:
        """All requests: table sizes, no duplicates, nothing much heavier left out."""
        for request, length in enumerate(self.case.seq_lens.tolist()):
            row = int(self.case.rows[request])
            k = reference.table_size(length, *self.sizes) if row else 0
            assert int(self.tables.counts[row]) == k
            assert int(self.tables.bases[row]) == (length if k else 0)
            if k == 0:
                continue
            chosen = self.chosen(layer, request)
            assert chosen.shape[0] == k
            assert chosen.min() >= 0 and chosen.max() < length
            assert chosen.unique().shape[0] == k
            weights = self.weights(request, length - prefill, length)
            kept = torch.zeros(length, dtype=torch.bool, device=DEVICE)
            kept[chosen] = True
            exact = weights.topk(k).values.sum()
            assert weights[kept].sum() >= kept_share * exact
            if kept_share >= KEPT:
                lightest = weights[kept].min() + self.unstored(k)
                assert lightest >= weights[~kept].max() * WORST_RATIO


LENGTHS = [3000, 1, 17, 500, 64, -1, 1025, 230, 0, 6001]


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "num_queries"),
    [
        (128, 2, 4, 7),
        (128, 8, 4, 7),
        (64, 8, 8, 7),
        (64, 3, 3, 4),
        (64, 5, 1, 2),
        (128, 2, 5, 8),
        (128, 1, 16, 8),
        (64, 1, 16, 16),
        (128, 2, 4, 1),
        (64, 3, 3, 1),
        (128, 4, 2, 16),
    ],
)
def test_verification_selects_the_heaviest(head_dim, num_kv_heads, group, num_queries):
    case = make_case(
        LENGTHS, num_queries, num_kv_heads * group, num_kv_heads, head_dim, BF16, sharpness=2.0
    )
    setup = Setup(case)
    for _ in range(2):  # the second pass has references that fit
        setup.begin()
        for layer in range(LAYERS):
            setup.verify(layer)
    for layer in range(LAYERS):
        setup.check(layer)
    assert (setup.collector._histograms == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "num_queries"),
    [(kv, group, n) for kv in (1, 2) for group in (1, 3, 5, 8, 13, 16) for n in (1, 2, 7, 16)],
)
def test_every_head_of_both_queries_counts_and_no_other_query(
    head_dim, num_kv_heads, group, num_queries
):
    """Each head and query has a position of its own that it attends to and nobody else does."""
    num_heads, length = num_kv_heads * group, 3000
    ends = sorted({0, num_queries - 1})
    k = len(ends) * num_heads
    case = make_case([length], num_queries, num_heads, num_kv_heads, head_dim, BF16)
    if PagedAttention.supports(
        *(num_heads, num_kv_heads, head_dim, num_queries, BF16),
        torch.cuda.get_device_capability(),
    ):
        pytest.skip("no such instance on this device")
    own = torch.randperm(length, device=DEVICE)[: num_queries * num_heads]
    own = own.view(num_queries, num_heads)
    for query in range(num_queries):
        for head in range(num_heads):
            q = case.q[query, head].float()
            # A score of 20 there, and less than 12 for the others.
            case.k_cache[case.slots(0)[own[query, head]].long(), head // group] = (
                q * 20 / (case.scale * q.square().sum())
            ).to(BF16)
    setup = Setup(case, ratio=1e-6, min_tokens=k)
    for _ in range(2):
        setup.begin()
        setup.verify(0)
    assert setup.chosen(0, 0).sort().values.tolist() == own[ends].flatten().sort().values.tolist()


def test_tables_have_to_be_dense():
    case = make_case([3000], 7, 8, 2, 128, BF16)
    setup = Setup(case)
    setup.begin()
    setup.attend(0)
    part = Tables(
        setup.tables.positions.repeat(1, 1, 2)[:, :, :MAX_K],
        setup.tables.counts,
        setup.tables.bases,
    )
    with pytest.raises(ValueError, match="contiguous"):
        setup.collector.select(setup.attention, 0, case.rows, part)
    narrow = Tables(
        setup.tables.positions[:, :, :8].contiguous(), setup.tables.counts, setup.tables.bases
    )
    with pytest.raises(ValueError, match="max_tokens"):
        setup.collector.select(setup.attention, 0, case.rows, narrow)


@pytest.mark.parametrize(("shift", "kept_share"), [(-1.5, 0.93), (1.5, 0.93), (-6, 0.8), (6, 0.8)])
def test_old_references(shift, kept_share):
    """References up to so many octaves away from this pass's log-sum-exp, which then replaces
    them. A head's two queries then differ in how much they count."""
    case = make_case([4000, 700], 7, 8, 2, 128, BF16)
    setup = Setup(case)
    setup.begin()
    setup.verify(0)
    setup.collector.score_ref += shift * torch.rand_like(setup.collector.score_ref)
    setup.begin()
    setup.verify(0)
    setup.check(0, kept_share=kept_share)
    setup.begin()
    setup.verify(0)
    setup.check(0)


@pytest.mark.parametrize("kind", ["zeros", "ones", "full", "random", "two values"])
def test_exactly_k_whatever_the_bytes(kind):
    case = make_case([3000, 40, 900, 5000], 7, 8, 2, 128, BF16)
    setup = Setup(case)
    setup.begin()
    setup.attend(0)
    scores = setup.collector.scores
    if kind == "random":
        scores.random_(0, 256)
    elif kind == "two values":
        scores.fill_(3 | 12 << 4)  # even tokens in the lower halves of bytes
    else:
        scores.fill_({"zeros": 0, "ones": 1, "full": 255}[kind])
    setup.collector.select(setup.attention, 0, case.rows, setup.tables)
    for request, length in enumerate(case.seq_lens.tolist()):
        chosen = setup.chosen(0, request)
        assert chosen.unique().shape[0] == reference.table_size(length, *setup.sizes)
        assert chosen.numel() == 0 or (chosen.min() >= 0 and chosen.max() < length)
        if kind == "two values":
            assert (chosen % 2 == 1).all()


@pytest.mark.parametrize(
    ("lengths", "shares_a_block"),
    [
        ([9000, 40, 700, 1025], 1),
        ([777] * 200, 1),
        ([777] * 600, 2),
        ([6000] * 40 + [300] * 500, 2),
    ],
)
def test_same_scores_give_the_same_tables(lengths, shares_a_block):
    """Entry by entry. The last have more shares than select has blocks."""
    case = make_case(lengths, 7, 8, 2, 128, BF16)
    setup = Setup(case, capacity=1 << 19)
    setup.begin()
    setup.verify(0)
    collector = setup.collector
    assert (int(collector._num_shares) > collector._num_blocks) == (shares_a_block > 1)
    first = setup.tables.positions.clone()
    assert (first[0, case.rows[0], 0] >= 0).all()
    for _ in range(5):
        setup.tables.positions.fill_(-1)
        setup.collector.score_ref.zero_()
        setup.begin()
        setup.verify(0)
        assert torch.equal(setup.tables.positions, first)
    setup.begin()
    setup.verify(0)  # with references that fit
    setup.check(0, kept_share=0.93)  # of 300 tokens 22 are chosen, few for a share


def test_nothing_outside_a_table_is_written():
    case = make_case([3000, 40, -1], 7, 8, 2, 128, BF16)
    setup = Setup(case)
    setup.begin()
    setup.verify(1)
    for request in (0, 1):
        chosen = setup.chosen(1, request)
        assert (chosen >= 0).all()
        setup.tables.positions[1, int(case.rows[request]), : chosen.shape[0]] = -1
    assert (setup.tables.positions == -1).all()
    assert (setup.collector.score_ref[:, 0] == 0).all()
    assert (setup.collector.score_ref[0] == 0).all()


def test_capacity():
    """Requests that don't fit keep their tables; smaller ones behind them still fit."""
    case = make_case([1000, 3000, 900, 100, 10], 7, 8, 2, 128, BF16)
    setup = Setup(case, capacity=2000)
    setup.begin()
    setup.verify(0)
    rows = case.rows.tolist()
    counts = [int(setup.tables.counts[row]) for row in rows]
    bases = [int(setup.tables.bases[row]) for row in rows]
    sizes = [reference.table_size(length, *setup.sizes) for length in (1000, 900, 100)]
    assert counts == [sizes[0], 3, sizes[1], sizes[2], 0]
    assert bases == [1000, 5, 900, 100, 0]
    assert (setup.tables.positions[0, rows[1]] == -1).all()


def test_budget_limits():
    case = make_case([4000, 100], 7, 8, 2, 128, BF16)
    setup = Setup(case, ratio=0.9, min_tokens=99)
    setup.begin()
    setup.verify(0)
    assert [int(setup.tables.counts[row]) for row in case.rows.tolist()] == [MAX_K, 99]
    assert setup.chosen(0, 0).unique().shape[0] == MAX_K
    assert setup.chosen(0, 1).unique().shape[0] == 99


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 8)])
def test_prefill(head_dim, group):
    case = make_case(LENGTHS, 1, 2 * group, 2, head_dim, BF16, sharpness=3.0)
    setup = Setup(case)
    setup.collector.score_ref.fill_(1e4)
    setup.prefill(*range(LAYERS))
    for layer in range(LAYERS):
        setup.check(layer, prefill=True)


def test_graph():
    """A pass captured once; replayed with other lengths."""
    case = make_case([3000, 500, 1700], 7, 8, 2, 128, BF16)
    setup = Setup(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        setup.begin()
        for layer in range(LAYERS):
            setup.verify(layer)
    for lengths in ([3000, 500, 1700], [299, 500, 12], [2999, 16, 1700]):
        case.seq_lens.copy_(torch.tensor(lengths, device=DEVICE))
        for _ in range(2):  # the second has references that fit
            graph.replay()
        for layer in range(LAYERS):
            setup.check(layer)
