// A CTA's way through its tiles, twice: the segment whose KV it attends to, and, some steps ahead,
// the groups of 16 entries whose KV it asks for. The second doesn't stop at a segment's end, so that
// KV keeps coming while results are merged.
#pragma once
#include "params.cuh"

// A CTA's part of one (request, KV head) pair's tiles.
struct Segment {
  CtaStart at;
  int remaining;  // tiles of this and all later segments

  // Those with entries; 0 or less where the CTA's part ends while turning to the pair.
  __device__ __forceinline__ int tiles() const {
    return min(at.place + remaining, tiles_of<kTileTokens>(at.list)) - max(at.place, 0);
  }
  // Of a stream's groups: the first's first entry, and how many. Where all warps attend to a tile,
  // every warp has a group of it, if one without entries.
  __device__ __forceinline__ int first_entry(int stream) const {
    return (max(at.place, 0) * kTileGroups + stream) * kGroupTokens;
  }
  __device__ __forceinline__ int groups(int stream) const {
    const int tiles = this->tiles();
    if (VEGAS_WGMMA) return tiles;
    // The last tile may end before this stream's group of it.
    const bool ends_early = first_entry(stream) + (tiles - 1) * kTileTokens >= at.list.length;
    return tiles - (ends_early ? 1 : 0);
  }
  __device__ __forceinline__ void next(const AttendParams& p) {
    const int done = min(remaining, tiles_of<kTileTokens>(at.list) - at.place);
    remaining -= done;
    at.tile += done;
    at.place = -kTurnTiles;
    if (++at.head_set == p.num_head_sets) {
      at.head_set = 0;
      ++at.request;
      if (remaining > 0) at.list = p.plan.lists[at.request];
    }
  }
};

// What one lane knows of a group on its way: the KV slot, or for the time being the position, of
// entry lane % 16.
struct Group {
  int index;
  int row;
  int request;
  int head_set;
  int valid;  // entries of the group, or 0 or less; those past them repeat the list's last

  __device__ __forceinline__ bool is_copied() const {
    return valid > (VEGAS_WGMMA ? -kTileTokens : 0);
  }
};
constexpr int kNothing = -kTileTokens;  // `valid` past the last tile

// The walk ahead. From entry to slot there are two dependent loads; each gets a step's time.
template <bool kSparse>
struct Lookahead {
  Segment segment;
  int entry;
  int groups;  // of the segment from `entry` on

  __device__ __forceinline__ void open(int stream) {
    entry = segment.first_entry(stream);
    groups = segment.groups(stream);
  }

  // The stream's next group, by entries. After the last one: groups without entries.
  __device__ __forceinline__ Group next(const AttendParams& p, int stream, int lane) {
    while (groups <= 0) {
      if (segment.remaining > 0) segment.next(p);
      if (segment.remaining == 0) return {0, segment.at.list.row, 0, 0, kNothing};
      open(stream);
    }
    return take(lane);
  }
  // The same, but groups without entries after the segment's last one.
  __device__ __forceinline__ Group take(int lane) {
    const List& list = segment.at.list;
    const Group group{min(entry + lane % kGroupTokens, max(list.length - 1, 0)), list.row,
                      segment.at.request, segment.at.head_set,
                      groups > 0 ? list.length - entry : kNothing};
    entry += kTileTokens;
    --groups;
    return group;
  }

  // From entry to position, in two parts so that several loads can be on their way.
  __device__ __forceinline__ int load(const AttendParams& p, const Group& group) const {
    if (!kSparse || group.index >= segment.at.list.count) return 0;
    return p.positions[static_cast<int64_t>(group.row) * p.max_count + group.index];
  }
  __device__ __forceinline__ Group position(Group group, int loaded) const {
    const List& list = segment.at.list;
    group.index = kSparse && group.index < list.count ? min(max(loaded, 0), list.base - 1)
                                                      : group.index + list.base - list.count;
    return group;
  }
  __device__ __forceinline__ Group positions(const AttendParams& p, int stream, int lane) {
    const Group group = next(p, stream, lane);
    return position(group, load(p, group));
  }
};

__device__ __forceinline__ Group slots(const AttendParams& p, Group group) {
  group.index = p.req_to_token[group.row * p.req_to_token_stride + group.index];
  return group;
}

// A CTA's first groups, of its first segment alone: slots of kStages, the positions of the one after.
// Loads of a kind are on their way together; the compiler keeps them so where there is a barrier.
template <bool kSparse>
__device__ __forceinline__ void first_groups(const AttendParams& p, Lookahead<kSparse>& lookahead,
                                             int lane, Group (&groups)[kStages + 1]) {
  int loaded[kStages + 1];
#pragma unroll
  for (int s = 0; s <= kStages; ++s) {
    groups[s] = lookahead.take(lane);
    loaded[s] = lookahead.load(p, groups[s]);
  }
  __syncwarp();
#pragma unroll
  for (int s = 0; s <= kStages; ++s) groups[s] = lookahead.position(groups[s], loaded[s]);
#pragma unroll
  for (int s = 0; s < kStages; ++s) groups[s] = slots(p, groups[s]);
  __syncwarp();
}

// Where the 16 bytes of K and V from `dim` on come from, of one of a group's 16 tokens.
struct Sources {
  const void* k;
  const void* v;
};
__device__ __forceinline__ Sources sources(const AttendParams& p, const Group& group, int slot,
                                           int token, int dim, bool any_new) {
  if (!kWidens && any_new) {
    const int which = token - (group.valid - p.num_new);
    if (which >= 0 && token < group.valid) {
      const int64_t from = static_cast<int64_t>(group.request) * p.num_new + which;
      return {p.new_k + from * p.new_k_stride + dim, p.new_v + from * p.new_v_stride + dim};
    }
  }
  const int64_t offset = static_cast<int64_t>(slot) * p.num_kv_heads * kHeadDim + dim;
  return {p.k + offset, p.v + offset};
}

// Starts this warp's copies of a group: copy(i, any_new) for each instruction of a lane.
template <int kCopies, typename Copy>
__device__ __forceinline__ void for_copies(const AttendParams& p, const Group& group, Copy copy) {
  if (p.num_new > 0 && group.valid < kGroupTokens + p.num_new) {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) copy(i, true);
  } else {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(i, false);
  }
}

// Writes new K and V into the cache: this thread's part of it, 16 bytes of either at a time.
__device__ __forceinline__ void store_new(const AttendParams& p, int num_ctas) {
  if (kWidens) return;  // new KV of 8 bits is the caller's
  const int of_token = p.num_kv_heads * kChunks;
  const int total = p.batch * p.num_new * of_token;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < total; i += num_ctas * kThreads) {
    const int token = i / of_token, dim = i % of_token * 8;
    const List list = p.plan.lists[token / p.num_new];
    const int entry = list.length - p.num_new + token % p.num_new;
    if (entry < 0) continue;
    const int position = entry + list.base - list.count;
    const int64_t slot = p.req_to_token[list.row * p.req_to_token_stride + position];
    const auto k = *reinterpret_cast<const uint4*>(p.new_k + token * p.new_k_stride + dim);
    const auto v = *reinterpret_cast<const uint4*>(p.new_v + token * p.new_v_stride + dim);
    const int64_t to = slot * p.num_kv_heads * kHeadDim + dim;
    *reinterpret_cast<uint4*>(p.k + to) = k;
    *reinterpret_cast<uint4*>(p.v + to) = v;
  }
}
