// From the attention's 4-bit scores to every layer's table of selected positions.
//
//   begin   once a pass: who collects, how many entries each table gets, where the scores go
//   select  a layer, twice over each block's shares of tokens:
//           the weight of every token, summed over heads, as a 12-bit key of its logarithm, and the
//           histogram of the keys;
//           when a request's shares are all through: the threshold, the positions of the keys above
//           it, and as many of those at it as are missing; also the next pass's references
//
// Blocks of `select` wait for each other, so there are no more than the device holds at once, and they
// are launched together or not at all.
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

// Of a request: shares whose keys are counted, shares that have read the histogram. Zeros between
// layers.
struct LayerState {
  int counted;
  int read;
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
  uint64_t* chosen;           // a share's: kPublished, keys at the threshold, keys above it
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
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 2;  // on a multiprocessor
// Of Hopper's 50 MB of L2 for scores on their way: writes among the attention's reads cost it more
// time than their bytes, and more of the L2 costs the attention itself (NOTES.md).
constexpr size_t kSetAside = 12 << 20;

__host__ __device__ int div_up(int a, int b) { return (a + b - 1) / b; }

// One block. Whether a request fits depends on those before it, so that part is one thread's.
__global__ void __launch_bounds__(256) begin_kernel(const BeginParams p) {
  __shared__ int lengths[kMaxBatch];
  __shared__ int wanted[kMaxBatch];
  __shared__ int groups[kMaxBatch];
  __shared__ int first_share[kMaxBatch + 1];  // for a while, how many each has
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
  }
  __syncthreads();
  for (int r = threadIdx.x; r < p.batch; r += blockDim.x) {
    first_share[r] = groups[r] < 0 ? 0 : div_up(div_up(lengths[r], kUnitTokens), share_units);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int share = 0;
    for (int r = 0; r < p.batch; ++r) {
      const int own = first_share[r];
      first_share[r] = share;
      share += own;
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
    const int index = i - first_share[r], count = first_share[r + 1] - first_share[r];
    const int units = div_up(lengths[r], kUnitTokens);
    p.selection.shares[i] = {r,
                             static_cast<int>(p.rows[r]),
                             lengths[r],
                             wanted[r],
                             groups[r],
                             static_cast<int>(static_cast<int64_t>(units) * index / count),
                             static_cast<int>(static_cast<int64_t>(units) * (index + 1) / count),
                             index,
                             count,
                             {}};
  }
}

// Weights of 2^15 and more, relative to the lowest exponent, are 1 times a factor of about this. The
// others are normal halves, and there is room for the sum of many.
constexpr float kFactorOctaves = 4.f;

// What the stored sums of a head's weights are multiplied by. They are relative to the references,
// whose error this makes good for the head's total.
__device__ __forceinline__ __half2 factor_of(const SelectParams& p, const Share& share, int head) {
  const int num_heads = p.num_kv_heads * p.group;
  const int64_t token = static_cast<int64_t>(share.request) * p.num_queries;
  const float first = p.lse[token * num_heads + head];
  const float last = p.lse[(token + p.num_queries - 1) * num_heads + head];
  const float2 references = *reinterpret_cast<const float2*>(
      p.references + (static_cast<int64_t>(share.row) * num_heads + head) * 2);
  // Of all positions, relative to the references; a query that saw nothing has none.
  const auto mass_of = [](float lse, float reference) {
    return isfinite(lse) ? exp2f(fminf(fmaxf(lse - reference, -60.f), 60.f)) : 0.f;
  };
  float mass = mass_of(first, references.x);
  if (p.num_queries > 1) mass += mass_of(last, references.y);
  const float exponent = kFactorOctaves + (p.num_queries > 1 ? 1.f : 0.f) - log2f(mass);
  return __float2half2_rn(mass > 0.f ? exp2f(fminf(fmaxf(exponent, -24.f), 15.f)) : 0.f);
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

struct Shared {
  unsigned histogram[kBins];
  uint64_t warp_counts[kWarps];
  uint64_t others_counts[kWarps];
  int warp_sums[kWarps];
  int threshold;  // the lowest key that is chosen
  int above;      // keys above it
  bool last;
};
// Of each head: where its scores are in a group of tokens, in 8 bytes, and what they count. Padded
// with heads that count nothing.
struct Heads {
  uint32_t* offsets;
  __half2* factors;
};
constexpr int kHeadBytes = sizeof(uint32_t) + sizeof(__half2);
constexpr int kLaneHeads = 4;  // loaded at once
constexpr int kBatchHeads = 8 * kLaneHeads;
__host__ __device__ int padded_heads(int num_heads) {
  return div_up(num_heads, kBatchHeads) * kBatchHeads;
}

// Keys of a share's tokens and their histogram. The histogram in shared memory is zeros before and
// after.
__device__ __forceinline__ void count_keys(const SelectParams& p, const Share& share, Shared& shared,
                           const Heads& heads) {
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int lane_group = lane / 8, lane_head = lane % 8;  // of 4 groups, of 8 heads
  const int num_heads = p.num_kv_heads * p.group, batches = div_up(num_heads, kBatchHeads);
  const uint2* const scores =
      reinterpret_cast<const uint2*>(s.scores) + static_cast<int64_t>(share.first_group) * p.group;
  uint16_t* const keys = s.keys + static_cast<int64_t>(share.first_group) * kGroupTokens;
  const int last_group = div_up(share.length, kGroupTokens) - 1;
  // No branches, so that loads are on their way together: past the end there is something to load.
  const auto load = [&](uint2 (&loaded)[kLaneHeads], int unit, int batch) {
    const int group = min(unit * (kUnitTokens / kGroupTokens) + lane_group, last_group);
    const uint2* const from = scores + static_cast<uint32_t>(group * p.group);
#pragma unroll
    for (int i = 0; i < kLaneHeads; ++i) {
      loaded[i] = __ldg(from + heads.offsets[batch * kBatchHeads + 8 * i + lane_head]);
    }
  };

  uint2 loaded[kLaneHeads];
  load(loaded, share.first_unit + warp, 0);
  for (int h = threadIdx.x; h < num_heads; h += kThreads) heads.factors[h] = factor_of(p, share, h);
  __syncthreads();
  for (int unit = share.first_unit + warp; unit < share.end_unit; unit += kWarps) {
    __half2 weights[8] = {};
    for (int batch = 0; batch < batches; ++batch) {
      uint2 following[kLaneHeads];
      const bool last = batch == batches - 1;
      load(following, last ? unit + kWarps : unit, last ? 0 : batch + 1);
#pragma unroll
      for (int i = 0; i < kLaneHeads; ++i) {
        const __half2 factor = heads.factors[batch * kBatchHeads + 8 * i + lane_head];
        const uint32_t words[2] = {loaded[i].x, loaded[i].y};
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          __half2* const four = weights + 4 * w;
          four[0] = __hfma2(factor, decode<0>(words[w]), four[0]);
          four[1] = __hfma2(factor, decode<1>(words[w]), four[1]);
          four[2] = __hfma2(factor, decode<2>(words[w]), four[2]);
          four[3] = __hfma2(factor, decode<3>(words[w]), four[3]);
        }
        loaded[i] = following[i];
      }
    }
    // Sum over the 8 lanes; each is left with two tokens.
    exchange<4>(weights, lane & 4, 4);
    exchange<2>(weights, lane & 2, 2);
    exchange<1>(weights, lane & 1, 1);
    const int token = unit * kUnitTokens + lane_group * kGroupTokens + lane_head / 4 * 8 +
                      lane_head % 4;
    const int low = key_of(__low2half(weights[0])), high = key_of(__high2half(weights[0]));
    if (token < share.length) {
      keys[token] = low;
      atomicAdd(shared.histogram + low, 1u);
    }
    if (token + 4 < share.length) {
      keys[token + 4] = high;
      atomicAdd(shared.histogram + high, 1u);
    }
  }
  __syncthreads();
  unsigned* const bins = s.histograms + static_cast<int64_t>(share.request) * kBins;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (shared.histogram[bin] != 0) {
      atomicAdd(bins + bin, shared.histogram[bin]);
      shared.histogram[bin] = 0;
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&s.states[share.request].counted, 1);
}

// The highest key that `wanted` keys reach, from the request's histogram.
__device__ void find_threshold(const unsigned* bins, int wanted, Shared& shared) {
  constexpr int kOwn = kBins / kThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = kBins - kOwn * (static_cast<int>(threadIdx.x) + 1);
  unsigned own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const uint4 four = __ldcg(reinterpret_cast<const uint4*>(bins + first + i));
    own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
  }
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  int before = sum;  // keys above this thread's
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += shared.warp_sums[w];
#pragma unroll
  for (int i = kOwn - 1; i >= 0; --i) {
    const int at = static_cast<int>(own[i]);
    if (before < wanted && before + at >= wanted) {
      shared.threshold = first + i;
      shared.above = before;
    }
    before += at;
  }
  __syncthreads();
}

