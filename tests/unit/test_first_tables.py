"""Where each request of a prefill batch gets its first table from."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_vegas.config import VegasConfig
from sgl_vegas.tables.first_tables import FirstTables
from sgl_vegas.tables.prefix_tables import PrefixTables
from sgl_vegas.tables.radix_tree import keep_tables
from sgl_vegas.tables.request_tables import RequestTables

LAYERS, WIDTH = 2, 64
PREFIX = 100  # cached, with a table
KEPT = [3, 50, 99]


class World:
    def __init__(self, first_table: str = "cached") -> None:
        # 10 positions of 100 tokens, so 10 tokens may follow a prefix that brings its table.
        self.config = VegasConfig(sparsity_ratio=0.1, min_tokens=4, first_table=first_table)
        allocator: Any = SimpleNamespace(device="cpu", free_segment=lambda *a, **k: None)
        self.tree = RadixCache.create_simulated(mock_allocator=allocator)
        self.tables = RequestTables(LAYERS, 8, WIDTH, "cpu")
        self.prefixes = PrefixTables(self.tables, 8)
        self.first = FirstTables(self.config, self.tables, self.prefixes)
        self.first.connected = keep_tables(self.tree, self.prefixes, self.config)
        key = RadixKey(array("q", range(PREFIX)), None)
        inserted = self.tree.insert(InsertParams(key=key, value=torch.arange(PREFIX)))
        self.node = inserted.last_device_node
        for layer in range(LAYERS):
            self.tables.put(layer, 7, PREFIX, torch.tensor(KEPT))
        self.prefixes.store(self.node, 7, PREFIX, len(KEPT))
        for row in range(1, 7):  # what rows' former owners left
            self.tables.put(0, row, 40, torch.tensor([1, 2]))

    def request(self, row: int, node: Any, cached: int) -> Any:
        return SimpleNamespace(req_pool_idx=row, last_node=node, prefix_indices=[0] * cached)

    def prefill(self, *requests: tuple[Any, int], chunked: Any = None) -> list[int]:
        batch: Any = SimpleNamespace(
            reqs=[request for request, _ in requests],
            seq_lens_cpu=torch.tensor([seq_len for _, seq_len in requests]),
            chunked_req=chunked,
            tree_cache=self.tree,
        )
        return self.first.before_prefill(batch)

    def table(self, row: int) -> tuple[list[int], int]:
        count = int(self.tables.counts[row])
        return self.tables.positions[0, row, :count].tolist(), int(self.tables.bases[row])


def test_little_after_a_cached_prefix_takes_its_table() -> None:
    world = World()
    near = world.request(1, world.node, PREFIX)
    far = world.request(2, world.node, PREFIX)
    new = world.request(3, world.tree.root_node, 0)
    assert world.prefill((near, 110), (far, 120), (new, 110)) == [1, 2]
    assert world.table(1) == (KEPT, PREFIX)
    assert world.prefixes.events["hits"] == 1


def test_a_part_of_a_prefix_brings_its_part_of_the_table() -> None:
    world = World()
    split = world.tree._split_node(world.node.key, world.node, 95)
    assert world.prefill((world.request(1, split, 95), 100)) == []
    assert world.table(1) == (KEPT[:2], 95)


@pytest.mark.parametrize("first_table", ["cached", "prompt"])
def test_requests_in_the_middle_of_their_prompt_draft_by_nothing_old(first_table: str) -> None:
    world = World(first_table)
    middle = world.request(1, world.tree.root_node, 0)
    whole = world.request(2, world.tree.root_node, 0)
    assert world.prefill((middle, 50), (whole, 50), chunked=middle) == [1]
    assert world.table(1) == ([], 0)


def test_none_drafts_by_everything() -> None:
    world = World("none")
    assert world.prefill((world.request(1, world.node, PREFIX), 104)) == []
    assert world.table(1) == ([], 0)


def test_prompt_asks_no_prefix() -> None:
    world = World("prompt")
    assert VegasConfig(first_table="prompt").reuses_tables is False
    world.first.prefixes = None  # as the worker makes it then
    assert world.prefill((world.request(1, world.node, PREFIX), 104)) == [0]


def test_trees_that_cannot_keep_tables_say_why(caplog: pytest.LogCaptureFixture) -> None:
    tree: Any = SimpleNamespace(disable=False)
    world = World()
    assert keep_tables(tree, world.prefixes, world.config) is False
    assert "SimpleNamespace" in caplog.text
    off = RadixCache.create_simulated(disable=True)
    assert keep_tables(off, world.prefixes, world.config) is False
    assert "switched off" in caplog.text
