// From the attention's 4-bit scores to every layer's table of selected positions.
//
//   begin    once a pass: who collects, how many entries each table gets, where the scores go
//   reduce   a layer: weight of every token, summed over heads and queries, as a 12-bit key of its
//            logarithm, and the histogram of the keys; a request's last block finds the threshold
//   compact  a layer: positions of the keys above the threshold, and as many of those at it as are
//            missing; also the next pass's references
//
// Every launcher returns a cudaError_t.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// A block's part of a layer's work: some of a request's units.
struct __align__(16) Share {
  int request;
  int row;  // of the tables
  int length;  // tokens that the request ranks
  int wanted;  // entries of its tables
  int first_group;  // of 16 tokens, the request's first in the buffers
  int first_unit, end_unit;  // of the request, of 64 tokens
  int index, count;          // among the request's shares
  int unused[3];
};

// A request's part in one layer; `shares_done` is zero between layers.
struct LayerState {
  int threshold;  // the lowest key that is chosen
  int above;      // keys above it
  int shares_done;
};

// What the attention needs to know of a request.
struct __align__(16) ScoreGroups {
  int first;  // group, in the buffer
  int count;
  int lowest_exponent;  // 2^(this + n) is stored as n, from 0 (nothing) to 15 (that or more)
  int unused;
};

struct Selection {
  ScoreGroups* score_groups;  // max_batch
  int* num_shares;            // 1
  Share* shares;              // num_blocks + max_batch
  uint64_t* chosen;           // a share's: kCounted, keys at the threshold, keys above it
  LayerState* states;         // max_batch
  unsigned* histograms;       // (max_batch, 4096), zeros between layers
  uint16_t* keys;             // a token's, (groups * 16,)
  const uint8_t* scores;      // (num_kv_heads, groups, head, 8)
};

struct BeginParams {
  Selection selection;
  const int64_t* rank_lens;
  const int64_t* rows;
  int* counts;
  int* bases;
  double ratio;
  int64_t min_tokens;
  int64_t max_tokens;
  int64_t capacity;
  int num_heads;
  int batch;
  int num_blocks;
};

struct SelectParams {
  Selection selection;
  const int64_t* rows;
  const float* lse;   // (batch * num_queries, num_heads), log2
  float* references;  // the layer's (num_rows, num_heads, 2), log2
  int* positions;     // the layer's (num_rows, max_count)
  int64_t score_head_stride;
  int max_count;
  int batch;
  int num_kv_heads;
  int group;
  int num_queries;
};

