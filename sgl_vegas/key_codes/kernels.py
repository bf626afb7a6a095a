"""Triton kernels of the draft steps that rank again: encode keys, weigh candidates, pick the best.

Like the CUDA kernels they read lengths on the device only, allocate nothing, and have the same grid
for any lengths, so that they can be captured. `words.py` is their reference in PyTorch.
"""

# Triton reads the annotations of a kernel's parameters: no postponed ones here.
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
BITS = 64
# Query heads of a KV head, padded to what a product takes.
GROUP = 16
BINS = 4096
# Keys are logarithms of a weight's share of all: 32 octaves below 1.
BINS_PER_OCTAVE = 128


@triton.jit
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
    levels = tl.dot(keys.to(tl.float32), matrix, input_precision="ieee")
    levels = tl.floor(levels + tl.load(shift + head * 64 + c)[None, :])
    levels = tl.minimum(tl.maximum(levels, 0.0), tl.load(most + head * 64 + c)[None, :])
    fields = levels.to(tl.int64) << tl.load(offsets + head * 64 + c).to(tl.int64)[None, :]
    tl.store(words + slot * num_kv_heads + head, tl.sum(fields, axis=1), i < n)


@triton.jit
def _chunk(count, split, num_splits, BLOCK: tl.constexpr):
    """A split's candidates: [start, end)."""
    size = tl.cdiv(tl.cdiv(count, num_splits), BLOCK) * BLOCK
    start = tl.minimum(split * size, count)
    return start, tl.minimum(start + size, count)


