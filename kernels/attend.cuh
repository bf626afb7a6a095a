// Split-KV attention of a few queries over KV with page size 1: the memory-bound main loop.
//
// A CTA walks its tiles (plan.cuh) in segments, a segment being its part of one (request, KV head)
// pair. A stream is kRowWarps warps that share a ring of KV in shared memory; stream i takes every
// kStreams-th group of 16 entries, with its own maxima, sums and outputs, so that the main loop has
// no CTA barrier.
// At a segment's end the streams' results are merged. A whole pair's go to the output, a piece's to the
// workspace, where the last CTA of the pair or a kernel of its own merges them: combine.cuh.
//
// Token t = 4q + 2j + b of a group of 16 lies in ring row 8j + 2q + b, so that a thread's four
// scores of a row are those of four neighbouring tokens.
#pragma once
#include "combine.cuh"
#include "params.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "scores.cuh"
#include "segments.cuh"

constexpr int kFours = kHeadDim / 4;
// A row's maximum may lag behind, while four of its weights relative to it sum up to no more.
constexpr float kMaximumSlack = 256.f;

// Starts this warp's share of copying a group's K and V into a stage.
__device__ __forceinline__ void start_copies(const AttendParams& p, const Group& group,
                                             uint32_t stage, int row_warp, int lane,
                                             uint64_t policy) {
  constexpr int kTokensAtOnce = 32 / kChunks;
  constexpr int kShare = kGroupTokens / kRowWarps;
  static_assert(kShare % kTokensAtOnce == 0, "a warp copies whole instructions");
  const int dim = group.head_set * kHeadDim + lane % kChunks * 8;
  for_copies<kShare / kTokensAtOnce>(p, group, [&](int i, bool any_new) {
    const int token = row_warp * kShare + i * kTokensAtOnce + lane / kChunks;
    const int slot = __shfl_sync(~0u, group.index, token);
    const Sources from = sources(p, group, slot, token, dim, any_new);
    const int row = ((token >> 1) & 1) * 8 + (token >> 2) * 2 + (token & 1);
    const uint32_t to = stage + row * kRowBytes + ((lane % kChunks ^ (row & 7)) << 4);
    const uint32_t bytes = token < group.valid ? 16 : 0;
    copy_async(to, from.k, bytes, policy);
    copy_async(to + kHalfStage, from.v, bytes, policy);
  });
}

// Four neighbouring tokens' scores as 4 bits each, the lowest first, from two words of score_digits.
__device__ __forceinline__ uint16_t encode(uint32_t low, uint32_t high) {
  const uint32_t digits = low >> 7 | high << 1;
  return static_cast<uint16_t>(digits | digits >> 12);
}

template <bool kSparse, bool kScores>
__global__ void __launch_bounds__(kThreads, kCtas)
    attend_kernel(const AttendParams p) {
  extern __shared__ __align__(1024) char shared[];
  char* const q_shared = shared + kRingBytes;
  float2* const stats = reinterpret_cast<float2*>(shared + kRingBytes + kQueryBytes);
  float2* const score_heads =
      reinterpret_cast<float2*>(shared + kRingBytes + kQueryBytes + kStatBytes);
  const uint32_t shared_base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stream = warp / kRowWarps, row_warp = warp % kRowWarps;
  const int quad = lane % 4;
  const uint32_t ring = shared_base + stream * kStages * kStageBytes;
  const int places = end_of_places(p);
  const uint64_t policy = evict_first_policy();

  // Byte addresses of this lane in ldmatrix; a step of 16 dims flips bits 5 and up.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t k_lane =
      ((matrix >> 1) * 8 + matrix_row) * kRowBytes + (((matrix & 1) ^ matrix_row) << 4);
  const uint32_t v_lane =
      ((matrix & 1) * 8 + matrix_row) * kRowBytes + (((matrix >> 1) ^ matrix_row) << 4);
  const uint32_t q_lane =
      shared_base + kRingBytes + row_warp * kWarpRows * kRowBytes + v_lane;

  // The rows that this lane has parts of, and which blocks of 8 are not all padding.
  int rows[kRowTiles][2], used = 0;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[m][half] = row_at(p, row_warp * kWarpRows + m * 16 + half * 8 + lane / 4);
      used |= __any_sync(~0u, rows[m][half] >= 0) << (2 * m + half);
    }
  }

  Segment segment{p.plan.ctas[blockIdx.x], 0};
  segment.remaining = p.plan.ctas[blockIdx.x + 1].tile - segment.at.tile;
  const int tiles_total = p.plan.ctas[gridDim.x].tile;
  if (segment.remaining == 0) return;

  // Fill the ring but for one stage, and have the slots of the group after, and the positions of the
  // one after that.
  Lookahead<kSparse> lookahead{segment, 0, 0};
  lookahead.open(stream);
  int padding = max(kStages + 1 - lookahead.groups, 0);
  Group groups[kStages + 1];
  first_groups(p, lookahead, lane, groups);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    start_copies(p, groups[s], ring + s * kStageBytes, row_warp, lane, policy);
    commit_copies();
  }
  Group next_slots = groups[kStages - 1], next_positions = groups[kStages];
  // By those that have tiles, while their KV is on its way.
  if (p.num_new > 0) store_new(p, min(static_cast<int>(gridDim.x), tiles_total));
  int stage_index = 0;
  // Where this thread's shares of the queries are, from a pair's first on; -1: in a row that pads.
  constexpr int kShares = kRows * kChunks / kThreads;
  int share_at[kShares];
