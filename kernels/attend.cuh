// Split-KV attention of a few queries over KV with page size 1: the memory-bound main loop.
//
// A CTA walks its tiles (plan.cuh) in segments, a segment being its part of one (request, KV head)
// pair. Rows of the score matrix are a pair's (query, head of the group), query-major. A stream is
// kRowWarps warps that share a ring of KV in shared memory; stream i takes every kStreams-th group
// of 16 entries, with its own maxima, sums and outputs, so that the main loop has no CTA barrier.
// At a segment's end the streams' results are merged and written to the workspace, and the pieces of
// a pair by its last segment or a kernel of their own: combine.cuh.
//
// Token t = 4q + 2j + b of a group of 16 lies in ring row 8j + 2q + b, so that a thread's four
// scores of a row are those of four neighbouring tokens.
#pragma once
#include "combine.cuh"
#include "params.cuh"
#include "plan.cuh"
#include "ptx.cuh"

// A row's maximum may lag behind, while four of its weights relative to it sum up to no more.
constexpr float kMaximumSlack = 256.f;

// Where a row's scores go in a group of `scores`, and the exponent that they get.
struct ScoreRow {
  float shift;  // -reference - the request's lowest exponent
  int offset;   // -1: nowhere
};

// Maps a list's entries to KV slots. Every entry may be asked for: those past the end give the last.
template <bool kSparse>
struct Entries {
  const int* slots;  // the request's row of req_to_token
  const int* table;
  int last, count, base;

  // First of two dependent loads.
  __device__ __forceinline__ int position(int entry) const {
    entry = min(entry, last);
    if (kSparse) {
      if (entry < count) return min(max(table[entry], 0), base - 1);
      return base + entry - count;
    }
    return entry;
  }
  __device__ __forceinline__ int slot(int position) const { return slots[position]; }
};

// Four neighbouring tokens' scores as 4 bits each, the lowest first: round(log2(weight * factor)),
// from 0 to 15. Rounding goes by the weight itself, up from 1.5 times a power of two. decode in
// selection.cu is the inverse.
__device__ __forceinline__ uint16_t encode(float factor, float a, float b, float c, float d) {
  // The exponent, and what of the mantissa clamping to a byte leaves.
  const auto byte = [factor](float weight) {
    return (__float_as_int(weight * factor) - (127 << 23) + (1 << 22)) >> 19;
  };
  const uint32_t bytes = pack_bytes(byte(b), byte(d), byte(a), byte(c));
  return static_cast<uint16_t>((bytes & 0xF0F0) | ((bytes >> 20) & 0x0F0F));
}

// Starts this warp's share of copying a group's K and V into a stage.
__device__ __forceinline__ void start_copies(const char* k, const char* v, int64_t slot_stride,
                                             int my_slot, int valid, uint32_t stage, int row_warp,
                                             int lane, uint64_t policy) {
  constexpr int kRowsAtOnce = 32 / kChunks;
  constexpr int kShare = kGroupTokens / kRowWarps;
  static_assert(kShare % kRowsAtOnce == 0, "a warp copies whole instructions");
#pragma unroll
  for (int i = 0; i < kShare / kRowsAtOnce; ++i) {
    const int token = row_warp * kShare + i * kRowsAtOnce + lane / kChunks;
    const int chunk = lane % kChunks;
    const int64_t offset = __shfl_sync(~0u, my_slot, token) * slot_stride;
    const int row = ((token >> 1) & 1) * 8 + (token >> 2) * 2 + (token & 1);
    const uint32_t to = stage + row * kRowBytes + ((chunk ^ (row & 7)) << 4);
    const uint32_t bytes = token < valid ? 16 : 0;
    copy_async(to, k + offset, bytes, policy);
    copy_async(to + kHalfStage, v + offset, bytes, policy);
  }
}

