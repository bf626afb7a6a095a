// Where the attention kernels write the scores of a request's first and last query. selection.cu
// reads them: ScoreGroups there.
#pragma once
#include "params.cuh"

// A pair's scores: groups of 16 tokens, in each 8 bytes for every kind, a kind being a head with one
// of the two queries.
struct ScorePlace {
  uint8_t* at;
  int groups;
  int group_bytes;
  int lowest_exponent;
};
__device__ __forceinline__ ScorePlace score_place(const AttendParams& p, const CtaStart& at, int kv_head) {
  const int4 groups = p.score_groups[at.request];
  const int bytes = (p.num_queries > 1 ? 2 * p.group : p.group) * (kScoreTokens / 2);
  return {p.scores + kv_head * p.score_head_stride + static_cast<int64_t>(groups.x) * bytes,
          groups.y, bytes, groups.z};
}

// Where a row's scores go in a group, and the exponent that they get. In shared memory: a reference
// that the loop got from global memory would make its first use wait for the loop's own loads from
// there.
struct ScoreRow {
  float shift;  // -reference - the request's lowest exponent
  int offset;   // -1: nowhere
};
static_assert(sizeof(ScoreRow) == kScoreRowBytes);

__device__ __forceinline__ ScoreRow score_row(const AttendParams& p, const CtaStart& at, int kv_head,
                                              int r, int lowest_exponent) {
  const int from_last = r - (p.num_queries - 1) * p.group;
  const bool first = r < p.group;
  if (!first && (from_last < 0 || r >= p.num_queries * p.group)) return {0.f, -1};
  const int head = first ? r : from_last, which = first ? 0 : 1;
  const int64_t row = at.list.row;
  const int64_t at_head = (row * p.num_kv_heads + kv_head) * p.group + head;
  return {-p.references[at_head * 2 + which] - lowest_exponent,
          (which * p.group + head) * (kScoreTokens / 2)};
}

// Whether any of the 8 rows from r on has scores to store.
__device__ __forceinline__ bool has_scores(const AttendParams& p, int r) {
  return r < p.group ||
         (r + 8 > (p.num_queries - 1) * p.group && r < p.num_queries * p.group);
}