#pragma unroll
  for (int i = 0; i < kShares; ++i) {
    const int r = row_at(p, (threadIdx.x + i * kThreads) / kChunks), query = r / p.group;
    share_at[i] = r >= 0 ? query * static_cast<int>(p.q_stride) +
                               (r - query * p.group) * kHeadDim + lane % kChunks * 8
                         : -1;
  }
  Parts parts;
  const bool merges_in_place = p.num_queries * p.group <= kMaxRowsInPlace;

  for (; segment.tiles() > 0; segment.next(p)) {
    const CtaStart& at = segment.at;
    const List& list = at.list;
    const int first_token = segment.first_entry(stream);
    const int steps = segment.groups(stream);

    // Queries, zeros in the rows that pad.
    const Element* const q = p.q + static_cast<int64_t>(at.request) * p.num_queries * p.q_stride +
                             at.head_set * p.group * kHeadDim;
    uint4 shares[kShares];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      shares[i] = share_at[i] >= 0 ? *reinterpret_cast<const uint4*>(q + share_at[i])
                                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const int place = (threadIdx.x + i * kThreads) / kChunks;
      *reinterpret_cast<uint4*>(q_shared + place * kRowBytes +
                                ((lane % kChunks ^ (place & 7)) << 4)) = shares[i];
    }

    int score_steps = 0;
    uint8_t* score_at = nullptr;
    int score_step_bytes = 0;
    if (kScores) {
      const int first_group = first_token / kGroupTokens;
      const ScorePlace place = score_place(p, at, at.head_set);
      score_steps = div_up(max(place.groups - first_group, 0), kStreams);
      score_step_bytes = kStreams * place.group_bytes;
      score_at = place.at + static_cast<int64_t>(first_group) * place.group_bytes + quad * 2;
      if (threadIdx.x < kMaxGroup) {
        score_heads[threadIdx.x] =
            score_exponents(p, score_references(p, at, at.head_set, threadIdx.x),
                            place.lowest_exponent);
      }
    }
    __syncthreads();  // queries and the heads' exponents are there

    uint32_t q_held[kRowTiles == 1 ? kSteps : 1][4];
    if (kRowTiles == 1) {
#pragma unroll
      for (int d = 0; d < kSteps; ++d) load_matrices(q_held[d], q_lane ^ (d << 5));
    }

    float o[kRowTiles][kSteps * 2][4];
    float maximum[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = kNoMaximum;
        sum[m][half] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < kSteps * 2; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][d][e] = 0.f;
      }
    }

    const int all_visible = list.length - p.num_queries + 1;  // entries that query 0 sees
    const int first_for_all = p.window > 0 ? list.length - p.window : 0;
    for (int s = 0; s < steps + padding; ++s) {
      const int token = first_token + s * kTileTokens;
      wait_copies<kStages - 2>();
      if (kRowWarps == 1) __syncwarp();
      else named_barrier(1 + stream, 32 * kRowWarps);
      // The stage that the step before this one read.
      const int free_index = stage_index == 0 ? kStages - 1 : stage_index - 1;
      if (next_slots.is_copied()) {
        start_copies(p, next_slots, ring + free_index * kStageBytes, row_warp, lane, policy);
      }
      commit_copies();
      next_slots = slots(p, next_positions);
      next_positions = lookahead.positions(p, stream, lane);

      const uint32_t stage = ring + stage_index * kStageBytes;
      stage_index = stage_index == kStages - 1 ? 0 : stage_index + 1;
      if (s >= steps) continue;

      float x[kRowTiles][2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][j][e] = 0.f;
        }
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
        uint32_t b[4];
        load_matrices(b, (stage + k_lane) ^ (d << 5));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          if (kRowTiles == 1) {
            multiply_add(x[m][0], q_held[d], b[0], b[1]);
            multiply_add(x[m][1], q_held[d], b[2], b[3]);
          } else {
            uint32_t a[4];
            load_matrices(a, (q_lane ^ (d << 5)) + m * 16 * kRowBytes);
            multiply_add(x[m][0], a, b[0], b[1]);
            multiply_add(x[m][1], a, b[2], b[3]);
          }
        }
      }

      // Query i sees entries below all_visible + i, and the window's last of these.
      if (token + kGroupTokens > all_visible || token < first_for_all) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int limit = all_visible + rows[m][half] / p.group - token - quad * 4;
            const int low = p.window > 0 ? limit - p.window : 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                if (2 * j + b >= limit || 2 * j + b < low) x[m][j][half * 2 + b] = -INFINITY;
              }
            }
          }
        }
      }

      // Weights relative to the maxima so far; says whether those are too old.
      uint32_t weights[kRowTiles][4];
      float added[kRowTiles][2];
      const auto weigh = [&]() -> bool {
        bool outgrown = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (!(used >> (2 * m + half) & 1)) {
              weights[m][half] = weights[m][half + 2] = 0;
              added[m][half] = 0.f;
              continue;
            }
            const float top = maximum[m][half];
            const float a = exp2_fast(fmaf(x[m][0][half * 2], p.scale, -top));
            const float b = exp2_fast(fmaf(x[m][0][half * 2 + 1], p.scale, -top));
            const float c = exp2_fast(fmaf(x[m][1][half * 2], p.scale, -top));
            const float d = exp2_fast(fmaf(x[m][1][half * 2 + 1], p.scale, -top));
            weights[m][half] = pack_operands(a, b);
            weights[m][half + 2] = pack_operands(c, d);
            added[m][half] = (a + b) + (c + d);
            outgrown |= added[m][half] > kMaximumSlack;
          }
        }
        return outgrown;
      };
      if (__any_sync(~0u, weigh())) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float top = fmaxf(fmaxf(x[m][0][half * 2], x[m][0][half * 2 + 1]),
                              fmaxf(x[m][1][half * 2], x[m][1][half * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = fmaxf(top * p.scale, maximum[m][half]);
            const float factor = exp2_fast(maximum[m][half] - top);
            maximum[m][half] = top;
            sum[m][half] *= factor;
#pragma unroll
            for (int d = 0; d < kSteps * 2; ++d) {
              o[m][d][half * 2] *= factor;
              o[m][d][half * 2 + 1] *= factor;
            }
          }
        }
        weigh();
      }
      if (kScores && s < score_steps && row_warp == 0) {
        // A block of the first query's heads, and the last query's.
        const auto store = [&](int block, const uint32_t* first, float first_top,
                               const uint32_t* last, float last_top) {
          const int head = block * 8 + lane / 4;
          const float2 exponents = score_heads[head];
          const float first_factor = score_factor(first_top, exponents.x);
          const float last_factor = score_factor(last_top, exponents.y);
          const uint16_t code = encode(score_digits(first[0], first_factor, last[0], last_factor),
                                       score_digits(first[2], first_factor, last[2], last_factor));
          if (head < p.group) {
            *reinterpret_cast<uint16_t*>(score_at + head * (kScoreTokens / 2)) = code;
          }
        };
        if constexpr (kRowTiles == 1) {
          store(0, weights[0], maximum[0][0], weights[0] + 1, maximum[0][1]);
          // Only where there is a single query; its second block has no partner.
          if (p.group > 8) store(1, weights[0] + 1, maximum[0][1], weights[0] + 1, maximum[0][1]);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (half * 8 < p.group) {
              store(half, weights[0] + half, maximum[0][half], weights[1] + half,
                    maximum[1][half]);
            }
          }
        }
      }
      score_at += score_step_bytes;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        sum[m][0] += added[m][0];
        sum[m][1] += added[m][1];
      }

