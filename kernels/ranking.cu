// Scores of a table's candidates by the 64-bit codes of their keys, for the draft steps that rank
// again. A score is linear in a code's bits (sgl_vegas/key_codes/words.py), so that a KV head's scores
// are a product of bits with 64 weights a query head. Bits become halves in the registers where the
// tensor cores want them, one instruction for two: as bits of mantissas, with exponents that make
// each count 1. What the exponents add is taken off from where sums begin.
//
// Built for one model: VEGAS_KV_HEADS, and VEGAS_GROUP query heads of each.
#include <cuda_runtime.h>

#include "ptx.cuh"

struct RankingParams {
  const uint64_t* words;    // the layer's (num_slots, num_kv_heads)
  const int* positions;     // the layer's (num_rows, max_count)
  const int* counts;        // (num_rows,)
  const int* bases;         // (num_rows,)
  const int* wanted;        // (num_rows,)
  const int64_t* rows;      // (batch,)
  const int* req_to_token;  // (num_rows, width)
  const uint4* weights;     // (batch, num_heads, 64) halves, in the order of `load_weights`
  __half* scores;           // (batch, max_count, num_heads), in log2 units
  float* stats;             // (batch, num_parts, 2, num_heads): references, sums of 2^(score - reference)
  int64_t req_to_token_stride;
  int width;                // of req_to_token
  int max_count;
  int num_parts;
};

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Candidates that a warp scores at a time.
constexpr int kTile = 32;

constexpr int kKvHeads = VEGAS_KV_HEADS;
constexpr int kGroup = VEGAS_GROUP;
constexpr int kNumHeads = kKvHeads * kGroup;
// KV heads of a CTA: of four, their codes of a candidate are one sector.
constexpr int kHeads = kKvHeads % 4 == 0 ? 4 : kKvHeads % 3 == 0 ? 3 : kKvHeads % 2 == 0 ? 2 : 1;
constexpr int kOwnHeads = kHeads * kGroup;
// A product has 8 columns, one a query head: several KV heads share them, or one has 16.
constexpr int kHeadColumns = kGroup <= 1 ? 1 : kGroup <= 2 ? 2 : kGroup <= 4 ? 4 : kGroup <= 8 ? 8 : 16;
constexpr int kColumns = kHeads * kHeadColumns;
constexpr int kProducts = (kColumns + 7) / 8;
constexpr int kHeadProducts = (kHeadColumns + 7) / 8;
// Below any score.
constexpr float kLow = -1e30f;

// The query head, of the CTA's, that a column has; -1 for padding.
__device__ __forceinline__ constexpr int head_of(int column) {
  const int of_group = column % kHeadColumns;
  return column < kColumns && of_group < kGroup ? column / kHeadColumns * kGroup + of_group : -1;
}

// A thread's part of the right operands: for the k-th product of each KV head, 0 where the thread's
// column is another head's. A query head's 64 weights lie as its four lanes read them, 16 each: half e
// of register i of the low or high word's is of bit 32 * high + 16 * e + 4 * lane + 3 - i, see `halves`.
__device__ __forceinline__ void load_weights(uint32_t (&b)[kHeads][kHeadProducts][8],
                                             const uint4* weights, int group_id, int lane_in_group) {
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
#pragma unroll
    for (int k = 0; k < kHeadProducts; ++k) {
      const int column = (head * kHeadColumns / 8 + k) * 8 + group_id;
      const int query_head = column / kHeadColumns == head ? head_of(column) : -1;
      uint4 low = {}, high = {};
      if (query_head >= 0) {
        const uint4* own = weights + query_head * 8 + lane_in_group * 2;
        low = own[0], high = own[1];
      }
      b[head][k][0] = low.x, b[head][k][1] = low.y, b[head][k][2] = low.z, b[head][k][3] = low.w;
      b[head][k][4] = high.x, b[head][k][5] = high.y, b[head][k][6] = high.z, b[head][k][7] = high.w;
    }
  }
}

// 2^(1 + i), in both halves: its mantissa's bit 9 - i counts 1.
__device__ __forceinline__ constexpr uint32_t exponents(int i) { return 0x40004000u + i * 0x04000400u; }

