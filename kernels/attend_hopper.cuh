// Split-KV attention of a few queries over KV with page size 1, with Hopper's wgmma: the memory-bound
// main loop.
//
// A CTA is one warpgroup. It walks its tiles (plan.cuh) in segments, a segment being its part of one
// (request, set of KV heads) pair, and attends to a tile a step: each warp copies a quarter of its
// entries into a ring in shared memory (cp.async), and all four multiply. Products cost next to
// nothing even where most of their rows pad; what counts is that few instructions stand between a
// tile's arrival and the next copies. Heads of 64 dims are read two at once, since memory gives 256
// bytes in one place faster than twice 128.
//
// Rows of the score matrix are a KV head's (query, head of the group), query-major. Blocks of 8 go
// to the warps in turn, so that few rows are shared out evenly: row r is in block r / 8, of warp
// r / 8 % 4, in the lower or the upper half of its 16 rows of a product.
//
// A whole pair's results go to the output, a piece's to the workspace, where the last CTA of the pair
// or a kernel of its own merges them: combine.cuh.
#pragma once
#include "combine.cuh"
#include "params.cuh"
#include "plan.cuh"
#include "scores.cuh"
#include "segments.cuh"
#include "wgmma.cuh"

// A row's maximum may lag behind, while a lane's weights relative to it sum up to no more.
constexpr float kMaximumSlack = 256.f;

// Products of 64 rows: kRowTiles for each head.
constexpr int kProducts = kHeads * kRowTiles;
constexpr int kLaneTokens = kTileTokens / 4;  // of a row, a lane's
constexpr int kKVBlockBytes = kTileTokens * kBlockRowBytes;
constexpr int kHeadBytes = kHeadDim / 64 * kKVBlockBytes;
constexpr int kQueryBlockBytes = 64 * kBlockRowBytes;
constexpr int kProductBytes = 64 * kRowBytes;

// Where the chunk of 8 dims of a head's row is in the operand of queries.
__device__ __forceinline__ uint32_t query_offset(int r, int chunk) {
  const int block = r / 8;
  return block / 8 * kProductBytes +
         chunk_offset<kQueryBlockBytes>(block % 4 * 16 + block / 4 % 2 * 8 + r % 8, chunk);
}

// A lane's scores of a row are of the products' columns 8j + 2 * quad + b, b < 2. They are to be
// those of kLaneTokens neighbouring tokens, in the order in which `encode` packs them, so token t of
// quad's lies in the tile's row 8j + 2 * quad + b with t = token_of(j, b).
__host__ __device__ constexpr int token_of(int j, int b) { return j / 4 * 8 + j % 4 + 4 * b; }

// Starts a warp's copies of its group of a tile.
__device__ __forceinline__ void start_copies(const AttendParams& p, const Group& group,
                                             uint32_t stage, int warp, int lane, uint64_t policy) {
  constexpr int kSetChunks = kHeads * kChunks;
  constexpr int kTokensAtOnce = 32 / kSetChunks;
  const int chunk = lane % kSetChunks;
  const int dim = group.head_set * kHeads * kHeadDim + chunk * 8;
  for_copies<kGroupTokens / kTokensAtOnce>(p, group, [&](int i, bool any_new) {
    const int token = i * kTokensAtOnce + lane / kSetChunks;
    const int slot = __shfl_sync(~0u, group.index, token);
    const Sources from = sources(p, group, slot, token, dim, any_new);
    const int j = token / 8 * 4 + token % 4, b = token / 4 % 2;
    const uint32_t to = stage + chunk_offset<kKVBlockBytes>(8 * j + 2 * warp + b, chunk);
    const uint32_t bytes = token < group.valid ? 16 : 0;
    copy_async(to, from.k, bytes, policy);
    copy_async(to + kHalfStage, from.v, bytes, policy);
  });
}

// Two weights as bf16, of which the bits are close to a logarithm: 8 for the exponent, 7 that follow.
__device__ __forceinline__ uint32_t logarithms(uint32_t packed, float low, float high) {
#if VEGAS_HALF
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
#else
  return packed;
#endif
}

