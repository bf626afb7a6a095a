// Scores of a table's candidates by the 64-bit codes of their keys, for the draft steps that rank
// again. A score is linear in a code's bits (sgl_vegas/key_codes/words.py), so that a KV head's scores
// are a product of bits with 64 weights a query head. Bits become signs of 1.0, put together in the
// registers where the tensor cores want them: the weights come halved and negated, and what that
// shifts a head's scores by, its softmax takes out.
#include <cuda_runtime.h>

#include "ptx.cuh"

struct RankingParams {
  const uint64_t* words;         // the layer's (num_slots, num_kv_heads)
  const int* positions;          // the layer's (num_rows, max_count)
  const int* counts;             // (num_rows,)
  const int* bases;              // (num_rows,)
  const int* wanted;             // (num_rows,)
  const int64_t* rows;           // (batch,)
  const int* req_to_token;       // (num_rows, width)
  const uint4* weights;          // (batch, num_kv_heads, 8 or 16 heads, 64) halves, see load_weights
  __half* scores;                // (batch, max_count, num_heads), in log2 units
  float* stats;                  // (batch, num_parts, 2, num_heads): maxima, sums of 2^(score - maximum)
  int64_t req_to_token_stride;
  int width;                     // of req_to_token
  int max_count;
  int num_kv_heads;
  int group;                     // query heads of a KV head
  int num_parts;
};

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Candidates that a warp scores at a time.
constexpr int kTile = 32;
// KV heads of a CTA: their codes of a candidate are one sector.
constexpr int kHeads = 4;

// A thread's part of the right operands of one KV head: a head's 64 weights lie as its four lanes
// read them, 16 each. Half e of register i of the low or high word's is that of bit
// 32 * high + 16 * e + 15 - (4 * lane + i), see `signs`.
template <int kColumns>
__device__ __forceinline__ void load_weights(uint32_t (&b)[kColumns][8], const uint4* of_head,
                                             int group_id, int lane_in_group) {
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    const uint4* own = of_head + (column * 8 + group_id) * 8 + lane_in_group * 2;
    const uint4 low = own[0], high = own[1];
    b[column][0] = low.x, b[column][1] = low.y, b[column][2] = low.z, b[column][3] = low.w;
    b[column][4] = high.x, b[column][5] = high.y, b[column][6] = high.z, b[column][7] = high.w;
  }
}

// 1.0 or -1.0 in both halves: by bits 15 - shift and 31 - shift.
__device__ __forceinline__ uint32_t signs(uint32_t word, int shift) {
  return ((word << shift) & 0x80008000u) | 0x3C003C00u;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Softmax sums of one column: `maximum` and `sum` take in four more scores.
__device__ __forceinline__ void take_in(float& maximum, float& sum, const float (&scores)[4]) {
  const float most = fmaxf(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])), maximum);
  // Nothing but -inf so far: any finite reference will do.
  const float reference = most == -INFINITY ? 0.0f : most;
  float total = sum * exp2_approx(maximum - reference);
#pragma unroll
  for (int i = 0; i < 4; ++i) total += exp2_approx(scores[i] - reference);
  maximum = most, sum = total;
}

__device__ __forceinline__ void merge(float& maximum, float& sum, float other, float other_sum) {
  const float most = fmaxf(maximum, other);
  const float reference = most == -INFINITY ? 0.0f : most;
  sum = sum * exp2_approx(maximum - reference) + other_sum * exp2_approx(other - reference);
  maximum = most;
}

// Grid: parts of the candidates, requests, sets of KV heads. kColumns: 8 query heads each.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) score_kernel(const RankingParams p) {
  constexpr int kMostHeads = kHeads * kColumns * 8;
  __shared__ __align__(16) __half staged[kWarps][kTile * kMostHeads];
  __shared__ float2 of_warps[kWarps][kMostHeads];
  const int request = blockIdx.y, first_head = blockIdx.z * kHeads;
  const int64_t row = p.rows[request];
  if (p.wanted[row] == 0) return;
  const int count = min(p.counts[row], p.max_count);
  // No table makes it read outside of its request's row.
  const int last = max(min(p.bases[row], p.width) - 1, 0);
  const int size = (count + kTile * p.num_parts - 1) / (kTile * p.num_parts) * kTile;
  const int start = blockIdx.x * size, end = min(start + size, count);
  if (start >= end) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group_id = lane / 4, lane_in_group = lane % 4;
  const int num_heads = p.num_kv_heads * p.group, heads = min(kHeads, p.num_kv_heads - first_head);
  const int own_heads = heads * p.group;
  uint32_t b[kHeads][kColumns][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    const int of = request * p.num_kv_heads + first_head + min(head, heads - 1);
    load_weights<kColumns>(b[head], p.weights + static_cast<int64_t>(of) * kColumns * 64, group_id,
                           lane_in_group);
  }
  float maxima[kHeads][kColumns][2], sums[kHeads][kColumns][2];
