// A warp's part of a long row on its way through shared memory.
#pragma once

#include "cluster/pool.cuh"
#include "cluster/state.cuh"
#include "ptx/compare.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk::cluster {

// The end of a row in a ring of shared memory: what is missing to a word is put in as -inf. `target`: where
// the first of this lane's vectors goes, the others in steps of a group; `left`: elements from there on. Out
// of line: most words are whole.
template <typename T>
__device__ __noinline__ void fetch_end(uint32_t target, const T* from, int left) {
#pragma unroll
  for (int j = 0; j < Word<T>::kVecs; ++j) {
    const int there = left - j * Word<T>::kGroup;
    const uint32_t vec = target + j * 32 * sizeof(uint4);
    if (there >= kPerVec<T>) {
      ptx::copy_async(vec, from + j * Word<T>::kGroup);
    } else {
      ptx::store_shared(vec, absent_vec<T>());
      // There may be nothing behind the end to read.
#pragma unroll 1
      for (int e = 0; e < there; ++e) {
        ptx::store_shared(vec + e * sizeof(T), from[j * Word<T>::kGroup + e]);
      }
    }
  }
}

// Words of 16 consecutive elements a lane, fetched in coalesced order. A lane's vectors are swapped about, by
// an exclusive or with their addresses, so that 16-byte reads of neighbouring lanes fall into different
// banks.
template <typename T>
struct Ring {
  static constexpr int kVecs = Word<T>::kVecs;
  static constexpr int kLaneBytes = kVecs * sizeof(uint4);
  static constexpr uint32_t kWordBytes = 32 * kLaneBytes;
  static constexpr uint32_t kBytes = kRingDepth * kWordBytes;  // of one warp
  static_assert(alignof(Shared) % kLaneBytes == 0, "addresses of a lane differ in their last bits only");

  const T* data;  // of the warp's part, for this lane
  int length;     // elements of the part
  int words;
  // The first word looked at; those before it come last. Warps that walked in step through parts a power of
  // two apart would crowd the same channels of the memory.
  int first;
  uint32_t fetched;  // where, in the first word, the first of the vectors that this lane fetches goes,
  uint32_t held;     // and, but for swapping, the first of those lies that it holds
  // A row longer than L2 would drive out all else, this kernel's own instructions first.
  uint64_t policy = ptx::evict_first_policy();

  __device__ __forceinline__ Ring(const T* part, int elements, int warp, int lane, const void* storage)
      : data(part + lane * kPerVec<T>),
        length(elements),
        words((elements + kWordElements - 1) / kWordElements),
        first(warp * words / kWarps) {
    const uint32_t ring = ptx::shared_address(storage) + warp * kBytes;
    const int owner = lane / kVecs;
    // Owners of the further vectors are 8 apart (16, of two), and swap alike.
    fetched = ring + owner * kLaneBytes + (lane % kVecs * sizeof(uint4) ^ swap(owner));
    held = ring + lane * kLaneBytes + swap(lane);
    ptx::keep(fetched);
    ptx::keep(held);
  }

  __device__ __forceinline__ static uint32_t swap(int owner) {
    return (owner * kVecs >> 3 & (kVecs - 1)) * sizeof(uint4);
  }

  // Starts to fetch a word into `slot`, in bytes: `left` elements are left of the warp's part, from `from`
  // on.
  __device__ __forceinline__ void fetch(const T* from, int left, uint32_t slot) const {
    if (left >= kWordElements) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        ptx::copy_async(fetched + slot + j * 32 * sizeof(uint4), from + j * Word<T>::kGroup, policy);
      }
    } else {
      const int lane = threadIdx.x & 31;
      fetch_end(fetched + slot, from, left - lane * kPerVec<T>);
    }
  }

  // Marks of this lane's elements of the word in `slot` that are not below `lo`, which is finite.
  __device__ __forceinline__ uint32_t not_below(float lo, uint32_t slot) const {
    ptx::Marks marks;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const uint4 vec = ptx::load_shared(held + slot ^ j * sizeof(uint4));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        ptx::mark_unless_less(marks.of[j % 2], element<T>(vec, e), lo, 1u << (j * kPerVec<T> + e));
      }
    }
    return marks.bits();
  }

  __device__ __forceinline__ float value(uint32_t slot, int place) const {
    return to_float(ptx::load_shared_element<T>(held + slot ^ place * sizeof(T)));
  }
};

// Which word of a warp's part is fetched next.
template <typename T>
struct Feed {
  const T* from;
  int left;    // elements of the part from there on
  int wanted;  // words still to be fetched

  __device__ __forceinline__ explicit Feed(const Ring<T>& ring)
      : from(ring.data + ring.first * kWordElements),
        left(ring.length - ring.first * kWordElements),
        wanted(ring.words) {}

  __device__ __forceinline__ void fetch(const Ring<T>& ring, uint32_t slot) {
    if (wanted > 0) ring.fetch(from, left, slot);
    ptx::commit_copies();  // empty groups too: waiting counts groups
    --wanted;
    from += kWordElements;
    left -= kWordElements;
    if (left <= 0) {
      from = ring.data;
      left = ring.length;
    }
  }
};

// Streams this warp's part, of which the first words are under way, and keeps what is not below `lo`.
template <typename T>
__device__ __forceinline__ void sift(const Task<T>& task, const Ring<T>& ring, Feed<T>& feed, float lo,
                                     Pool& pool) {
  // Of this lane's first element.
  int position = static_cast<int>(ring.data - task.row.data) + task.lane * (kValuesPerThread - kPerVec<T>);
  const int end = position + ring.words * kWordElements;
  position += ring.first * kWordElements;
  uint32_t slot = 0;
  ptx::keep(lo);
#pragma unroll 1
  for (int word = 0; word < ring.words; ++word) {
    ptx::wait_copies<kRingDepth - 1>();
    __syncwarp();
    pool.append(&task.shared->pool_used, ring.not_below(lo, slot), task.lane,
                [&](int place) { return Kept{position + place, ring.value(slot, place)}; });
    __syncwarp();  // all have read the slot
    feed.fetch(ring, slot);
    slot = slot + Ring<T>::kWordBytes == Ring<T>::kBytes ? 0 : slot + Ring<T>::kWordBytes;
    position += kWordElements;
    if (position == end) {
      position -= ring.words * kWordElements;
      pool.turn = pool.count;
    }
  }
  __syncwarp();
}

}  // namespace gvr_topk::cluster
