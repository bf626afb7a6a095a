"""What verification learnt about cached prefixes, kept beside their KV on radix-tree nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.tables.request_tables import RequestTables

PAGE_POSITIONS = 128
EVENTS = ("hits", "misses", "stores", "evictions")


@dataclass(eq=False)
class _Entry:
    """A prefix's tables.

    Attributes:
        length: tokens of the prefix.
        pages: (n,) int64.
        count: () int32, positions of each layer.
        base: () int32, KV length that they were chosen at, `length` at most.
    """

    length: int
    pages: torch.Tensor
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

        Args:
            length: tokens of the prefix that the request has too; positions from there on are
                left out.
            max_count: positions that the row's tables may have at most.
        """
        length = min(length, _prefix_length(node))
        wanted = -(-min(max_count, self._width) // PAGE_POSITIONS)
        if length == 0 or not 0 < wanted <= self._pages.shape[1]:
            return
        self._entries.pop(node, None)
        while len(self._free) < wanted:
            del self._entries[next(iter(self._entries))]
            self._count("evictions")
        numbers = [self._free.pop() for _ in range(wanted)]
        positions, count = _cut(
            self._tables.positions[:, row, : wanted * PAGE_POSITIONS],
            self._tables.counts[row],
            length,
        )
        padding = wanted * PAGE_POSITIONS - positions.shape[1]
        positions = torch.nn.functional.pad(positions, (0, padding))
        pages = to_device(numbers, self._pages.device)
        self._pages[:, pages] = positions.unflatten(1, (wanted, PAGE_POSITIONS))
        entry = _Entry(length, pages, count, self._tables.bases[row].clamp(max=length))
        weakref.finalize(entry, self._free.extend, numbers).atexit = False
        self._entries[node] = entry
        self._count("stores")

    def take(self, node: Any, row: int, length: int, min_base: int) -> bool:
        """Give request row `row` the tables of the deepest prefix on the way to `node`.

        Args:
            length: tokens that the request shares with `node`'s prefix.
            min_base: tokens that a prefix must have: drafts attend to all that come after it.

        Returns whether there was one.
        """
        entry = self._find(node, length, min_base) if length >= max(min_base, 1) else None
        if entry is None:
            self._count("misses")
            return False
        self._count("hits")
        positions, count = _cut(self._pages[:, entry.pages].flatten(1), entry.count, length)
        width = min(positions.shape[1], self._width)
        self._tables.positions[:, row, :width] = positions[:, :width]
        self._tables.counts[row] = count
        self._tables.bases[row] = entry.base.clamp(max=length)
        return True

    def clear(self) -> None:
        self._entries.clear()

    def _find(self, node: Any, length: int, min_base: int) -> _Entry | None:
        # A node that a split has made has none yet, but its children's are right up to its end.
        candidates = [node, *node.children.values()]
        while (node := node.parent) is not None:
            candidates.append(node)
        for candidate in candidates:
            entry = self._entries.get(candidate)
            if entry is not None and min(entry.length, length) >= min_base:
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


def _cut(
    positions: torch.Tensor, count: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each layer's first `count` positions, (num_layers, n), those below `length` in front; and
    how many every layer has of them."""
    valid = torch.arange(positions.shape[1], device=positions.device) < count
    valid = valid & (positions < length)
    order = torch.argsort(valid.to(torch.uint8), dim=1, descending=True, stable=True)
    return positions.gather(1, order), valid.sum(dim=1).min().to(torch.int32)
