"""Tables by request row, and what drafts read of them."""

from __future__ import annotations

import torch

from sgl_vegas.tables.request_tables import RequestTables

NUM_LAYERS = 3


def filled(base: int, positions: torch.Tensor, max_selected: int = 40) -> RequestTables:
    tables = RequestTables(NUM_LAYERS, 4, max_selected, "cpu")
    for layer in range(NUM_LAYERS):
        tables.put(layer, 1, base, positions + layer)
    return tables


def test_drafts_see_the_table_and_every_position_from_its_base_on() -> None:
    tables = filled(90, torch.tensor([3, 70, 5]))
    got = tables.draft_positions(1, 95)
    assert got.dtype == torch.int64
    assert got.tolist() == [
        [3 + layer, 70 + layer, 5 + layer, 90, 91, 92, 93, 94, 95] for layer in range(NUM_LAYERS)
    ]


def test_a_row_without_a_table_drafts_densely() -> None:
    assert filled(90, torch.tensor([3])).draft_positions(2, 4).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_wild_positions_are_cut_to_the_rows_own() -> None:
    wild = torch.tensor([-1, -(2**31), 2**31 - 3, 59, 60, 10_000])
    got = filled(60, wild).draft_positions(1, 64)
    assert bool(((got >= 0) & (got <= 64)).all())
    assert got[:, -5:].tolist() == [[60, 61, 62, 63, 64]] * NUM_LAYERS
    assert bool((got[:, :-5] < 60).all())


def test_a_table_from_beyond_the_committed_length_is_cut() -> None:
    got = filled(120, torch.arange(100, 117)).draft_positions(1, 30)
    assert bool((got <= 30).all())
    assert bool((got[:, -1] == 30).all())


def test_an_empty_table_leaves_the_recent_tokens() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert filled(20, nothing).draft_positions(1, 22).tolist() == [[20, 21, 22]] * NUM_LAYERS


def test_an_empty_base_ignores_positions() -> None:
    assert filled(0, torch.tensor([5])).draft_positions(1, 2).tolist() == [[0, 1, 2]] * NUM_LAYERS


def test_more_positions_than_fit_are_cut_off() -> None:
    tables = filled(50, torch.arange(30), max_selected=8)
    assert tables.counts.tolist() == [0, 8, 0, 0]
    assert tables.draft_positions(1, 50)[0].tolist() == [*range(8), 50]


def test_put_replaces_and_drop_forgets() -> None:
    tables = filled(50, torch.arange(9))
    for layer in range(NUM_LAYERS):
        tables.put(layer, 1, 60, torch.tensor([7]))
        tables.put(layer, 3, 10, torch.tensor([1, 2]))
    assert tables.draft_positions(1, 61).tolist() == [[7, 60, 61]] * NUM_LAYERS
    tables.drop(torch.tensor([1, 2]))
    assert (tables.counts.tolist(), tables.bases.tolist()) == ([0, 0, 0, 2], [0, 0, 0, 10])
    tables.clear()
    assert not tables.counts.any()
    assert not tables.bases.any()


def test_buffers_never_move() -> None:
    """CUDA graphs hold their addresses."""
    tables = filled(50, torch.arange(9))
    before = [t.data_ptr() for t in (tables.positions, tables.counts, tables.bases)]
    tables.put(0, 2, 5, torch.arange(2))
    tables.drop(torch.tensor([2]))
    tables.clear()
    assert [t.data_ptr() for t in (tables.positions, tables.counts, tables.bases)] == before
