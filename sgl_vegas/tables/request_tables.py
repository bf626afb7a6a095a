"""The tables of the running requests, by request-pool row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RequestTable:
    """What one request's drafts attend to beside its recent tokens.

    Attributes:
        base: KV length when the table was made; positions at or after it are *recent*.
        positions: (num_layers, k) int32, logical positions in `[0, base)`. Logical, so that they
            stay right when the KV moves, is shared, or is computed again after a retraction.
    """

    base: int
    positions: torch.Tensor


class RequestTables:
    """Tables by request-pool row. A row without one drafts densely."""

    def __init__(self) -> None:
        self._tables: dict[int, RequestTable] = {}

    def put(self, row: int, table: RequestTable) -> None:
        self._tables[row] = table

    def get(self, row: int) -> RequestTable | None:
        return self._tables.get(row)

    def drop(self, row: int) -> None:
        self._tables.pop(row, None)

    def clear(self) -> None:
        self._tables.clear()

    def __len__(self) -> int:
        return len(self._tables)
