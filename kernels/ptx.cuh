// The machine instructions that CUDA C++ has no good names for, and the 16-bit type of the build.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#if VEGAS_HALF
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif
// What the products are of: halves where the KV has 8 bits.
#define VEGAS_HALF_OPERANDS (VEGAS_HALF || VEGAS_FP8)

// As Elements.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if VEGAS_HALF
  __half2 two = __floats2half2_rn(low, high);
#else
  __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
#endif
  return *reinterpret_cast<uint32_t*>(&two);
}

// As halves; what is larger becomes the largest half.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t two;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}
__device__ __forceinline__ float2 unpack_halves(uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

__device__ __forceinline__ uint32_t pack_operands(float low, float high) {
#if VEGAS_HALF_OPERANDS
  return pack_halves(low, high);
#else
  return pack(low, high);
#endif
}

// c (16x8, fp32) += a (16x16) * b (16x8).
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#if VEGAS_HALF_OPERANDS
#define VEGAS_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define VEGAS_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  asm(VEGAS_MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// KV is read once: it leaves the L2 first, so that page tables, scores and partials stay.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Scores are read soon: they are the last to leave the L2, as far as a part is set aside for that.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void store(void* at, uint2 value, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(at), "r"(value.x),
               "r"(value.y), "l"(policy)
               : "memory");
}

// 16 bytes, or zeros where `bytes` is 0.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, uint32_t bytes,
                                           uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