namespace {

constexpr int kMaxBatch = 2048;
constexpr int kGroupTokens = 16;
constexpr int kUnitTokens = 64;  // tokens that a warp reduces at once
constexpr int kBins = 4096;
constexpr float kBinsPerOctave = 128.f;
constexpr float kLowestOctave = -16.f;
// How far a reference may be below the log-sum-exp before scores that matter are clamped.
constexpr int kSpareOctaves = 3;
constexpr int kReduceThreads = 512;
constexpr int kCompactThreads = 256;

__host__ __device__ int div_up(int a, int b) { return (a + b - 1) / b; }

// One block. Whether a request fits depends on those before it, so that part is one thread's.
__global__ void __launch_bounds__(256) begin_kernel(const BeginParams p) {
  __shared__ int lengths[kMaxBatch];
  __shared__ int wanted[kMaxBatch];
  __shared__ int groups[kMaxBatch];
  __shared__ int first_share[kMaxBatch + 1];
  __shared__ int share_units;
  for (int r = threadIdx.x; r < p.batch; r += blockDim.x) {
    const int64_t length = p.rank_lens[r];
    int64_t k = static_cast<int64_t>(ceil(p.ratio * static_cast<double>(length)));
    k = min(max(k, p.min_tokens), p.max_tokens);
    const bool ranked = p.rows[r] != 0 && length > k;
    lengths[r] = ranked ? static_cast<int>(length) : 0;
    wanted[r] = ranked ? static_cast<int>(k) : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t used = 0;
    int group = 0, units = 0, requests = 0;
    for (int r = 0; r < p.batch; ++r) {
      const int length = lengths[r];
      const bool collected = length > 0 && used + length <= p.capacity;
      groups[r] = collected ? group : -1;
      if (collected) {
        used += length;
        group += div_up(length, kGroupTokens);
        units += div_up(length, kUnitTokens);
        ++requests;
      }
    }
    // Shares of one request each, with so many units at most. With few requests there are no more
    // shares than blocks.
    share_units = requests <= p.num_blocks / 2 ? div_up(units, p.num_blocks - requests)
                                               : div_up(2 * units, p.num_blocks);
    int share = 0;
    for (int r = 0; r < p.batch; ++r) {
      first_share[r] = share;
      if (groups[r] >= 0) share += div_up(div_up(lengths[r], kUnitTokens), share_units);
    }
    first_share[p.batch] = share;
    *p.selection.num_shares = share;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < p.batch; r += blockDim.x) {
    const bool collected = groups[r] >= 0;
    const int group = max(groups[r], 0), length = collected ? lengths[r] : 0;
    // Not more than `wanted` tokens can weigh 2 * num_heads / wanted, since all weights sum up to
    // 2 * num_heads. So such a token is chosen, and how heavy it is needn't be known.
    const int heavy = static_cast<int>(ceilf(log2f(2.f * p.num_heads / max(wanted[r], 1))));
    p.selection.score_groups[r] = {group, div_up(length, kGroupTokens),
                                   heavy + kSpareOctaves - 15, 0};
    const int64_t row = p.rows[r];
    if (collected) {
      p.counts[row] = wanted[r];
      p.bases[row] = lengths[r];
    } else if (lengths[r] == 0) {
      p.counts[row] = 0;
      p.bases[row] = 0;
    }
  }
  for (int i = threadIdx.x; i < first_share[p.batch]; i += blockDim.x) {
    int r = 0, high = p.batch;  // the request is in [r, high)
    while (high - r > 1) {
      const int middle = (r + high) / 2;
      if (first_share[middle] <= i) r = middle;
      else high = middle;
    }
    const int index = i - first_share[r], units = div_up(lengths[r], kUnitTokens);
    p.selection.shares[i] = {r,
                             static_cast<int>(p.rows[r]),
                             lengths[r],
                             wanted[r],
                             groups[r],
                             index * share_units,
                             min((index + 1) * share_units, units),
                             index,
                             first_share[r + 1] - first_share[r],
                             {}};
  }
}

// A head's scores in a group of tokens: 8 bytes.
struct ScoreHead {
  __half2 factor;
  uint32_t offset;  // 8-byte units
};

// Weights of 2^15 and more, relative to the lowest exponent, are 1 times a factor of about this. The
// others are normal halves, and there is room for the sum of many.
constexpr float kFactorOctaves = 4.f;

// The stored weights of both queries are relative to their references, whose error the factor makes
// good for their sum.
__device__ ScoreHead score_head(const SelectParams& p, const Share& share, int head) {
  const int num_heads = p.num_kv_heads * p.group;
  const int64_t token = static_cast<int64_t>(share.request) * p.num_queries;
  const float first = p.lse[token * num_heads + head];
  const float last = p.lse[(token + p.num_queries - 1) * num_heads + head];
  const float2 references =
      *reinterpret_cast<const float2*>(p.references + (static_cast<int64_t>(share.row) * num_heads + head) * 2);
  // Of all positions, relative to the references; a query that saw nothing has none.
  const auto mass_of = [](float lse, float reference) {
    return isfinite(lse) ? exp2f(fminf(fmaxf(lse - reference, -60.f), 60.f)) : 0.f;
  };
  float mass = mass_of(first, references.x);
  if (p.num_queries > 1) mass += mass_of(last, references.y);
  const float exponent = kFactorOctaves + (p.num_queries > 1 ? 1.f : 0.f) - log2f(mass);
  return {__float2half2_rn(mass > 0.f ? exp2f(fminf(fmaxf(exponent, -24.f), 15.f)) : 0.f),
          static_cast<uint32_t>(head / p.group * (p.score_head_stride / 8) + head % p.group)};
}

// Tokens kToken and kToken + 4 of the 8 in a word as halves: 0, or 2^(n - 15) for n from 1 to 15.
template <int kToken>
__device__ __forceinline__ __half2 decode(uint32_t word) {
  // The nibble goes to the exponent's lower 4 bits.
  constexpr int kLeft = 10 - 4 * kToken;
  if constexpr (kLeft >= 0) word <<= kLeft;
  else word >>= -kLeft;
  const uint32_t halves = word & 0x3C003C00;
  return *reinterpret_cast<const __half2*>(&halves);
}

// An infinite weight, a sum of clamped ones, is very heavy.
__device__ __forceinline__ int key_of(__half weight) {
  const float w = __half2float(weight);
  if (w > 65504.f) return kBins - 1;
  const int key = static_cast<int>((__log2f(w) - kLowestOctave) * kBinsPerOctave);
  return min(max(key, 0), kBins - 1);
}

// Adds the partner lane's values to half of one's own and gives it the other half of them.
template <int kHalf>
__device__ __forceinline__ void exchange(__half2 (&values)[8], bool upper, int partner) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const __half2 sent = upper ? values[i] : values[i + kHalf];
    const __half2 kept = upper ? values[i + kHalf] : values[i];
    values[i] = __hadd2(kept, __shfl_xor_sync(~0u, sent, partner));
  }
}

