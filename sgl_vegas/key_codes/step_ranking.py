"""Ranking a table's candidates again at every draft step, on the device and inside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from sgl_vegas_kernels.ranking import (  # pyright: ignore[reportMissingImports]
    CandidateScores,
    bit_order,
    num_parts,
    stats_size,
)

from sgl_vegas.key_codes import kernels as triton_kernels
from sgl_vegas.key_codes.words import WORD_BITS, WordCodes
from sgl_vegas.tables.request_tables import RequestTables

# To a type checker, what Triton compiles are functions of constants only.
kernels: Any = triton_kernels

# Programs that a launch should have, where there is work for so many: a few a processor.
PROGRAMS = 512
# Candidates that a program of the picking kernel lists at a time.
TILE = 1024


class StepRanking:
    """The codes of all keys of a pool, and what a draft step chooses by them.

    A table holds candidates: of each row's `counts`, a step takes every `candidates`-th part, those
    to which its own queries would give most weight. One layer at a time, so that one list is kept.

    Attributes:
        words: (num_layers, num_slots, num_kv_heads) int64, codes of the keys in the pool's slots.
        positions: (1, num_rows, max_chosen) int32, what the last `choose` wrote.
        wanted: (num_rows,) int32, how many of them.
    """

    def __init__(
        self,
        codes: WordCodes,
        tables: RequestTables,
        candidates: int,
        num_heads: int,
        num_slots: int,
        max_batch: int,
        score: Callable[..., None] | None = None,
    ) -> None:
        """`score`: stands in for the CUDA kernel, called as `CandidateScores` is."""
        device = tables.counts.device
        num_layers, num_kv_heads = codes.encode.shape[:2]
        num_rows, max_count = tables.positions.shape[1:]

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.codes = codes.to(device)
        self.words = buffer(num_layers, num_slots, num_kv_heads, dtype=torch.int64)
        self.positions = buffer(1, num_rows, max(max_count // candidates, 1), dtype=torch.int32)
        self.wanted = buffer(num_rows, dtype=torch.int32)
        self._tables, self._candidates = tables, candidates
        self._group = num_heads // num_kv_heads
        assert self._group <= 16, "the attention kernels have no more either"
        self._score = score or CandidateScores(num_heads, num_kv_heads, device)
        # As the scoring kernel reads them.
        self._weigh = self.codes.weigh[:, :, bit_order()].contiguous()
        self._weights = buffer(max_batch, num_heads, WORD_BITS, dtype=torch.float16)
        self._scores = buffer(max_batch, max_count, num_heads, dtype=torch.float16)
        self._stats = buffer(stats_size(max_batch, num_heads), dtype=torch.float32)
        self._keys = buffer(max_batch, max_count, dtype=torch.int16)
        self._histograms = buffer(max_batch, kernels.BINS.value, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        buffers = (
            *(self.words, self.positions, self.wanted, self._weigh, self._weights),
            *(self._scores, self._stats, self._keys, self._histograms),
        )
        return sum(x.nbytes for x in buffers)

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int) -> int:
        """What a slot's codes take."""
        return 8 * num_layers * num_kv_heads

    def encode(self, layer: int, slots: torch.Tensor, k_cache: torch.Tensor) -> None:
        """Code the keys in some slots, (n,) int64, of a layer's (num_slots, num_kv_heads,
        head_dim)."""
        _, num_kv_heads, head_dim = k_cache.shape
        codes = self.codes
        kernels.encode_kernel[(triton.cdiv(len(slots), 16), num_kv_heads)](
            k_cache,
            slots,
            codes.encode[layer],
            codes.shift[layer],
            codes.most[layer],
            codes.offsets[layer],
            self.words[layer],
            len(slots),
            num_kv_heads,
            HEAD_DIM=head_dim,
            DIM=max(triton.next_power_of_2(head_dim), 16),
            BLOCK=16,
        )

    def begin(self, rows: torch.Tensor) -> None:
        """Set how many candidates the next steps take of `rows`, (batch_size,) int64."""
        counts = self._tables.counts[rows]
        wanted = (counts // self._candidates).clamp_min(1)
        self.wanted[rows] = wanted.where(counts > 0, 0).to(torch.int32)

    def choose(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        req_to_token: torch.Tensor,
        scale: float,
    ) -> None:
        """Write the layer's list of each row.

        Args:
            q: (batch_size, num_heads, head_dim), the step's queries; rows may be strided.
            rows: (batch_size,) int64, those of `begin`.
            req_to_token: (num_rows, width) int32, KV slot of each position.
            scale: factor of the logits.
        """
        batch, num_heads, head_dim = q.shape
        num_kv_heads = num_heads // self._group
        tables, max_count = self._tables, self._tables.positions.shape[2]
        positions = tables.positions[layer]
        kernels.weights_kernel[(batch, num_kv_heads)](
            q,
            self._weigh[layer],
            self.wanted,
            rows,
            self._weights,
            self._histograms,
            q.stride(0),
            num_kv_heads,
            scale * kernels.LOG2E,
            HEAD_DIM=head_dim,
            DIM=max(triton.next_power_of_2(head_dim), 16),
            HEADS_A_KV_HEAD=self._group,
        )
        self._score(
            self.words[layer],
            positions,
            tables.counts,
            tables.bases,
            self.wanted,
            rows,
            req_to_token,
            self._weights,
            self._scores,
            self._stats,
        )
        programs = min(-(-PROGRAMS // batch), -(-max_count // kernels.BLOCK.value))
        kernels.weigh_kernel[(batch, programs)](
            tables.counts,
            self.wanted,
            rows,
            self._scores,
            self._stats,
            self._keys,
            self._histograms,
            max_count,
            num_parts(batch, num_kv_heads),
            NUM_HEADS=num_heads,
            HEADS=triton.next_power_of_2(num_heads),
        )
        kernels.pick_kernel[(batch, min(programs, -(-max_count // TILE)))](
            positions,
            tables.counts,
            self.wanted,
            rows,
            self._keys,
            self._histograms,
            self.positions,
            max_count,
            self.positions.shape[2],
            TILE=TILE,
            num_warps=8,
        )
