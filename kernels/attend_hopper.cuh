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
// Blocks of 8 places (rows.cuh) go to the warps in turn, so that few rows are shared out evenly: place
// i is in block i / 8, of warp i / 8 % 4, in the lower or the upper half of its 16 rows of a product.
//
// A whole pair's results go to the output, a piece's to the workspace, where the last CTA of the pair
// or a kernel of its own merges them: combine.cuh.
#pragma once
#include "combine.cuh"
#include "fp8.cuh"
#include "params.cuh"
#include "plan.cuh"
#include "rows.cuh"
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

// Where the chunk of 8 dims of a head's place is in the operand of queries.
__device__ __forceinline__ uint32_t query_offset(int place, int chunk) {
  const int block = place / 8;
  return block / 8 * kProductBytes +
         chunk_offset<kQueryBlockBytes>(block % 4 * 16 + block / 4 % 2 * 8 + place % 8, chunk);
}

// A lane's scores of a row are of the products' columns 8j + 2 * quad + b, b < 2. They are to be
// those of kLaneTokens neighbouring tokens, in the order in which they are packed, so token t of
// quad's lies in the tile's row 8j + 2 * quad + b with t = token_of(j, b).
__host__ __device__ constexpr int token_of(int j, int b) { return j / 4 * 8 + j % 4 + 4 * b; }

// The row of an operand that has a token of a warp's group.
__device__ __forceinline__ int operand_row(int warp, int token) {
  const int j = token / 8 * 4 + token % 4, b = token / 4 % 2;
  return 8 * j + 2 * warp + b;
}

// Starts a warp's copies of its group of a tile.
__device__ __forceinline__ void start_copies(const AttendParams& p, const Group& group,
                                             uint32_t stage, int warp, int lane, uint64_t policy) {
  constexpr int kTokensAtOnce = 32 / kSetChunks;
  const int chunk = lane % kSetChunks;
  const int dim = group.head_set * kHeads * kHeadDim + chunk * kChunkDims;
  for_copies<kGroupTokens / kTokensAtOnce>(p, group, [&](int i, bool any_new) {
    const int token = i * kTokensAtOnce + lane / kSetChunks;
    const int slot = __shfl_sync(~0u, group.index, token);
    const Sources from = sources(p, group, slot, token, dim, any_new);
    const uint32_t to =
        stage + (kWidens ? ((warp * kGroupTokens + token) * kSetChunks + chunk) * 16
                         : chunk_offset<kKVBlockBytes>(operand_row(warp, token), chunk));
    const uint32_t bytes = token < group.valid ? 16 : 0;
    copy_async(to, from.k, bytes, policy);
    copy_async(to + kHalfStage, from.v, bytes, policy);
  });
}

