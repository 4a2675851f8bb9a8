// Streams each warp's part of a row through the warp's ring of tiles. A part is whole tiles, and parts follow
// each other, so that (warp, tile, lane, index in the lane) is index order.
#pragma once

#include "core/tile_ring.cuh"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk {

// The first part starts at the 16-byte boundary before the row. The elements between that boundary and the
// row belong to the same allocation, and are fetched but not visited.
template <typename T, int kBlockWarps, int kDepth>
struct PartStream {
  using Ring = TileRing<T, kDepth>;
  static constexpr int kStep = kBlockWarps * kTileElements;  // one tile of every warp

  // Elements of all parts of a row, if every part is as long as the first.
  GVR_TOPK_HOST_DEVICE static constexpr int padded(int n) { return (n + kStep - 1) / kStep * kStep; }

  Ring ring;
  const T* from;  // where this lane fetches the part's first tile
  int lead;       // elements between the row's 16-byte boundary and the row
  int begin;      // first element of the part, counted from that boundary
  int length;     // elements of the part, including those before the row
  int lane;

  __device__ __forceinline__ PartStream(const RowView<T>& row, const void* storage, int warp, int lane_)
      : ring(storage, warp, lane_), lane(lane_) {
    lead = static_cast<int>(reinterpret_cast<uintptr_t>(row.data) / sizeof(T) % kPerVec<T>);
    const int n = row.n + lead, part = padded(n) / kBlockWarps;
    begin = min(warp * part, n);
    length = min(part, n - begin);
    from = row.data - lead + begin + lane * kPerVec<T>;
  }

  // Starts the first copies of a pass over the part.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int step = 0; step < kDepth; ++step) request(step, step * Ring::kTileBytes);
  }

  // Calls visit(step, slot, bits of this lane's elements that belong to the row) for every tile of a pass
  // that was started. Bits beyond a lane's elements may be set. No copy is under way afterwards.
  template <typename Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) const {
    uint32_t slot = 0;
#pragma unroll 1
    for (int step = 0; step * kTileElements < length; ++step) {
      ptx::wait_copies<kDepth - 1>();
      __syncwarp();  // The tile's copies of all lanes have arrived.
      const int before = begin + step + lane == 0 ? lead : 0;
      const int left = length - step * kTileElements - lane * kValuesPerThread;
      visit(step, slot, ptx::bit_range(before, max(left - before, 0)));
      ptx::reconverge(ptx::unknown_zero());  // All lanes have read the slot.
      request(step + kDepth, slot);
      slot = Ring::next(slot);
    }
  }

 private:
  // An empty group is committed as well, because a wait counts groups.
  __device__ __forceinline__ void request(int step, uint32_t slot) const {
    const int left = length - step * kTileElements;
    if (left > 0) ring.fetch(from + step * kTileElements, left, slot);
    ptx::commit_copies();
  }
};

}  // namespace gvr_topk
