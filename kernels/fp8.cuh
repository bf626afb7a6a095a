// KV of 8 bits (e4m3) for the products: a group's entries from the ring to the operands, as halves,
// which hold every e4m3 exactly.
#pragma once
#include "params.cuh"
#include "wgmma.cuh"

// Four e4m3 in a word, the first lowest.
__device__ __forceinline__ uint2 widen(uint32_t four) {
  const auto low = static_cast<uint16_t>(four), high = static_cast<uint16_t>(four >> 16);
  uint2 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.x) : "h"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.y) : "h"(high));
  return halves;
}

// Eight elements of a query as operands.
__device__ __forceinline__ uint4 operands_of(uint4 elements) {
#if VEGAS_FP8 && !VEGAS_HALF
  uint32_t* const words = &elements.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(words + i));
    words[i] = pack_halves(two.x, two.y);
  }
#endif
  return elements;
}

// A warp's group, whose entries lie behind each other in `from`; row_of(token) is an entry's row in
// the operand.
template <int kBlockBytes, typename RowOf>
__device__ __forceinline__ void widen_group(const char* from, char* to, int lane, RowOf row_of) {
#pragma unroll
  for (int i = 0; i < kGroupTokens * kSetChunks / 32; ++i) {
    const int token = (i * 32 + lane) / kSetChunks, chunk = lane % kSetChunks;
    const auto in = *reinterpret_cast<const uint4*>(from + (i * 32 + lane) * 16);
    const uint2 a = widen(in.x), b = widen(in.y), c = widen(in.z), d = widen(in.w);
    const uint4 halves[2] = {make_uint4(a.x, a.y, b.x, b.y), make_uint4(c.x, c.y, d.x, d.y)};
    // Half of the lanes write their second chunk first: no two of eight to the same banks.
    const int swapped = chunk / 4 % 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      *reinterpret_cast<uint4*>(
          to + chunk_offset<kBlockBytes>(row_of(token), chunk * 2 + (j ^ swapped))) =
          j == swapped ? halves[0] : halves[1];
    }
  }
}