template <bool kSparse, bool kScores>
__global__ void __launch_bounds__(kThreads, kCtas)
    attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(1024) char shared[];
  char* const operands_shared = shared + kRingBytes;
  char* const q_shared = operands_shared + kOperandBytes;
  float2* const score_heads = reinterpret_cast<float2*>(q_shared + kQueryBytes);
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t queries = ring + kRingBytes + kOperandBytes;

  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int quad = lane % 4;
  const uint64_t policy = evict_first_policy();
  const uint64_t score_policy = p.keeps_scores ? evict_last_policy() : evict_normal_policy();
  // The rows of a head that this lane has parts of, and which of its blocks are not all padding.
  int rows[kRowTiles][2], used = 0;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[m][half] = row_at(p, ((m * 2 + half) * 4 + warp) * 8 + lane / 4);
      used |= __any_sync(~0u, rows[m][half] >= 0) << (2 * m + half);
    }
  }
  // The head whose scores this lane has parts of, if there is one.
  const int scored_head = warp * 8 + lane / 4;

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
    const int r = row_at(p, i * kRowsAtOnce % kHeadRows + threadIdx.x / kChunks);
    const int query = r / p.group;
    share_at[i] = r >= 0 ? query * static_cast<int>(p.q_stride) +
                               (h * p.group + r - query * p.group) * kHeadDim + lane % kChunks * 8
                         : -1;
  }
  Parts parts;
  const bool merges_in_place = p.num_queries * p.group <= kMaxRowsInPlace;

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
    ScorePlace score_to{};
    float2 references{};
    if (kScores) {
      score_to = score_place(p, at, at.head_set * kHeads);
      references = score_references(p, at, at.head_set * kHeads + threadIdx.x / kMaxGroup,
                                    threadIdx.x % kMaxGroup);
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const int h = i * kRowsAtOnce / kHeadRows;
      const int place = i * kRowsAtOnce % kHeadRows + threadIdx.x / kChunks;
      *reinterpret_cast<uint4*>(q_shared + h * kRowTiles * kProductBytes +
                                query_offset(place, lane % kChunks)) = operands_of(shares[i]);
    }

    int score_tokens = 0;  // of the list, that have scores
    uint8_t* score_at = nullptr;
    int score_step_bytes = 0;
    if (kScores) {
      score_tokens = score_to.groups * kScoreTokens;
      score_step_bytes = kTileTokens / kScoreTokens * score_to.group_bytes;
      const int own = first_token + quad * kLaneTokens;
      score_at = score_to.at + static_cast<int64_t>(own / kScoreTokens) * score_to.group_bytes +
                 own % kScoreTokens / 2 + scored_head * (kScoreTokens / 2);
      if (threadIdx.x < kHeads * kMaxGroup) {
        score_heads[threadIdx.x] = score_exponents(p, references, score_to.lowest_exponent);
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
      if (kWidens && s < steps) {
        __syncwarp();
        const auto row_of = [warp](int token) { return operand_row(warp, token); };
        constexpr int kGroupBytes = kGroupTokens * kSetChunks * 16;
        const char* const from = shared + stage_index * kStageBytes + warp * kGroupBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          widen_group<kKVBlockBytes>(from + i * kHalfStage, operands_shared + i * kHalfOperands,
                                     lane, row_of);
        }
      }
      fence_async_proxy();
      __syncthreads();  // the tile is there, and the one before it has been read
      const int free_index = stage_index == 0 ? kStages - 1 : stage_index - 1;
      if (next_slots.is_copied()) {
        start_copies(p, next_slots, ring + free_index * kStageBytes, warp, lane, policy);
      }
      commit_copies();
      next_slots = slots(p, next_positions);
      next_positions = lookahead.positions(p, warp, lane);

      const uint32_t tile = kWidens ? ring + kRingBytes : ring + stage_index * kStageBytes;
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
                        dims_descriptor<kKVBlockBytes>(tile + m / kRowTiles * kHeadBytes, d),
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
            const int query = rows[head_product][half] / p.group;
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
              packed[j] = pack_operands(low, high);
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
          }
#pragma unroll
          for (int j = 0; j < kTileTokens / 8; ++j) {
            weights[m][j / 2][half + 2 * (j % 2)] = exists ? packed[j] : 0;
          }
        }
        if (kScores && head_product == 0 && warp * 8 < p.group) {
          const int h = m / kRowTiles;
          const float2 exponents = score_heads[h * kMaxGroup + scored_head];
          const float first_factor = score_factor(maximum[m][0], exponents.x);
          const float last_factor = score_factor(maximum[m][1], exponents.y);
          uint32_t codes[kTileTokens / 32];
#pragma unroll
          for (int i = 0; i < kTileTokens / 32; ++i) {
            uint32_t digits[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t* const pair = weights[m][2 * i + j / 2] + 2 * (j % 2);
              digits[j] = score_digits(pair[0], first_factor, pair[1], last_factor);
            }
            codes[i] = digits[0] >> 7 | digits[1] >> 3 | digits[2] << 1 | digits[3] << 5;
          }
          if (scored_head < p.group && token + quad * kLaneTokens < score_tokens) {
            store(score_at + h * p.score_head_stride, make_uint2(codes[0], codes[1]), score_policy);
          }
        }

        fence_products();
#pragma unroll
        for (int i = 0; i < kTileTokens / 16; ++i) {
          multiply_rows(o[m], weights[m][i],
                        rows_descriptor<kKVBlockBytes>(
                            tile + kHalfOperands + m / kRowTiles * kHeadBytes, i));
        }
        commit_products();
      }
      if (kScores) score_at += score_step_bytes;
      wait_products();
      if (kWidens) __syncthreads();  // the tile has been read
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
        const int r = rows[m % kRowTiles][half];
        if (r < 0) continue;
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
          const float factor = piece_factor(stat);
          __half* const to = p.partial_o + row * kHeadDim + quad * 2;
#pragma unroll
          for (int d = 0; d < kHeadDim / 8; ++d) {
            *reinterpret_cast<uint32_t*>(to + d * 8) =
                pack_halves(o[m][4 * d + 2 * half] * factor, o[m][4 * d + 2 * half + 1] * factor);
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