// Two bits of a word, at 9 - i and 25 - i, as halves that are larger by `kept`, which is `exponents(i)`
// in a register: one instruction takes one constant.
template <int i>
__device__ __forceinline__ uint32_t halves(uint32_t word, uint32_t kept) {
  uint32_t two;  // (word & mask) | kept
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(two) : "r"(word), "n"(0x02000200u >> i), "r"(kept));
  return two;
}

// A bit that is one half, likewise.
__device__ __forceinline__ constexpr uint32_t one_half(int i) {
  return exponents(i) | (0x01000100u >> i);
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void merge(float& reference, float& sum, float other, float other_sum) {
  const float most = fmaxf(reference, other);
  sum = sum * exp2_approx(reference - most) + other_sum * exp2_approx(other - most);
  reference = most;
}

// Grid: parts of the candidates, requests, sets of KV heads.
__global__ void __launch_bounds__(kThreads) score_kernel(const RankingParams p) {
  __shared__ __align__(16) __half staged[kWarps][kTile * kOwnHeads];
  __shared__ float2 of_warps[kWarps][kProducts * 8];
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
  const int* positions = p.positions + row * p.max_count;
  const int* slots = p.req_to_token + row * p.req_to_token_stride;
  // The slot of each lane's candidate; behind the end any slot will do.
  const auto find_slot = [&](int tile) {
    const int t = tile + lane;
    return t < end ? slots[max(min(positions[t], last), 0)] : 0;
  };
  // Of candidates group_id + 8 * i, the code of the KV head with the lane's number in its group.
  const uint64_t* own_words = p.words + first_head + min(lane_in_group, kHeads - 1);
  const auto find_words = [&](int slot, uint64_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = own_words[static_cast<int64_t>(__shfl_sync(~0u, slot, group_id + 8 * i)) * kKvHeads];
  };
  uint64_t words[4], next_words[4];
  int tile = start + warp * kTile;
  find_words(find_slot(tile), words);
  int next_slot = find_slot(tile + kThreads);

  uint32_t b[kHeads][kHeadProducts][8];
  load_weights(b, p.weights + static_cast<int64_t>(request * kNumHeads + first_head * kGroup) * 8,
               group_id, lane_in_group);
  // What all bits would make if each were one half: scores are relative to that.
  float offsets[kProducts][4] = {};
#pragma unroll
  for (int head = 0; head < kHeads; ++head)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = k % 2 * 2;
      const uint32_t a[4] = {one_half(i), one_half(i), one_half(i + 1), one_half(i + 1)};
#pragma unroll
      for (int j = 0; j < kHeadProducts; ++j)
        multiply_add(offsets[head * kHeadColumns / 8 + j], a, b[head][j][2 * k], b[head][j][2 * k + 1]);
    }
  float references[kProducts][2], sums[kProducts][2];
#pragma unroll
  for (int product = 0; product < kProducts; ++product)
#pragma unroll
    for (int i = 0; i < 2; ++i) references[product][i] = kLow, sums[product][i] = 0.0f;
  // Where the lane's bits are, for `halves`: 6 + 4 * lane to the left, around.
  const int rotation = 6 - 4 * lane_in_group;
  // A zero that the compiler doesn't know, or it would take a constant and two instructions.
  const uint32_t zero = p.max_count >> 31;
  const uint32_t kept[4] = {exponents(0) | zero, exponents(1) | zero, exponents(2) | zero,
                            exponents(3) | zero};

  for (bool first = true; tile < end; tile += kThreads, first = false) {
    find_words(next_slot, next_words);
    next_slot = find_slot(tile + 2 * kThreads);
    float c[2][kProducts][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
#pragma unroll
      for (int product = 0; product < kProducts; ++product)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[pair][product][i] = -offsets[product][i];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t upper[2], lower[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int from = group_id * 4 + head;
          const uint32_t above = words[2 * pair] >> (32 * half);
          const uint32_t below = words[2 * pair + 1] >> (32 * half);
          const uint32_t both[2] = {__shfl_sync(~0u, above, from), __shfl_sync(~0u, below, from)};
          upper[half] = __funnelshift_l(both[0], both[0], rotation);
          lower[half] = __funnelshift_l(both[1], both[1], rotation);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t low[4] = {halves<0>(upper[half], kept[0]), halves<0>(lower[half], kept[0]),
                                   halves<1>(upper[half], kept[1]), halves<1>(lower[half], kept[1])};
          const uint32_t high[4] = {halves<2>(upper[half], kept[2]), halves<2>(lower[half], kept[2]),
                                    halves<3>(upper[half], kept[3]), halves<3>(lower[half], kept[3])};
#pragma unroll
          for (int j = 0; j < kHeadProducts; ++j) {
            const uint32_t(&own)[8] = b[head][j];
            float(&sum)[4] = c[pair][head * kHeadColumns / 8 + j];
            multiply_add(sum, low, own[4 * half], own[4 * half + 1]);
            multiply_add(sum, high, own[4 * half + 2], own[4 * half + 3]);
          }
        }
      }
    }
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const int column = product * 8 + lane_in_group * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = c[j / 2][product][j % 2 * 2], high = c[j / 2][product][j % 2 * 2 + 1];
        __half* to = &staged[warp][(group_id + 8 * j) * kOwnHeads];
        if constexpr (kGroup == kHeadColumns && kGroup % 2 == 0) {
          if (column < kColumns) *reinterpret_cast<__half2*>(to + column) = __floats2half2_rn(low, high);
        } else {
          if (head_of(column) >= 0) to[head_of(column)] = __float2half_rn(low);
          if (head_of(column + 1) >= 0) to[head_of(column + 1)] = __float2half_rn(high);
        }
      }
    }
    if (tile + kTile > end) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (tile + group_id + 8 * j >= end)
