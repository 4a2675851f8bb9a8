// One row as one thread of its cluster sees it: where the row and shared memory lie, and which elements this
// thread owns.
#pragma once

#include <cstdint>

#include "cluster/messages.cuh"
#include "cluster/smem_layout.cuh"
#include "core/config.cuh"
#include "core/launch_traits.cuh"
#include "core/row_view.cuh"
#include "gvr_topk/params.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

template <typename T>
struct RowContext {
  using Element = T;

  RowView<T> row;
  int k;
  int rank;  // rank of this CTA in the cluster
  int ctas;  // CTAs in the cluster
  int log2_ctas;
  // A CTA owns consecutive elements. If one tile per warp is enough, the tile stays in registers, and warps
  // own equal parts. Otherwise the CTA walks through its part 16 tiles at a time, one per warp, because DRAM
  // prefers this to 16 separate streams. Either way (CTA, step, warp, index in the tile) is index order.
  int begin;  // start of this warp's first tile
  int end;    // end of this warp's part, or of the CTA's part if there are several steps
  int steps;  // tiles per warp
  int thread;
  int lane;
  int warp;
  uint32_t zero;  // see ptx::unknown_zero
  Shared* shared;
  Candidate* candidates;  // [candidate_capacity] candidates of this CTA, in index order
  int candidate_capacity;
  KeyList list;
  uint16_t* masks;  // [steps][kThreads] bits of candidates; only for rows of several steps
  uint4* ring;      // [kRingDepth][vectors][kThreads] tiles under way; null: tiles are loaded when needed

  // Sets the row's length, and with it the parts that this CTA and warp own.
  GVR_DEVICE void set_length(int length) {
    row.n = length;
    const int n = max(length, 0);
    const int span = warp_span(n, log2_ctas, sizeof(T));
    steps = steps_of(span);
    if (steps == 1) {
      begin = min(n, (rank * kWarps + warp) * span);
      end = min(n, begin + span);
    } else {
      const int part = steps * kStepElements;
      begin = min(n, rank * part + warp * kTileElements);
      end = min(n, (rank + 1) * part);
    }
  }

  GVR_DEVICE int tile_begin(int step) const { return min(end, begin + step * kStepElements); }

  // Bits of one tile's elements for which `test(key)` holds. Testing values (match_tile) is faster.
  template <typename Test>
  GVR_DEVICE uint32_t match_keys(const Tile<T>& tile, int at, Test test) const {
    return valid_bits<T>(at, end, lane) &
           match_tile(tile, at, end, [&](float x) { return test(order_key(x)); });
  }

  // Vectors of one tile that hold elements of this warp's part.
  GVR_DEVICE int tile_vecs(int step) const {
    constexpr int kGroup = 32 * kPerVec<T>;
    return min(Tile<T>::kVecs, (end - tile_begin(step) + kGroup - 1) / kGroup);
  }

  GVR_DEVICE uint16_t& mask(int step) const { return masks[step * kThreads + thread]; }

  // The block's threads form one team for each CTA of the cluster. A team sends to the CTA `team_target`.
  GVR_DEVICE int team_size() const { return kThreads >> log2_ctas; }
  GVR_DEVICE int team_target() const { return thread >> (kLog2Threads - log2_ctas); }
  GVR_DEVICE int team_index() const { return thread & (team_size() - 1); }

