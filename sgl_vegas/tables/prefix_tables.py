"""What verification learnt about cached prefixes, kept beside their KV on radix-tree nodes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.tables.request_tables import RequestTables

PAGE_POSITIONS = 128


@dataclass
class _Entry:
    """A prefix's tables.

    Attributes:
        pages: (n,) int64.
        count: () int32, positions of each layer.
        base: () int32, length of the prefix that they were chosen from; 0: there are none.
    """

    pages: torch.Tensor
    count: torch.Tensor
    base: torch.Tensor


class PrefixTables:
    """Tables of prefixes, in a memory budget of their own, the least recently used dropped first.

    A table belongs to a node of SGLang's radix tree and ends with it. Positions are logical, so it
    serves every request with that prefix. When SGLang splits a node, the existing object stays the
    lower one, whose prefix is the same. Nothing here waits for the device.

    Attributes:
        hits, misses: requests that took a table, and that found none.
        stores, evictions: tables kept, and dropped for want of room.
    """

    def __init__(self, tables: RequestTables, num_pages: int) -> None:
        num_layers, _, width = tables.positions.shape
        device = tables.positions.device
        self._tables = tables
        self._pages = torch.zeros(
            (num_layers, num_pages, PAGE_POSITIONS), dtype=torch.int32, device=device
        )
        self._width = width
        self._free = list(range(num_pages))
        # By node, the least recently used first. An entry's pages are free when it is gone.
        self._entries: weakref.WeakKeyDictionary[Any, _Entry] = weakref.WeakKeyDictionary()
        self.hits = self.misses = self.stores = self.evictions = 0

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    @property
    def num_tables(self) -> int:
        return len(self._entries)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def store(self, node: Any, row: int, length: int, max_count: int) -> None:
        """Keep the tables of request row `row` for the prefix that ends with `node`.

        Args:
            length: tokens of the prefix; positions from there on are left out.
            max_count: positions that the row's tables may have at most.
        """
        wanted = -(-min(max_count, self._width) // PAGE_POSITIONS)
        if node.parent is None or not 0 < wanted <= self._pages.shape[1]:
            return
        self._entries.pop(node, None)
        while len(self._free) < wanted:
            del self._entries[next(iter(self._entries))]
            self.evictions += 1
        numbers = [self._free.pop() for _ in range(wanted)]
        positions, count = _cut(
            self._tables.positions[:, row, : wanted * PAGE_POSITIONS],
            self._tables.counts[row],
            length,
        )
        padding = wanted * PAGE_POSITIONS - positions.shape[1]
        positions = torch.nn.functional.pad(positions, (0, padding))
        pages = torch.tensor(numbers, device=self._pages.device)
        self._pages[:, pages] = positions.unflatten(1, (wanted, PAGE_POSITIONS))
        entry = _Entry(pages, count, self._tables.bases[row].clamp(max=length))
        weakref.finalize(entry, self._free.extend, numbers).atexit = False
        self._entries[node] = entry
        self.stores += 1

    def take(self, node: Any, row: int, length: int) -> bool:
        """Give request row `row` the tables of the deepest prefix on the way to `node`.

        Args:
            length: tokens that the request shares with `node`'s prefix.

        Returns whether there was one. The row keeps its own if it turns out to be empty.
        """
        entry = self._find(node) if length > 0 else None
        if entry is None:
            self.misses += 1
            return False
        self.hits += 1
        positions, count = _cut(self._pages[:, entry.pages].flatten(1), entry.count, length)
        width = min(positions.shape[1], self._width)
        found = entry.base > 0
        own = self._tables.positions[:, row, :width]
        own.copy_(torch.where(found, positions[:, :width], own))
        for mine, theirs in (
            (self._tables.counts, count),
            (self._tables.bases, entry.base.clamp(max=length)),
        ):
            mine[row] = torch.where(found, theirs, mine[row])
        return True

    def clear(self) -> None:
        self._entries.clear()

    def _find(self, node: Any) -> _Entry | None:
        # A node that a split has made has none yet, but its children's are right up to its end.
        for candidate in (node, *node.children.values()):
            if candidate in self._entries:
                return self._use(candidate)
        while (node := node.parent) is not None:
            if node in self._entries:
                return self._use(node)
        return None

    def _use(self, node: Any) -> _Entry:
        entry = self._entries.pop(node)
        self._entries[node] = entry
        return entry


def _cut(
    positions: torch.Tensor, count: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each layer's first `count` positions, (num_layers, n), those below `length` in front; and
    how many every layer has of them."""
    valid = torch.arange(positions.shape[1], device=positions.device) < count
    valid = valid & (positions < length)
    order = torch.argsort(valid.to(torch.uint8), dim=1, descending=True, stable=True)
    return positions.gather(1, order), valid.sum(dim=1).min().to(torch.int32)
