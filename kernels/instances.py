"""Which instance of the attention kernel a shape needs, and whether the device can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .build import Source

WARPS = 4
MAX_ROW_WARPS = 4
# Accumulators of a thread hold rows * head_dim / 32 floats, 128 at most.
MAX_ROW_TILES = {64: 4, 128: 2}
# Hopper's products have 64 rows; two of them are in a warpgroup's registers.
MAX_WGMMA_ROWS = 128
WGMMA_TILE_TOKENS = 32
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
    # attend_hopper.cuh in place of attend.cuh.
    wgmma: bool
    head_dim: int
    # Of 16 rows (query, head of the group), that a warp owns.
    row_tiles: int
    # Warps that share a stream of KV.
    row_warps: int
    # KV heads of a CTA at once.
    heads: int
    # Entries of a tile.
    tile_tokens: int
    stages: int
    ctas: int
    half: bool
    capability: tuple[int, int]

    @property
    def rows(self) -> int:
        """Of a KV head."""
        return 16 * self.row_tiles * self.row_warps

    def source(self) -> Source:
        return Source(
            "attention.cu",
            (
                ("VEGAS_WGMMA", int(self.wgmma)),
                ("VEGAS_HEAD_DIM", self.head_dim),
                ("VEGAS_ROW_TILES", self.row_tiles),
                ("VEGAS_ROW_WARPS", self.row_warps),
                ("VEGAS_HEADS", self.heads),
                ("VEGAS_TILE_TOKENS", self.tile_tokens),
                ("VEGAS_STAGES", self.stages),
                ("VEGAS_WARPS", WARPS),
                ("VEGAS_CTAS", self.ctas),
                ("VEGAS_HALF", int(self.half)),
            ),
            self.capability,
        )


def shared_bytes(instance: Instance) -> int:
    """What params.cuh's kSharedBytes says."""
    row_bytes, rows = instance.head_dim * 2, instance.rows
    if instance.wgmma:
        rows *= instance.heads
        ring = instance.stages * 2 * instance.tile_tokens * instance.heads * row_bytes
        return ring + rows * (row_bytes + 8)
    streams = WARPS // instance.row_warps
    ring = streams * instance.stages * 2 * 16 * row_bytes
    merge = WARPS * 4 * (instance.head_dim + 8) * 4
    return ring + max(rows * row_bytes, merge) + (streams + 1) * rows * 8


def find_instance(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Instance | None:
    """The smallest instance for num_rows rows of a KV head; None where there is none."""
    wgmma = capability == (9, 0) and num_rows <= MAX_WGMMA_ROWS
    row_warps = WARPS if wgmma else 1
    while not wgmma and -(-num_rows // (16 * row_warps)) > MAX_ROW_TILES[head_dim]:
        row_warps *= 2
        if row_warps > MAX_ROW_WARPS:
            return None
    row_tiles = -(-num_rows // (16 * row_warps))
    # Two heads of 64 dims are 256 bytes in one place; their accumulators have to fit.
    heads = 2 if wgmma and head_dim == 64 and row_tiles == 1 and num_kv_heads % 2 == 0 else 1
    tile_tokens = WGMMA_TILE_TOKENS if wgmma else 16 * (WARPS // row_warps)
    processor, block = SHARED_MEMORY[capability]
    # Two blocks a multiprocessor hide each other's segment boundaries; one is better than too few
    # stages.
    for ctas, min_stages in ((2, 3), (1, 2)):
        room = min(block, processor // ctas - RESERVED)
        for stages in range(MAX_STAGES, min_stages - 1, -1):
            instance = Instance(
                *(wgmma, head_dim, row_tiles, row_warps, heads, tile_tokens, stages, ctas),
                *(dtype == torch.float16, capability),
            )
            if shared_bytes(instance) <= room:
                return instance
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
    if find_instance(num_queries * group, num_kv_heads, head_dim, dtype, capability) is None:
        return (
            f"{num_queries} queries of {group} heads a KV head with head dim {head_dim} "
            f"on compute capability {capability[0]}.{capability[1]}"
        )
    return None
