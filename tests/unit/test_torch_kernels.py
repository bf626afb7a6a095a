"""The PyTorch attention paths on a paged KV pool, against float64 loops that know no pool."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch

from sgl_vegas.attention.torch_kernels import TorchKernels
from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import Collected, SelectionPolicy, build_policy
from sgl_vegas.tables.request_tables import RequestTables

NUM_LAYERS = 2
HEADS, KV_HEADS, DIM = 8, 2, 64
SCALE = 1.7 / math.sqrt(DIM)
ROWS = [5, 0, 3, 2]
# The third request fits its budget of 16 and is selected whole.
SEQ_LENS = [90, 33, 16, 200]
BUDGETS = [16, 16, 16, 20]
CONFIG = VegasConfig(sparsity_ratio=0.1, min_tokens=16)


class Spy(SelectionPolicy):
    """Remembers what it was asked, selects what tells layer and request apart."""

    def __init__(self, config: VegasConfig) -> None:
        super().__init__(config)
        self.calls: list[tuple[int, bool, int]] = []
        self.scores: list[torch.Tensor | None] = []

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        self.calls.append((layer, scores is not None, seq_len))
        self.scores.append(scores)
        return torch.tensor([seq_len - 1 - layer], device=device)


class Pool:
    """Keys of several requests in permuted slots; every slot that no request owns holds NaN."""

    def __init__(self, num_verified: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [seq_len + num_verified for seq_len in SEQ_LENS]
        num_slots = sum(lengths) + 50
        slots = torch.randperm(num_slots, generator=generator)
        self.req_to_token = torch.zeros(6, 256, dtype=torch.int32)
        self.caches = [
            torch.full((num_slots, KV_HEADS, DIM), float("nan")) for _ in range(NUM_LAYERS)
        ]
        self.keys_of = [
            [torch.randn(length, KV_HEADS, DIM, generator=generator) for length in lengths]
            for _ in range(NUM_LAYERS)
        ]
        # What lies behind a request's tokens in its row is left over from an earlier one.
        self.req_to_token[:] = slots[-50:][torch.randint(50, (6, 256), generator=generator)].int()
        start = 0
        for i, (row, length) in enumerate(zip(ROWS, lengths, strict=True)):
            own = slots[start : start + length]
            start += length
            self.req_to_token[row, :length] = own.int()
            for layer in range(NUM_LAYERS):
                self.caches[layer][own] = self.keys_of[layer][i]
        num_queries = 2 if num_verified else 1
        self.queries = [
            torch.randn(len(ROWS), num_queries, HEADS, DIM, generator=generator) * 2
            for _ in range(NUM_LAYERS)
        ]


def weights_of(queries: torch.Tensor, keys: torch.Tensor, visible: list[int], seq_len: int):
    """Mean softmax weight of each of the first `seq_len` entries, float64, a head at a time."""
    total = torch.zeros(seq_len, dtype=torch.float64)
    for i, length in enumerate(visible):
        for h in range(HEADS):
            k = keys[:length, h // (HEADS // KV_HEADS)].double()
            logits = (k * queries[i, h].double()).sum(-1) * SCALE
            weights = logits.exp() / logits.exp().sum()
            total += weights[:seq_len]
    return total / (len(visible) * HEADS)


class Selected(NamedTuple):
    """One request's table: base, positions (num_layers, k)."""

    base: int
    positions: torch.Tensor


def collect(policy: SelectionPolicy, pool: Pool, num_verified: int) -> list[Selected]:
    """The tables that a prefill (num_verified 0) or verify pass makes of the pool's queries."""
    tables = RequestTables(NUM_LAYERS, len(pool.req_to_token), 256, "cpu")
    kernels = TorchKernels(policy, tables, pool.req_to_token, num_verified)
    rows, seq_lens = torch.tensor(ROWS), torch.tensor(SEQ_LENS)
    if num_verified:
        kernels.begin_verify(rows, seq_lens)
    else:
        kernels.begin_prefill(rows, seq_lens)
    for layer in range(NUM_LAYERS):
        cache = pool.caches[layer]
        if num_verified:
            # The first and the last query of a request are the pool's; those between don't count.
            first_and_last = pool.queries[layer]
            queries = torch.full((len(ROWS), num_verified, HEADS, DIM), float("nan"))
            queries[:, 0], queries[:, -1] = first_and_last[:, 0], first_and_last[:, 1]
            kernels.verify(layer, queries.flatten(0, 1), None, cache, cache, SCALE)
        else:
            kernels.prefill(layer, pool.queries[layer][:, 0], cache, cache, SCALE)
    return [
        Selected(int(tables.bases[row]), tables.positions[:, row, : int(tables.counts[row])])
        for row in ROWS
    ]


