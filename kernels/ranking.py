"""Scores of a table's candidates by the codes of their keys: one launch a layer and draft step."""

from __future__ import annotations

import ctypes

import torch

from . import structs
from .build import Source, check, load
from .structs import pointer

# CTAs that a launch should have, where there is work for so many: those that an H200 has room for.
CTAS = 512
# Most parts of one request's candidates; whoever reads the statistics merges so many.
MAX_PARTS = 128
# A part holds a multiple of so many candidates, the last one excepted.
TILE = 32


def num_parts(batch: int, num_kv_heads: int) -> int:
    """Parts that each request's candidates are cut into, whatever their number."""
    heads = next(count for count in (4, 3, 2, 1) if num_kv_heads % count == 0)  # of a CTA
    return min(max(CTAS // (batch * (num_kv_heads // heads)), 1), MAX_PARTS)


def stats_size(max_batch: int, num_heads: int) -> int:
    """Numbers that the statistics of any batch up to `max_batch` take."""
    return max(CTAS, max_batch) * 2 * num_heads


class CandidateScores:
    """Launches the kernel of `ranking.cu`, for at most 16 query heads a KV head."""

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device) -> None:
        """Builds the kernel where that is still to do. Raises RuntimeError where nvcc fails."""
        self._device = device.index
        defines = (
            ("VEGAS_HALF", 1),
            ("VEGAS_KV_HEADS", num_kv_heads),
            ("VEGAS_GROUP", num_heads // num_kv_heads),
        )
        capability = torch.cuda.get_device_capability(device)
        (self._library,) = load([Source("ranking.cu", defines, capability)])

    def __call__(
        self,
        words: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        bases: torch.Tensor,
        wanted: torch.Tensor,
        rows: torch.Tensor,
        req_to_token: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
        stats: torch.Tensor,
    ) -> None:
        """Write the scores of `rows`, but of those with nothing `wanted`.

        Args:
            words: (num_slots, num_kv_heads) int64.
            positions: (num_rows, max_count) int32, contiguous.
            counts, bases, wanted: (num_rows,) int32.
            rows: (batch_size,) int64.
            req_to_token: (num_rows, width) int32, KV slot of each position.
            weights: (batch_size, num_heads, 64) float16, contiguous: what a set bit counts, in log2
                units, in the order of `bit_order`.
            scores: (batch_size, max_count, num_heads) float16, contiguous: written, as if bits were
                1/2 and -1/2, which changes each head's by a constant.
            stats: at least (batch_size, num_parts, 2, num_heads) float32, flat: written, of parts
                that have candidates, a reference a head and the sum of 2^(score - reference).
        """
        params = structs.RankingParams(
            words=pointer(words, torch.int64, 2, "words"),
            positions=pointer(positions, torch.int32, 2, "positions"),
            counts=pointer(counts, torch.int32, 1, "counts"),
            bases=pointer(bases, torch.int32, 1, "bases"),
            wanted=pointer(wanted, torch.int32, 1, "wanted"),
            rows=pointer(rows, torch.int64, 1, "rows"),
            req_to_token=pointer(req_to_token, torch.int32, 2, "req_to_token"),
            weights=pointer(weights, torch.float16, 3, "weights"),
            scores=pointer(scores, torch.float16, 3, "scores"),
            stats=pointer(stats, torch.float32, 1, "stats"),
            req_to_token_stride=req_to_token.stride(0),
            width=req_to_token.shape[1],
            max_count=positions.shape[1],
            num_parts=num_parts(len(rows), words.shape[1]),
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self._library.vegas_score_candidates(
            self._device, ctypes.byref(params), len(rows), stream
        )
        check(self._library, error, "score_candidates")


def bit_order() -> torch.Tensor:
    """(64,) int64: which bit of a code each of a head's weights is for.

    Of the four lanes that share a product's column, each reads 16 weights at once: two of each of
    four registers of the low word, then of the high one.
    """
    place = torch.arange(64)
    lane, word, register, half = place // 16, place // 8 % 2, place // 2 % 4, place % 2
    return 32 * word + 16 * half + 4 * lane + 3 - register
