"""Where each request of a prefill batch gets its first table from."""

from __future__ import annotations

import gc
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import build_policy
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
        self.first = FirstTables(build_policy(self.config), self.tables, self.prefixes)
        self.first.connected = keep_tables(self.tree, self.prefixes, build_policy(self.config))
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
    world.first.connected = False  # as the worker leaves it then
    batch: Any = SimpleNamespace(
        reqs=[world.request(1, world.node, PREFIX)], req_pool_indices=torch.tensor([1])
    )
    # Scored, for what the first verify pass's scores are measured against.
    assert world.prefill((batch.reqs[0], 104)) == [0]
    world.first.after_prefill(batch)
    assert world.table(1) == ([], 0)
    assert world.tables.known_bases[1] == 0


def test_a_table_for_another_text_is_left() -> None:
    """Cut to a short part of the text that it was chosen for, it says little."""
    world = World()
    split = world.tree._split_node(world.node.key, world.node, 80)
    assert world.prefill((world.request(1, split, 80), 84)) == [0]
    assert world.prefixes.events["misses"] == 1


def test_tables_are_not_handed_on_for_ever() -> None:
    """Prompts that each go on from the one before, and none of which comes to a verify pass."""
    world = World()
    length, hits = PREFIX, 0
    while world.prefixes.events["misses"] == 0:
        length += 4
        request = world.request(1, world.node, length - 4)
        scored = world.prefill((request, length))
        hits += not scored
        key = RadixKey(array("q", range(length)), None)
        inserted = world.tree.insert(InsertParams(key=key, value=torch.arange(length)))
        world.node = inserted.last_device_node
        world.prefixes.store(world.node, 1, length, 20)
        # What drafts attend to beside the table is no more than a table's own size.
        assert length - world.table(1)[1] <= world.config.budget(length) or scored
    assert 1 <= hits <= 3


def test_a_verify_pass_makes_tables_new() -> None:
    world = World()
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(req_pool_idx=3, origin_input_ids=[0] * 50, output_ids=[0] * 7)]
    )
    world.first.verified(batch)
    assert world.tables.known_bases[3] == 56  # the newest token's KV is the pass's own


def test_a_request_that_ended_takes_no_row() -> None:
    """Under overlap with a grammar, results are read before the next pass, which it is still in."""
    world = World()
    batch: Any = SimpleNamespace(
        reqs=[
            SimpleNamespace(req_pool_idx=row, origin_input_ids=[0] * 50, output_ids=[0] * 7)
            for row in (None, 3)
        ]
    )
    before = list(world.tables.known_bases)
    world.first.verified(batch)
    before[3] = 56
    assert world.tables.known_bases == before


def test_what_exceeds_the_scores_room_is_known_to_have_no_table() -> None:
    world = World("prompt")
    world.first.connected = False
    world.first.score_capacity = 150
    requests = [world.request(row, world.tree.root_node, 0) for row in (1, 2, 3)]
    assert world.prefill((requests[0], 100), (requests[1], 100), (requests[2], 3)) == [0, 1, 2]
    assert world.tables.known_bases[1:4] == [100, 0, 0]
    batch: Any = SimpleNamespace(
        reqs=[
            SimpleNamespace(req_pool_idx=row, origin_input_ids=[0] * 100, output_ids=[0] * 9)
            for row in (1, 2)
        ]
    )
    world.first.verified(batch)
    assert world.tables.known_bases[1:3] == [108, 0]


class Pools:
    """A tree with the memory that it hands requests' KV to, and the hooks on it."""

    def __init__(self) -> None:
        self.world = World()
        tree: Any = self.world.tree
        tree.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.arange(8 * 300).view(8, 300),
            write=lambda indices, values: None,
        )
        allocator = tree.token_to_kv_pool_allocator
        allocator.free_segments = allocator.free = lambda *arguments, **options: None
        self.tree = tree

    def request(self, row: int, ids: list[int], output: list[int]) -> Any:
        return SimpleNamespace(
            req_pool_idx=row,
            origin_input_ids=array("q", ids),
            output_ids=array("q", output),
            get_fill_ids=lambda: array("q", ids),
            extra_key=None,
            last_node=self.tree.root_node,
            cache_protected_len=0,
            prefix_indices=[],
        )

    def put(self, row: int, base: int) -> None:
        for layer in range(LAYERS):
            self.world.tables.put(layer, row, base, torch.tensor([1, 2]))

    def taken(self, ids: list[int]) -> bool:
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids), None)))
        node, length = match.last_device_node, len(match.device_indices)
        return self.world.prefixes.take(node, 6, length)


def test_trees_keep_tables_where_they_cache() -> None:
    pools = Pools()
    ids = list(range(500, 560))
    request = pools.request(1, ids, [7])
    pools.put(1, 60)
    pools.tree.cache_unfinished_req(request)
    assert pools.taken(ids)
    request.output_ids = array("q", range(900, 930))
    pools.put(1, 80)
    pools.tree.cache_finished_req(request, kv_len_to_handle=85)
    assert pools.taken([*ids, *range(900, 925)])
    assert pools.world.prefixes.num_tables == 3


def test_retraction_keeps_what_was_learnt() -> None:
    pools = Pools()
    ids = list(range(500, 560))
    request = pools.request(1, ids, [7])
    pools.tree.cache_unfinished_req(request, chunked=True)  # in the tree, without a table
    assert not pools.taken(ids)
    pools.put(1, 63)
    request.output_ids = array("q", range(900, 930))
    pools.tree.cache_finished_req(request, is_insert=False, kv_len_to_handle=85)
    assert pools.taken(ids)


def test_a_row_without_a_table_replaces_none() -> None:
    """A resumed request that is aborted between two chunks of its prompt."""
    pools = Pools()
    ids = list(range(500, 560))
    request = pools.request(1, ids, [7])
    pools.put(1, 60)
    pools.tree.cache_unfinished_req(request)
    pools.world.prefill((request, 40), chunked=request)
    pools.tree.cache_finished_req(request, is_insert=False, kv_len_to_handle=40)
    assert pools.taken(ids)
    assert int(pools.world.tables.counts[6]) == 2


def test_evicted_nodes_take_their_tables_along() -> None:
    pools = Pools()
    for row, start in ((1, 500), (2, 700)):
        request = pools.request(row, list(range(start, start + 60)), [])
        pools.put(row, 60)
        pools.tree.cache_finished_req(request, kv_len_to_handle=60)
    pools.world.node = None
    del request
    pools.tree.evict(EvictParams(num_tokens=1 << 30))
    gc.collect()
    assert pools.world.prefixes.num_tables == 0
    assert pools.world.prefixes.used_bytes == 0


def test_prompt_asks_no_prefix() -> None:
    world = World("prompt")
    assert VegasConfig(first_table="prompt").reuses_tables is False
    world.first.prefixes = None  # as the worker makes it then
    assert world.prefill((world.request(1, world.node, PREFIX), 104)) == [0]


def test_trees_that_cannot_keep_tables_say_why(caplog: pytest.LogCaptureFixture) -> None:
    tree: Any = SimpleNamespace(disable=False)
    world = World()
    assert keep_tables(tree, world.prefixes, build_policy(world.config)) is False
    assert "SimpleNamespace" in caplog.text
    off = RadixCache.create_simulated(disable=True)
    assert keep_tables(off, world.prefixes, build_policy(world.config)) is False
    assert "switched off" in caplog.text