@pytest.mark.parametrize("num_verified", [0, 2, 7])
def test_vegas_selects_by_the_first_and_last_query(num_verified: int) -> None:
    pool = Pool(num_verified, seed=num_verified)
    tables = collect(build_policy(CONFIG), pool, num_verified)
    for i, (table, seq_len, budget) in enumerate(zip(tables, SEQ_LENS, BUDGETS, strict=True)):
        # A prefill's last query sits at the end of the prompt; a verify pass's first query is the
        # first verified token, and its last one the last.
        visible = [seq_len + 1, seq_len + num_verified] if num_verified else [seq_len]
        assert table.base == seq_len
        assert table.positions.shape == (NUM_LAYERS, budget)
        assert table.positions.dtype == torch.int32
        for layer in range(NUM_LAYERS):
            weights = weights_of(pool.queries[layer][i], pool.keys_of[layer][i], visible, seq_len)
            ordered, order = weights.sort(descending=True)
            if budget < seq_len:  # rounding may not decide the set
                assert float(ordered[budget - 1] - ordered[budget]) > 1e-8
            assert sorted(table.positions[layer].tolist()) == sorted(order[:budget].tolist())


def test_layers_and_requests_are_not_mixed_up() -> None:
    policy = Spy(CONFIG)
    tables = collect(policy, Pool(4, seed=1), 4)
    expected = [(layer, False, seq_len) for layer in range(NUM_LAYERS) for seq_len in SEQ_LENS]
    assert policy.calls == expected
    for table, seq_len in zip(tables, SEQ_LENS, strict=True):
        assert table.base == seq_len
        assert table.positions.tolist() == [[seq_len - 1], [seq_len - 2]]


def test_scores_are_collected_only_where_they_are_read() -> None:
    policy = Spy(CONFIG)
    policy.collects = Collected.FIRST_AND_LAST
    collect(policy, Pool(4, seed=2), 4)
    by_length = {seq_len: had for _, had, seq_len in policy.calls}
    assert by_length == {90: True, 33: True, 16: False, 200: True}


