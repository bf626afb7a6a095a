"""From tables to KV slots: the one place where logical positions meet `req_to_token`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_vegas.tables.request_tables import RequestTables


@dataclass(frozen=True)
class StepIndices:
    """What one draft step attends to, in the layout of a paged decode with page size 1.

    Attributes:
        kv_indptr: (batch_size + 1,) int32 on the CPU, since kernels are planned there.
        kv_indices: (num_layers, kv_indptr[-1]) int32, KV slots.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


class DraftIndices:
    """KV slots of one iteration's drafts: each request's table, then its recent tokens.

    Recent tokens come last and in order, so that draft step i takes a prefix one longer than
    step i - 1.
    """

    def __init__(
        self,
        tables: RequestTables,
        req_to_token: torch.Tensor,
        rows: list[int],
        seq_lens: list[int],
        num_steps: int,
        num_layers: int,
    ) -> None:
        """Args:
        req_to_token: (num_rows, max_context_len) int32, KV slot of each position.
        rows: request-pool row of each request.
        seq_lens: committed KV length of each request; draft step i writes position seq_len + i.
        """
        self._slots: list[torch.Tensor] = []  # each (num_layers, length at the last step)
        self._first_lengths: list[int] = []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            slots_of = req_to_token[row]
            table = tables.get(row)
            base = 0 if table is None else min(table.base, seq_len)
            recent = slots_of[base : seq_len + num_steps].expand(num_layers, -1)
            if table is None or base == 0:
                slots = recent
            else:
                # A wrong table may cost acceptance, never memory safety.
                positions = table.positions.long().clamp(0, base - 1)
                slots = torch.cat([slots_of[positions], recent], dim=1)
            self._slots.append(slots)
            self._first_lengths.append(slots.shape[1] - num_steps + 1)

    def at_step(self, step: int) -> StepIndices:
        """Indices of draft step `step`, which attends to its own token too."""
        lengths = [first + step for first in self._first_lengths]
        kv_indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        kv_indptr[1:] = torch.tensor(lengths).cumsum(0)
        kv_indices = torch.cat(
            [slots[:, :length] for slots, length in zip(self._slots, lengths, strict=True)], dim=1
        )
        return StepIndices(kv_indptr, kv_indices)
