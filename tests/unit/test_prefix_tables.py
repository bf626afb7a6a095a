"""Tables on the nodes of SGLang's own radix tree, against a plain dictionary of prefixes."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_vegas.tables.prefix_tables import PAGE_POSITIONS, PrefixTables
from sgl_vegas.tables.request_tables import RequestTables
from tests.server_process import has_cuda

DEVICE = "cuda" if has_cuda() else "cpu"
LAYERS, ROWS, WIDTH = 2, 4, 2 * PAGE_POSITIONS + 10
FROM, TO = 1, 2  # rows that tables are stored from and taken into
Prefix = tuple[str | None, tuple[int, ...]]
# Of each layer; and the length that they were chosen from.
Table = tuple[list[list[int]], int]


class World:
    """A tree, the store under test, and the dictionary that says what it has to hold."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self.random = random.Random(seed)
        allocator: Any = SimpleNamespace(device="cpu", free_segment=lambda *a, **k: None)
        self.tree = RadixCache.create_simulated(mock_allocator=allocator)
        self.tables = RequestTables(LAYERS, ROWS, WIDTH, DEVICE)
        self.store = PrefixTables(self.tables, num_pages)
        self.model: dict[Prefix, Table] = {}

    def tokens(self) -> list[int]:
        """Often one that shares a prefix with an earlier one."""
        tail = [self.random.randrange(2) for _ in range(self.random.randrange(1, 40))]
        if self.model and self.random.random() < 0.7:
            _, known = self.random.choice(list(self.model))
            return [*known[: self.random.randrange(len(known) + 1)], *tail]
        return tail

    def insert(self, extra: str | None, tokens: list[int]) -> Any:
        key = RadixKey(array("q", tokens), extra)
        value = torch.arange(len(tokens))
        return self.tree.insert(InsertParams(key=key, value=value)).last_device_node

    def match(self, extra: str | None, tokens: list[int]) -> tuple[Any, int]:
        key = RadixKey(array("q", tokens), extra)
        result = self.tree.match_prefix(MatchPrefixParams(key=key))
        return result.last_device_node, len(result.device_indices)

    def put(self, extra: str | None, tokens: list[int]) -> None:
        """Store a random table that was made a little past the prefix, as under overlap."""
        length = len(tokens)
        base = length + self.random.randrange(3)
        count = self.random.randint(min(2, base), min(base, WIDTH))
        chosen = [self.random.sample(range(base), count) for _ in range(LAYERS)]
        for layer, positions in enumerate(chosen):
            self.tables.put(layer, FROM, base, torch.tensor(positions))
        self.store.store(self.insert(extra, tokens), FROM, length, count)
        self.model[extra, tuple(tokens)] = cut((chosen, base), length)

    def retract(self, extra: str | None, tokens: list[int]) -> None:
        """A request with that prefix and more leaves the tree as it is, and its table there."""
        node, length = self.match(extra, tokens)
        if length == 0:
            return
        base = length + self.random.randrange(1, 30)
        count = self.random.randint(1, min(base, WIDTH))
        chosen = [self.random.sample(range(base), count) for _ in range(LAYERS)]
        for layer, positions in enumerate(chosen):
            self.tables.put(layer, FROM, base, torch.tensor(positions))
        self.store.store(node, FROM, length, count)
        if base - length > count:
            return
        self.model[extra, tuple(tokens[:length])] = cut((chosen, base), length)

    def take(
        self, extra: str | None, tokens: list[int], min_base: int = 0
    ) -> tuple[bool, int, Table]:
        node, length = self.match(extra, tokens)
        self.tables.drop(torch.tensor([TO], device=DEVICE))
        found = self.store.take(node, TO, length, min_base)
        count = int(self.tables.counts[TO])
        positions = self.tables.positions[:, TO, :count].tolist()
        return found, length, (positions, int(self.tables.bases[TO]))

    def ends(self) -> Iterator[Prefix]:
        """The prefixes that end with a node."""
        stack: list[tuple[Any, str | None, tuple[int, ...]]] = [(self.tree.root_node, None, ())]
        while stack:
            node, extra, prefix = stack.pop()
            for child in node.children.values():
                whole = prefix + tuple(child.key.token_ids)
                own = child.key.extra_key if node is self.tree.root_node else extra
                stack.append((child, own, whole))
                yield own, whole

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=num_tokens))
        alive = set(self.ends())
        self.model = {prefix: table for prefix, table in self.model.items() if prefix in alive}


