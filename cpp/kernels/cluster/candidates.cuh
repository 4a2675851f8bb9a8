// Candidates of a row in shared memory, in ascending order of their positions. Their keys are loaded and
// visited, and the selected ones are written.
#pragma once

#include "cluster/key_of_rank.cuh"
#include "cluster/row_options.cuh"
#include "core/part_stream.cuh"

namespace gvr_topk {

template <int kMost, int kMostItems>
struct alignas(16) CandidateList {
  static constexpr int kAtOnce = 4;  // candidates that a thread takes at a time, to save instructions
  static constexpr int kGroups = kMost / (kAtOnce * kThreads);
  static_assert(kMost == kGroups * kAtOnce * kThreads);

  int32_t position[kMost];
  uint32_t key[kMost];         // absent ones behind the last candidate, up to a whole group
  int32_t staged[kMostItems];  // positions of the selected ones

  // Loads the keys of `count` candidates, and calls visit(key) for this thread's, and for absent ones. They
  // are in shared memory behind the next block barrier.
  template <typename T, typename Visit>
  GVR_DEVICE void load_keys(const RowContext<T>& ctx, int count, Visit visit) {
    // Lanes take neighbours, which often share a sector. All loads overlap.
    const auto for_each_place = [&](auto take) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int group = kAtOnce * (32 * ctx.warp + g * kThreads);
        if (group >= count) break;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) take(kAtOnce * g + j, group + 32 * j + ctx.lane);
      }
    };
    const T* const row = ctx.row.data;
    T value[kGroups * kAtOnce];
    for_each_place([&](int j, int i) { value[j] = __ldg(row + position[min(i, count - 1)]); });
    for_each_place([&](int j, int i) {
      const uint32_t x = i < count ? order_key(to_float(value[j])) : kAbsentKey;
      key[i] = x;
      visit(x);
    });
  }

  // Calls visit(key) for keys of this thread, always the same, and for a few absent ones.
  template <typename Visit>
  GVR_DEVICE void for_each_key(int thread, int count, Visit visit) const {
#pragma unroll 1
    for (int i = kAtOnce * thread; i < count; i += kAtOnce * kThreads) {
      const uint4 keys = *reinterpret_cast<const uint4*>(key + i);
      visit(keys.x), visit(keys.y), visit(keys.z), visit(keys.w);
    }
  }

  // The key of the visit with this number.
  GVR_DEVICE uint32_t key_of_visit(int thread, int visit) const {
    return key[visit / kAtOnce * kAtOnce * kThreads + kAtOnce * thread + visit % kAtOnce];
  }

  // Writes the selected positions in ascending order, and returns how many there are. Of the elements equal
  // to the k-th, the first ones are selected, or none if they are masked and dropped. A block
  // barrier has passed since `sums` were last read.
  template <typename T>
  GVR_DEVICE int emit(const RowContext<T>& ctx, const LaunchTraits& traits, int count, uint32_t kth,
                      uint32_t (&sums)[kWarps], const OutputWriter& output) {
    constexpr uint32_t kLow = 0xffffu;
    constexpr int kOfWarp = 32 * kAtOnce;
    // Every warp takes as many consecutive groups.
    const int groups = (count + kOfWarp * kWarps - 1) / (kOfWarp * kWarps);
    // Calls visit(numbers, index, keys) for each of this lane's groups. The numbers are those of elements
    // above the k-th key and, from bit 16 on, of those equal to it.
    const auto for_each_group = [&](auto visit) {
#pragma unroll 1
      for (int g = 0; g < groups; ++g) {
        const int i = (ctx.warp * groups + g) * kOfWarp + kAtOnce * ctx.lane;
        const uint4 keys = i < count ? *reinterpret_cast<const uint4*>(key + i) : uint4{};
        const uint32_t own[kAtOnce] = {keys.x, keys.y, keys.z, keys.w};
        uint32_t numbers = 0;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) numbers += (own[j] > kth) + (own[j] == kth ? kLow + 1 : 0);
        visit(numbers, i, own);
      }
    };
    uint32_t numbers = 0;
    for_each_group([&](uint32_t here, int, const uint32_t (&)[kAtOnce]) { numbers += here; });
    const BlockSum sum = block_sum(ctx, sums, numbers);
    const int items = count_items(traits, ctx.k, kth, sum.all & kLow);
    OutputCursor cursor{0, items - (sum.all & kLow)};
    cursor.advance(sum.earlier & kLow, sum.earlier >> 16);
    const uint32_t to = ptx::shared_address(staged);
    for_each_group([&](uint32_t here, int i, const uint32_t (&own)[kAtOnce]) {
      const uint32_t upto = ptx::inclusive_scan(here), all = __shfl_sync(0xffffffffu, upto, 31);
      const int4 at = *reinterpret_cast<const int4*>(position + min(i, kMost - kAtOnce));
      const int positions[kAtOnce] = {at.x, at.y, at.z, at.w};
      OutputCursor of_lane = cursor;
      of_lane.advance((upto - here) & kLow, (upto - here) >> 16);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool is_above = own[j] > kth, is_tie = own[j] == kth;
        const bool is_item = is_above || (is_tie && of_lane.ties_left > 0);
        ptx::store_shared_if(is_item && of_lane.first < kMostItems, to + sizeof(int32_t) * of_lane.first,
                             positions[j]);
        of_lane.advance(is_above, is_tie);
      }
      cursor.advance(all & kLow, all >> 16);
    });
    __syncthreads();
#pragma unroll 1
    for (int i = ctx.thread; i < items; i += kThreads) output.put(i, staged[i]);
    return items;
  }
};

}  // namespace gvr_topk