template <bool kSparse, bool kScores>
__global__ void __launch_bounds__(kThreads, kCtas)
    attend_kernel(const AttendParams p) {
  extern __shared__ __align__(1024) char shared[];
  char* const q_shared = shared + kBufferBytes;
  float2* const stats = reinterpret_cast<float2*>(shared + kBufferBytes + kQueryBytes);
  ScoreRow* const score_rows =
      reinterpret_cast<ScoreRow*>(shared + kBufferBytes + kQueryBytes + kStatBytes);
  const uint32_t shared_base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stream = warp / kRowWarps, row_warp = warp % kRowWarps;
  const int quad = lane % 4;
  const uint32_t ring = shared_base + stream * kStages * kStageBytes;
  const int rows_used = p.num_queries * p.group;
  const uint64_t policy = evict_first_policy();
  const int64_t slot_stride = static_cast<int64_t>(p.num_kv_heads) * kRowBytes;

  // Byte addresses of this lane in ldmatrix; a step of 16 dims flips bits 5 and up.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t k_lane =
      ((matrix >> 1) * 8 + matrix_row) * kRowBytes + (((matrix & 1) ^ matrix_row) << 4);
  const uint32_t v_lane =
      ((matrix & 1) * 8 + matrix_row) * kRowBytes + (((matrix >> 1) ^ matrix_row) << 4);
  const uint32_t q_lane =
      shared_base + kBufferBytes + row_warp * kWarpRows * kRowBytes + v_lane;

  // The last 8 rows of a warp's may all be padding.
  const bool upper_used = row_warp * kWarpRows + kWarpRows - 8 < rows_used;
  // Which blocks of 8 rows have scores to store.
  int scored_blocks = 0;
  if (kScores) {
#pragma unroll
    for (int block = 0; block < 2 * kRowTiles; ++block) {
      const int r = row_warp * kWarpRows + block * 8;
      const bool first = r < p.group;
      const bool last = r + 8 > (p.num_queries - 1) * p.group && r < rows_used;
      scored_blocks |= (first || last) << block;
    }
  }

  CtaStart at = p.plan.ctas[blockIdx.x];
  int remaining = p.plan.ctas[blockIdx.x + 1].tile - at.tile;

  while (remaining > 0) {
    const List list = at.list;
    const int list_tiles = tiles_of<kTileTokens>(list);
    const int tiles = min(remaining, list_tiles - at.place);
    const int64_t row = list.row;
    const Entries<kSparse> entries{p.req_to_token + row * p.req_to_token_stride,
                                   p.positions + row * p.max_count, max(list.length - 1, 0),
                                   list.count, list.base};
    const int head_bytes = at.head * kRowBytes + (lane % kChunks) * 16;
    const char* const k = reinterpret_cast<const char*>(p.k) + head_bytes;
    const char* const v = reinterpret_cast<const char*>(p.v) + head_bytes;
    const int first_token = (at.place * kStreams + stream) * kGroupTokens;
    // The last tile may end before this stream's group of it.
    const int steps =
        tiles - (first_token + (tiles - 1) * kTileTokens >= list.length ? 1 : 0);
    const int my_entry = first_token + lane % kGroupTokens;

    // Fill the ring but for one stage, and have the slots of the step after, and the positions of
    // the step after that.
    int next_slot, next_position;
    {
      int slots[kStages];
#pragma unroll
      for (int s = 0; s < kStages; ++s) slots[s] = entries.position(my_entry + s * kTileTokens);
#pragma unroll
      for (int s = 0; s < kStages; ++s) slots[s] = entries.slot(slots[s]);
      next_position = entries.position(my_entry + kStages * kTileTokens);
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        if (s < steps) {
          start_copies(k, v, slot_stride, slots[s], list.length - first_token - s * kTileTokens,
                       ring + s * kStageBytes, row_warp, lane, policy);
        }
        commit_copies();
      }
      next_slot = slots[kStages - 1];
    }

    // Queries, zeros in the rows that pad.
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int r = i / kChunks, chunk = i % kChunks;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (r < rows_used) {
        const int query = r / p.group;
        const int head = at.head * p.group + r - query * p.group;
        const int64_t token = static_cast<int64_t>(at.request) * p.num_queries + query;
        value = *reinterpret_cast<const uint4*>(p.q + token * p.q_stride + head * kHeadDim +
                                                chunk * 8);
      }
      *reinterpret_cast<uint4*>(q_shared + r * kRowBytes + ((chunk ^ (r & 7)) << 4)) = value;
    }

    int score_steps = 0;
    uint8_t* score_at = nullptr;
    int score_step_bytes = 0;
    if (kScores) {
      const int4 groups = p.score_groups[at.request];
      const int kinds = p.num_queries > 1 ? 2 * p.group : p.group;
      const int first_group = first_token / kGroupTokens;
      score_steps = div_up(max(groups.y - first_group, 0), kStreams);
      score_step_bytes = kStreams * kinds * (kGroupTokens / 2);
      score_at = p.scores + at.head * p.score_head_stride +
                 static_cast<int64_t>(groups.x + first_group) * kinds * (kGroupTokens / 2) +
                 quad * 2;
      // In shared memory: a reference that the loop got from global memory would make its first use
      // wait for the loop's own loads from there.
      for (int r = threadIdx.x; r < kRows; r += kThreads) {
        const int from_last = r - (p.num_queries - 1) * p.group;
        int kind = -1, which = 0, head = r;
        if (r < p.group) {
          kind = r;
        } else if (from_last >= 0 && r < rows_used) {
          kind = p.group + from_last;
          which = 1;
          head = from_last;
        }
        ScoreRow score_row{0.f, -1};
        if (kind >= 0) {
          const int64_t at_head = (row * p.num_kv_heads + at.head) * p.group + head;
          score_row.shift = -p.references[at_head * 2 + which] - groups.z;
          score_row.offset = kind * (kGroupTokens / 2);
        }
        score_rows[r] = score_row;
      }
    }
    __syncthreads();  // queries and score rows are there

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
    int stage_index = 0;
    for (int s = 0; s < steps; ++s) {
      const int token = first_token + s * kTileTokens;
      wait_copies<kStages - 2>();
      if (kRowWarps == 1) __syncwarp();
      else named_barrier(1 + stream, 32 * kRowWarps);
      // The stage that the step before this one read.
      const int free_index = stage_index == 0 ? kStages - 1 : stage_index - 1;
      if (s + kStages - 1 < steps) {
        start_copies(k, v, slot_stride, next_slot,
                     list.length - token - (kStages - 1) * kTileTokens,
                     ring + free_index * kStageBytes, row_warp, lane, policy);
      }
      commit_copies();
      next_slot = entries.slot(next_position);
      next_position = entries.position(my_entry + (s + kStages + 1) * kTileTokens);

      const uint32_t stage = ring + stage_index * kStageBytes;
      stage_index = stage_index == kStages - 1 ? 0 : stage_index + 1;

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

      // Query i sees entries below all_visible + i.
      if (token + kGroupTokens > all_visible) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = row_warp * kWarpRows + m * 16 + half * 8 + lane / 4;
            const int limit =
                all_visible + min(r / p.group, p.num_queries - 1) - token - quad * 4;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                if (2 * j + b >= limit) x[m][j][half * 2 + b] = -INFINITY;
              }
            }
          }
        }
      }

      // Weights relative to the maxima so far; says whether those are too old.
      uint32_t weights[kRowTiles][4];
      float added[kRowTiles][2];
      const bool store_scores = kScores && s < score_steps;
      const auto weigh = [&]() -> bool {
        bool outgrown = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (m == kRowTiles - 1 && half == 1 && !upper_used) {
              weights[m][1] = weights[m][3] = 0;
              added[m][1] = 0.f;
              continue;
            }
            const float top = maximum[m][half];
            const float a = exp2_fast(fmaf(x[m][0][half * 2], p.scale, -top));
            const float b = exp2_fast(fmaf(x[m][0][half * 2 + 1], p.scale, -top));
            const float c = exp2_fast(fmaf(x[m][1][half * 2], p.scale, -top));
            const float d = exp2_fast(fmaf(x[m][1][half * 2 + 1], p.scale, -top));
            weights[m][half] = pack(a, b);
            weights[m][half + 2] = pack(c, d);
            added[m][half] = (a + b) + (c + d);
            outgrown |= added[m][half] > kMaximumSlack;
            if (store_scores && (scored_blocks >> (2 * m + half) & 1)) {
              const ScoreRow score =
                  score_rows[row_warp * kWarpRows + m * 16 + half * 8 + lane / 4];
              const uint16_t code = encode(exp2_fast(top + score.shift), a, b, c, d);
              if (score.offset >= 0) {
                *reinterpret_cast<uint16_t*>(score_at + score.offset) = code;
              }
            }
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

    // Merge the streams, through the ring's memory.
    wait_copies<0>();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int r = row_warp * kWarpRows + m * 16 + half * 8 + lane / 4;
        if (quad == 0) stats[stream * kRows + r] = make_float2(maximum[m][half], total);
      }
    }
    __syncthreads();  // nobody reads the ring any more, and `stats` is complete
    float* const merge = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int warp_row = m * 16 + half * 8 + lane / 4;
        const int r = row_warp * kWarpRows + warp_row;
        float top = kNoMaximum;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) top = fmaxf(top, stats[i * kRows + r].x);
        const float factor = exp2_fast(maximum[m][half] - top);
        float* const to = merge + (stream * kRows + r) * kMergeStride + quad * 2;
