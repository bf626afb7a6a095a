// Merges the pieces of pairs that several CTAs have parts of, from the workspace: a thread for eight
// dims of a row. Pieces have outputs of their own, as halves: writes cost the attention's reads far
// more than their bytes (NOTES.md), and a half's 11 bits are more than a bf16 output keeps. Outputs
// beyond a half's range, 65,504, are cut to it, and those below 2^-14 lose bits.
#pragma once
#include "rows.cuh"
#include "segments.cuh"

constexpr int kCombineThreads = 256;
constexpr int kEights = kHeadDim / 8;

// CTAs [first, end) have pieces of a pair.
struct Pieces {
  int first;
  int end;
};

// What a row's outputs are multiplied by in the end, and its log-sum-exp (log2).
struct Softmax {
  float factor;
  float lse;
};
// stat: maximum (log2), sum. A head's sink is one more entry, without a value.
__device__ __forceinline__ Softmax softmax_of(const AttendParams& p, int kv_head, int r,
                                              float2 stat) {
  if (p.sinks != nullptr) {
    const float sink = p.sinks[kv_head * p.group + r % p.group] * 1.44269504f;
    const float top = fmaxf(stat.x, sink);
    const float before = exp2_fast(stat.x - top);
    const float sum = stat.y * before + exp2_fast(sink - top);
    return {p.v_scale * before / sum, top + log2f(sum)};
  }
  return stat.y > 0.f ? Softmax{p.v_scale / stat.y, stat.x + log2f(stat.y)} : Softmax{0.f, -INFINITY};
}

// tile, tiles: the pair's first with entries, and how many those are; total: all that are numbered.
__device__ __forceinline__ Pieces pieces_of(int tile, int tiles, int total, int num_ctas) {
  return {cta_of_tile(tile, total, num_ctas), cta_of_tile(tile + tiles - 1, total, num_ctas) + 1};
}

// A piece's factor: its outputs are those of its entries alone, without a sink.
__device__ __forceinline__ float piece_factor(float2 stat) {
  return stat.y > 0.f ? 1.f / stat.y : 0.f;
}

template <int kAtOnce>
__device__ __forceinline__ void merge_pieces(const AttendParams& p, const Pieces& pieces,
                                             int request, int head_set, int item) {
  const int rows = p.num_queries * p.group;
  const int eight = item % kEights, r = item / kEights % rows, h = item / kEights / rows;
  const int64_t pair = request * p.num_head_sets + head_set;
  float maximum = kNoMaximum, sum = 0.f;
  float o[8] = {};
  for (int c = pieces.first; c < pieces.end; c += kAtOnce) {
    float2 stats[kAtOnce];
    uint4 values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      stats[j] = make_float2(kNoMaximum, 0.f);
      values[j] = make_uint4(0, 0, 0, 0);
      if (c + j >= pieces.end) continue;
      // Other multiprocessors wrote these: past the L1.
      const int64_t at = (c + j + pair) * kSlotRows + h * kHeadRows + r;
      stats[j] = __ldcg(p.partial_stats + at);
      values[j] = __ldcg(reinterpret_cast<const uint4*>(p.partial_o + at * kHeadDim) + eight);
    }
    float top = maximum;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, stats[j].x);
    const float before = exp2_fast(maximum - top);
    maximum = top;
    sum *= before;
#pragma unroll
    for (int d = 0; d < 8; ++d) o[d] *= before;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float mass = stats[j].y * exp2_fast(stats[j].x - top);
      sum += mass;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const float2 two = unpack_halves((&values[j].x)[d]);
        o[2 * d] += two.x * mass;
        o[2 * d + 1] += two.y * mass;
      }
    }
  }
  const int kv_head = head_set * kHeads + h;
  const int64_t row = output_row(p, request, kv_head, r);
  const Softmax softmax = softmax_of(p, kv_head, r, make_float2(maximum, sum));
  uint4 packed;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    (&packed.x)[d] = pack(o[2 * d] * softmax.factor, o[2 * d + 1] * softmax.factor);
  }
  *reinterpret_cast<uint4*>(p.out + row * kHeadDim + eight * 8) = packed;
  if (eight == 0) p.lse[row] = softmax.lse;
}