// The block's threads find the highest key that `wanted` keys reach, and clear the histogram.
__device__ void find_threshold(const Selection& s, int request, int wanted) {
  __shared__ int warp_sums[kReduceThreads / 32];
  constexpr int kOwn = kBins / kReduceThreads;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  unsigned* const bins = s.histograms + static_cast<int64_t>(request) * kBins;
  int own[kOwn];  // from the highest key down
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = static_cast<int>(__ldcg(bins + kBins - 1 - (thread * kOwn + i)));
    sum += own[i];
  }
  int before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  LayerState* const state = s.states + request;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (before < wanted && before + own[i] >= wanted) {
      *state = {kBins - 1 - (thread * kOwn + i), before, 0};
    }
    before += own[i];
    bins[kBins - 1 - (thread * kOwn + i)] = 0;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kReduceThreads, 2) reduce_kernel(const SelectParams p) {
  extern __shared__ ScoreHead score_heads[];
  __shared__ unsigned histogram[kBins];
  __shared__ bool last;
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int lane_group = lane / 8, lane_row = lane % 8;  // of 4 groups, of 8 heads
  const int num_heads = p.num_kv_heads * p.group;
  for (int i = threadIdx.x; i < kBins; i += kReduceThreads) histogram[i] = 0;

  // Both loads at once, which is why the second doesn't wait for the loop's condition.
  const int num_shares = *s.num_shares;
  Share share = s.shares[blockIdx.x];
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    if (i != blockIdx.x) share = s.shares[i];
    if (threadIdx.x == 0) s.chosen[i] = 0;
    for (int h = threadIdx.x; h < num_heads; h += kReduceThreads) {
      score_heads[h] = score_head(p, share, h);
    }
    __syncthreads();
    for (int unit = share.first_unit + warp; unit < share.end_unit; unit += kReduceThreads / 32) {
      const int group = unit * (kUnitTokens / kGroupTokens) + lane_group;
      const bool valid = group * kGroupTokens < share.length;
      const int64_t buffer_group = share.first_group + group;
      const uint2* const from =
          reinterpret_cast<const uint2*>(s.scores) + buffer_group * p.group;
      __half2 weights[8] = {};
      if (valid) {
#pragma unroll 8
        for (int h = lane_row; h < num_heads; h += 8) {
          const ScoreHead score = score_heads[h];
          const uint2 loaded = __ldcs(from + score.offset);
          const uint32_t words[2] = {loaded.x, loaded.y};
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            __half2* const four = weights + 4 * w;
            four[0] = __hfma2(score.factor, decode<0>(words[w]), four[0]);
            four[1] = __hfma2(score.factor, decode<1>(words[w]), four[1]);
            four[2] = __hfma2(score.factor, decode<2>(words[w]), four[2]);
            four[3] = __hfma2(score.factor, decode<3>(words[w]), four[3]);
          }
        }
      }
      // Sum over the 8 lanes; each is left with two tokens.
      exchange<4>(weights, lane & 4, 4);
      exchange<2>(weights, lane & 2, 2);
      exchange<1>(weights, lane & 1, 1);
      if (valid) {
        const int token = group * kGroupTokens + lane_row / 4 * 8 + lane_row % 4;
        const int low = key_of(__low2half(weights[0])), high = key_of(__high2half(weights[0]));
        uint16_t* const keys = s.keys + share.first_group * int64_t{kGroupTokens} + token;
        keys[0] = low;
        keys[4] = high;
        if (token < share.length) atomicAdd(histogram + low, 1u);
        if (token + 4 < share.length) atomicAdd(histogram + high, 1u);
      }
    }
    __syncthreads();
    unsigned* const bins = s.histograms + static_cast<int64_t>(share.request) * kBins;
    for (int bin = threadIdx.x; bin < kBins; bin += kReduceThreads) {
      if (histogram[bin] != 0) {
        atomicAdd(bins + bin, histogram[bin]);
        histogram[bin] = 0;
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(&s.states[share.request].shares_done, 1) == share.count - 1;
      __threadfence();
    }
    __syncthreads();
    if (last) find_threshold(s, share.request, share.wanted);
  }
}