// Eight tokens' scores as 4 bits each, the first lowest: round(log2(weight) + shift) from 0 to 15.
// Rounding goes by the weight itself, up from 1.5 times a power of two. shifts: what the logarithms
// get, twice. decode in selection.cu is the inverse.
__device__ __forceinline__ uint32_t encode(const uint32_t (&logs)[4], uint32_t shifts) {
  constexpr uint32_t kMost = 0x07FF07FF, kDigits = 0x07800780;
  uint32_t digits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    digits[i] = __viaddmin_s16x2_relu(logs[i], shifts, kMost) & kDigits;
  }
  return digits[0] >> 7 | digits[1] >> 3 | digits[2] << 1 | digits[3] << 5;
}
// The shifts for weights relative to 2^top. Rows whose score nobody wants may have any.
__device__ __forceinline__ uint32_t encode_shifts(float top, const ScoreRow& row) {
  const float octaves = fminf(fmaxf(top + row.shift, -100.f), 100.f);
  const int shift = __float2int_rn(octaves * 128.f) - (127 << 7) + (1 << 6);
  return __byte_perm(shift, shift, 0x1010);
}

template <bool kSparse, bool kScores>
__global__ void __launch_bounds__(kThreads, kCtas)
    attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) char shared[];
  char* const q_shared = shared + kRingBytes;
  ScoreRow* const score_rows =
      reinterpret_cast<ScoreRow*>(shared + kRingBytes + kQueryBytes);
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t queries = ring + kRingBytes;

  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int quad = lane % 4;
  const int rows_used = p.num_queries * p.group;
  const uint64_t policy = evict_first_policy();
  // This lane's rows of a head, in its product m.
  const auto row_of = [warp, lane](int m, int half) {
    return ((m * 2 + half) * 4 + warp) * 8 + lane / 4;
  };
  // Of a head's blocks of this warp, which have rows, and which have scores to store.
  int used = 0, scored = 0;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int r = (i * 4 + warp) * 8;
    used |= (r < rows_used) << i;
    if (kScores) scored |= has_scores(p, r) << i;
  }

  Segment segment{p.plan.ctas[blockIdx.x], 0};
  segment.remaining = p.plan.ctas[blockIdx.x + 1].tile - segment.at.tile;
  const int tiles_total = p.plan.ctas[gridDim.x].tile;
  if (segment.remaining == 0) return;

  // Fill the ring but for one stage, and have the slots of the group after, and the positions of the
  // one after that.
  Lookahead<kSparse> lookahead{segment, 0, 0};
  lookahead.open(warp);
  int padding = __shfl_sync(~0u, max(kStages + 1 - lookahead.groups, 0), 0);
  Group groups[kStages + 1];
  first_groups(p, lookahead, lane, groups);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    start_copies(p, groups[s], ring + s * kStageBytes, warp, lane, policy);
    commit_copies();
  }
  Group next_slots = groups[kStages - 1], next_positions = groups[kStages];
  // By those that have tiles, while their KV is on its way.
  if (p.num_new > 0) store_new(p, min(static_cast<int>(gridDim.x), tiles_total));
  int stage_index = 0;
  // Where this thread's shares of the queries are, from a pair's first on; -1: in a row that pads.
  constexpr int kShares = kHeads * kHeadRows * kChunks / kThreads;
  constexpr int kRowsAtOnce = kThreads / kChunks;
  int share_at[kShares];
