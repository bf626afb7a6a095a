// Rows of the score matrix: a KV head's (query, head of the group), query-major. They are numbered
// r; the places that they have in the products' operands follow that order, but for the last
// query's, which come at kLastPlace: there a lane that has a head's score of the first query also has
// the same head's of the last one.
#pragma once
#include "params.cuh"

// Of the places in front, those from the group's size on are the following queries', up to here.
constexpr int kLastPlace = VEGAS_WGMMA ? 32 : kRowTiles == 1 ? 8 : 16;

// The row that has the place; -1 where it pads.
__device__ __forceinline__ int row_at(const AttendParams& p, int place) {
  const int before_last = (p.num_queries - 1) * p.group;
  if (p.num_queries == 1) return place < p.group ? place : -1;
  const int from_last = place - kLastPlace;
  if (from_last >= 0 && from_last < p.group) return before_last + from_last;
  const int r = from_last < 0 ? place : place - p.group;
  return r < before_last ? r : -1;
}

// Places from this one on all pad.
__device__ __forceinline__ int end_of_places(const AttendParams& p) {
  const int rows = p.num_queries * p.group;
  return p.num_queries == 1 ? rows : max(rows, kLastPlace + p.group);
}

// Of `out` and `lse`.
__device__ __forceinline__ int64_t output_row(const AttendParams& p, int request, int kv_head,
                                              int r) {
  const int query = r / p.group;
  const int64_t token = static_cast<int64_t>(request) * p.num_queries + query;
  return (token * p.num_kv_heads + kv_head) * p.group + r - query * p.group;
}
