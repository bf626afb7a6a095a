// Hopper's matrix products of a warpgroup (wgmma, sm_90a), and how their operands lie in shared memory.
//
// A block is some rows (queries, or entries of K or V) of 64 dims, 128 bytes each, whose 16-byte
// chunks are swizzled by the row (128-byte swizzle); blocks start at multiples of 1,024 bytes. An
// operand with more dims has a block for each 64 of them.
#pragma once
#include "ptx.cuh"

constexpr int kBlockRowBytes = 128;

// Where a chunk of 8 dims of a row lies in an operand whose blocks have kBytes.
template <int kBytes>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return chunk / 8 * kBytes + row * kBlockRowBytes + ((chunk % 8 ^ row % 8) << 4);
}

// Descriptors: bits 0-13 the address, 16-29 and 32-45 the leading and the stride byte offset, all in
// 16 bytes; 62-63 the swizzle, 1 being 128 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kEightRows = static_cast<uint64_t>(8 * kBlockRowBytes >> 4) << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(leading >> 4) << 16 | address >> 4;
}
// Of an operand whose dims are summed over (Q, K): the step's 16 dims.
template <int kBytes>
__device__ __forceinline__ uint64_t dims_descriptor(uint32_t operand, int step) {
  return descriptor(operand + step / 4 * kBytes + step % 4 * 32, 16);
}
// Of one whose rows are summed over (V): the step's 16 rows, all dims.
template <int kBytes>
__device__ __forceinline__ uint64_t rows_descriptor(uint32_t operand, int step) {
  return descriptor(operand + step * 16 * kBlockRowBytes, kBytes);
}

// Generic writes of shared memory (cp.async's too) before this are seen by wgmma after a barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Registers that were written before this may be operands.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#if VEGAS_HALF_OPERANDS
#define VEGAS_WGMMA_TYPES ".f32.f16.f16 "
#else
#define VEGAS_WGMMA_TYPES ".f32.bf16.bf16 "
#endif
#define VEGAS_OUT8(x, i)                                                                        \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define VEGAS_OUT32(x, i) \
  VEGAS_OUT8(x, i), VEGAS_OUT8(x, i + 8), VEGAS_OUT8(x, i + 16), VEGAS_OUT8(x, i + 24)
#define VEGAS_NAMES32                                                                    \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define VEGAS_NAMES64                                                                            \
  VEGAS_NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
                "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// x (64 x 64) = or += a (64 x 16) * b (64 x 16) transposed.
__device__ __forceinline__ void multiply_dims(float (&x)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16" VEGAS_WGMMA_TYPES "{" VEGAS_NAMES32
      "}, %32, %33, p, 1, 1, 0, 0;}"
      : VEGAS_OUT32(x, 0)
      : "l"(a), "l"(b), "r"(add));
}
// o (64 x 64 or 128) += a (64 x 16) * b (16 x 64 or 128).
__device__ __forceinline__ void multiply_rows(float (&o)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16" VEGAS_WGMMA_TYPES "{" VEGAS_NAMES32
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
      : VEGAS_OUT32(o, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_rows(float (&o)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16" VEGAS_WGMMA_TYPES "{" VEGAS_NAMES64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
      : VEGAS_OUT32(o, 0), VEGAS_OUT32(o, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
