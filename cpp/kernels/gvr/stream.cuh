// A row on its way through shared memory: every warp streams its own contiguous part.
#pragma once

#include "gvr/state.cuh"

namespace gvr_topk::gvr {

// A warp's part, in words of 64 consecutive bytes a lane, so that (warp, word, lane, place) is index order.
// Words are fetched 16 bytes at a time in coalesced order; the vectors of a lane are rotated so that reads of
// neighbouring lanes fall into different banks. The first part starts at the 16-byte boundary before the row:
// what lies between belongs to the same allocation, and is fetched but never counted.
template <typename T>
struct Stream {
  static constexpr int kVecs = cluster::kWordBytes / sizeof(uint4);
  static constexpr int kLaneElements = kVecs * kPerVec<T>;
  static constexpr int kElements = 32 * kLaneElements;  // of a word
  static constexpr int kSlotBytes = kElements * static_cast<int>(sizeof(T));
  static_assert(kVecs == 4, "the rotation is of four vectors");

  int shift;   // elements between the row's 16-byte boundary and the row
  int begin;   // of the part, counted from that boundary
  int length;  // elements of the part, and of those before the row
  int lane;
  const T* data;      // of the part, where this lane fetches
  const uint4* held;  // where in the ring's first slot this lane's vectors lie,
  uint32_t fetched;   // and the shared address it fetches to

  __device__ __forceinline__ Stream(const Row<T>& row, int warp, int lane_id, uint4* rings) : lane(lane_id) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.data) % sizeof(uint4) / sizeof(T));
    const int n = row.n + shift;
    const int span = warp_span(n, 0, sizeof(T));
    begin = min(warp * span, n);
    length = min(span, n - begin);
    data = row.data - shift + begin + lane * kPerVec<T>;
    held = rings + (warp * kRingDepth * 32 + lane) * kVecs;
    fetched = ptx::shared_address(held - lane * kVecs + ((lane & ~3) + ((lane & 3) ^ (lane >> 3 & 3))));
  }

  __device__ __forceinline__ int steps() const { return (length + kElements - 1) / kElements; }

  // Starts to fetch a word, whose part of this lane begins at `from`; nothing beyond the end.
  __device__ __forceinline__ void request(int step, int slot, const T* from) const {
    const uint32_t to = fetched + slot * kSlotBytes;
    if (step < length / kElements) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) ptx::copy_async(to + 512 * j, from + 32 * j * kPerVec<T>);
    } else if (step < steps()) {
      request_last(from, to, length - step * kElements - lane * kPerVec<T>);
    }
    ptx::commit_copies();  // empty groups too: waiting counts groups
  }

  // The first `left` elements; there may be nothing to read behind them. Out of line: it is for a warp's last
  // word.
  __device__ __noinline__ static void request_last(const T* from, uint32_t to, int left) {
#pragma unroll 1
    for (int j = 0; j < kVecs; ++j) {
      if (kPerVec<T> <= left) {
        ptx::copy_async(to, from);
      } else {
        T* const slot = static_cast<T*>(__cvta_shared_to_generic(to));
#pragma unroll 1
        for (int e = 0; e < left; ++e) slot[e] = from[e];
      }
      from += 32 * kPerVec<T>;
      to += 512;
      left -= 32 * kPerVec<T>;
    }
  }

  // Before each pass.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int slot = 0; slot < kRingDepth; ++slot) request(slot, slot, data + slot * kElements);
  }

  // Calls visit(step, vectors of this lane, which of its elements are the row's) for every word. Bits of
  // more elements than a lane has may be set.
  template <typename Visit>
  __device__ __forceinline__ void for_each_word(Visit visit) const {
    const uint4* vecs[kVecs];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) vecs[j] = held + (j ^ (lane >> 1 & 3));
    const T* next = data + kRingDepth * kElements;
    // Of the part, only the very first elements are not the row's, and only of warp 0.
    int before = begin == 0 && lane == 0 ? shift : 0;
    int left = length - lane * kLaneElements;
    const int steps = this->steps();
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
        for (int j = 0; j < kVecs; ++j) vec[j] = vecs[j][slot * (kSlotBytes / sizeof(uint4))];
        __syncwarp();  // all have read the slot
        request(step + kRingDepth, slot, next);
        next += kElements;
        visit(step, vec, bit_range(before, max(left - before, 0)));
        before = 0;
        left -= kElements;
      }
    }
  }

  // `count` bits from `first` on, as many as there are.
  __device__ __forceinline__ static uint32_t bit_range(int first, int count) {
    uint32_t bits;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
    return bits;
  }
};

}  // namespace gvr_topk::gvr