// Keys that are chosen, or may be, packed as in `chosen`: such counts can be added. A lane's have
// 16 bits each.
constexpr uint64_t kPublished = 1ull << 63;
__device__ uint64_t widen(uint32_t counts) {
  return static_cast<uint64_t>(counts >> 16) << 32 | (counts & 0xFFFF);
}
__device__ int above_of(uint64_t counts) { return static_cast<int>(counts & 0xFFFFFFFF); }
__device__ int at_of(uint64_t counts) { return static_cast<int>(counts >> 32 & 0x7FFFFFFF); }

__device__ void keep_references(const SelectParams& p, int request, int64_t row) {
  const int num_heads = p.num_kv_heads * p.group;
  if (row == 0) return;
  for (int i = threadIdx.x; i < 2 * num_heads; i += kThreads) {
    const int which = i % 2, head = i / 2, query = which ? p.num_queries - 1 : 0;
    const float lse =
        p.lse[(static_cast<int64_t>(request) * p.num_queries + query) * num_heads + head];
    p.references[row * num_heads * 2 + i] = isfinite(lse) ? lse : 0.f;
  }
}

// A share's part of the table: positions in order, those above the threshold first, so that a table
// depends on the keys alone. A share has to wait for the counts of those before it.
__device__ __forceinline__ void write_positions(const SelectParams& p, const Share& share,
                                                int index, Shared& shared) {
  constexpr int kLaneTokens = 4, kStepTokens = 32 * kLaneTokens;
  const Selection& s = p.selection;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  LayerState* const state = s.states + share.request;
  unsigned* const bins = s.histograms + static_cast<int64_t>(share.request) * kBins;
  if (threadIdx.x == 0) {
    while (*reinterpret_cast<volatile int*>(&state->counted) < share.count) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
  find_threshold(bins, share.wanted, shared);
  int read = 0;
  if (threadIdx.x == 0) read = atomicAdd(&state->read, 1);

  const int threshold = shared.threshold, above = shared.above;
  const uint16_t* const keys = s.keys + static_cast<int64_t>(share.first_group) * kGroupTokens;
  // A warp's tokens follow each other, as do a lane's in a step.
  const int units = div_up(share.end_unit - share.first_unit, kWarps);
  const int first = (share.first_unit + warp * units) * kUnitTokens;
  const int end = min(min(share.first_unit + (warp + 1) * units, share.end_unit) * kUnitTokens,
                      share.length);
  // A lane's keys from a token on; -1 past the end.
  const auto load = [&](int (&own)[kLaneTokens], int t) {
    uint2 loaded = make_uint2(0, 0);
    if (t < end) loaded = *reinterpret_cast<const uint2*>(keys + t);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      const uint32_t word = i < 2 ? loaded.x : loaded.y;
      own[i] = t + i < end ? static_cast<int>(word >> 16 * (i % 2) & 0xFFFF) : -1;
    }
  };
  const auto count = [&](const int (&own)[kLaneTokens]) {
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      counts += (own[i] > threshold) + ((own[i] == threshold) << 16);
    }
    return counts;
  };
  int first_own[kLaneTokens];
  load(first_own, first + lane * kLaneTokens);
  uint64_t own_counts = widen(__reduce_add_sync(~0u, count(first_own)));
  for (int t0 = first + kStepTokens; t0 < end; t0 += kStepTokens) {
    int own[kLaneTokens];
    load(own, t0 + lane * kLaneTokens);
    own_counts += widen(__reduce_add_sync(~0u, count(own)));
  }
  if (lane == 0) shared.warp_counts[warp] = own_counts;
  __syncthreads();
  uint64_t before = 0;  // chosen, or may be, in front of this warp's tokens
  for (int w = 0; w < warp; ++w) before += shared.warp_counts[w];
  volatile uint64_t* const chosen = s.chosen + (index - share.index);  // of the request's shares
  if (threadIdx.x == kThreads - 32) chosen[share.index] = kPublished | (before + own_counts);
  uint64_t others = 0;
  for (int j = threadIdx.x; j < share.index; j += kThreads) {
    uint64_t one;
    do one = chosen[j];
    while (!(one & kPublished));
    others += one & ~kPublished;
  }
  for (int step = 16; step > 0; step /= 2) others += __shfl_xor_sync(~0u, others, step);
  if (lane == 0) shared.others_counts[warp] = others;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) before += shared.others_counts[w];
  const int at_wanted = share.wanted - above;
  int* const positions = p.positions + static_cast<int64_t>(share.row) * p.max_count;
  for (int t0 = first; t0 < end; t0 += kStepTokens) {
    const int t = t0 + lane * kLaneTokens;
    int own[kLaneTokens];
    if (t0 == first) {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) own[i] = first_own[i];
    } else {
      load(own, t);
    }
    uint32_t lanes_counts = count(own);
    const uint32_t lane_counts = lanes_counts;
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, lanes_counts, step);
      if (lane >= step) lanes_counts += other;
    }
    const uint64_t in_front = before + widen(lanes_counts - lane_counts);
    int place_above = above_of(in_front), place_at = at_of(in_front);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (own[i] > threshold) positions[place_above++] = t + i;
      if (own[i] == threshold) {
        if (place_at < at_wanted) positions[above + place_at] = t + i;
        ++place_at;
      }
    }
    before += widen(__shfl_sync(~0u, lanes_counts, 31));
  }

  if (share.index == 0) keep_references(p, share.request, share.row);
  if (threadIdx.x == 0) shared.last = read == share.count - 1;
  __syncthreads();
  if (shared.last) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
    if (threadIdx.x == 0) *state = {0, 0};
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks) select_kernel(const __grid_constant__ SelectParams p) {
  extern __shared__ uint32_t of_heads[];
  __shared__ Shared shared;
  const Selection& s = p.selection;
  const int num_heads = p.num_kv_heads * p.group;
  const int padded = padded_heads(num_heads);
  const Heads heads{of_heads, reinterpret_cast<__half2*>(of_heads + padded)};
  // Both loads at once: the second doesn't wait for the loop's condition.
  const int num_shares = *s.num_shares;
  Share share = s.shares[blockIdx.x];
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.histogram[bin] = 0;
  for (int h = threadIdx.x; h < padded; h += kThreads) {
    heads.offsets[h] = h < num_heads ? h / p.group * (p.score_head_stride / 8) + h % p.group : 0;
    heads.factors[h] = __float2half2_rn(0.f);
  }
  __syncthreads();
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    if (i >= gridDim.x) share = s.shares[i];
    if (threadIdx.x == 0) s.chosen[i] = 0;
    count_keys(p, share, shared, heads);
  }
  for (int i = blockIdx.x; i < num_shares; i += gridDim.x) {
    if (num_shares > gridDim.x) share = s.shares[i];
    write_positions(p, share, i, shared);
  }
  for (int r = blockIdx.x; r < p.batch; r += gridDim.x) {
    if (s.score_groups[r].count == 0) keep_references(p, r, p.rows[r]);
  }
}

