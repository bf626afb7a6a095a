// Merges a row's pieces from the workspace that attend.cuh filled: one warp a row.
#pragma once
#include "params.cuh"

constexpr int kCombineWarps = 8;

// CTAs [first, end) have pieces of a pair.
struct Pieces {
  int first;
  int end;
};

// tile, tiles: the pair's first and how many it has.
__device__ __forceinline__ Pieces pieces_of(const Plan& plan, int tile, int tiles, int num_ctas) {
  const int total = plan.ctas[num_ctas].tile;
  return {cta_of_tile(tile, total, num_ctas), cta_of_tile(tile + tiles - 1, total, num_ctas) + 1};
}

__device__ __forceinline__ void merge_pieces(const AttendParams& p, const Pieces& pieces, int request,
                                             int kv_head, int r, int lane) {
  constexpr int kValues = kHeadDim / 32;  // of a lane: 4 or 2
  constexpr int kAtOnce = 8;
  const int64_t pair = request * p.num_kv_heads + kv_head;
  float maximum = kNoMaximum, sum = 0.f;
  float o[kValues] = {};
  for (int c0 = pieces.first; c0 < pieces.end; c0 += 32) {
    const int count = min(32, pieces.end - c0);
    const float2* const stats = p.partial_stats + (c0 + pair) * kRows + r;
    const float* const from = p.partial_o + ((c0 + pair) * kRows + r) * kHeadDim + lane * kValues;
    // Other multiprocessors wrote these: past the L1.
    const float2 stat =
        lane < count ? __ldcg(stats + lane * kRows) : make_float2(kNoMaximum, 0.f);
    float top = 0.f, factor = 0.f;
    for (int j0 = 0; j0 < count; j0 += kAtOnce) {
      float piece[kAtOnce][kValues];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float* const one = from + min(j0 + j, count - 1) * (kRows * kHeadDim);
        if (kValues == 4) {
          *reinterpret_cast<float4*>(piece[j]) = __ldcg(reinterpret_cast<const float4*>(one));
        } else {
          *reinterpret_cast<float2*>(piece[j]) = __ldcg(reinterpret_cast<const float2*>(one));
        }
      }
      if (j0 == 0) {  // after the loads, which needn't wait for it
        top = stat.x;
        for (int step = 16; step > 0; step /= 2) {
          top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        }
        top = fmaxf(top, maximum);
        factor = exp2_fast(stat.x - top);
        const float before = exp2_fast(maximum - top);
        sum = sum * before + stat.y * factor;
#pragma unroll
        for (int e = 0; e < kValues; ++e) o[e] *= before;
        maximum = top;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float f = __shfl_sync(~0u, factor, min(j0 + j, 31));
        if (j0 + j < count) {
#pragma unroll
          for (int e = 0; e < kValues; ++e) o[e] += f * piece[j][e];
        }
      }
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float inverse = sum > 0.f ? 1.f / sum : 0.f;
  const int query = r / p.group;
  const int head = kv_head * p.group + r - query * p.group;
  const int64_t to =
      (static_cast<int64_t>(request) * p.num_queries + query) * p.num_kv_heads * p.group + head;
  uint32_t packed[kValues / 2];
#pragma unroll
  for (int e = 0; e < kValues; e += 2) packed[e / 2] = pack(o[e] * inverse, o[e + 1] * inverse);
  Element* out = p.out + to * kHeadDim + lane * kValues;
  if (kValues == 4) *reinterpret_cast<uint2*>(out) = make_uint2(packed[0], packed[kValues / 2 - 1]);
  else *reinterpret_cast<uint32_t*>(out) = packed[0];
  if (lane == 0) p.lse[to] = sum > 0.f ? maximum + log2f(sum) : -INFINITY;
}

// Grid: (num_kv_heads * batch, rows / kCombineWarps).
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_kernel(const AttendParams p, int num_ctas) {
  const int r = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  if (r >= p.num_queries * p.group) return;
  const int request = blockIdx.x / p.num_kv_heads, kv_head = blockIdx.x % p.num_kv_heads;
  const int request_tile = p.plan.tile_indptr[request];
  const int tiles = (p.plan.tile_indptr[request + 1] - request_tile) / p.num_kv_heads;
  const Pieces pieces = pieces_of(p.plan, request_tile + kv_head * tiles, tiles, num_ctas);
  merge_pieces(p, pieces, request, kv_head, r, threadIdx.x % 32);
}