#pragma unroll
  for (int head = 0; head < kHeads; ++head)
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 2; ++i) maxima[head][column][i] = -INFINITY, sums[head][column][i] = 0.0f;

  const int* positions = p.positions + row * p.max_count;
  const int* slots = p.req_to_token + row * p.req_to_token_stride;
  // The slot of each lane's candidate.
  const auto find_slot = [&](int tile) {
    const int t = tile + lane;
    return t < end ? slots[max(min(positions[t], last), 0)] : 0;
  };
  // Of candidates group_id + 8 * i, the code of the KV head with the lane's number in its group.
  const auto find_words = [&](int slot, uint64_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = __shfl_sync(~0u, slot, group_id + 8 * i);
      words[i] = lane_in_group < heads
                     ? p.words[at * p.num_kv_heads + first_head + lane_in_group]
                     : 0;
    }
  };

  uint64_t words[4], next_words[4];
  int tile = start + warp * kTile;
  // A warp without candidates has slot 0's codes and counts none.
  find_words(find_slot(tile), words);
  int next_slot = find_slot(tile + kThreads);
  for (; tile < end; tile += kThreads) {
    find_words(next_slot, next_words);
    next_slot = find_slot(tile + 2 * kThreads);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= heads) break;
      float c[2][kColumns][4] = {};
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t upper[2], lower[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int from = group_id * 4 + head;
          const uint64_t above = words[2 * pair], below = words[2 * pair + 1];
          upper[half] = __shfl_sync(~0u, static_cast<uint32_t>(above >> (32 * half)), from)
                        << (4 * lane_in_group);
          lower[half] = __shfl_sync(~0u, static_cast<uint32_t>(below >> (32 * half)), from)
                        << (4 * lane_in_group);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = k % 2 * 2;
          const uint32_t a[4] = {signs(upper[k / 2], i), signs(lower[k / 2], i),
                                 signs(upper[k / 2], i + 1), signs(lower[k / 2], i + 1)};
#pragma unroll
          for (int column = 0; column < kColumns; ++column)
            multiply_add(c[pair][column], a, b[head][column][2 * k], b[head][column][2 * k + 1]);
        }
      }
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float scores[4];
          const int of_group = column * 8 + lane_in_group * 2 + i;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int t = group_id + 8 * j;
            scores[j] = c[j / 2][column][j % 2 * 2 + i];
            if (of_group < p.group)
              staged[warp][t * own_heads + head * p.group + of_group] = __float2half_rn(scores[j]);
            if (tile + t >= end) scores[j] = -INFINITY;
          }
          take_in(maxima[head][column][i], sums[head][column][i], scores);
        }
      }
    }
    __syncwarp();
    const int tokens = min(end - tile, kTile);
    __half* to = p.scores + (static_cast<int64_t>(request) * p.max_count + tile) * num_heads +
                 first_head * p.group;
    if ((own_heads | num_heads) % 8 == 0) {
      const int pieces = own_heads / 8;
      for (int i = lane; i < tokens * pieces; i += 32)
        *reinterpret_cast<uint4*>(to + i / pieces * num_heads + i % pieces * 8) =
            *reinterpret_cast<const uint4*>(&staged[warp][i * 8]);
    } else {
      for (int i = lane; i < tokens * own_heads; i += 32)
        to[i / own_heads * num_heads + i % own_heads] = staged[warp][i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = next_words[i];
  }

#pragma unroll
  for (int head = 0; head < kHeads; ++head)
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float maximum = maxima[head][column][i], sum = sums[head][column][i];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          const float other = __shfl_xor_sync(~0u, maximum, offset);
          const float other_sum = __shfl_xor_sync(~0u, sum, offset);
          merge(maximum, sum, other, other_sum);
        }
        const int of_group = column * 8 + lane_in_group * 2 + i;
        if (group_id == 0) of_warps[warp][head * kColumns * 8 + of_group] = {maximum, sum};
      }
  __syncthreads();
  float* stats = p.stats + (static_cast<int64_t>(request) * p.num_parts + blockIdx.x) * 2 * num_heads;
  for (int i = threadIdx.x; i < own_heads; i += kThreads) {
    const int at = i / p.group * kColumns * 8 + i % p.group;
    float2 all = of_warps[0][at];
#pragma unroll
    for (int other = 1; other < kWarps; ++other)
      merge(all.x, all.y, of_warps[other][at].x, of_warps[other][at].y);
    stats[first_head * p.group + i] = all.x;
    stats[num_heads + first_head * p.group + i] = all.y;
  }
}

}  // namespace

extern "C" {

int vegas_score_candidates(int device, const RankingParams* params, int batch, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const dim3 grid(params->num_parts, batch, (params->num_kv_heads + kHeads - 1) / kHeads);
  const auto on = static_cast<cudaStream_t>(stream);
  if (params->group <= 8) {
    score_kernel<1><<<grid, kThreads, 0, on>>>(*params);
  } else {
    score_kernel<2><<<grid, kThreads, 0, on>>>(*params);
  }
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