@pytest.mark.parametrize("num_verified", [0, 2, 7])
def test_the_policy_sees_exact_scores(num_verified: int) -> None:
    """An entry too few or too many moves all weights of a query, but seldom their order."""
    pool, policy = Pool(num_verified, seed=4), Spy(CONFIG)
    policy.collects = Collected.FIRST_AND_LAST
    collect(policy, pool, num_verified)
    for (layer, _, seq_len), scores in zip(policy.calls, policy.scores, strict=True):
        if scores is None:
            continue
        i, kv_len = SEQ_LENS.index(seq_len), seq_len + num_verified
        visible = [seq_len + 1, kv_len] if num_verified else [seq_len]
        assert scores.shape == (len(visible), HEADS, kv_len)
        for query, length in enumerate(visible):
            for h in range(HEADS):
                keys = pool.keys_of[layer][i][:length, h // (HEADS // KV_HEADS)].double()
                expected = (keys * pool.queries[layer][i, query, h].double()).sum(-1) * SCALE
                torch.testing.assert_close(
                    scores[query, h, :length].double(), expected, rtol=0, atol=1e-5
                )
                assert bool(scores[query, h, length:].isneginf().all())


def test_streaming_needs_no_queries() -> None:
    pool = Pool(3, seed=3)
    for queries in pool.queries:
        queries.fill_(float("nan"))
    tables = collect(build_policy(VegasConfig(6, 0.1, 16, None, "streaming")), pool, 3)
    for table, seq_len, budget in zip(tables, SEQ_LENS, BUDGETS, strict=True):
        expected = [*range(4), *range(seq_len - budget + 4, seq_len)]
        assert table.positions.tolist() == [expected] * NUM_LAYERS


def attention_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(heads, dim) float64: one query over all of `keys`, a head at a time."""
    outputs = []
    for h in range(HEADS):
        k, v = (x[:, h // (HEADS // KV_HEADS)].double() for x in (keys, values))
        outputs.append(torch.softmax(k @ query[h].double() * SCALE, dim=0) @ v)
    return torch.stack(outputs)


def take_out(pool: Pool, layer: int, first: list[int], count: int) -> torch.Tensor:
    """`count` positions' keys of each request, and NaN in their places: (requests * count, ...)."""
    taken = []
    for row, keys, start in zip(ROWS, pool.keys_of[layer], first, strict=True):
        slots = pool.req_to_token[row, start : start + count].long()
        pool.caches[layer][slots] = float("nan")
        taken.append(keys[start : start + count])
    return torch.cat(taken)


@pytest.mark.parametrize("in_cache", [False, True])
def test_verify_attends_to_everything_before_each_query(in_cache: bool) -> None:
    width = 4
    pool = Pool(width, seed=5)
    tables = RequestTables(NUM_LAYERS, 6, 256, "cpu")
    kernels = TorchKernels(build_policy(CONFIG), tables, pool.req_to_token, width)
    kernels.begin_verify(torch.tensor(ROWS), torch.tensor(SEQ_LENS))
    queries = torch.randn(len(ROWS) * width, HEADS, DIM, generator=torch.Generator().manual_seed(6))
    before = pool.caches[1].clone()
    new = None
    if not in_cache:
        taken = take_out(pool, 1, SEQ_LENS, width)
        new = (taken, taken)
    got = kernels.verify(1, queries, new, pool.caches[1], pool.caches[1], SCALE)
    torch.testing.assert_close(pool.caches[1], before, rtol=0, atol=0, equal_nan=True)
    for i, seq_len in enumerate(SEQ_LENS):
        for j in range(width):
            keys = pool.keys_of[1][i][: seq_len + j + 1]
            expected = attention_of(queries[i * width + j], keys, keys)
            torch.testing.assert_close(got[i * width + j].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_drafts_attend_to_the_table_and_what_came_after(dense: bool) -> None:
    pool = Pool(8, seed=7)
    tables = RequestTables(NUM_LAYERS, 6, 32, "cpu")
    generator = torch.Generator().manual_seed(8)
    chosen = {}
    for row, seq_len in zip(ROWS, SEQ_LENS, strict=True):
        for layer in range(NUM_LAYERS):
            chosen[row, layer] = torch.randperm(seq_len - 3, generator=generator)[:8]
            tables.put(layer, row, seq_len - 3, chosen[row, layer])
    kernels = TorchKernels(build_policy(CONFIG), tables, pool.req_to_token, 8)
    for step in (0, 5):
        kernels.begin_draft(torch.tensor(ROWS), torch.tensor(SEQ_LENS), step, dense)
        queries = torch.randn(len(ROWS), HEADS, DIM, generator=generator)
        for layer in range(NUM_LAYERS):
            first = [seq_len + step for seq_len in SEQ_LENS]
            before = pool.caches[layer].clone()
            taken = take_out(pool, layer, first, 1)
            new = (taken, taken)
            got = kernels.draft(layer, queries, new, pool.caches[layer], pool.caches[layer], SCALE)
            torch.testing.assert_close(pool.caches[layer], before, rtol=0, atol=0, equal_nan=True)
            for i, (row, seq_len) in enumerate(zip(ROWS, SEQ_LENS, strict=True)):
                recent = range(0 if dense else seq_len - 3, seq_len + step + 1)
                positions = [*recent] if dense else [*chosen[row, layer].tolist(), *recent]
                keys = pool.keys_of[layer][i][positions]
                expected = attention_of(queries[i], keys, keys)
                torch.testing.assert_close(got[i].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_prefill_forgets_the_rows_last_request() -> None:
    pool = Pool(0, seed=9)
    tables = RequestTables(NUM_LAYERS, 6, 32, "cpu")
    tables.put(0, ROWS[0], 77, torch.arange(5))
    policy = build_policy(VegasConfig(policy="dense"))
    kernels = TorchKernels(policy, tables, pool.req_to_token, 4)
    kernels.begin_prefill(torch.tensor(ROWS), torch.tensor(SEQ_LENS))
    assert not tables.counts.any()
    assert not tables.bases.any()


def all_queries(pool: Pool, width: int) -> list[torch.Tensor]:
    """Of each layer, (requests, width, heads, dim)."""
    generator = torch.Generator().manual_seed(11)
    shape = (len(ROWS), width, HEADS, DIM)
    return [torch.randn(shape, generator=generator) * 2 for _ in pool.queries]


@pytest.mark.parametrize("policy", ["all-queries", "last-accepted"])
def test_rivals_rank_by_queries_of_their_own(policy: str) -> None:
    width, accepted = 5, [0, 4, 2, 3]
    pool = Pool(width, seed=10)
    queries = all_queries(pool, width)
    tables = RequestTables(NUM_LAYERS, 6, 256, "cpu")
    config = VegasConfig(4, 0.1, 16, policy=policy)
    kernels = TorchKernels(build_policy(config), tables, pool.req_to_token, width)
    kernels.begin_verify(torch.tensor(ROWS), torch.tensor(SEQ_LENS))
    for layer, cache in enumerate(pool.caches):
        kernels.verify(layer, queries[layer].flatten(0, 1), None, cache, cache, SCALE)
    if policy == "last-accepted":
        kernels.accepted(torch.tensor(accepted))
    for i, (row, seq_len, budget) in enumerate(zip(ROWS, SEQ_LENS, BUDGETS, strict=True)):
        counted = [accepted[i]] if policy == "last-accepted" else list(range(width))
        assert tables.bases[row] == seq_len
        for layer in range(NUM_LAYERS):
            visible = [seq_len + place + 1 for place in counted]
            of_request = queries[layer][i, counted]
            weights = weights_of(of_request, pool.keys_of[layer][i], visible, seq_len)
            expected = sorted(weights.topk(budget).indices.tolist())
            got = tables.positions[layer, row, : tables.counts[row]]
            assert sorted(got.tolist()) == expected


def quest_positions(q: torch.Tensor, keys: torch.Tensor, kv_head: int, budget: int) -> set[int]:
    """What Quest attends to, as its paper states it: a page's bound is, element by element, the
    larger of the query times the page's minimum and maximum, summed up."""
    whole = len(keys) // 16
    bounds = []
    for page in range(whole):
        of_page = keys[page * 16 : page * 16 + 16, kv_head].double()
        low, high = of_page.min(dim=0).values, of_page.max(dim=0).values
        of_heads = [
            sum(
                max(float(x) * float(lo), float(x) * float(hi))
                for x, lo, hi in zip(q[h].double(), low, high, strict=True)
            )
            for h in range(HEADS)
            if h // (HEADS // KV_HEADS) == kv_head
        ]
        bounds.append(sum(of_heads) / len(of_heads))
    tail = set(range(max(whole * 16, len(keys) - budget), len(keys)))
    wanted = max(budget - len(tail), 0) // 16
    best = sorted(range(whole), key=lambda page: -bounds[page])[:wanted]
    return tail | {page * 16 + i for page in best for i in range(16)}


def oracle_positions(q: torch.Tensor, keys: torch.Tensor, kv_head: int, budget: int) -> set[int]:
    """The entries of most weight for the query heads that share a KV head."""
    weights = torch.zeros(len(keys), dtype=torch.float64)
    for h in range(HEADS):
        if h // (HEADS // KV_HEADS) == kv_head:
            weights += torch.softmax(keys[:, kv_head].double() @ q[h].double() * SCALE, dim=0)
    return set(weights.topk(budget).indices.tolist())


@pytest.mark.parametrize(
    ("policy", "positions_of"), [("quest", quest_positions), ("oracle", oracle_positions)]
)
def test_rivals_that_select_at_every_draft_step(policy: str, positions_of) -> None:
    pool = Pool(8, seed=12)
    tables = RequestTables(NUM_LAYERS, 6, 32, "cpu")
    config = VegasConfig(sparsity_ratio=0.2, min_tokens=16, policy=policy)
    kernels = TorchKernels(build_policy(config), tables, pool.req_to_token, 8)
    generator = torch.Generator().manual_seed(13)
    for step in (0, 1, 5):
        kernels.begin_draft(torch.tensor(ROWS), torch.tensor(SEQ_LENS), step, dense=False)
        queries = torch.randn(len(ROWS), HEADS, DIM, generator=generator) * 2
        for layer, cache in enumerate(pool.caches):
            got = kernels.draft(layer, queries, None, cache, cache, SCALE)
            for i, seq_len in enumerate(SEQ_LENS):
                keys = pool.keys_of[layer][i]
                recent = set(range(seq_len, seq_len + step + 1))
                for h in range(HEADS):
                    kv_head = h // (HEADS // KV_HEADS)
                    chosen = positions_of(
                        queries[i], keys[:seq_len], kv_head, config.budget(seq_len)
                    )
                    k = keys[sorted(chosen | recent), kv_head].double()
                    expected = torch.softmax(k @ queries[i, h].double() * SCALE, dim=0) @ k
                    torch.testing.assert_close(got[i, h].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.02, 0.2, 1.0])
@pytest.mark.parametrize(
    ("policy", "positions_of"), [("quest", quest_positions), ("oracle", oracle_positions)]
)
def test_a_padded_batch_is_selected_from_request_by_request(
    policy: str, positions_of, ratio: float
) -> None:
    lens = (90, 5, 33, 160, 16, 200)
    config = VegasConfig(sparsity_ratio=ratio, min_tokens=4, policy=policy)
    # Requests of other ratios may be asked about in the same call.
    halved = dataclasses.replace(config, sparsity_ratio=ratio / 2)
    budgets = tuple((halved if i % 2 else config).budget(n) for i, n in enumerate(lens))
    generator = torch.Generator().manual_seed(18)
    built = build_policy(config)
    for layer in range(NUM_LAYERS):
        q = torch.randn(len(lens), HEADS, DIM, generator=generator) * 2
        keys = torch.randn(len(lens), 210, KV_HEADS, DIM, generator=generator)
        for of_request, length in zip(keys, lens, strict=True):
            of_request[length:] = 9.0
        got = built.select_step(layer, 0, q, keys, lens, budgets, None, SCALE)
        assert got is not None
        assert got.shape[-1] <= max(budgets)
        if got.dim() == 2:
            got = got[:, None].expand(-1, KV_HEADS, -1)
        for i, length in enumerate(lens):
            assert bool(((got[i] < 0) == (got[i, 0] < 0)).all())
            for kv_head in range(KV_HEADS):
                expected = positions_of(q[i], keys[i, :length], kv_head, budgets[i])
                assert sorted(x for x in got[i, kv_head].tolist() if x >= 0) == sorted(expected)


class EveryOtherStep(SelectionPolicy):
    """Attends to one entry of its table, another one at every second step; pads what it says."""

    reselects = True

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        return torch.arange(seq_len - 8, seq_len, device=device)

    def select_step(
        self, layer, step, q, keys, seq_lens, budgets, tables, scale
    ) -> torch.Tensor | None:
        if step % 2:
            return None
        assert tables is not None
        padding = torch.full((len(tables), 3), -1)
        return torch.cat([tables[:, step + layer : step + layer + 1], padding], dim=1)


def test_a_policy_may_keep_what_it_selected() -> None:
    pool = Pool(8, seed=14)
    tables = RequestTables(NUM_LAYERS, 6, 32, "cpu")
    kernels = TorchKernels(EveryOtherStep(CONFIG), tables, pool.req_to_token, 8)
    rows, base = torch.tensor(ROWS), torch.tensor(SEQ_LENS)
    kernels.begin_verify(rows, base)
    for layer, cache in enumerate(pool.caches):
        queries = torch.ones(len(ROWS) * 8, HEADS, DIM)
        kernels.verify(layer, queries, None, cache, cache, SCALE)
    generator = torch.Generator().manual_seed(15)
    for step in range(4):
        # Two tokens were committed since the tables were made.
        kernels.begin_draft(rows, base + 2, step, dense=False)
        queries = torch.randn(len(ROWS), HEADS, DIM, generator=generator)
        for layer, cache in enumerate(pool.caches):
            got = kernels.draft(layer, queries, None, cache, cache, SCALE)
            for i, seq_len in enumerate(SEQ_LENS):
                chosen = seq_len - 8 + step // 2 * 2 + layer
                keys = pool.keys_of[layer][i][[chosen, *range(seq_len, seq_len + 3 + step)]]
                expected = attention_of(queries[i], keys, keys)
                torch.testing.assert_close(got[i].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_row_without_a_table_drafts_densely() -> None:
    pool = Pool(8, seed=16)
    tables = RequestTables(NUM_LAYERS, 6, 32, "cpu")
    kernels = TorchKernels(EveryOtherStep(CONFIG), tables, pool.req_to_token, 8)
    kernels.begin_draft(torch.tensor(ROWS), torch.tensor(SEQ_LENS), 0, dense=False)
    queries = torch.randn(len(ROWS), HEADS, DIM, generator=torch.Generator().manual_seed(17))
    got = kernels.draft(0, queries, None, pool.caches[0], pool.caches[0], SCALE)
    for i, seq_len in enumerate(SEQ_LENS):
        keys = pool.keys_of[0][i][: seq_len + 1]
        torch.testing.assert_close(
            got[i].double(), attention_of(queries[i], keys, keys), rtol=1e-4, atol=1e-5
        )
