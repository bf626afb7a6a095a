"""Which instance of the attention kernel a shape needs, and whether the device can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .build import Source

MIN_WARPS = 4
MAX_ROW_WARPS = 8
# Accumulators of a thread hold rows * head_dim / 32 floats, 128 at most.
MAX_ROW_TILES = {64: 4, 128: 2}
# Hopper's products have 64 rows; two of them are in a warpgroup's registers. Drafts, which have few
# rows, come sooner from attend.cuh unless two heads are read at once: kernels/NOTES.md.
MAX_WGMMA_ROWS = 128
MIN_WGMMA_ROWS = {64: 1, 128: 17}
WGMMA_TILE_TOKENS = 64
FP8 = torch.float8_e4m3fn
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
    warps: int
    # KV heads of a CTA at once.
    heads: int
    stages: int
    ctas: int
    half: bool
    # KV of 8 bits.
    fp8: bool
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
                ("VEGAS_STAGES", self.stages),
                ("VEGAS_WARPS", self.warps),
                ("VEGAS_CTAS", self.ctas),
                ("VEGAS_HALF", int(self.half)),
                ("VEGAS_FP8", int(self.fp8)),
            ),
            self.capability,
        )


def shared_bytes(instance: Instance) -> int:
    """What params.cuh's kSharedBytes says."""
    row_bytes, rows, score_heads = instance.head_dim * 2, instance.rows, MAX_GROUP * 8
    if instance.wgmma:
        tile = 2 * WGMMA_TILE_TOKENS * instance.heads * row_bytes
        ring = instance.stages * tile // 2 + tile if instance.fp8 else instance.stages * tile
        return ring + instance.heads * (rows * row_bytes + score_heads)
    streams = instance.warps // instance.row_warps
    ring = streams * instance.stages * 2 * 16 * row_bytes
    merge = instance.warps * 4 * (instance.head_dim + 8) * 4
    return ring + max(rows * row_bytes, merge) + streams * rows * 8 + score_heads


def find_instance(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: tuple[int, int],
) -> Instance | None:
    """The smallest instance for num_rows rows of a KV head; None where there is none."""
    fp8 = kv_dtype == FP8
    min_rows = 1 if fp8 else MIN_WGMMA_ROWS[head_dim]
    wgmma = capability == (9, 0) and min_rows <= num_rows <= MAX_WGMMA_ROWS
    if fp8 and not wgmma:
        return None
    row_warps = MIN_WARPS if wgmma else 1
    while not wgmma and -(-num_rows // (16 * row_warps)) > MAX_ROW_TILES[head_dim]:
        row_warps *= 2
        if row_warps > MAX_ROW_WARPS:
            return None
    row_tiles = -(-num_rows // (16 * row_warps))
    warps = max(row_warps, MIN_WARPS)
    # Two heads of 64 dims are 256 bytes in one place; their accumulators have to fit.
    heads = 2 if wgmma and head_dim == 64 and row_tiles == 1 and num_kv_heads % 2 == 0 else 1
    processor, block = SHARED_MEMORY[capability]
    # Two blocks a multiprocessor hide each other's segment boundaries; one is better than too few
    # stages.
    for ctas, min_stages in ((2, 3), (1, 2)):
        if ctas * warps > 2 * MIN_WARPS:
            continue  # each thread may need all registers that it can have
        room = min(block, processor // ctas - RESERVED)
        for stages in range(MAX_STAGES, min_stages - 1, -1):
            instance = Instance(
                *(wgmma, head_dim, row_tiles, row_warps, warps, heads, stages, ctas),
                *(dtype == torch.float16, fp8, capability),
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
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the kernels can't run the shape on the device, or None. capability: (major, minor);
    kv_dtype: None for that of the queries."""
    kv_dtype = kv_dtype or dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} (bfloat16 and float16 are supported)"
    if kv_dtype not in (dtype, FP8):
        return f"KV of {kv_dtype} with queries of {dtype} (theirs and {FP8} are supported)"
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
    num_rows = num_queries * group
    if find_instance(num_rows, num_kv_heads, head_dim, dtype, kv_dtype, capability) is None:
        return (
            f"{num_queries} queries of {group} heads a KV head with head dim {head_dim} and KV of "
            f"{kv_dtype} on compute capability {capability[0]}.{capability[1]}"
        )
    return None
