"""Which instance of the attention kernel a shape needs, and whether the device can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .build import Source

WARPS = 4
MAX_ROW_WARPS = 4
# Accumulators of a thread hold rows * head_dim / 32 floats, 128 at most.
MAX_ROW_TILES = {64: 4, 128: 2}
MAX_GROUP = 16
MAX_QUERIES = 16
MAX_BATCH = 2048
MAX_STAGES = 16
# Shared memory in bytes of one multiprocessor, one block, by compute capability.
SHARED_MEMORY = {
    (8, 0): (164 << 10, 163 << 10),
    (8, 6): (100 << 10, 99 << 10),
    (8, 7): (164 << 10, 163 << 10),
    (8, 9): (100 << 10, 99 << 10),
    (9, 0): (228 << 10, 227 << 10),
    (10, 0): (228 << 10, 227 << 10),
    (10, 3): (228 << 10, 227 << 10),
    (12, 0): (100 << 10, 99 << 10),
    (12, 1): (100 << 10, 99 << 10),
}
# Of each block, besides what it asks for.
RESERVED = 1 << 10


@dataclass(frozen=True)
class Instance:
    head_dim: int
    # Of 16 rows (query, head of the group), that a warp owns.
    row_tiles: int
    # Warps that share a stream of KV.
    row_warps: int
    stages: int
    ctas: int
    half: bool
    capability: tuple[int, int]

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.row_warps

    def source(self) -> Source:
        return Source(
            "attention.cu",
            (
                ("VEGAS_HEAD_DIM", self.head_dim),
                ("VEGAS_ROW_TILES", self.row_tiles),
                ("VEGAS_ROW_WARPS", self.row_warps),
                ("VEGAS_STAGES", self.stages),
                ("VEGAS_WARPS", WARPS),
                ("VEGAS_CTAS", self.ctas),
                ("VEGAS_HALF", int(self.half)),
            ),
            self.capability,
        )


def shared_bytes(head_dim: int, row_tiles: int, row_warps: int, stages: int) -> int:
    """What params.cuh's kSharedBytes says."""
    streams, rows = WARPS // row_warps, 16 * row_tiles * row_warps
    ring = streams * stages * 2 * 16 * head_dim * 2
    merge = WARPS * 4 * (head_dim + 8) * 4
    return ring + max(rows * head_dim * 2, merge) + (streams + 1) * rows * 8


def find_instance(
    num_rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> Instance | None:
    """The smallest instance for num_rows rows; None where there is none."""
    row_warps = 1
    while -(-num_rows // (16 * row_warps)) > MAX_ROW_TILES[head_dim]:
        row_warps *= 2
        if row_warps > MAX_ROW_WARPS:
            return None
    row_tiles = -(-num_rows // (16 * row_warps))
    processor, block = SHARED_MEMORY[capability]
    # Two blocks a multiprocessor hide each other's segment boundaries; one is better than too few
    # stages.
    for ctas, min_stages in ((2, 3), (1, 2)):
        room = min(block, processor // ctas - RESERVED)
        for stages in range(MAX_STAGES, min_stages - 1, -1):
            if shared_bytes(head_dim, row_tiles, row_warps, stages) <= room:
                half = dtype == torch.float16
                return Instance(head_dim, row_tiles, row_warps, stages, ctas, half, capability)
    return None


def unsupported(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_queries: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> str | None:
    """Why the kernels can't run the shape on the device, or None. capability: (major, minor)."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} (bfloat16 and float16 are supported)"
    if head_dim not in MAX_ROW_TILES:
        return f"head dim {head_dim} (64 and 128 are supported)"
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        return f"{num_heads} query heads over {num_kv_heads} KV heads"
    group = num_heads // num_kv_heads
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads a KV head (up to {MAX_GROUP} are supported)"
    if not 1 <= num_queries <= MAX_QUERIES:
        return f"{num_queries} queries a request (1 to {MAX_QUERIES} are supported)"
    if capability not in SHARED_MEMORY:
        return f"compute capability {capability[0]}.{capability[1]}"
    if find_instance(num_queries * group, head_dim, dtype, capability) is None:
        return (
            f"{num_queries} queries of {group} heads a KV head with head dim {head_dim} "
            f"on compute capability {capability[0]}.{capability[1]}"
        )
    return None