@triton.jit
def _bits(words, slots, t, end, num_kv_heads, head):
    """(BLOCK, 64) float16, those of the candidates' codes."""
    word = tl.load(words + slots * num_kv_heads + head, t < end, other=0)
    return ((word[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1).to(tl.float16)


@triton.jit
def _slots(positions, row, t, end, base, max_count, req_to_token, req_to_token_stride):
    """Of the candidates `t`; no table makes it read outside of its request's positions."""
    position = tl.load(positions + row * max_count + t, t < end, other=0)
    position = tl.minimum(tl.maximum(position, 0), base - 1)
    return tl.load(req_to_token + row * req_to_token_stride + position, t < end, other=0).to(
        tl.int64
    )


@triton.jit
def lse_kernel(
    q,  # (batch, num_heads, HEAD_DIM), rows may be strided
    weigh,  # the layer's (num_kv_heads, 64, HEAD_DIM) float32
    words,  # the layer's (num_slots, num_kv_heads) int64
    positions,  # the layer's (num_rows, max_count) int32
    counts,  # (num_rows,) int32
    bases,  # (num_rows,) int32
    wanted,  # (num_rows,) int32
    rows,  # (batch,) int64
    req_to_token,  # (num_rows, width) int32
    weights,  # (batch, num_kv_heads, 64, GROUP) float16, a bit's weight in log2 units
    stats,  # (batch, num_kv_heads, splits, 2, GROUP) float32, maximum and sum of 2^(score - it)
    histograms,  # (batch, BINS) int32
    q_stride,
    req_to_token_stride,
    max_count,
    num_kv_heads,
    scale,  # of the logits, with log2(e)
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_A_KV_HEAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax sums of a split of the candidates, and what the kernels behind it start from. Grid:
    batch, KV heads, splits."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + request)
    count, base = tl.load(counts + row), tl.load(bases + row)
    if tl.load(wanted + row) == 0:
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
    # (64, GROUP)
    product = tl.dot(of_bits, queries.to(tl.float32), input_precision="ieee")
    of_head = (product * scale).to(tl.float16)
    if split == 0:
        at = (request * num_kv_heads + head) * 64 + j[:, None]
        tl.store(weights + at * 16 + g[None, :], of_head)
        if head == 0:
            bins = tl.arange(0, 4096)
            tl.store(histograms + request * 4096 + bins, tl.zeros((4096,), tl.int32))
    start, end = _chunk(count, split, NUM_SPLITS, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    maximum = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    for t0 in range(start, end, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        slots = _slots(positions, row, t, end, base, max_count, req_to_token, req_to_token_stride)
        scores = tl.dot(_bits(words, slots, t, end, num_kv_heads, head), of_head)
        scores = tl.where(t[:, None] < end, scores, -float("inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=0))
        total = total * tl.exp2(maximum - higher)
        total += tl.sum(tl.exp2(scores - higher[None, :]), axis=0)
        maximum = higher
    at = ((request * num_kv_heads + head) * NUM_SPLITS + split) * 32
    tl.store(stats + at + g, maximum)
    tl.store(stats + at + 16 + g, total)


@triton.jit
def weigh_kernel(
    words,
    positions,
    counts,
    bases,
    wanted,
    rows,
    req_to_token,
    weights,
    stats,
    keys,  # (batch, max_count) int16, 12 bits of each candidate's weight's logarithm
    histograms,
    req_to_token_stride,
    max_count,
    num_kv_heads,
    HEADS_A_KV_HEAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each candidate's weight, the mean over heads of its softmax share. Grid: batch, parts. The
    arguments are those of `lse_kernel`."""
    request, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + request)
    count, base = tl.load(counts + row), tl.load(bases + row)
    if tl.load(wanted + row) == 0:
        return
    g, j, s = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, NUM_SPLITS)
    start, end = _chunk(count, split, NUM_BLOCKS, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    for t0 in range(start, end, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        slots = _slots(positions, row, t, end, base, max_count, req_to_token, req_to_token_stride)
        weight = tl.zeros((BLOCK,), tl.float32)
        for head in range(0, num_kv_heads):
            of_head = request * num_kv_heads + head
            at = (of_head * NUM_SPLITS + s[:, None]) * 32 + g[None, :]
            maxima, sums = tl.load(stats + at), tl.load(stats + at + 16)
            maximum = tl.max(maxima, axis=0)
            # A split without candidates has the maximum -inf and adds nothing.
            total = tl.sum(sums * tl.exp2(maxima - maximum[None, :]), axis=0)
            of_bits = tl.load(weights + (of_head * 64 + j[:, None]) * 16 + g[None, :])
            scores = tl.dot(_bits(words, slots, t, end, num_kv_heads, head), of_bits)
            shares = tl.exp2(scores - maximum[None, :]) / total[None, :]
            weight += tl.sum(tl.where(g[None, :] < HEADS_A_KV_HEAD, shares, 0.0), axis=1)
        mean = tl.maximum(weight / (num_kv_heads * HEADS_A_KV_HEAD), 1e-30)
        key = ((tl.log2(mean) + 32.0) * 128).to(tl.int32)
        key = tl.minimum(tl.maximum(key, 0), 4095)
        tl.store(keys + request * max_count + t, key.to(tl.int16), t < end)
        tl.atomic_add(histograms + request * 4096 + key, 1, t < end, sem="relaxed")


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
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes each row's `wanted` heaviest candidates, those at the threshold last, each in the
    table's order. Grid: batch, parts."""
    request, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + request)
    count, target = tl.load(counts + row), tl.load(wanted + row)
    if target == 0:
        return
    bins = tl.arange(0, 4096)
    histogram = tl.load(histograms + request * 4096 + bins)
    # Candidates with at least a bin's key.
    reach = count - (tl.cumsum(histogram, axis=0) - histogram)
    threshold = tl.max(tl.where(reach >= target, bins, 0), axis=0)
    above = tl.sum(tl.where(bins > threshold, histogram, 0), axis=0)
    own = keys + request * max_count
    start, end = _chunk(count, split, NUM_SPLITS, BLOCK)
    place_above, place_at = 0, above
    for t0 in range(0, start, BLOCK):
        is_above, is_at = _counted(own, t0 + tl.arange(0, BLOCK), start, threshold)
        place_above += tl.sum(is_above, axis=0)
        place_at += tl.sum(is_at, axis=0)
    for t0 in range(start, end, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
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