#pragma unroll
        for (int d = 0; d < kSteps * 2; ++d) {
          *reinterpret_cast<float2*>(to + d * 8) =
              make_float2(o[m][d][half * 2] * factor, o[m][d][half * 2 + 1] * factor);
        }
      }
    }
    __syncthreads();
    const int pair = at.request * p.num_kv_heads + at.head;
    const int64_t slot_row = static_cast<int64_t>(blockIdx.x + pair) * kRows;
    constexpr int kFours = kHeadDim / 4;
    for (int i = threadIdx.x; i < rows_used * kFours; i += kThreads) {
      const int r = i / kFours, four = i % kFours;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float4 one = *reinterpret_cast<const float4*>(
            merge + (j * kRows + r) * kMergeStride + four * 4);
        total.x += one.x;
        total.y += one.y;
        total.z += one.z;
        total.w += one.w;
      }
      *reinterpret_cast<float4*>(p.partial_o + (slot_row + r) * kHeadDim + four * 4) = total;
    }
    for (int r = threadIdx.x; r < rows_used; r += kThreads) {
      float top = kNoMaximum, total = 0.f;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) top = fmaxf(top, stats[i * kRows + r].x);
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const float2 one = stats[i * kRows + r];
        total += one.y * exp2_fast(one.x - top);
      }
      p.partial_stats[slot_row + r] = make_float2(top, total);
    }
    if (kMergesInPlace) __threadfence();
    __syncthreads();  // the ring may be filled again
    if (kMergesInPlace) {
      const Pieces pieces = pieces_of(p.plan, at.tile - at.place, list_tiles, gridDim.x);
      bool last = false;
      if (threadIdx.x == 0) {
        last = atomicAdd(p.pieces_done + pair, 1) == pieces.end - pieces.first - 1;
        if (last) p.pieces_done[pair] = 0;
      }
      if (__syncthreads_or(last)) {
        __threadfence();
        for (int r = warp; r < rows_used; r += kWarps) {
          merge_row(p, pieces, at.request, at.head, r, lane);
        }
      }
    }

    remaining -= tiles;
    at.tile += tiles;
    at.place = 0;
    if (++at.head == p.num_kv_heads) {
      at.head = 0;
      ++at.request;
      if (remaining > 0) at.list = p.plan.lists[at.request];
    }
  }
}