#pragma unroll
  for (int i = 0; i < kShares; ++i) {
    const int h = i * kRowsAtOnce / kHeadRows;
    const int r = i * kRowsAtOnce % kHeadRows + threadIdx.x / kChunks, query = r / p.group;
    share_at[i] = r < rows_used
                      ? query * static_cast<int>(p.q_stride) +
                            (h * p.group + r - query * p.group) * kHeadDim + lane % kChunks * 8
                      : -1;
  }
  Parts parts;
  const bool merges_in_place = rows_used <= kMaxRowsInPlace;

  for (; __shfl_sync(~0u, segment.tiles(), 0) > 0; segment.next(p)) {
    const CtaStart& at = segment.at;
    const List& list = at.list;
    const int first_token = max(at.place, 0) * kTileTokens;
    const int steps = __shfl_sync(~0u, segment.tiles(), 0);

    // Queries, zeros in the rows that pad.
    const Element* const q = p.q + static_cast<int64_t>(at.request) * p.num_queries * p.q_stride +
                             at.head_set * kHeads * p.group * kHeadDim;
    uint4 shares[kShares];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      shares[i] = share_at[i] >= 0 ? *reinterpret_cast<const uint4*>(q + share_at[i])
                                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const int h = i * kRowsAtOnce / kHeadRows;
      const int r = i * kRowsAtOnce % kHeadRows + threadIdx.x / kChunks;
      *reinterpret_cast<uint4*>(q_shared + h * kRowTiles * kProductBytes +
                                query_offset(r, lane % kChunks)) = shares[i];
    }

    int score_tokens = 0;  // of the list, that have scores
    uint8_t* score_at = nullptr;
    int score_step_bytes = 0;
    if (kScores) {
      const ScorePlace place = score_place(p, at, at.head_set * kHeads);
      score_tokens = place.groups * kScoreTokens;
      score_step_bytes = kTileTokens / kScoreTokens * place.group_bytes;
      const int own = first_token + quad * kLaneTokens;
      score_at = place.at + static_cast<int64_t>(own / kScoreTokens) * place.group_bytes +
                 own % kScoreTokens / 2;
      for (int r = threadIdx.x; r < kHeads * kHeadRows; r += kThreads) {
        score_rows[r] = score_row(p, at, at.head_set * kHeads + r / kHeadRows, r % kHeadRows,
                                  place.lowest_exponent);
      }
    }

    float o[kProducts][kHeadDim / 2];
    float maximum[kProducts][2], sum[kProducts][2];
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      maximum[m][0] = maximum[m][1] = kNoMaximum;
      sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
      for (int d = 0; d < kHeadDim / 2; ++d) o[m][d] = 0.f;
    }

    const int all_visible = list.length - p.num_queries + 1;  // entries that query 0 sees
    const int first_for_all = p.window > 0 ? list.length - p.window : 0;
    for (int s = 0; s < steps + padding; ++s) {
      const int token = first_token + s * kTileTokens;
      wait_copies<kStages - 2>();
      fence_async_proxy();
      __syncthreads();  // the tile is there, and the one before it has been read
      const int free_index = stage_index == 0 ? kStages - 1 : stage_index - 1;
      if (next_slots.is_copied()) {
        start_copies(p, next_slots, ring + free_index * kStageBytes, warp, lane, policy);
      }
      commit_copies();
      next_slots = slots(p, next_positions);
      next_positions = lookahead.positions(p, warp, lane);

      const uint32_t stage = ring + stage_index * kStageBytes;
      stage_index = stage_index == kStages - 1 ? 0 : stage_index + 1;
      if (s >= steps) continue;

      float scores[kProducts][kTileTokens / 2];
      fence_products();
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          multiply_dims(scores[m],
                        dims_descriptor<kQueryBlockBytes>(queries + m * kProductBytes, d),
                        dims_descriptor<kKVBlockBytes>(stage + m / kRowTiles * kHeadBytes, d),
                        d > 0);
        }
      }
      commit_products();
      wait_products();

      uint32_t weights[kProducts][kTileTokens / 16][4];
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
        auto& x = scores[m];
        const int head_product = m % kRowTiles;
        // Query i sees entries below all_visible + i, and the window's last of these.
        if (token + kTileTokens > all_visible || token < first_for_all) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int query = min(row_of(head_product, half) / p.group, p.num_queries - 1);
            const int limit = all_visible + query - token - quad * kLaneTokens;
            const int low = p.window > 0 ? limit - p.window : 0;
