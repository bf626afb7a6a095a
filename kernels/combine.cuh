// Merges the pieces of pairs that several CTAs have parts of, from the workspace that attend.cuh
// filled: a thread for four dims of a row.
#pragma once
#include "params.cuh"

constexpr int kCombineThreads = 256;
constexpr int kFours = kHeadDim / 4;

// CTAs [first, end) have pieces of a pair.
struct Pieces {
  int first;
  int end;
};

// A pair that a CTA has a part of; without pieces there is none.
struct Part {
  int request;
  int head;
  Pieces pieces;
};

// Of `out` and `lse`.
__device__ __forceinline__ int64_t output_row(const AttendParams& p, int request, int kv_head,
                                              int r) {
  const int query = r / p.group;
  const int64_t token = static_cast<int64_t>(request) * p.num_queries + query;
  return (token * p.num_kv_heads + kv_head) * p.group + r - query * p.group;
}

// stat: maximum (log2), sum.
__device__ __forceinline__ float lse_of(float2 stat) {
  return stat.y > 0.f ? stat.x + log2f(stat.y) : -INFINITY;
}
__device__ __forceinline__ float inverse_of(float sum) { return sum > 0.f ? 1.f / sum : 0.f; }

// tile, tiles: the pair's first with entries, and how many those are; total: all that are numbered.
__device__ __forceinline__ Pieces pieces_of(int tile, int tiles, int total, int num_ctas) {
  return {cta_of_tile(tile, total, num_ctas), cta_of_tile(tile + tiles - 1, total, num_ctas) + 1};
}

__device__ __forceinline__ void write_output(const AttendParams& p, int64_t row, int four, float4 o,
                                             float inverse) {
  *reinterpret_cast<uint2*>(p.out + row * kHeadDim + four * 4) =
      make_uint2(pack(o.x * inverse, o.y * inverse), pack(o.z * inverse, o.w * inverse));
}

__device__ __forceinline__ void merge_pieces(const AttendParams& p, const Pieces& pieces,
                                             int request, int kv_head, int r, int four) {
  constexpr int kAtOnce = 12;
  const int64_t pair = request * p.num_kv_heads + kv_head;
  float maximum = kNoMaximum, sum = 0.f;
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int c = pieces.first; c < pieces.end; c += kAtOnce) {
    float2 stats[kAtOnce];
    float4 values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      // Other multiprocessors wrote these: past the L1.
      const int64_t at = (min(c + j, pieces.end - 1) + pair) * kRows + r;
      stats[j] = __ldcg(p.partial_stats + at);
      values[j] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kHeadDim) + four);
    }
    float top = maximum;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, stats[j].x);
    const float before = exp2_fast(maximum - top);
    maximum = top;
    sum *= before;
    o = make_float4(o.x * before, o.y * before, o.z * before, o.w * before);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float factor = c + j < pieces.end ? exp2_fast(stats[j].x - top) : 0.f;
      sum += stats[j].y * factor;
      o.x += values[j].x * factor;
      o.y += values[j].y * factor;
      o.z += values[j].z * factor;
      o.w += values[j].w * factor;
    }
  }
  const int64_t row = output_row(p, request, kv_head, r);
  write_output(p, row, four, o, inverse_of(sum));
  if (four == 0) p.lse[row] = lse_of(make_float2(maximum, sum));
}

// Grid: (num_kv_heads * batch, rows * kFours / kCombineThreads).
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const AttendParams p, int num_ctas) {
  const int item = blockIdx.y * kCombineThreads + threadIdx.x;
  if (item >= p.num_queries * p.group * kFours) return;
  const int request = blockIdx.x / p.num_kv_heads, kv_head = blockIdx.x % p.num_kv_heads;
  const int request_tile = p.plan.tile_indptr[request];
  const int tiles = (p.plan.tile_indptr[request + 1] - request_tile) / p.num_kv_heads;
  const Pieces pieces = pieces_of(request_tile + kv_head * tiles + kTurnTiles, tiles - kTurnTiles,
                                  p.plan.tile_indptr[p.batch], num_ctas);
  if (pieces.end - pieces.first == 1) return;  // whole: the output is there
  merge_pieces(p, pieces, request, kv_head, item / kFours, item % kFours);
}
