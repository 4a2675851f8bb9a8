// What is selected of a short row, once the k-th element is one of few, or of those that are equal.
#pragma once

#include "single/bins.cuh"
#include "single/split.cuh"

namespace gvr_topk::single {

// Leaves of those inside the selected ones, by comparing them with each other: equal ones go by their
// positions. `before` becomes the number selected in earlier warps, and `kth` the k-th key, if there are any.
// `key_of` makes keys of what is held. One block barrier.
template <typename T, int kValues, typename KeyOf>
__device__ __forceinline__ void settle_few(const Task<T>& task, const Held<T, kValues>& held, Bins& bins,
                                           SplitOf<Held<T, kValues>>& split, uint32_t& before, uint32_t& kth,
                                           KeyOf key_of) {
  Shared& sm = *task.shared;
  const uint32_t here = __reduce_add_sync(0xffffffffu, split.above.count());
  if (task.lane == 0) sm.warp_value[0][task.warp] = here;
  uint32_t first = 0;
  const bool any = split.inside.any();  // few lanes have
  if (any) {
    first = atomicAdd(&sm.small_count, split.inside.count());
    uint32_t slot = first;
#pragma unroll
    for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
#pragma unroll 1
      for (uint32_t left = split.inside.word[w]; left != 0; left &= left - 1) {
        const uint32_t place = w * kValuesPerThread + ((__ffs(left) - 1) >> 1);
        const uint64_t key = key_of(held.bits_at(place));
        if (slot < kRankDirectly) bins.few[slot++] = key << 32 | ~held.position(task.lane, place);
      }
    }
  }
  __syncthreads();
  before = earlier_warps(task, 0);
  const uint64_t mine = bins.few[task.lane];
  float ahead = 0.0f;
#pragma unroll 1
  for (uint32_t i = 0; i < split.few; i += 4) {  // absent ones are ahead of none
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::count_if_greater(ahead, bins.few[i + j], mine);
  }
  const bool there = static_cast<uint32_t>(task.lane) < split.few;
  const float rank = static_cast<float>(split.rank);
  const uint32_t taken = __ballot_sync(0xffffffffu, there && ahead < rank);
  const bool earlier = ~static_cast<uint32_t>(mine) < static_cast<uint32_t>(held.begin);
  before += __popc(__ballot_sync(0xffffffffu, there && ahead < rank && earlier));
  const uint32_t last = __ballot_sync(0xffffffffu, there && ahead == rank - 1.0f);
  if (last != 0) kth = __shfl_sync(0xffffffffu, static_cast<uint32_t>(mine >> 32), __ffs(last) - 1);
  if (!any) return;
#pragma unroll
  for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
#pragma unroll 1
    for (uint32_t left = split.inside.word[w]; left != 0; left &= left - 1) {
      if (taken >> first++ & 1) split.above.word[w] |= left & -left;
    }
  }
}

// The same of many that are equal: the first in index order that the quota allows.
template <typename T, int kValues>
__device__ __forceinline__ void settle_ties(const Task<T>& task, const Held<T, kValues>& held,
                                            SplitOf<Held<T, kValues>>& split, uint32_t& before) {
  Shared& sm = *task.shared;
  const uint32_t above = __reduce_add_sync(0xffffffffu, split.above.count());
  const uint32_t tied = __reduce_add_sync(0xffffffffu, split.inside.count());
  if (task.lane == 0) sm.warp_value[1][task.warp] = above | tied << 16;
  __syncthreads();
  const uint32_t packed = earlier_warps(task, 1);
  const uint32_t ties_before = min(packed >> 16, split.rank);
  before = (packed & 0xffffu) + ties_before;
  const uint32_t left = split.rank - ties_before;
  uint32_t passed = 0;
#pragma unroll
  for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
    passed += for_each_in_order<T>(single_bits(split.inside.word[w]), kVecsOfWord<T>, task.lane,
                                   [&](int bit, uint32_t rank) {
                                     if (passed + rank < left) split.above.word[w] |= 1u << 2 * bit;
                                   });
  }
}

}  // namespace gvr_topk::single