#pragma unroll
            for (int j = 0; j < kTileTokens / 8; ++j) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                const int t = token_of(j, b);
                if (t >= limit || t < low) x[4 * j + 2 * half + b] = -INFINITY;
              }
            }
          }
        }

        // Weights relative to the maxima so far.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = 2 * head_product + half;
          const bool exists = used >> block & 1;
          float& top = maximum[m][half];
          uint32_t packed[kTileTokens / 8];
          const auto weigh = [&] {
            float added = 0.f;
#pragma unroll
            for (int j = 0; j < kTileTokens / 8; ++j) {
              const float low = exp2_fast(fmaf(x[4 * j + 2 * half], p.scale, -top));
              const float high = exp2_fast(fmaf(x[4 * j + 2 * half + 1], p.scale, -top));
              packed[j] = pack(low, high);
              added += low + high;
            }
            return added;
          };
          if (exists) {
            float added = weigh();
            if (__any_sync(~0u, added > kMaximumSlack)) {
              float largest = x[2 * half];
#pragma unroll
              for (int j = 0; j < kTileTokens / 8; ++j) {
                largest = fmaxf(largest, fmaxf(x[4 * j + 2 * half], x[4 * j + 2 * half + 1]));
              }
              largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
              largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
              largest = fmaxf(largest * p.scale, top);
              const float factor = exp2_fast(top - largest);
              top = largest;
              sum[m][half] *= factor;
#pragma unroll
              for (int d = 0; d < kHeadDim / 8; ++d) {
                o[m][4 * d + 2 * half] *= factor;
                o[m][4 * d + 2 * half + 1] *= factor;
              }
              added = weigh();
            }
            sum[m][half] += added;
            if (kScores && (scored >> block & 1)) {
              const ScoreRow score =
                  score_rows[m / kRowTiles * kHeadRows + row_of(head_product, half)];
              const uint32_t shifts = encode_shifts(top, score);
              uint32_t codes[kTileTokens / 32];
#pragma unroll
              for (int i = 0; i < kTileTokens / 32; ++i) {
                uint32_t logs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  const int column = 4 * (4 * i + j) + 2 * half;
                  logs[j] = logarithms(packed[4 * i + j],
                                       exp2_fast(fmaf(x[column], p.scale, -top)),
                                       exp2_fast(fmaf(x[column + 1], p.scale, -top)));
                }
                codes[i] = encode(logs, shifts);
              }
              if (score.offset >= 0 && token + quad * kLaneTokens < score_tokens) {
                uint8_t* const to =
                    score_at + m / kRowTiles * p.score_head_stride + score.offset;
                if constexpr (kTileTokens == 64) {
                  *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
                } else {
                  *reinterpret_cast<uint32_t*>(to) = codes[0];
                }
              }
            }
          }
#pragma unroll
          for (int j = 0; j < kTileTokens / 8; ++j) {
            weights[m][j / 2][half + 2 * (j % 2)] = exists ? packed[j] : 0;
          }
        }

        fence_products();
#pragma unroll
        for (int i = 0; i < kTileTokens / 16; ++i) {
          multiply_rows(o[m], weights[m][i],
                        rows_descriptor<kKVBlockBytes>(
                            stage + kHalfStage + m / kRowTiles * kHeadBytes, i));
        }
        commit_products();
      }
      if (kScores) score_at += score_step_bytes;
      wait_products();
    }

    const int pair_tiles = tiles_of<kTileTokens>(list);
    const bool whole = segment.tiles() == pair_tiles;
    const int64_t slot =
        blockIdx.x + static_cast<int64_t>(at.request) * p.num_head_sets + at.head_set;
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      const int h = m / kRowTiles, kv_head = at.head_set * kHeads + h;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int r = row_of(m % kRowTiles, half);
        if (r >= rows_used) continue;
        const float2 stat = make_float2(maximum[m][half], total);
        if (whole) {
          const int64_t row = output_row(p, at.request, kv_head, r);
          const Softmax softmax = softmax_of(p, kv_head, r, stat);
          if (quad == 0) p.lse[row] = softmax.lse;
          Element* const to = p.out + row * kHeadDim + quad * 2;
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d) {
            *reinterpret_cast<uint32_t*>(to + d * 8) =
                pack(o[m][4 * d + 2 * half] * softmax.factor,
                     o[m][4 * d + 2 * half + 1] * softmax.factor);
          }
        } else {
          const int64_t row = slot * kSlotRows + h * kHeadRows + r;
          if (quad == 0) p.partial_stats[row] = stat;
          float* const to = p.partial_o + row * kHeadDim + quad * 2;
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d) {
            *reinterpret_cast<float2*>(to + d * 8) =
                make_float2(o[m][4 * d + 2 * half], o[m][4 * d + 2 * half + 1]);
          }
        }
      }
    }
    __syncthreads();  // nobody reads the queries any more, and the writes are done
    if (merges_in_place && !whole) parts.add(p, segment, tiles_total);
    padding = 0;
  }
  if (merges_in_place) parts.merge(p, reinterpret_cast<int*>(q_shared));
}