// A share's keys that are chosen, or may be: packed as in `chosen`, so that counts can be added.
constexpr uint64_t kCounted = 1ull << 63;
__device__ uint64_t pack_counts(int above, int at) {
  return static_cast<uint64_t>(at) << 32 | static_cast<uint32_t>(above);
}
__device__ int above_of(uint64_t counts) { return static_cast<int>(counts & 0x7FFFFFFF); }
__device__ int at_of(uint64_t counts) { return static_cast<int>(counts >> 32 & 0x7FFFFFFF); }

// Positions in order, those above the threshold first, so that a table depends on the keys alone.
// A share waits for the counts of those before it, whose blocks started earlier.
__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const SelectParams p) {
  constexpr int kWarps = kCompactThreads / 32;
  __shared__ uint64_t warp_counts[kWarps];
  __shared__ unsigned long long before;
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lower_lanes = (1u << lane) - 1;

  // Both loads at once, which is why the second doesn't wait for the loop's condition.
  const int num_shares = *s.num_shares;
  Share share = s.shares[blockIdx.x];
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    if (i != blockIdx.x) share = s.shares[i];
    const int threshold = s.states[share.request].threshold;
    const int above = s.states[share.request].above;
    const uint16_t* const keys = s.keys + static_cast<int64_t>(share.first_group) * kGroupTokens;
    // A warp's tokens follow each other.
    const int units = div_up(share.end_unit - share.first_unit, kWarps);
    const int first = (share.first_unit + warp * units) * kUnitTokens;
    const int end = min(min(share.first_unit + (warp + 1) * units, share.end_unit) * kUnitTokens,
                        share.length);
    int own_above = 0, own_at = 0;
#pragma unroll 4
    for (int t = first + lane; t < end; t += 32) {
      own_above += keys[t] > threshold;
      own_at += keys[t] == threshold;
    }
    own_above = __reduce_add_sync(~0u, own_above);
    own_at = __reduce_add_sync(~0u, own_at);
    if (lane == 0) warp_counts[warp] = pack_counts(own_above, own_at);
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    uint64_t counts = 0;  // of the warps before this one
    for (int w = 0; w < warp; ++w) counts += warp_counts[w];
    volatile uint64_t* const chosen = s.chosen + (i - share.index);  // of the request's shares
    if (threadIdx.x == kCompactThreads - 1) chosen[share.index] = kCounted | (counts + warp_counts[warp]);
    uint64_t others = 0;
    for (int j = threadIdx.x; j < share.index; j += kCompactThreads) {
      uint64_t one;
      do one = chosen[j];
      while (!(one & kCounted));
      others += one & ~kCounted;
    }
    if (others != 0) atomicAdd(&before, static_cast<unsigned long long>(others));
    __syncthreads();
    counts += before;
    int place_above = above_of(counts), place_at = at_of(counts);
    const int at_wanted = share.wanted - above;
    int* const positions = p.positions + static_cast<int64_t>(share.row) * p.max_count;
    for (int t0 = first; t0 < end; t0 += 32) {
      const int t = t0 + lane;
      const int key = t < end ? keys[t] : -1;
      const unsigned is_above = __ballot_sync(~0u, key > threshold);
      const unsigned is_at = __ballot_sync(~0u, key == threshold);
      const int own_place = place_at + __popc(is_at & lower_lanes);
      if (key > threshold) positions[place_above + __popc(is_above & lower_lanes)] = t;
      if (key == threshold && own_place < at_wanted) positions[above + own_place] = t;
      place_above += __popc(is_above);
      place_at += __popc(is_at);
    }
    __syncthreads();
  }

  // The reduce kernel is done with the references of this pass.
  const int num_heads = p.num_kv_heads * p.group;
  const int total = p.batch * num_heads * 2;
  for (int i = blockIdx.x * kCompactThreads + threadIdx.x; i < total;
       i += gridDim.x * kCompactThreads) {
    const int which = i % 2, head = i / 2 % num_heads, request = i / (2 * num_heads);
    const int64_t row = p.rows[request];
    if (row == 0) continue;
    const int query = which ? p.num_queries - 1 : 0;
    const float lse =
        p.lse[(static_cast<int64_t>(request) * p.num_queries + query) * num_heads + head];
    p.references[(row * num_heads + head) * 2 + which] = isfinite(lse) ? lse : 0.f;
  }
}