#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
        uint32_t b[4];
        load_matrices_transposed(b, (stage + kHalfStage + v_lane) ^ (d << 5));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add(o[m][d * 2], weights[m], b[0], b[1]);
          multiply_add(o[m][d * 2 + 1], weights[m], b[2], b[3]);
        }
      }
    }

    // Merge the streams, some rows at a time, where the queries were.
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int place = row_warp * kWarpRows + m * 16 + half * 8 + lane / 4;
        if (quad == 0) stats[stream * kRows + place] = make_float2(maximum[m][half], total);
      }
    }
    __syncthreads();  // nobody reads the queries any more, and `stats` is complete
    const int pair_tiles = tiles_of<kTileTokens>(list);
    const bool whole = segment.tiles() == pair_tiles;
    const int pair = at.request * p.num_head_sets + at.head_set;
    const int64_t slot_row = static_cast<int64_t>(blockIdx.x + pair) * kSlotRows;
    const auto top_of = [stats](int place) {
      float top = kNoMaximum;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) top = fmaxf(top, stats[i * kRows + place].x);
      return top;
    };
    const auto stat_of = [stats, top_of](int place) {
      const float top = top_of(place);
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const float2 one = stats[i * kRows + place];
        total += one.y * exp2_fast(one.x - top);
      }
      return make_float2(top, total);
    };
    float* const merge = reinterpret_cast<float*>(q_shared);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = row_warp * kWarpRows + m * 16 + half * 8 + lane / 4;
        const float factor = exp2_fast(maximum[m][half] - top_of(place));
