"""What verification learnt about cached prefixes, kept beside their KV on radix-tree nodes."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.tables.request_tables import RequestTables

PAGE_POSITIONS = 128
MAX_CHILDREN = 16
EVENTS = ("hits", "misses", "stores", "evictions")


@dataclass(eq=False)
class _Entry:
    """A prefix's tables.

    Attributes:
        length: tokens of the prefix.
        known_base: what the host knows of `base`: it is no less.
        pages: (n,) int64, those of the positions first.
        num_table_pages: how many those are; references are in the others.
        count: () int32, positions of each layer.
        base: () int32, KV length that they were chosen at, `length` at most.
    """

    length: int
    known_base: int
    pages: torch.Tensor
    num_table_pages: int
    count: torch.Tensor
    base: torch.Tensor


class PrefixTables:
    """Tables of prefixes, in a memory budget of their own, the least recently used dropped first.

    A table belongs to a node of SGLang's radix tree and ends with it. Positions are logical, so it
    serves every request with that prefix, whatever slots hold it. When SGLang splits a node, the
    existing object stays the lower one, whose prefix is the same. Nothing here waits for the
    device.

    Nodes are SGLang's: all that is asked of them is `parent`, `children`, `key`, and to be hashable
    and weakly referable.

    Attributes:
        events: how often requests took a table ("hits") and found none ("misses"), tables were kept
            ("stores") and dropped for want of room ("evictions").
        nbytes: of the buffers, which is the budget.
    """

    def __init__(
        self,
        tables: RequestTables,
        num_pages: int,
        on_event: Callable[[str], None] = lambda event: None,
    ) -> None:
        """Args:
        num_pages: of PAGE_POSITIONS positions of every layer each; see `page_bytes`.
        on_event: called with each of EVENTS as it happens.
        """
        num_layers, _, self._width = tables.positions.shape
        self._tables = tables
        self._pages = torch.zeros(
            (num_layers, num_pages, PAGE_POSITIONS),
            dtype=torch.int32,
            device=tables.positions.device,
        )
        self._free = list(range(num_pages))
        # By node, the least recently used first. An entry's pages are free when it is gone.
        self._entries: weakref.WeakKeyDictionary[Any, _Entry] = weakref.WeakKeyDictionary()
        self.events: dict[str, int] = dict.fromkeys(EVENTS, 0)
        self._on_event = on_event

    @staticmethod
    def page_bytes(num_layers: int) -> int:
        return num_layers * PAGE_POSITIONS * 4

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    @property
    def used_bytes(self) -> int:
        num_pages = self._pages.shape[1]
        return self.nbytes * (num_pages - len(self._free)) // max(num_pages, 1)

    @property
    def num_tables(self) -> int:
        return len(self._entries)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def store(self, node: Any, row: int, length: int, max_count: int) -> None:
        """Keep the tables of request row `row` for the prefix that ends with `node`.

        Nothing is kept, and what was is left, if the row has no table, or one that was chosen for a
        text more than `max_count` longer: cut to the prefix, it says little.

        Args:
            length: tokens of the prefix that the request has too; positions from there on are
                left out.
            max_count: positions to keep at most.
        """
        length = min(length, _prefix_length(node))
        if self._tables.known_bases[row] - length > max_count:
            return
        known_base = min(self._tables.known_bases[row], length)
        num_table_pages = -(-min(max_count, self._width) // PAGE_POSITIONS)
        width = num_table_pages * PAGE_POSITIONS
        wanted = num_table_pages + self._reference_pages
        if known_base == 0 or not 0 < num_table_pages <= wanted <= self._pages.shape[1]:
            return
        self._entries.pop(node, None)
        while len(self._free) < wanted:
            oldest = next(iter(self._entries), None)
            if oldest is None:  # somebody holds an entry
                return
            del self._entries[oldest], oldest
            self._count("evictions")
        numbers = [self._free.pop() for _ in range(wanted)]
        positions, count = _cut(
            self._tables.positions[:, row], self._tables.counts[row], length, width
        )
        payload = [_padded(positions, num_table_pages)]
        if self._tables.references is not None:
            references = self._tables.references[:, row].view(torch.int32)
            payload.append(_padded(references, self._reference_pages))
        pages = to_device(numbers, self._pages.device)
        self._pages[:, pages] = torch.cat(payload, dim=1)
        base = self._tables.bases[row].clamp(max=length)
        entry = _Entry(length, known_base, pages, num_table_pages, count, base)
        weakref.finalize(entry, self._free.extend, numbers).atexit = False
        self._entries[node] = entry
        self._count("stores")

    def take(
        self, node: Any, row: int, length: int, min_base: int = 1, max_length: float = math.inf
    ) -> bool:
        """Give request row `row` the tables of the deepest prefix on the way to `node`.

        Args:
            length: tokens that the request shares with `node`'s prefix.
            min_base: tokens that a table must at least have been chosen from: drafts attend to all
                that come after those.
            max_length: of prefixes; a longer one's table says less of what is shared with it.

        Returns whether there was one.
        """
        entry = self._find(node, length, max(min_base, 1), max_length)
        if entry is None:
            self._count("misses")
            return False
        self._count("hits")
        pages = self._pages[:, entry.pages]
        num_table_pages = entry.num_table_pages
        of_table = pages[:, :num_table_pages].flatten(1)
        positions, count = _cut(of_table, entry.count, length, self._width)
        self._tables.positions[:, row, : positions.shape[1]] = positions
        self._tables.counts[row] = count
        self._tables.bases[row] = entry.base.clamp(max=length)
        self._tables.known_bases[row] = min(entry.known_base, length)
        if self._tables.references is not None:
            references = self._tables.references[:, row]
            of_references = pages[:, num_table_pages:].flatten(1)[:, : references.shape[1]]
            self._tables.references[:, row] = of_references.view(torch.float32)
        return True

    @property
    def _reference_pages(self) -> int:
        references = self._tables.references
        return 0 if references is None else -(-references.shape[2] // PAGE_POSITIONS)

    def clear(self) -> None:
        self._entries.clear()

    def _find(self, node: Any, length: int, min_base: int, max_length: float) -> _Entry | None:
        # A node that a split has made has none yet, but its children's are right up to its end.
        newest = itertools.islice(reversed(node.children.values()), MAX_CHILDREN)
        candidates = [node, *newest]
        while (node := node.parent) is not None:
            candidates.append(node)
        for candidate in candidates:
            entry = self._entries.get(candidate)
            if entry is None or entry.length > max_length:
                continue
            if min(entry.known_base, length) >= min_base:
                self._entries[candidate] = self._entries.pop(candidate)  # now the last used
                return entry
        return None

    def _count(self, event: str) -> None:
        self.events[event] += 1
        self._on_event(event)


def to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """(n,) int64, without waiting for the device."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _prefix_length(node: Any) -> int:
    length = 0
    while node.parent is not None:
        length += len(node.key)
        node = node.parent
    return length


def _padded(columns: torch.Tensor, num_pages: int) -> torch.Tensor:
    """(num_layers, n) as (num_layers, num_pages, PAGE_POSITIONS)."""
    missing = num_pages * PAGE_POSITIONS - columns.shape[1]
    padded = torch.nn.functional.pad(columns, (0, missing))
    return padded.unflatten(1, (num_pages, PAGE_POSITIONS))


def _cut(
    positions: torch.Tensor, count: torch.Tensor, length: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each layer's first `count` positions, (num_layers, n), those below `length`, as many as
    every layer has and `width` allows: (num_layers, min(n, width)), and how many.

    Layers that have more leave their last ones out: kernels write what is sure of its place in
    order, from the sinks on, and then what was a tie.
    """
    num_layers, n = positions.shape
    valid = torch.arange(n, device=positions.device) < count
    valid = valid & (positions < length)
    ranks = valid.cumsum(dim=1)  # from 1
    kept = ranks[:, -1].min().clamp(max=width)
    places = torch.where(valid & (ranks <= kept), ranks - 1, n)
    found = positions.new_zeros((num_layers, n + 1)).scatter_(1, places, positions)
    return found[:, : min(n, width)], kept.to(torch.int32)
