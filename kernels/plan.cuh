// Stream-K plan: which work tiles each CTA has. Made on the device from lengths that only the device
// knows, once a pass, for all layers.
//
// A tile is kTileTokens entries of one (request, KV head) pair, or of as many heads as a CTA attends
// to at once (a set), of which an empty request's pairs have one without entries. Turning to a pair
// takes a CTA the time of kTurnTiles tiles; so these are in front of every pair's tiles, without
// entries. All are numbered by request, then head, then place in the list, which is below 0 for the
// first kTurnTiles. CTA c of N has [c*T/N, (c+1)*T/N) of
// them, T being how many there are and N the number of CTAs, or T where that is less.
#pragma once
#include <cstdint>

constexpr int kMaxBatch = 2048;
constexpr int kTurnTiles = 2;

// One request's list of KV entries. The first `count` are table positions, all below `base`; the
// others are positions base, base + 1, ... Dense lists have count = 0, and base = 0 without a window.
struct __align__(16) List {
  int length;
  int count;
  int base;
  int row;  // the request's, of req_to_token and the tables
};

// Where a CTA starts. Holds the list too: a CTA's first KV waits for one load less.
struct __align__(16) CtaStart {
  int tile;     // number of its first tile; the next entry's is one past its last
  int request;  // of that tile, as are:
  int head_set;
  int place;  // of the tile within the pair's list
  List list;
};

struct Plan {
  CtaStart* ctas;  // num_ctas + 1
  List* lists;     // max_batch
};

// CTA that has the tile; tiles_total > 0.
__device__ __forceinline__ int cta_of_tile(int tile, int tiles_total, int num_ctas) {
  return static_cast<int>(((tile + 1LL) * min(num_ctas, tiles_total) - 1) / tiles_total);
}

__host__ __device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// A list's tiles, without those for turning to it.
template <int kTileTokens>
__device__ __forceinline__ int tiles_of(const List& list) {
  return max(div_up(list.length, kTileTokens), 1);
}

struct PlanParams {
  Plan plan;
  const int64_t* seq_lens;
  const int64_t* rows;
  const int* counts;  // null for dense, as is:
  const int* bases;
  int batch;
  int num_head_sets;
  int num_ctas;
  int extra;  // entries of a list past seq_len: num_queries, or the draft step + 1
  int max_count;
  int window;  // dense: positions up to its own that the first query sees; 0: all
};

constexpr int kPlanThreads = 1024;

__device__ __forceinline__ List make_list(const PlanParams& p, int r) {
  const int64_t row = p.rows[r], seq_len = p.seq_lens[r];
  List list{0, 0, 0, static_cast<int>(row)};
  if (p.counts != nullptr) {
    const int64_t base = min(static_cast<int64_t>(p.bases[row]), seq_len);
    if (base > 0) {
      list.base = static_cast<int>(base);
      list.count = min(max(p.counts[row], 0), p.max_count);
    }
  }
  if (p.window > 0) list.base = static_cast<int>(max(seq_len + 1 - p.window, int64_t{0}));
  const int64_t length = list.count + seq_len + p.extra - list.base;
  list.length = static_cast<int>(max(length, static_cast<int64_t>(0)));
  return list;
}

// One block. kTileTokens: see above.
template <int kTileTokens>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const PlanParams p) {
  __shared__ int indptr[kMaxBatch + 1];
  __shared__ int warp_sums[32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int carry = 0;
  for (int first = 0; first < p.batch; first += kPlanThreads) {
    const int r = first + thread;
    int tiles = 0;
    if (r < p.batch) {
      const List list = make_list(p, r);
      p.plan.lists[r] = list;
      tiles = (tiles_of<kTileTokens>(list) + kTurnTiles) * p.num_head_sets;
    }
    int sum = tiles;  // inclusive, first of the warp and then of the block
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
    if (r < p.batch) indptr[r] = carry + before + sum - tiles;
    carry += total;
    __syncthreads();
  }
  if (thread == 0) indptr[p.batch] = carry;
  __syncthreads();
  const int working = min(p.num_ctas, carry);
  for (int c = thread; c <= p.num_ctas; c += kPlanThreads) {
    CtaStart start{carry, 0, 0, 0, {0, 0, 0, 0}};
    if (c < working) {
      start.tile = static_cast<int>(static_cast<int64_t>(c) * carry / working);
      int low = 0, high = p.batch;  // the request is in [low, high)
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (indptr[middle] <= start.tile) low = middle;
        else high = middle;
      }
      const int tiles = (indptr[low + 1] - indptr[low]) / p.num_head_sets;
      const int offset = start.tile - indptr[low];
      start.request = low;
      start.head_set = offset / tiles;
      start.place = offset % tiles - kTurnTiles;
      start.list = p.plan.lists[low];
    }
    p.plan.ctas[c] = start;
  }
}