// The pairs that a CTA has parts of, its first and its last at most, where the CTAs merge pieces
// themselves: whoever has the last of a pair's pieces does. Thread 0 keeps the counts.
class Parts {
 public:
  // After a barrier behind the writes of a segment that is no whole pair.
  __device__ __forceinline__ void add(const AttendParams& p, const Segment& segment,
                                      int tiles_total) {
    const CtaStart& at = segment.at;
    const int pair_tiles = tiles_of<kTileTokens>(at.list);
    const Part part{at.request, at.head_set,
                    pieces_of(at.tile - at.place, pair_tiles, tiles_total, gridDim.x)};
    if (max(at.place, 0) + segment.tiles() < pair_tiles) {
      last_ = part;
    } else {  // begun by another CTA
      first_ = part;
      if (threadIdx.x == 0) {
        __threadfence();
        first_done_ = atomicAdd(counter(p, part), 1);
      }
    }
  }

  // By the whole CTA, at its end. is_last: two ints of shared memory.
  __device__ __forceinline__ void merge(const AttendParams& p, int* is_last) {
    if (threadIdx.x == 0) {
      __threadfence();
      is_last[0] = close(p, first_, first_done_);
      is_last[1] =
          close(p, last_, last_.exists() ? atomicAdd(counter(p, last_), 1) : 0);
      __threadfence();
    }
    __syncthreads();
    const int items = kHeads * p.num_queries * p.group * kEights;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!is_last[i]) continue;
      const Part part = i == 0 ? first_ : last_;
      for (int item = threadIdx.x; item < items; item += kThreads) {
        merge_pieces<12>(p, part.pieces, part.request, part.head_set, item);
      }
    }
  }

 private:
  struct Part {
    int request;
    int head_set;
    Pieces pieces;
    __device__ __forceinline__ bool exists() const { return pieces.end > pieces.first; }
  };

  static __device__ __forceinline__ int* counter(const AttendParams& p, const Part& part) {
    return p.pieces_done + part.request * p.num_head_sets + part.head_set;
  }
  // done: pieces before this CTA's.
  static __device__ __forceinline__ bool close(const AttendParams& p, const Part& part, int done) {
    if (!part.exists() || done < part.pieces.end - part.pieces.first - 1) return false;
    *counter(p, part) = 0;
    return true;
  }

  Part first_{}, last_{};
  int first_done_ = 0;
};

// Grid: (num_ctas, rows * kEights / kCombineThreads). Block x has the pair whose pieces begin with
// CTA x's, if there is one.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const AttendParams p) {
  const int first = blockIdx.x, num_ctas = gridDim.x;
  const CtaStart own = p.plan.ctas[first], next = p.plan.ctas[first + 1];
  const int total = p.plan.ctas[num_ctas].tile;
  const bool begun_before =
      own.request == next.request && own.head_set == next.head_set && own.place > 0;
  if (next.tile == total || next.place <= 0 || begun_before) return;
  const int pair_end = next.tile - next.place + tiles_of<kTileTokens>(next.list);
  Pieces pieces{first, first + 2};
  for (int c = first + 2 + threadIdx.x % 32;; c += 32) {
    const bool in_pair = c < num_ctas && p.plan.ctas[c].tile < pair_end;
    pieces.end += __popc(__ballot_sync(~0u, in_pair));
    if (!__all_sync(~0u, in_pair)) break;
  }
  const int item = blockIdx.y * kCombineThreads + threadIdx.x;
  if (item >= kHeads * p.num_queries * p.group * kEights) return;
  if (pieces.end == first + 2) merge_pieces<2>(p, pieces, next.request, next.head_set, item);
  else merge_pieces<12>(p, pieces, next.request, next.head_set, item);
}
