// Sizes of an instance of the attention kernel, from the compiler's command line (instances.py), and
// what a call gets.
#pragma once
#include "plan.cuh"
#include "ptx.cuh"

constexpr int kHeadDim = VEGAS_HEAD_DIM;
constexpr int kRowTiles = VEGAS_ROW_TILES;  // a warp's, of 16 rows
constexpr int kStages = VEGAS_STAGES;
constexpr int kWarps = VEGAS_WARPS;
constexpr int kCtas = VEGAS_CTAS;  // on a multiprocessor

constexpr int kThreads = kWarps * 32;
constexpr int kScoreTokens = 16;  // of a group of scores
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kChunks = kRowBytes / 16;
#if VEGAS_FP8
using KV = uint8_t;
#else
using KV = Element;
#endif
constexpr bool kWidens = sizeof(KV) == 1;
constexpr int kChunkDims = 16 / sizeof(KV);  // of 16 bytes of KV
constexpr int kSteps = kHeadDim / 16;  // of 16 dims
constexpr int kScoreHeadBytes = 8;
constexpr int kMaxGroup = 16;

#if VEGAS_WGMMA
// attend_hopper.cuh: all warps attend to a tile, of which each copies a group, for kHeads KV heads
// at once.
constexpr int kHeads = VEGAS_HEADS;
constexpr int kTileTokens = 64;
constexpr int kTileGroups = kWarps;
constexpr int kGroupTokens = kTileTokens / kTileGroups;
constexpr int kRowWarps = 4;
constexpr int kHeadRows = 16 * kRowTiles * kRowWarps;
constexpr int kSetChunks = kHeads * kHeadDim / kChunkDims;
constexpr int kHalfStage = kTileTokens * kSetChunks * 16;  // K, then as much V
// A tile's K, then V, for the products: the stage itself unless the KV has to be widened.
constexpr int kHalfOperands = kTileTokens * kHeads * kRowBytes;
constexpr int kOperandBytes = kWidens ? 2 * kHalfOperands : 0;
constexpr int kStageBytes = 2 * kHalfStage;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kQueryBytes = kHeads * kHeadRows * kRowBytes;
constexpr int kSharedBytes =
    kRingBytes + kOperandBytes + kQueryBytes + kHeads * kMaxGroup * kScoreHeadBytes;
#else
static_assert(!kWidens, "KV of 8 bits: attend_hopper.cuh alone");
// attend.cuh: every kRowWarps warps have a stream of groups of their own.
constexpr int kHeads = 1;
constexpr int kRowWarps = VEGAS_ROW_WARPS;
constexpr int kTileGroups = kWarps / kRowWarps;
constexpr int kGroupTokens = 16;
constexpr int kStreams = kTileGroups;
constexpr int kTileTokens = kGroupTokens * kTileGroups;
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kRows = kWarpRows * kRowWarps;
constexpr int kHeadRows = kRows;
constexpr int kHalfStage = kGroupTokens * kRowBytes;  // K, then as much V
constexpr int kStageBytes = 2 * kHalfStage;
constexpr int kRingBytes = kStreams * kStages * kStageBytes;
constexpr int kMergeRows = 4;               // of each warp, merged at once
constexpr int kMergeStride = kHeadDim + 8;  // floats; the 8 keep rows in different banks
constexpr int kMergeBytes = kWarps * kMergeRows * kMergeStride * 4;
constexpr int kQueryBytes = kRows * kRowBytes > kMergeBytes ? kRows * kRowBytes : kMergeBytes;
constexpr int kStatBytes = kStreams * kRows * 8;
constexpr int kSharedBytes = kRingBytes + kQueryBytes + kStatBytes + kMaxGroup * kScoreHeadBytes;
#endif

// A piece's rows in the workspace: kHeadRows for each of the CTA's heads.
constexpr int kSlotRows = kHeads * kHeadRows;
// Few rows' pieces are merged by whoever finishes the last of them, many by a kernel of their own.
constexpr int kMaxRowsInPlace = 16;

constexpr float kNoMaximum = -1e30f;  // finite: differences of it aren't NaN

struct AttendParams {
  Plan plan;
  const Element* q;
  KV* k;
  KV* v;
  // K and V of the lists' last num_new entries, query by query; the call writes them into k and v.
  const Element* new_k;
  const Element* new_v;
  Element* out;  // (batch * num_queries, num_heads, kHeadDim)
  float* lse;    // (batch * num_queries, num_heads), log2; -inf where a row sees nothing
  const float* sinks;  // (num_heads,), natural logarithms; or null
  const int* req_to_token;
  const int* positions;      // sparse: the layer's (num_rows, max_count)
  __half* partial_o;         // (slots, kSlotRows, kHeadDim): a piece's own outputs
  float2* partial_stats;     // (slots, kSlotRows): maximum (log2), sum
  int* pieces_done;          // a pair's; zeros between calls
  uint8_t* scores;           // (num_kv_heads, group of 16 tokens, head, 8)
  const float* references;   // the layer's (num_rows, num_heads, 2), log2
  const int4* score_groups;  // (batch,): selection.cu's ScoreGroups
  int64_t q_stride;
  int64_t new_k_stride;
  int64_t new_v_stride;
  int64_t req_to_token_stride;
  int64_t score_head_stride;
  int max_count;
  int batch;
  int num_kv_heads;
  int num_head_sets;  // of kHeads KV heads
  int group;  // query heads of a KV head
  int num_queries;
  int num_new;  // 0 or num_queries
  int keeps_scores;  // whether a part of the L2 is set aside for them
  int window;   // positions up to its own that a query sees; 0: all
  float scale;  // times log2(e)
  float v_scale;  // of the outputs
};
