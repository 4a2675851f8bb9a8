// A row on its way through shared memory: every warp streams its own contiguous part.
#pragma once

#include "gvr/state.cuh"

namespace gvr_topk::gvr {

// A warp's part, in words of 64 consecutive bytes a lane, so that (warp, word, lane, place) is index order.
// Words are fetched 16 bytes at a time in coalesced order; the vectors of a lane are rotated so that reads of
// neighbouring lanes fall into different banks. The part starts at a 16-byte boundary: up to seven elements
// before the row's first belong to warp 0, and are never read.
template <typename T>
struct Stream {
  static constexpr int kVecs = cluster::kWordBytes / sizeof(uint4);
  static constexpr int kLaneElements = kVecs * kPerVec<T>;
  static constexpr int kElements = 32 * kLaneElements;  // of a word
  static constexpr int kWordVecs = 32 * kVecs;
  static_assert(kVecs == 4, "the rotation is of four vectors");

  const T* data;  // of the part
  int lead;       // elements of it before the row's first
  int length;     // elements of it, those included
  int begin;      // its place behind the row's 16-byte boundary
  int shift;      // elements between that boundary and the row
  int lane;
  int steps;        // words
  int first_whole;  // words that are whole are fetched and tested without a look at the ends
  uint32_t whole;
  uint4* fetched;     // where in the ring's first slot this lane fetches to,
  const uint4* held;  // and where its own vectors start

  __device__ __forceinline__ Stream(const Row<T>& row, int warp, int lane_id, uint4* rings) : lane(lane_id) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.data) % sizeof(uint4) / sizeof(T));
    const int n = row.n + shift;
    const int span = warp_span(n, 0, sizeof(T));
    begin = min(warp * span, n);
    length = min(span, n - begin);
    data = row.data - shift + begin;
    lead = warp == 0 ? shift : 0;
    steps = (length + kElements - 1) / kElements;
    first_whole = lead > 0;
    whole = max(length / kElements - first_whole, 0);
    uint4* const ring = rings + warp * kRingDepth * kWordVecs;
    fetched = ring + ((lane & ~3) + ((lane & 3) ^ (lane >> 3 & 3)));
    held = ring + lane * kVecs;
  }

  __device__ __forceinline__ bool is_whole(int step) const {
    return static_cast<uint32_t>(step - first_whole) < whole;
  }

  // Starts to fetch a word; nothing beyond the ends.
  __device__ __forceinline__ void request(int step, int slot) const {
    const T* from = data + step * kElements + lane * kPerVec<T>;
    uint4* const to = fetched + slot * kWordVecs;
    if (is_whole(step)) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        ptx::copy_async(ptx::shared_address(to + 32 * j), from + 32 * j * kPerVec<T>);
      }
    } else if (step < steps) {
      request_edge(from, to, lead - step * kElements - lane * kPerVec<T>,
                   length - step * kElements - lane * kPerVec<T>);
    }
    ptx::commit_copies();  // empty groups too: waiting counts groups
  }

  // Elements from `lead` up to `left`; there may be nothing to read before and behind them. Out of line: it
  // is for a warp's first and last word.
  __device__ __noinline__ static void request_edge(const T* from, uint4* to, int lead, int left) {
#pragma unroll 1
    for (int j = 0; j < kVecs; ++j) {
      if (lead <= 0 && kPerVec<T> <= left) {
        ptx::copy_async(ptx::shared_address(to), from);
      } else {
#pragma unroll 1
        for (int e = max(lead, 0); e < min(left, kPerVec<T>); ++e) reinterpret_cast<T*>(to)[e] = from[e];
      }
      from += 32 * kPerVec<T>;
      to += 32;
      lead -= 32 * kPerVec<T>;
      left -= 32 * kPerVec<T>;
    }
  }

  // Before each pass.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int slot = 0; slot < kRingDepth; ++slot) request(slot, slot);
  }

  // Which of this lane's elements of a word are the row's.
  __device__ __forceinline__ uint32_t valid(int step) const {
    const int first = step * kElements + lane * kLaneElements;
    const int end = min(max(length - first, 0), kLaneElements);
    const uint32_t before_end = end < 32 ? (1u << end) - 1 : 0xffffffffu;
    return first < lead ? before_end & ~0u << (lead - first) : before_end;
  }

  // Calls visit(step, vectors of this lane, which elements are the row's) for every word.
  template <typename Visit>
  __device__ __forceinline__ void for_each_word(Visit visit) const {
    const uint4* from[kVecs];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) from[j] = held + (j ^ (lane >> 1 & 3));
#pragma unroll 1
    for (int first = 0; first < steps; first += kRingDepth) {
#pragma unroll
      for (int slot = 0; slot < kRingDepth; ++slot) {
        const int step = first + slot;
        if (step >= steps) break;
        ptx::wait_copies<kRingDepth - 1>();
        __syncwarp();
        uint4 vec[kVecs];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) vec[j] = from[j][slot * kWordVecs];
        __syncwarp();  // all have read the slot
        request(step + kRingDepth, slot);
        visit(step, vec, is_whole(step) ? 0xffffffffu : valid(step));
      }
    }
  }
};

}  // namespace gvr_topk::gvr