// Sets the references of a pass that has none: the lse of a run without scores.
__global__ void __launch_bounds__(256) reference_kernel(const SelectParams p) {
  const int num_heads = p.num_kv_heads * p.group;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < p.batch * num_heads * 2; i += gridDim.x * 256) {
    const int which = i % 2, head = i / 2 % num_heads, request = i / (2 * num_heads);
    const int query = which ? p.num_queries - 1 : 0;
    const float lse =
        p.lse[(static_cast<int64_t>(request) * p.num_queries + query) * num_heads + head];
    p.references[(p.rows[request] * num_heads + head) * 2 + which] = isfinite(lse) ? lse : 0.f;
  }
}

}  // namespace

extern "C" {

// Loads the kernels, which a graph capture couldn't, and says how many blocks share a layer's work and
// how large the parameters are.
int vegas_prepare(int device, int* num_blocks, int* begin_bytes, int* select_bytes) {
  cudaError_t error = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, begin_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reduce_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, compact_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reference_kernel);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(num_blocks, cudaDevAttrMultiProcessorCount, device);
  }
  *num_blocks *= 2;
  *begin_bytes = sizeof(BeginParams);
  *select_bytes = sizeof(SelectParams);
  return error;
}

int vegas_begin(int device, const BeginParams* params, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  begin_kernel<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

int vegas_select(int device, const SelectParams* params, int num_blocks, void* stream) {
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  const auto on = static_cast<cudaStream_t>(stream);
  const size_t shared_bytes = sizeof(ScoreHead) * params->num_kv_heads * params->group;
  reduce_kernel<<<num_blocks, kReduceThreads, shared_bytes, on>>>(*params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  compact_kernel<<<num_blocks, kCompactThreads, 0, on>>>(*params);
  return cudaGetLastError();
}

int vegas_set_references(int device, const SelectParams* params, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  reference_kernel<<<16, 256, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
