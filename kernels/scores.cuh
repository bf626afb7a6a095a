// Where and how the attention kernels write scores: of a head and a position, the sum of the weights
// that the request's first and last query give it, each relative to that query's reference, as 4
// bits. selection.cu reads them: ScoreGroups there.
#pragma once
#include "params.cuh"

// A pair's scores: groups of 16 tokens, in each 8 bytes for every head of the KV head's group.
struct ScorePlace {
  uint8_t* at;
  int groups;
  int group_bytes;
  int lowest_exponent;
};
__device__ __forceinline__ ScorePlace score_place(const AttendParams& p, const CtaStart& at,
                                                  int kv_head) {
  const int4 groups = p.score_groups[at.request];
  const int bytes = p.group * (kScoreTokens / 2);
  return {p.scores + kv_head * p.score_head_stride + static_cast<int64_t>(groups.x) * bytes,
          groups.y, bytes, groups.z};
}

// The first and the last query's references of a head, if there is one.
__device__ __forceinline__ float2 score_references(const AttendParams& p, const CtaStart& at,
                                                   int kv_head, int head) {
  if (head >= p.group || kv_head >= p.num_kv_heads) return make_float2(0.f, 0.f);
  const int64_t row = at.list.row;
  return *reinterpret_cast<const float2*>(
      p.references + ((row * p.num_kv_heads + kv_head) * p.group + head) * 2);
}
// What a head's exponents get. In shared memory: a reference that the loop got from global memory
// would make its first use wait for the loop's own loads from there.
static_assert(sizeof(float2) == kScoreHeadBytes);
__device__ __forceinline__ float2 score_exponents(const AttendParams& p, float2 references,
                                                  int lowest_exponent) {
  return make_float2(-references.x - lowest_exponent,
                     p.num_queries > 1 ? -references.y - lowest_exponent : -INFINITY);
}

// What weights relative to 2^top are multiplied by. Any old reference gives something finite.
__device__ __forceinline__ float score_factor(float top, float exponent) {
  return exp2_fast(fminf(fmaxf(top + exponent, -100.f), 100.f));
}

// Two tokens' weights of a query, packed as for the product with V, times their factor: added to
// others, as bf16.
__device__ __forceinline__ __nv_bfloat162 add_weights(uint32_t weights, float factor,
                                                      __nv_bfloat162 others) {
#if VEGAS_HALF_OPERANDS
  const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&weights));
  const float2 before = __bfloat1622float2(others);
  return __floats2bfloat162_rn(fmaf(two.x, factor, before.x), fmaf(two.y, factor, before.y));
#else
  return __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&weights),
                 __float2bfloat162_rn(factor), others);
#endif
}

// Two tokens' scores, round(log2(sum)) from 0 to 15, in bits 7 to 10 of either half. The bits of a
// bf16 are close to a logarithm, 8 for the exponent and 7 that follow: rounding goes by the sum
// itself, up from 1.5 times a power of two. decode in selection.cu is the inverse.
__device__ __forceinline__ uint32_t score_digits(uint32_t first, float first_factor, uint32_t last,
                                                 float last_factor) {
  constexpr int kShift = ((1 << 6) - (127 << 7)) & 0xFFFF;
  constexpr uint32_t kShifts = static_cast<uint32_t>(kShift) << 16 | kShift, kMost = 0x07FF07FF, kDigits = 0x07800780;
  const __nv_bfloat162 none = __float2bfloat162_rn(0.f);
  const __nv_bfloat162 sums =
      add_weights(first, first_factor, add_weights(last, last_factor, none));
  return __viaddmin_s16x2_relu(*reinterpret_cast<const uint32_t*>(&sums), kShifts, kMost) & kDigits;
}
