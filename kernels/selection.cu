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

// A request's part in the pass.
struct Collection {
  int length;       // tokens to rank; 0: nothing is collected
  int wanted;       // entries of its tables
  int first_group;  // of 16 tokens, in the buffers
  int first_unit;   // of 64 tokens, of all requests' units
};

// A block's part of a layer's work: units [next, end), of which `next` is the request's.
struct Share {
  int request;
  int next;
  int end;
  int blocks;  // blocks that have units
  int units;   // of all of them
};

// A request's part in one layer; all zeros between layers but for the threshold.
struct LayerState {
  int threshold;  // the lowest key that is chosen
  int above;      // keys above it
  int above_taken;
  int at_taken;
  int blocks_done;
};

// What the attention needs to know of a request.
struct __align__(16) ScoreGroups {
  int first;  // group, in the buffer
  int count;
  int lowest_exponent;  // 2^(this + n) is stored as n, from 0 (nothing) to 15 (that or more)
  int unused;
};

struct Selection {
  Collection* collections;    // max_batch
  ScoreGroups* score_groups;  // max_batch
  Share* shares;              // a block's
  LayerState* states;         // max_batch
  unsigned* histograms;       // (max_batch, 4096), zeros between layers
  uint16_t* keys;             // a token's, (groups * 16,)
  const uint8_t* scores;      // (num_kv_heads, groups, which query and head, 8)
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
  __shared__ int units[kMaxBatch + 1];
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
    int group = 0, unit = 0;
    for (int r = 0; r < p.batch; ++r) {
      const int length = lengths[r];
      const bool collected = length > 0 && used + length <= p.capacity;
      units[r] = unit;
      groups[r] = collected ? group : -1;
      if (collected) {
        used += length;
        group += div_up(length, kGroupTokens);
        unit += div_up(length, kUnitTokens);
      }
    }
    units[p.batch] = unit;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < p.batch; r += blockDim.x) {
    const bool collected = groups[r] >= 0;
    const int group = max(groups[r], 0), length = collected ? lengths[r] : 0;
    p.selection.collections[r] = {length, wanted[r], group, units[r]};
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
  const int64_t total = units[p.batch];
  const int working = static_cast<int>(min(total, static_cast<int64_t>(p.num_blocks)));
  for (int block = threadIdx.x; block < p.num_blocks; block += blockDim.x) {
    Share share{0, 0, 0, working, static_cast<int>(total)};
    if (block < working) {
      share.next = static_cast<int>(block * total / working);
      share.end = static_cast<int>((block + 1) * total / working);
      int high = p.batch;  // the request is in [share.request, high)
      while (high - share.request > 1) {
        const int middle = (share.request + high) / 2;
        if (units[middle] <= share.next) share.request = middle;
        else high = middle;
      }
    }
    p.selection.shares[block] = share;
  }
}

// The part of a block's share that is one request's, in units of the request.
struct Part {
  int request;
  int first, end;
  Collection collection;
};

__device__ bool next_part(const Selection& s, Share& share, Part& part) {
  if (share.next >= share.end) return false;
  do {
    part.request = share.request++;
    part.collection = s.collections[part.request];
    part.end = part.collection.first_unit + div_up(part.collection.length, kUnitTokens);
  } while (part.end <= share.next);
  part.first = share.next - part.collection.first_unit;
  share.next = min(part.end, share.end);
  part.end = share.next - part.collection.first_unit;
  return true;
}

// How many blocks have parts of the request.
__device__ int blocks_of(const Share& share, const Collection& collection) {
  const auto block_of = [&](int unit) { return ((unit + 1LL) * share.blocks - 1) / share.units; };
  const int last = collection.first_unit + div_up(collection.length, kUnitTokens) - 1;
  return static_cast<int>(block_of(last) - block_of(collection.first_unit)) + 1;
}

// A row of scores in a group of tokens: 8 bytes.
struct ScoreRow {
  __half2 factor;
  uint32_t offset;  // 8-byte units
};

// Weights of 2^15 and more, relative to the lowest exponent, are 1 times a factor of about this. The
// others are normal halves, and there is room for the sum of many.
constexpr float kFactorOctaves = 4.f;

