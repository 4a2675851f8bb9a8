// Which of 256 histogram bins holds the r-th largest item.
#pragma once

#include <cstdint>

namespace gvr_topk {

struct BinHit {
  uint32_t bin;
  uint32_t above;  // items in higher bins
  uint32_t count;  // items in the bin
};

// One warp's view of a 256-bin histogram: lane l holds bins 8l .. 8l+7. Every warp that needs the
// answer scans for itself, which is cheaper than a broadcast through another block barrier.
struct BinScan {
  uint32_t bins[8];
  uint32_t above;  // items in the bins of higher lanes
  uint32_t sum;    // items in this lane's bins

  __device__ __forceinline__ BinScan(const uint32_t* hist, int lane) {
    const uint4 a = reinterpret_cast<const uint4*>(hist)[2 * lane];
    const uint4 b = reinterpret_cast<const uint4*>(hist)[2 * lane + 1];
    bins[0] = a.x, bins[1] = a.y, bins[2] = a.z, bins[3] = a.w;
    bins[4] = b.x, bins[5] = b.y, bins[6] = b.z, bins[7] = b.w;
    sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += bins[i];
    uint32_t suffix = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t higher = __shfl_down_sync(0xffffffffu, suffix, d);
      if (lane + d < 32) suffix += higher;
    }
    above = suffix - sum;
  }

  // Bin of the rank-th largest item, 1 <= rank <= number of items.
  __device__ __forceinline__ BinHit locate(uint32_t rank, int lane) const {
    BinHit hit{0, above, 0};
    uint32_t running = above;
    bool found = false;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      if (!found && rank > running && rank <= running + bins[i]) {
        hit = BinHit{static_cast<uint32_t>(8 * lane + i), running, bins[i]};
        found = true;
      }
      running += bins[i];
    }
    const uint32_t owner = __ballot_sync(0xffffffffu, found);
    const int source = owner != 0 ? __ffs(owner) - 1 : 0;
    hit.bin = __shfl_sync(0xffffffffu, hit.bin, source);
    hit.above = __shfl_sync(0xffffffffu, hit.above, source);
    hit.count = __shfl_sync(0xffffffffu, hit.count, source);
    return hit;
  }
};

}  // namespace gvr_topk
