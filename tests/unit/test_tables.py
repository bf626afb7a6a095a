"""Tables by request row, and draft indices against a brute force over logical positions."""

from __future__ import annotations

import pytest
import torch

from sgl_vegas.tables.draft_indices import DraftIndices
from sgl_vegas.tables.request_tables import RequestTable, RequestTables

NUM_LAYERS = 3
MAX_CONTEXT = 200


def random_pool(num_rows: int, seed: int) -> torch.Tensor:
    """A `req_to_token` whose slots are all different, in no order."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_rows * MAX_CONTEXT, generator=generator)
    return slots.view(num_rows, MAX_CONTEXT).int()


def random_table(base: int, k: int, seed: int) -> RequestTable:
    generator = torch.Generator().manual_seed(seed)
    positions = [torch.randperm(base, generator=generator)[:k] for _ in range(NUM_LAYERS)]
    return RequestTable(base, torch.stack(positions).int())


def build(
    tables: dict[int, RequestTable], pool: torch.Tensor, rows: list[int], seq_lens: list[int],
    num_steps: int,
) -> DraftIndices:  # fmt: skip
    store = RequestTables()
    for row, table in tables.items():
        store.put(row, table)
    return DraftIndices(store, pool, rows, seq_lens, num_steps, NUM_LAYERS)


def check_steps(
    indices: DraftIndices,
    tables: dict[int, RequestTable],
    pool: torch.Tensor,
    rows: list[int],
    seq_lens: list[int],
    num_steps: int,
) -> None:
    """Draft step i decodes position seq_len + i: it sees the table and base..seq_len + i."""
    for step in range(num_steps):
        got = indices.at_step(step)
        assert got.kv_indptr.dtype == torch.int32
        assert got.kv_indptr.device.type == "cpu"
        bounds = got.kv_indptr.tolist()
        assert bounds[0] == 0
        assert len(bounds) == len(rows) + 1
        assert got.kv_indices.shape == (NUM_LAYERS, bounds[-1])
        assert got.kv_indices.dtype == torch.int32
        for i, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
            table = tables.get(row)
            last = seq_len + step
            for layer in range(NUM_LAYERS):
                positions = set(range(last + 1))
                if table is not None:
                    selected = set(table.positions[layer].tolist())
                    positions = selected | set(range(table.base, last + 1))
                expected = {int(pool[row, position]) for position in positions}
                listed = got.kv_indices[layer, bounds[i] : bounds[i + 1]].tolist()
                assert set(listed) == expected
                assert len(listed) == len(expected)  # nothing is attended to twice


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_drafts_see_the_table_and_what_came_after(num_steps: int) -> None:
    pool = random_pool(6, seed=num_steps)
    tables = {
        4: random_table(90, 12, seed=1),
        1: random_table(150, 30, seed=2),
        5: random_table(40, 40, seed=3),  # selected whole
        3: random_table(7, 1, seed=4),
    }
    # 4: as after a verify pass; 1: nothing committed since; 2 has no table; order is arbitrary.
    rows, seq_lens = [4, 1, 2, 5, 0, 3], [95, 150, 33, 44, 1, 60]
    indices = build(tables, pool, rows, seq_lens, num_steps)
    check_steps(indices, tables, pool, rows, seq_lens, num_steps)


def test_a_step_takes_a_prefix_of_the_next() -> None:
    """Recent tokens lie last and in order, which the worker's graph relies on."""
    pool = random_pool(2, seed=9)
    indices = build({1: random_table(50, 8, seed=1)}, pool, [1], [53], 5)
    previous = indices.at_step(0).kv_indices
    assert previous[:, 8:].tolist() == [pool[1, 50:54].tolist()] * NUM_LAYERS
    for step in range(1, 5):
        current = indices.at_step(step).kv_indices
        assert torch.equal(current[:, :-1], previous)
        assert (current[:, -1] == pool[1, 53 + step]).all()
        previous = current


def test_one_request_reads_no_other_requests_slots() -> None:
    """Adversarial tables may only cost acceptance: positions are cut to the request's own."""
    pool = random_pool(3, seed=2)
    wild = torch.tensor([[-1, -(2**31), 2**31 - 1, 59, 60, 10_000]] * NUM_LAYERS).int()
    tables = {1: RequestTable(60, wild)}
    indices = build(tables, pool, [1, 2], [64, 5], 3)
    for step in range(3):
        got = indices.at_step(step)
        bounds = got.kv_indptr.tolist()
        recent = set(pool[1, 60 : 65 + step].tolist())
        committed = set(pool[1, :60].tolist())
        for layer in range(NUM_LAYERS):
            listed = got.kv_indices[layer, : bounds[1]].tolist()
            assert recent <= set(listed) <= recent | committed
            assert listed.count(int(pool[1, 60])) == 1
            other = got.kv_indices[layer, bounds[1] :].tolist()
            assert other == pool[2, : 6 + step].tolist()


def test_a_table_from_beyond_the_committed_length_is_cut() -> None:
    """A stale table may be longer than its request: nothing past the draft's own token is read."""
    pool = random_pool(2, seed=3)
    positions = torch.arange(100, 120).repeat(NUM_LAYERS, 1).int()
    indices = build({1: RequestTable(120, positions)}, pool, [1], [30], 2)
    for step in range(2):
        got = indices.at_step(step)
        allowed = set(pool[1, : 31 + step].tolist())
        for layer in range(NUM_LAYERS):
            listed = set(got.kv_indices[layer].tolist())
            assert listed <= allowed
            assert set(pool[1, 30 : 31 + step].tolist()) <= listed


def test_tables_without_positions_leave_the_recent_tokens() -> None:
    pool = random_pool(2, seed=4)
    nothing = torch.empty(NUM_LAYERS, 0, dtype=torch.int32)
    for base in (0, 20):
        got = build({1: RequestTable(base, nothing)}, pool, [1], [25], 2).at_step(1)
        assert got.kv_indices.tolist() == [pool[1, base:27].tolist()] * NUM_LAYERS
        assert got.kv_indptr.tolist() == [0, 27 - base]


def test_an_empty_base_ignores_positions() -> None:
    pool = random_pool(2, seed=5)
    wild = torch.tensor([[5, 6]] * NUM_LAYERS).int()
    got = build({0: RequestTable(0, wild)}, pool, [0], [10], 1).at_step(0)
    assert got.kv_indices.tolist() == [pool[0, :11].tolist()] * NUM_LAYERS


def test_the_pool_is_only_read() -> None:
    pool = random_pool(2, seed=6)
    before = pool.clone()
    indices = build({1: random_table(30, 5, seed=1)}, pool, [0, 1], [20, 33], 3)
    indices.at_step(2).kv_indices.fill_(-1)
    assert torch.equal(pool, before)


def test_store_keeps_replaces_and_drops() -> None:
    tables = RequestTables()
    first, second = random_table(10, 2, seed=1), random_table(12, 2, seed=2)
    assert tables.get(3) is None
    tables.put(3, first)
    tables.put(4, second)
    assert (tables.get(3), tables.get(4), len(tables)) == (first, second, 2)
    tables.put(3, second)
    assert (tables.get(3), len(tables)) == (second, 2)
    tables.drop(3)
    tables.drop(3)  # SGLang may release a request twice
    assert (tables.get(3), tables.get(4), len(tables)) == (None, second, 1)
    tables.clear()
    assert (tables.get(4), len(tables)) == (None, 0)