__device__ ScoreRow score_row(const SelectParams& p, int request, int64_t row, int index,
                              int kinds) {
  const int kv_head = index / kinds, kind = index % kinds;
  const int which = kind >= p.group;
  const int num_heads = p.num_kv_heads * p.group;
  const int head = kv_head * p.group + kind - which * p.group;
  const float reference = p.references[(row * num_heads + head) * 2 + which];
  const int query = which ? p.num_queries - 1 : 0;
  const float lse =
      p.lse[(static_cast<int64_t>(request) * p.num_queries + query) * num_heads + head];
  const float exponent = fminf(fmaxf(reference - lse + kFactorOctaves, -24.f), 15.f);
  // Not finite: a query that saw nothing.
  const float factor = isfinite(reference - lse) ? exp2f(exponent) : 0.f;
  return {__float2half2_rn(factor),
          static_cast<uint32_t>(kv_head * (p.score_head_stride / 8) + kind)};
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
      *state = {kBins - 1 - (thread * kOwn + i), before, 0, 0, 0};
    }
    before += own[i];
    bins[kBins - 1 - (thread * kOwn + i)] = 0;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kReduceThreads, 2) reduce_kernel(const SelectParams p) {
  extern __shared__ ScoreRow score_rows[];
  __shared__ unsigned histogram[kBins];
  __shared__ bool last;
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int lane_group = lane / 8, lane_row = lane % 8;  // of 4 groups, of 8 rows
  const int kinds = p.num_queries > 1 ? 2 * p.group : p.group;
  const int num_rows = p.num_kv_heads * kinds;
  for (int i = threadIdx.x; i < kBins; i += kReduceThreads) histogram[i] = 0;

  Share share = s.shares[blockIdx.x];
  Part part;
  while (next_part(s, share, part)) {
    const Collection collection = part.collection;
    const int64_t row = p.rows[part.request];
    for (int i = threadIdx.x; i < num_rows; i += kReduceThreads) {
      score_rows[i] = score_row(p, part.request, row, i, kinds);
    }
    __syncthreads();
    for (int unit = part.first + warp; unit < part.end; unit += kReduceThreads / 32) {
      const int group = unit * (kUnitTokens / kGroupTokens) + lane_group;
      const bool valid = group * kGroupTokens < collection.length;
      const int64_t buffer_group = collection.first_group + group;
      const uint2* const from =
          reinterpret_cast<const uint2*>(s.scores) + buffer_group * kinds;
      __half2 weights[8] = {};
      if (valid) {
#pragma unroll 8
        for (int i = lane_row; i < num_rows; i += 8) {
          const ScoreRow score = score_rows[i];
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
        uint16_t* const keys = s.keys + collection.first_group * int64_t{kGroupTokens} + token;
        keys[0] = low;
        keys[4] = high;
        if (token < collection.length) atomicAdd(histogram + low, 1u);
        if (token + 4 < collection.length) atomicAdd(histogram + high, 1u);
      }
    }
    __syncthreads();
    unsigned* const bins = s.histograms + static_cast<int64_t>(part.request) * kBins;
    for (int i = threadIdx.x; i < kBins; i += kReduceThreads) {
      if (histogram[i] != 0) {
        atomicAdd(bins + i, histogram[i]);
        histogram[i] = 0;
      }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int done = atomicAdd(&s.states[part.request].blocks_done, 1) + 1;
      last = done == blocks_of(share, collection);
      __threadfence();
    }
    __syncthreads();
    if (last) find_threshold(s, part.request, collection.wanted);
  }
}

__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const SelectParams p) {
  __shared__ int above_count, at_count, above_next, at_next;
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32;
  const unsigned lower_lanes = (1u << lane) - 1;

  Share share = s.shares[blockIdx.x];
  Part part;
  while (next_part(s, share, part)) {
    const Collection collection = part.collection;
    const int64_t row = p.rows[part.request];
    const int threshold = s.states[part.request].threshold;
    const int above = s.states[part.request].above;
    const int at_wanted = collection.wanted - above;
    const uint16_t* const keys =
        s.keys + static_cast<int64_t>(collection.first_group) * kGroupTokens;
    int* const positions = p.positions + row * p.max_count;
    const int first = part.first * kUnitTokens;
    const int end = min(part.end * kUnitTokens, collection.length);
    if (threadIdx.x == 0) above_count = at_count = 0;
    __syncthreads();
    int own_above = 0, own_at = 0;
    for (int t = first + static_cast<int>(threadIdx.x); t < end; t += kCompactThreads) {
      own_above += keys[t] > threshold;
      own_at += keys[t] == threshold;
    }
    own_above = __reduce_add_sync(~0u, own_above);
    own_at = __reduce_add_sync(~0u, own_at);
    if (lane == 0) {
      atomicAdd(&above_count, own_above);
      atomicAdd(&at_count, own_at);
    }
    __syncthreads();
    // Reserve places in the table, then hand them out to the warps.
    if (threadIdx.x == 0) above_next = atomicAdd(&s.states[part.request].above_taken, above_count);
    if (threadIdx.x == 32) at_next = atomicAdd(&s.states[part.request].at_taken, at_count);
    __syncthreads();
    for (int t0 = first + static_cast<int>(threadIdx.x) - lane; t0 < end; t0 += kCompactThreads) {
      const int t = t0 + lane;
      const int key = t < end ? keys[t] : -1;
      const unsigned is_above = __ballot_sync(~0u, key > threshold);
      const unsigned is_at = __ballot_sync(~0u, key == threshold);
      int place_above = 0, place_at = 0;
      if (lane == 0 && is_above) place_above = atomicAdd(&above_next, __popc(is_above));
      if (lane == 0 && is_at) place_at = atomicAdd(&at_next, __popc(is_at));
      place_above = __shfl_sync(~0u, place_above, 0) + __popc(is_above & lower_lanes);
      place_at = __shfl_sync(~0u, place_at, 0) + __popc(is_at & lower_lanes);
      if (key > threshold) positions[place_above] = t;
      if (key == threshold && place_at < at_wanted) positions[above + place_at] = t;
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
  const size_t shared_bytes = sizeof(ScoreRow) * params->num_kv_heads * params->group * 2;
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
