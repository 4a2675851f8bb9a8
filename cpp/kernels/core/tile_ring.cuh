// A warp's ring of tiles in shared memory, which asynchronous copies fill. Tiles are fetched in coalesced
// order, and each lane then reads 16 consecutive elements. The vectors of a lane are swizzled by an exclusive
// or on their addresses, so that 16-byte reads of neighbouring lanes fall into different banks.
#pragma once

#include <utility>

#include "core/key.cuh"
#include "core/lane_ranks.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// A warp covers 512 consecutive elements of a row at a time, and fetches them vector by vector, 16 bytes a
// lane.
constexpr int kTileElements = 32 * kValuesPerThread;
template <typename T>
constexpr int kGroup = 32 * kPerVec<T>;  // elements of one vector over the warp

// Fetches the last tile of a part. Memory behind the part's end may not exist, and is not read; nothing is
// known of the elements there. `target`: shared address of the first vector that this lane fetches; its other
// vectors follow in steps of a group. `left`: elements of the part from `from` on, where that vector lies.
// This is out of line because most tiles are whole.
template <typename T>
__device__ __noinline__ void fetch_end(uint32_t target, const T* from, int left) {
#pragma unroll
  for (int j = 0; j < kVecsOfTile<T>; ++j) {
    const int bytes = min((left - j * kGroup<T>)*static_cast<int>(sizeof(T)), 16);
    ptx::copy_part_async(bytes, target + j * 32 * sizeof(uint4), from + j * kGroup<T>);
  }
}

// `kEvictFirst`: whole tiles leave L2 first, or a row longer than L2 would evict even instructions.
template <typename T, int kDepth, bool kEvictFirst = true>
struct TileRing {
  static constexpr int kVecs = kVecsOfTile<T>;
  static constexpr int kLaneBytes = kVecs * sizeof(uint4);
  static constexpr uint32_t kTileBytes = 32 * kLaneBytes;
  static constexpr uint32_t kBytes = kDepth * kTileBytes;  // of one warp

  uint32_t write_address;  // of the first vector that this lane fetches, in slot 0
  uint32_t read_address;   // of this lane's own first vector, before swizzling, in slot 0
  uint64_t policy = ptx::evict_first_policy();

  // `storage` must start at a multiple of kLaneBytes, so that the addresses of a lane differ in their last
  // bits only.
  GVR_DEVICE TileRing(const void* storage, int warp, int lane) {
    const uint32_t ring = ptx::shared_address(storage) + warp * kBytes;
    const int owner = lane / kVecs;
    // The lanes that own the other vectors this lane fetches are 8 lanes apart (16 if there are two vectors),
    // so they have the same swizzle.
    write_address = ring + owner * kLaneBytes + (lane % kVecs * sizeof(uint4) ^ swizzle(owner));
    read_address = ring + own_offset(lane);
    ptx::keep(write_address);
    ptx::keep(read_address);
  }

  GVR_DEVICE static uint32_t swizzle(int owner) { return (owner * kVecs >> 3 & (kVecs - 1)) * sizeof(uint4); }
  GVR_DEVICE static uint32_t own_offset(int lane) { return lane * kLaneBytes + swizzle(lane); }

  // The slot that comes behind `slot`; both are byte offsets.
  GVR_DEVICE static uint32_t next(uint32_t slot) {
    return slot + kTileBytes == kBytes ? 0 : slot + kTileBytes;
  }

  // Starts to fetch a tile into a slot. `from`: the address from which this lane fetches its first vector;
  // `left`: elements that the warp's part has from the tile's beginning on.
  GVR_DEVICE void fetch(const T* from, int left, uint32_t slot) const {
    if (left >= kTileElements) {
      fetch_vecs(from, slot, std::make_integer_sequence<int, kVecs>());
    } else {
      const int lane = threadIdx.x & 31;
      fetch_end(write_address + slot, from, left - lane * kPerVec<T>);
    }
  }

  // Returns the bits of this lane's elements in the tile at `slot` that are not below `lo`; NaN is not below
  // it. `above` receives the bits of the elements that are not at or below `hi`. Both tell nothing of
  // elements that are not the part's.
  GVR_DEVICE uint32_t not_below(float lo, float hi, uint32_t slot, uint32_t& above) const {
    ptx::BitAccumulator bits, above_bits;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const uint4 vec = ptx::load_shared(read_address + slot ^ j * sizeof(uint4));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const float x = element<T>(vec, e), bit = 1u << (j * kPerVec<T> + e);
        ptx::set_bit_unless_less(bits.sums[j % 2], x, lo, bit);
        ptx::set_bit_unless_at_most(above_bits.sums[j % 2], x, hi, bit);
      }
    }
    above = above_bits.bits();
    return bits.bits();
  }

  GVR_DEVICE uint32_t not_below(float lo, uint32_t slot) const {
    uint32_t unused;  // The compiler removes these bits, which nobody reads.
    return not_below(lo, INFINITY, slot, unused);
  }

  // Calls visit(index, value) for each of this lane's elements in the tile at `slot`.
  template <typename Visit>
  GVR_DEVICE void for_each_value(uint32_t slot, Visit visit) const {
#pragma unroll 1
    for (int j = 0; j < kVecs; ++j) {
      const uint4 vec = ptx::load_shared(read_address + slot ^ j * sizeof(uint4));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) visit(j * kPerVec<T> + e, element<T>(vec, e));
    }
  }

  // Returns the bits of this lane's elements in the tile at `slot` for which test(key) holds.
  template <typename Test>
  GVR_DEVICE uint32_t matching(uint32_t slot, Test test) const {
    uint32_t bits = 0;
    for_each_value(slot, [&](int i, float x) { bits |= static_cast<uint32_t>(test(order_key(x))) << i; });
    return bits;
  }

  GVR_DEVICE float value(uint32_t slot, int index) const {
    return to_float(ptx::load_shared_element<T>(read_address + slot ^ index * sizeof(T)));
  }

 private:
  template <int... kVec>
  GVR_DEVICE void fetch_vecs(const T* from, uint32_t slot, std::integer_sequence<int, kVec...>) const {
    if constexpr (kEvictFirst) {
      (ptx::copy_async_at<kVec * 32 * sizeof(uint4)>(write_address + slot, from, policy), ...);
    } else {
      (ptx::copy_async(write_address + slot + kVec * 32 * sizeof(uint4), from + kVec * kGroup<T>), ...);
    }
  }
};

}  // namespace gvr_topk