// Sets the references of a pass that has none: the lse of a run without scores.
__global__ void __launch_bounds__(kThreads) reference_kernel(const SelectParams p) {
  for (int r = blockIdx.x; r < p.batch; r += gridDim.x) keep_references(p, r, p.rows[r]);
}

}  // namespace

extern "C" {

// Loads the kernels, which a graph capture couldn't, sets a part of the L2 aside, and says whether
// that could be done, how many blocks share a layer's work and how large the parameters are.
int vegas_prepare(int device, int num_heads, int* keeps_scores, int* num_blocks, int* begin_bytes,
                  int* select_bytes) {
  cudaError_t error = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, begin_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, select_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, reference_kernel);
  int processors = 0, fits = 0, major = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fits, select_kernel, kThreads,
                                                          padded_heads(num_heads) * kHeadBytes);
  }
  *num_blocks = processors * min(fits, kBlocks);
  *begin_bytes = sizeof(BeginParams);
  *select_bytes = sizeof(SelectParams);
  size_t set_aside = 0;
  if (error == cudaSuccess && major == 9) {
    // Not everywhere, not under MIG for one.
    cudaDeviceGetLimit(&set_aside, cudaLimitPersistingL2CacheSize);
    if (set_aside < kSetAside) cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, kSetAside);
    cudaDeviceGetLimit(&set_aside, cudaLimitPersistingL2CacheSize);
    cudaGetLastError();
  }
  *keeps_scores = set_aside >= kSetAside;
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
  const size_t shared_bytes = padded_heads(params->num_kv_heads * params->group) * kHeadBytes;
  SelectParams copy = *params;
  void* arguments[] = {&copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(select_kernel), num_blocks,
                                     kThreads, arguments, shared_bytes, on);
}

int vegas_set_references(int device, const SelectParams* params, void* stream) {
  const cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  reference_kernel<<<16, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
  return cudaGetLastError();
}

const char* vegas_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
const char* vegas_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // extern "C"