#pragma unroll 1
        for (int quarter = 0; quarter < 2; ++quarter) {
          const int first_place = m * 16 + half * 8 + quarter * kMergeRows;  // of each row warp's
          if (first_place >= places) break;
          if (lane / 16 == quarter) {
            float* const to =
                merge + (warp * kMergeRows + lane / 4 % kMergeRows) * kMergeStride + quad * 2;
#pragma unroll
            for (int d = 0; d < kSteps * 2; ++d) {
              *reinterpret_cast<float2*>(to + d * 8) =
                  make_float2(o[m][d][half * 2] * factor, o[m][d][half * 2 + 1] * factor);
            }
          }
          __syncthreads();
          for (int i = threadIdx.x; i < kRowWarps * kMergeRows * kFours; i += kThreads) {
            const int merge_row = i / kFours, four = i % kFours;  // of all row warps' rows
            const int place_of_four =
                merge_row / kMergeRows * kWarpRows + first_place + merge_row % kMergeRows;
            const int r = row_at(p, place_of_four);
            float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = 0; j < kStreams; ++j) {
              const float4 one = *reinterpret_cast<const float4*>(
                  merge + (j * kRowWarps * kMergeRows + merge_row) * kMergeStride + four * 4);
              total.x += one.x;
              total.y += one.y;
              total.z += one.z;
              total.w += one.w;
            }
            if (r >= 0 && whole) {
              const float factor =
                  softmax_of(p, at.head_set, r, stat_of(place_of_four)).factor;
              Element* const to = p.out + output_row(p, at.request, at.head_set, r) * kHeadDim;
              *reinterpret_cast<uint2*>(to + four * 4) =
                  make_uint2(pack(total.x * factor, total.y * factor),
                             pack(total.z * factor, total.w * factor));
            } else if (r >= 0) {
              const float factor = piece_factor(stat_of(place_of_four));
              *reinterpret_cast<uint2*>(p.partial_o + (slot_row + r) * kHeadDim + four * 4) =
                  make_uint2(pack_halves(total.x * factor, total.y * factor),
                             pack_halves(total.z * factor, total.w * factor));
            }
          }
          __syncthreads();
        }
      }
    }
    for (int place = threadIdx.x; place < places; place += kThreads) {
      const int r = row_at(p, place);
      if (r < 0) continue;
      const float2 stat = stat_of(place);
      if (whole) {
        p.lse[output_row(p, at.request, at.head_set, r)] =
            softmax_of(p, at.head_set, r, stat).lse;
      } else {
        p.partial_stats[slot_row + r] = stat;
      }
    }
    __syncthreads();  // `stats` may be written again
    if (merges_in_place && !whole) parts.add(p, segment, tiles_total);
    padding = 0;
  }
  if (merges_in_place) parts.merge(p, reinterpret_cast<int*>(stats));
}