  // Calls visit(step, first position of the tile) with each tile loaded. If there is only one tile, it stays
  // in its registers and is never read again.
  template <typename Visit>
  GVR_DEVICE void for_each_tile(Tile<T>& tile, Visit visit) const {
    if (steps == 1) {
      visit(0, begin);
      return;
    }
    if (ring == nullptr) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        load_tile(row, tile_begin(step), end, lane, tile);
        visit(step, tile_begin(step));
      }
      return;
    }
    for (int step = 0; step < kRingDepth; ++step) request_tile(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::wait_copies<kRingDepth - 1>();
      const uint4* slot = ring_slot(step);
      if (is_whole(step)) {
#pragma unroll
        for (int j = 0; j < Tile<T>::kVecs; ++j) tile.vec[j] = slot[j * kThreads];
      } else {
        load_tile(row, tile_begin(step), end, lane, tile,
                  [&](int j, const T*) { return slot[j * kThreads]; });
      }
      visit(step, tile_begin(step));
      request_tile(step + kRingDepth);
    }
  }

  // Whether the whole tile lies in the row and can be loaded 16 bytes at a time. In an aligned row this fails
  // only for the last tiles.
  GVR_DEVICE bool is_whole(int step) const {
    return row.aligned && begin + step * kStepElements + kTileElements <= end;
  }

  // A thread reads back only what it requested, so the ring needs no barrier.
  GVR_DEVICE uint4* ring_slot(int step) const {
    return ring + (step % kRingDepth) * Tile<T>::kVecs * kThreads + thread;
  }

  GVR_DEVICE void request_tile(int step) const {
    if (step < steps && row.aligned) {
      const int left = end - tile_begin(step) - lane * kPerVec<T>;
      const T* first = row.data + tile_begin(step) + lane * kPerVec<T>;
      const uint32_t slot = ptx::shared_address(ring_slot(step));
      const bool whole = is_whole(step);
#pragma unroll
      for (int j = 0; j < Tile<T>::kVecs; ++j) {
        if (whole || j * Tile<T>::kGroup + kPerVec<T> <= left) {
          ptx::copy_async(slot + j * kThreads * sizeof(uint4), first + j * Tile<T>::kGroup);
        }
      }
    }
    ptx::commit_copies();  // An empty group is committed too, because waits count groups.
  }

  // Calls visit(i, i < count) for this thread's candidates. Warps own contiguous runs of them, and all lanes
  // of a warp take part in every call.
  template <typename Visit>
  GVR_DEVICE void for_each_candidate(uint32_t count, Visit visit) const {
    const int rounds = static_cast<int>(count + kThreads - 1) >> kLog2Threads;
    const int first = warp * rounds * 32 + lane;
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) visit(first + 32 * r, first + 32 * r < static_cast<int>(count));
  }
};

// The context of a row whose length is not known yet; `RowJob::agree_on_length` sets the length.
// `known_sizes`: the sizes in `traits` are constants.
template <typename T>
GVR_DEVICE RowContext<T> make_context(const TopkParams& p, const LaunchTraits& traits,
                                      const SmemLayout& layout, const RowView<T>& row, unsigned char* storage,
                                      bool known_sizes = false) {
  // A size that is a constant must remain visible to the compiler as one.
  const auto keep = [&](int& size) {
    if (!known_sizes) ptx::keep(size);
  };
  RowContext<T> ctx;
  ctx.row = row;
  ctx.k = p.k;
  ptx::keep(ctx.k);
  ptx::keep(ctx.row.data);
  ctx.rank = traits.log2_ctas() > 0 ? ptx::cluster_rank() : 0;
  ctx.log2_ctas = traits.log2_ctas();
  keep(ctx.log2_ctas);
  ctx.ctas = 1 << ctx.log2_ctas;
  keep(ctx.ctas);
  ctx.thread = threadIdx.x;
  ptx::keep(ctx.thread);
  ctx.zero = ptx::unknown_zero();
  ctx.lane = ctx.thread & 31;
  ctx.warp = ctx.thread >> 5;
  ctx.shared = reinterpret_cast<Shared*>(storage);
  int segment = traits.list_capacity() >> ctx.log2_ctas;
  keep(segment);
  ctx.list = KeyList(reinterpret_cast<uint32_t*>(storage + sizeof(Shared)), segment, ctx.rank);
  uint4* ring = static_cast<uint4*>(ctx.list.end(traits.list_capacity()));
  ctx.ring = traits.has(LaunchTraits::kRing) ? ring : nullptr;
  ctx.masks = reinterpret_cast<uint16_t*>(
      traits.has(LaunchTraits::kRing) ? ring + kRingDepth * kThreads * Tile<T>::kVecs : ring);
  ctx.candidates = reinterpret_cast<Candidate*>(ctx.masks + layout.masks);
  ctx.candidate_capacity = layout.candidate_capacity;
  return ctx;
}

GVR_DEVICE void cluster_sync(int ctas) {
  if (ctas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

// Sum of the numbers that earlier warps have stored in `warp_value[which]`.
template <typename Context>
GVR_DEVICE uint32_t earlier_warps(const Context& ctx, int which) {
  return __reduce_add_sync(0xffffffffu, ctx.lane < ctx.warp ? ctx.shared->warp_value[which][ctx.lane] : 0);
}

}  // namespace gvr_topk