def cut(table: Table, length: int) -> Table:
    layers = [[p for p in positions if p < length] for positions in table[0]]
    count = min(map(len, layers))
    return [positions[:count] for positions in layers], min(table[1], length)


@pytest.mark.parametrize("seed", range(3))
def test_store_is_a_dictionary_of_prefixes(seed: int) -> None:
    world = World(num_pages=4000, seed=seed)
    taken = 0
    for _ in range(1500):
        action = world.random.random()
        extra = world.random.choice([None, "a"])
        if action < 0.4:
            world.put(extra, world.tokens())
        elif action < 0.55:
            world.insert(extra, world.tokens())  # splits nodes, and has no table
        elif action < 0.6:
            world.evict(world.random.randrange(60))
        elif action < 0.603:
            world.tree.reset()
            world.store.clear()
            world.model.clear()
        elif action < 0.65:
            world.retract(extra, world.tokens())
        else:
            tokens = world.tokens()
            min_base = world.random.choice([0, world.random.randrange(len(tokens) + 1)])
            found, length, table = world.take(extra, tokens, min_base)
            shared = tuple(tokens[:length])
            on_path = [
                n for n in range(max(min_base, 1), length + 1) if (extra, shared[:n]) in world.model
            ]
            beyond = [
                cut(other, length)
                for (name, known), other in world.model.items()
                if name == extra and len(known) > length > 0 and known[:length] == shared
            ]
            if length < min_base:
                beyond = []
            if on_path and on_path[-1] == length:
                assert found and table == cut(world.model[extra, shared], length)
            elif found and table in beyond:
                pass
            elif on_path:
                expected = cut(world.model[extra, shared[: on_path[-1]]], length)
                assert found and table == expected
            else:
                assert not found and table == ([[], []], 0)
            taken += found
    assert taken > 100
    assert world.store.num_tables == len(world.model)
    assert world.store.events["hits"] == taken


def test_budget_and_least_recently_used() -> None:
    world = World(num_pages=3, seed=1)
    prompts = [[i] * (2 * PAGE_POSITIONS - 1) for i in range(4)]
    for i, tokens in enumerate(prompts[:3]):
        world.tables.put(0, FROM, 50, torch.arange(50))
        world.tables.put(1, FROM, 50, torch.arange(50))
        world.store.store(world.insert(None, tokens), FROM, len(tokens), 50)
        assert world.store.num_free_pages == 2 - i
    assert world.take(None, prompts[0])[0]
    # Two pages: the tables of prompts 1 and 2 have to go.
    world.store.store(world.insert(None, prompts[3]), FROM, 255, PAGE_POSITIONS + 1)
    assert world.store.events["evictions"] == 2
    assert [world.take(None, tokens)[0] for tokens in prompts] == [True, False, False, True]


def test_what_is_larger_than_the_budget_is_not_stored() -> None:
    world = World(num_pages=1, seed=1)
    node = world.insert(None, [7] * 200)
    world.store.store(node, FROM, 200, PAGE_POSITIONS + 1)
    assert world.store.num_tables == 0 and world.store.num_free_pages == 1


def test_pages_come_back_with_their_nodes() -> None:
    world = World(num_pages=100, seed=2)
    for _ in range(200):
        world.put(None, world.tokens())
        world.evict(world.random.randrange(40))
    world.evict(1 << 30)
    gc.collect()
    assert world.store.num_tables == 0
    assert world.store.num_free_pages == 100


def test_no_more_than_the_prefix_is_kept() -> None:
    """Whatever length the caller names."""
    world = World(num_pages=8, seed=3)
    node = world.insert(None, [1, 2, 3])
    for layer in range(LAYERS):
        world.tables.put(layer, FROM, 6, torch.tensor([1, 5, 2]))
    world.store.store(node, FROM, 9, 3)
    assert world.take(None, [1, 2, 3, 4]) == (True, 3, ([[1, 2], [1, 2]], 3))