#pragma unroll
          for (int product = 0; product < kProducts; ++product)
            c[j / 2][product][j % 2 * 2] = c[j / 2][product][j % 2 * 2 + 1] = -INFINITY;
    }
#pragma unroll
    for (int product = 0; product < kProducts; ++product)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scores[4] = {c[0][product][i], c[0][product][2 + i], c[1][product][i],
                                 c[1][product][2 + i]};
        // Whatever comes later is compared with a thread's first scores: exact up to 2^127 above them.
        if (first)
          references[product][i] = fmaxf(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])),
                                         kLow);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[product][i] += exp2_approx(scores[j] - references[product][i]);
      }
    __syncwarp();
    const int tokens = min(end - tile, kTile);
    __half* to = p.scores + (static_cast<int64_t>(request) * p.max_count + tile) * kNumHeads +
                 first_head * kGroup;
    if constexpr (kOwnHeads % 8 == 0 && kNumHeads % 8 == 0) {
      constexpr int kPieces = (kOwnHeads + 7) / 8;
#pragma unroll
      for (int i = lane; i < kTile * kPieces; i += 32)
        if (i < tokens * kPieces)
          *reinterpret_cast<uint4*>(to + i / kPieces * kNumHeads + i % kPieces * 8) =
              *reinterpret_cast<const uint4*>(&staged[warp][i * 8]);
    } else {
      for (int i = lane; i < tokens * kOwnHeads; i += 32)
        to[i / kOwnHeads * kNumHeads + i % kOwnHeads] = staged[warp][i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = next_words[i];
  }

#pragma unroll
  for (int product = 0; product < kProducts; ++product)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float reference = references[product][i];
      // Of a head whose scores reach further above its first ones, the sum is too small, or infinite
      // where many do: its list is a worse one, and no output another.
      float sum = fminf(sums[product][i], 1e38f);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        const float other = __shfl_xor_sync(~0u, reference, offset);
        const float other_sum = __shfl_xor_sync(~0u, sum, offset);
        merge(reference, sum, other, other_sum);
      }
      if (group_id == 0) of_warps[warp][product * 8 + lane_in_group * 2 + i] = {reference, sum};
    }
  __syncthreads();
  float* stats = p.stats + (static_cast<int64_t>(request) * p.num_parts + blockIdx.x) * 2 * kNumHeads;
  for (int column = threadIdx.x; column < kColumns; column += kThreads) {
    if (head_of(column) < 0) continue;
    float2 all = of_warps[0][column];
#pragma unroll
    for (int other = 1; other < kWarps; ++other)
      merge(all.x, all.y, of_warps[other][column].x, of_warps[other][column].y);
    const int head = first_head * kGroup + head_of(column);
    stats[head] = all.x;
    stats[kNumHeads + head] = all.y;
  }
}

}  // namespace

extern "C" {

int vegas_score_candidates(int device, const RankingParams* params, int batch, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const dim3 grid(params->num_parts, batch, kKvHeads / kHeads);
  score_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
