"""The tables of the running requests, by request-pool row, in buffers that never move."""

from __future__ import annotations

import torch


class RequestTables:
    """What each request's drafts attend to beside its recent tokens.

    Row r's drafts attend to the first `counts[r]` entries of `positions[layer, r]` and to every
    position from `bases[r]` on. A base of 0 means drafting densely. Positions are logical, so they
    stay right when the KV moves, is shared, or is computed again after a retraction. CUDA graphs
    hold the addresses of the buffers.

    Attributes:
        positions: (num_layers, num_rows, max_selected) int32, each in `[0, bases[row])`.
        counts: (num_rows,) int32.
        bases: (num_rows,) int32, KV length when the table was made.
        known_bases: of each row, what the host knows of its base: it is no less; 0 also for no
            table.
        references: (num_layers, num_rows, n) float32, what the CUDA kernels measure a row's scores
            against, so that it has to go wherever a table goes; None without them.
    """

    def __init__(
        self, num_layers: int, num_rows: int, max_selected: int, device: torch.device | str
    ) -> None:
        self.positions = torch.zeros(
            (num_layers, num_rows, max_selected), dtype=torch.int32, device=device
        )
        self.counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.bases = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.known_bases = [0] * num_rows
        self.references: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.counts.nbytes + self.bases.nbytes

    def put(self, layer: int, row: int, base: int, positions: torch.Tensor) -> None:
        """Set one layer of one row: `positions` (k,) integer. More than fit are cut off."""
        count = min(len(positions), self.positions.shape[2])
        self.positions[layer, row, :count] = positions[:count].to(torch.int32)
        self.counts[row] = count
        self.bases[row] = base
        self.known_bases[row] = base

    def drop(self, rows: torch.Tensor) -> None:
        """Let `rows`, (n,) int64, draft densely."""
        self.counts.index_fill_(0, rows, 0)
        self.bases.index_fill_(0, rows, 0)

    def clear(self) -> None:
        self.counts.zero_()
        self.bases.zero_()
        self.known_bases = [0] * len(self.known_bases)

    def draft_positions(self, row: int, seq_len: int) -> torch.Tensor:
        """What the draft at position `seq_len` attends to: (num_layers, n) int64, recent ones last.

        The reference of what the kernels read. A wrong table may cost acceptance, never memory
        safety: entries are cut to the row's committed positions.
        """
        base = min(int(self.bases[row]), seq_len)
        count = int(self.counts[row]) if base > 0 else 0
        selected = self.positions[:, row, :count].long().clamp(0, max(base - 1, 0))
        recent = torch.arange(base, seq_len + 1, device=selected.device)
        return torch.cat([selected, recent.expand(len(selected), -1)], dim=1)
