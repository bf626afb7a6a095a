// Merges a row's pieces from the workspace that attend.cuh filled: one warp a row.
#pragma once
#include "attend.cuh"

constexpr int kCombineWarps = 8;

struct CombineParams {
  Plan plan;
  const float* partial_o;
  const float2* partial_stats;
  Element* out;  // (batch * num_queries, num_heads, kHeadDim)
  float* lse;    // (batch * num_queries, num_heads), log2; -inf where a row sees nothing
  int batch;
  int num_kv_heads;
  int group;
  int num_queries;
  int num_ctas;
};

// Grid: (num_kv_heads * batch, rows / kCombineWarps).
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const CombineParams p) {
  constexpr int kValues = kHeadDim / 32;  // of a lane: 4 or 2
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32;
  const int r = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  if (r >= p.num_queries * p.group) return;
  const int pair = blockIdx.x;
  const int request = pair / p.num_kv_heads, kv_head = pair % p.num_kv_heads;
  const int request_tile = p.plan.tile_indptr[request];
  const int tiles = (p.plan.tile_indptr[request + 1] - request_tile) / p.num_kv_heads;
  const int tiles_total = p.plan.tile_indptr[p.batch];
  float maximum = kNoMaximum, sum = 0.f;
  float o[kValues] = {};
  if (tiles > 0) {
    const int tile = request_tile + kv_head * tiles;
    const int first = cta_of_tile(tile, tiles_total, p.num_ctas);
    const int end = cta_of_tile(tile + tiles - 1, tiles_total, p.num_ctas) + 1;
    for (int c = first + lane; c < end; c += 32) {
      maximum = fmaxf(maximum, p.partial_stats[static_cast<int64_t>(c + pair) * kRows + r].x);
    }
    for (int step = 16; step > 0; step /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    }
    for (int c0 = first; c0 < end; c0 += 32) {
      float factor = 0.f;
      if (c0 + lane < end) {
        const float2 stat = p.partial_stats[static_cast<int64_t>(c0 + lane + pair) * kRows + r];
        factor = exp2_fast(stat.x - maximum);
        sum += stat.y * factor;
      }
      const int count = min(32, end - c0);
      for (int j0 = 0; j0 < count; j0 += kAtOnce) {
        float piece[kAtOnce][kValues];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int64_t at = static_cast<int64_t>(c0 + min(j0 + j, count - 1) + pair) * kRows + r;
          const float* from = p.partial_o + at * kHeadDim + lane * kValues;
          if (kValues == 4) *reinterpret_cast<float4*>(piece[j]) = *reinterpret_cast<const float4*>(from);
          else *reinterpret_cast<float2*>(piece[j]) = *reinterpret_cast<const float2*>(from);
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
  }
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