def test_nothing_is_kept_for_the_root() -> None:
    world = World(num_pages=8, seed=4)
    world.tables.put(0, FROM, 9, torch.tensor([1]))
    world.store.store(world.tree.root_node, FROM, 9, 3)
    assert world.store.num_tables == 0


@pytest.mark.parametrize("size", [6, PAGE_POSITIONS, PAGE_POSITIONS + 4])
def test_references_go_with_tables(size: int) -> None:
    """What kernels measure a row's scores against is of use where the table is."""
    world = World(num_pages=12, seed=6)
    references = torch.randn(LAYERS, ROWS, size, device=DEVICE) * 1e3
    world.tables.references = references.clone()
    world.put(None, [1, 2, 3])
    world.tables.references[:, FROM] = 0  # the next request's
    found, _, table = world.take(None, [1, 2, 3])
    assert found and table == world.model[None, (1, 2, 3)]
    expected = references.clone()
    expected[:, FROM] = 0
    expected[:, TO] = references[:, FROM]
    assert torch.equal(world.tables.references, expected)
    # They count towards the budget.
    assert world.store.num_free_pages == 12 - 1 - -(-size // PAGE_POSITIONS)


def test_sinks_stay_where_layers_have_more_than_others() -> None:
    world = World(num_pages=8, seed=7)
    world.tables.put(0, FROM, 13, torch.tensor([0, 4, 7, 9]))
    world.tables.put(1, FROM, 13, torch.tensor([0, 5, 12, 3]))
    tokens = list(range(13))
    world.store.store(world.insert(None, tokens), FROM, 13, 4)
    assert world.take(None, tokens[:12])[2] == ([[0, 4, 7], [0, 5, 3]], 12)


def test_a_table_of_a_far_longer_text_replaces_none() -> None:
    world = World(num_pages=8, seed=10)
    node = world.insert(None, [0] * 50)
    for base, chosen in ((50, [10, 20]), (58, [10, 57])):
        for layer in range(LAYERS):
            world.tables.put(layer, FROM, base, torch.tensor(chosen))
        world.store.store(node, FROM, 50, 7)
    assert world.take(None, [0] * 50)[2] == ([[10, 20]] * LAYERS, 50)


def test_no_wider_table_is_kept_than_asked() -> None:
    """The place of a position in a row's table says nothing."""
    world = World(num_pages=8, seed=8)
    count = PAGE_POSITIONS + 40
    for layer in range(LAYERS):
        world.tables.put(layer, FROM, count, torch.arange(count).flip(0))
    world.store.store(world.insert(None, [0] * 100), FROM, 100, PAGE_POSITIONS)
    expected = list(range(99, -1, -1))
    assert world.take(None, [0] * 100)[2] == ([expected, expected], 100)


def test_an_old_table_is_no_recent_one() -> None:
    """However long the prefix is that it is kept with."""
    world = World(num_pages=8, seed=9)
    for layer in range(LAYERS):
        world.tables.put(layer, FROM, 10, torch.tensor([1]))
    world.store.store(world.insert(None, [0] * 50), FROM, 50, 1)
    assert not world.take(None, [0] * 50, min_base=11)[0]
    assert world.take(None, [0] * 50, min_base=10)[0]


def test_events_are_told() -> None:
    told: list[str] = []
    tables = RequestTables(LAYERS, ROWS, WIDTH, DEVICE)
    world = World(num_pages=1, seed=5)
    world.tables, world.store = tables, PrefixTables(tables, 1, told.append)
    world.take(None, [5])
    for tokens in ([5, 6], [7, 8]):
        for layer in range(LAYERS):
            tables.put(layer, FROM, 2, torch.tensor([1]))
        world.store.store(world.insert(None, tokens), FROM, 2, 1)
    assert world.take(None, [7, 8])[0]
    assert told == ["misses", "stores", "evictions", "stores", "hits"]
    assert world.store.events == {"hits": 1, "misses": 1, "stores": 2, "evictions": 1}
