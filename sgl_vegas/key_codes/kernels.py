"""Triton kernels of the draft steps that rank again: encode keys, weigh candidates, pick the best.

Like the CUDA kernels they read lengths on the device only, allocate nothing, and have the same grid
for any lengths, so that they can be captured. `words.py` is the reference of codes
and scores in PyTorch.
"""

# Triton reads the annotations of a kernel's parameters: no postponed ones here.
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Query heads of a KV head, padded to what a product takes.
GROUP = 16
# Candidates that have scores relative to one maximum.
BLOCK = tl.constexpr(128)
# Blocks whose softmax sums are merged at a time.
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
    weigh,  # the layer's (num_kv_heads, 64, HEAD_DIM) float32
    wanted,  # (num_rows,) int32
    rows,  # (batch,) int64
    weights,  # (batch, num_kv_heads, 64, GROUP) float16, a bit's weight in log2 units
    histograms,  # (batch, BINS) int32
    q_stride,
    num_kv_heads,
    scale,  # of the logits, with log2(e)
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_A_KV_HEAD: tl.constexpr,
):
    """What each bit of a code counts for each query head. Clears the histograms. Grid: batch, KV
    heads."""
    request, head = tl.program_id(0), tl.program_id(1)
    if tl.load(wanted + tl.load(rows + request)) == 0:
        return
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
    at = (request * num_kv_heads + head) * 64 + j[:, None]
    tl.store(weights + at * 16 + g[None, :], product.to(tl.float16))
    if head == 0:
        bins = tl.arange(0, BINS)
        tl.store(histograms + request * BINS + bins, tl.zeros((BINS,), tl.int32))


@triton.jit
def _bits(word):
    """(n, 32) float16, the bits of (n,) int32."""
    bits = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    # 0x3C00 is 1.0; a conversion would cost several times the product.
    return (bits * 0x3C00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def score_kernel(
    words,  # the layer's (num_slots, num_kv_heads) int64
    positions,  # the layer's (num_rows, max_count) int32
    counts,  # (num_rows,) int32
    bases,  # (num_rows,) int32
    wanted,  # (num_rows,) int32
    rows,  # (batch,) int64
    req_to_token,  # (num_rows, width) int32
    weights,  # (batch, NUM_KV_HEADS, 64, GROUP) float16
    shares,  # (batch, num_kv_heads, max_count, group) float16, 2^(score - the block's maximum)
    stats,  # (batch, num_blocks, 2, num_heads) float32, each block's maxima and sums of shares
    req_to_token_stride,
    width,  # of req_to_token
    max_count,
    num_blocks,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_A_KV_HEAD: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Scores of the candidates' codes. Grid: batch, parts of the blocks."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    count = tl.minimum(tl.load(counts + row), max_count)
    base = tl.minimum(tl.load(bases + row), width)
    if tl.load(wanted + row) == 0:
        return
    g, j = tl.arange(0, 16), tl.arange(0, 32)
    real = g < HEADS_A_KV_HEAD
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_A_KV_HEAD
    for block in range(tl.program_id(1), tl.cdiv(count, BLOCK), tl.num_programs(1)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(positions + row * max_count + t, t < count, other=0)
        # No table makes it read outside of its request's row.
        position = tl.maximum(tl.minimum(position, base - 1), 0)
        slot = tl.load(req_to_token + row * req_to_token_stride + position, t < count, other=0)
        at_slot = words + slot.to(tl.int64) * NUM_KV_HEADS
        at_stats = stats + (request * num_blocks + block) * 2 * num_heads
        for first in range(0, NUM_KV_HEADS, UNROLLED):
            for offset in tl.static_range(UNROLLED):
                head = first + offset
                word = tl.load(at_slot + head, t < count, other=0)
                of_bits = (
                    weights + ((request * NUM_KV_HEADS + head) * 64 + j[:, None]) * 16 + g[None, :]
                )
                scores = tl.dot(_bits(word.to(tl.int32)), tl.load(of_bits))
                scores += tl.dot(_bits((word >> 32).to(tl.int32)), tl.load(of_bits + 32 * 16))
                scores = tl.where(t[:, None] < count, scores, -float("inf"))
                maximum = tl.max(scores, axis=0)
                share = tl.exp2(scores - maximum[None, :])
                of_head = head * HEADS_A_KV_HEAD + g
                at_share = (request.to(tl.int64) * NUM_KV_HEADS + head) * max_count + t[:, None]
                tl.store(
                    shares + at_share * HEADS_A_KV_HEAD + g[None, :],
                    share.to(tl.float16),
                    (t[:, None] < count) & real[None, :],
                )
                tl.store(at_stats + of_head, maximum, real)
                tl.store(at_stats + num_heads + of_head, tl.sum(share, axis=0), real)


@triton.jit
def weigh_kernel(
    counts,
    wanted,
    rows,
    shares,
    stats,
    keys,  # (batch, max_count) int16, each candidate's bin
    histograms,
    max_count,
    num_blocks,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_A_KV_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each candidate's weight, the mean over heads of its softmax share. Grid: batch, parts of the
    blocks. HEADS is a power of two, the number of query heads or more."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    count = tl.minimum(tl.load(counts + row), max_count)
    if tl.load(wanted + row) == 0:
        return
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_A_KV_HEAD
    h, b = tl.arange(0, HEADS), tl.arange(0, MERGED)
    real = h < num_heads
    blocks = tl.cdiv(count, BLOCK)
    own = stats + request * num_blocks * 2 * num_heads + h
    maximum = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for first in range(0, blocks, MERGED):
        at = own[None, :] + (first + b[:, None]) * 2 * num_heads
        used = (first + b[:, None] < blocks) & real[None, :]
        maxima = tl.load(at, used, other=-float("inf"))
        sums = tl.load(at + num_heads, used, other=0.0)
        higher = tl.maximum(maximum, tl.max(maxima, axis=0))
        # Padding has no maximum at all.
        higher = tl.where(real, higher, 0.0)
        total = total * tl.exp2(maximum - higher)
        total += tl.sum(sums * tl.exp2(maxima - higher[None, :]), axis=0)
        maximum = higher
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        t = block * BLOCK + tl.arange(0, BLOCK)
        of_block = tl.load(own + block * 2 * num_heads, real, other=-float("inf"))
        factor = tl.where(real, tl.exp2(of_block - maximum) / (total * num_heads), 0.0)
        at = request.to(tl.int64) * NUM_KV_HEADS + h[None, :] // HEADS_A_KV_HEAD
        at = (at * max_count + t[:, None]) * HEADS_A_KV_HEAD + h[None, :] % HEADS_A_KV_HEAD
        share = tl.load(shares + at, (t[:, None] < count) & real[None, :], other=0.0)
        weight = tl.sum(share.to(tl.float32) * factor[None, :], axis=1)
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
    place_above, place_at = 0, above
    for t0 in range(0, start, COUNTED):
        is_above, is_at = _counted(own, t0 + tl.arange(0, COUNTED), start, threshold)
        place_above += tl.sum(is_above, axis=0)
        place_at += tl.sum(is_at, axis=0)
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
