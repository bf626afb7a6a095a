"""Triton kernels of the draft steps that rank again: encode keys, weigh candidates, pick the best.

`kernels/ranking.cu` scores the candidates between the weights and the weighing. Like the CUDA
kernels these read lengths on the device only, allocate nothing, and have the same grid for any
lengths, so that they can be captured. `words.py` is the reference of codes and scores in PyTorch.
"""

# Triton reads the annotations of a kernel's parameters: no postponed ones here.
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Candidates that are weighed at a time.
BLOCK = tl.constexpr(128)
# Candidates that the scoring kernel takes at a time, and parts whose sums are merged at a time.
SCORED = tl.constexpr(32)
MERGED = tl.constexpr(64)
# A weight's bin is its logarithm, down to 32 octaves below 1.
BINS = tl.constexpr(1024)
BINS_PER_OCTAVE = tl.constexpr(32)
# Candidates that the picking kernel counts at a time.
COUNTED = tl.constexpr(4096)


# A server would compile it again for the first prefill of one token.
@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    cache,  # (num_slots, num_kv_heads, HEAD_DIM)
    slots,  # (n,) int64
    encode,  # (num_kv_heads, HEAD_DIM, 64) float32
    shift,  # (num_kv_heads, 64) float32
    most,  # (num_kv_heads, 64) float32
    offsets,  # (num_kv_heads, 64) int32
    words,  # (num_slots, num_kv_heads) int64
    n,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words of the keys in `slots`. Grid: blocks of them, KV heads."""
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, i < n, other=0)
    d, c = tl.arange(0, DIM), tl.arange(0, 64)
    at = (slot[:, None] * num_kv_heads + head) * HEAD_DIM + d[None, :]
    keys = tl.load(cache + at, (i[:, None] < n) & (d[None, :] < HEAD_DIM), other=0.0)
    of_head = encode + head * HEAD_DIM * 64
    matrix = tl.load(of_head + d[:, None] * 64 + c[None, :], d[:, None] < HEAD_DIM, other=0.0)
    levels = tl.dot(keys.to(tl.float32), matrix, input_precision="tf32x3")
    levels = tl.floor(levels + tl.load(shift + head * 64 + c)[None, :])
    levels = tl.minimum(tl.maximum(levels, 0.0), tl.load(most + head * 64 + c)[None, :])
    fields = levels.to(tl.int64) << tl.load(offsets + head * 64 + c).to(tl.int64)[None, :]
    tl.store(words + slot * num_kv_heads + head, tl.sum(fields, axis=1), i < n)


@triton.jit
def weights_kernel(
    q,  # (batch, num_heads, HEAD_DIM), rows may be strided
    weigh,  # the layer's (num_kv_heads, 64, HEAD_DIM) float32, in the order of the weights
    wanted,  # (num_rows,) int32
    rows,  # (batch,) int64
    weights,  # (batch, num_heads, 64) float16, what a set bit counts, times `scale`
    histograms,  # (batch, BINS) int32
    q_stride,
    num_kv_heads,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_A_KV_HEAD: tl.constexpr,
):
    """What each bit of a code counts for each query head. Clears the histograms. Grid: batch, KV
    heads."""
    request, head = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + tl.load(rows + request)) == 0:
        return
    # A product has at least 16 columns.
    g, d, j = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, 64)
    heads = head * HEADS_A_KV_HEAD + g
    queries = tl.load(
        q + request * q_stride + heads[None, :] * HEAD_DIM + d[:, None],
        (g[None, :] < HEADS_A_KV_HEAD) & (d[:, None] < HEAD_DIM),
        other=0.0,
    )
    of_bits = tl.load(
        weigh + (head * 64 + j[:, None]) * HEAD_DIM + d[None, :], d[None, :] < HEAD_DIM, other=0.0
    )
    product = tl.dot(of_bits, queries.to(tl.float32), input_precision="tf32") * scale
    at = (request * num_kv_heads * HEADS_A_KV_HEAD + heads[None, :]) * 64 + j[:, None]
    tl.store(weights + at, product.to(tl.float16), g[None, :] < HEADS_A_KV_HEAD)
    if head == 0:
        bins = tl.arange(0, BINS)
        tl.store(histograms + request * BINS + bins, tl.zeros((BINS,), tl.int32))


@triton.jit
def weigh_kernel(
    counts,
    wanted,
    rows,
    scores,  # (batch, max_count, NUM_HEADS) float16, in log2 units
    stats,  # (batch, num_parts, 2, NUM_HEADS) float32, each part's references and sums of shares
    keys,  # (batch, max_count) int16, each candidate's bin
    histograms,
    max_count,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each candidate's weight, the mean over heads of its softmax share. Grid: batch, programs that
    share the blocks. HEADS is a power of two, the number of query heads or more."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    count = tl.minimum(tl.load(counts + row), max_count)
    blocks = tl.cdiv(count, BLOCK)
    if (tl.load(wanted + row) == 0) | (tl.program_id(1) >= blocks):
        return
    h, b = tl.arange(0, HEADS), tl.arange(0, MERGED)
    real = h < NUM_HEADS
    parts = tl.cdiv(count, tl.cdiv(count, SCORED * num_parts) * SCORED)
    own = stats + request * num_parts * 2 * NUM_HEADS + h
    maximum = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for first in range(0, parts, MERGED):
        at = own[None, :] + (first + b[:, None]) * 2 * NUM_HEADS
        used = (first + b[:, None] < parts) & real[None, :]
        maxima = tl.load(at, used, other=-float("inf"))
        sums = tl.load(at + NUM_HEADS, used, other=0.0)
        higher = tl.maximum(maximum, tl.max(maxima, axis=0))
        # Padding has no maximum at all.
        higher = tl.where(real, higher, 0.0)
        total = total * tl.exp2(maximum - higher)
        total += tl.sum(sums * tl.exp2(maxima - higher[None, :]), axis=0)
        maximum = higher
    # What a head's score lacks to the logarithm of its part of the mean.
    base = tl.where(real, maximum + tl.log2(tl.where(real, total * NUM_HEADS, 1.0)), float("inf"))
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        at = (request.to(tl.int64) * max_count + t[:, None]) * NUM_HEADS + h[None, :]
        score = tl.load(scores + at, (t[:, None] < count) & real[None, :], other=0.0)
        weight = tl.sum(tl.exp2(score.to(tl.float32) - base[None, :]), axis=1)
        key = ((tl.log2(tl.maximum(weight, 1e-30)) + 32.0) * BINS_PER_OCTAVE).to(tl.int32)
        key = tl.minimum(tl.maximum(key, 0), BINS - 1)
        tl.store(keys + request.to(tl.int64) * max_count + t, key.to(tl.int16), t < count)
        tl.atomic_add(histograms + request * BINS + key, 1, t < count, sem="relaxed")


@triton.jit
def _counted(keys, t, end, threshold):
    """Whether a candidate is above the threshold, and at it; as numbers."""
    key = tl.load(keys + t, t < end, other=-1).to(tl.int32)
    return (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)


@triton.jit
def pick_kernel(
    positions,
    counts,
    wanted,
    rows,
    keys,
    histograms,
    chosen,  # (num_rows, max_chosen) int32
    max_count,
    max_chosen,
    TILE: tl.constexpr,
):
    """Writes each row's `wanted` heaviest candidates, those at the threshold last, each in the
    table's order. Grid: batch, parts."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    count, target = tl.minimum(tl.load(counts + row), max_count), tl.load(wanted + row)
    size = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), TILE) * TILE
    start = tl.program_id(1) * size
    end = tl.minimum(start + size, count)
    if (target == 0) | (start >= end):
        return
    bins = tl.arange(0, BINS)
    histogram = tl.load(histograms + request * BINS + bins)
    # Candidates with at least a bin's key.
    reach = count - (tl.cumsum(histogram, axis=0) - histogram)
    threshold = tl.max(tl.where(reach >= target, bins, 0), axis=0)
    above = tl.sum(tl.where(bins > threshold, histogram, 0), axis=0)
    own = keys + request.to(tl.int64) * max_count
    # Summed up once, behind the loop: a sum over the program's threads costs more than a load.
    before_above, before_at = tl.zeros((COUNTED,), tl.int32), tl.zeros((COUNTED,), tl.int32)
    for t0 in range(0, start, COUNTED):
        is_above, is_at = _counted(own, t0 + tl.arange(0, COUNTED), start, threshold)
        before_above += is_above
        before_at += is_at
    place_above, place_at = tl.sum(before_above, axis=0), above + tl.sum(before_at, axis=0)
    for t0 in range(start, end, TILE):
        t = t0 + tl.arange(0, TILE)
        is_above, is_at = _counted(own, t, end, threshold)
        position = tl.load(positions + row * max_count + t, t < end, other=0)
        place = tl.where(
            is_above == 1,
            place_above + tl.cumsum(is_above, axis=0) - 1,
            place_at + tl.cumsum(is_at, axis=0) - 1,
        )
        listed = (is_above == 1) | ((is_at == 1) & (place < target))
        tl.store(chosen + row * max_chosen + place, position, listed & (t < end))
        place_above += tl.sum(is_above, axis=0)
        place_at += tl.sum(is_at, axis=0)
