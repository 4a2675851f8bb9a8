// One round by the window of the last step.
#pragma once

#include "single/split.cuh"
#include "single/window.cuh"

namespace gvr_topk::single {

// False where the k-th element lies outside the window `left`, or is not alone enough. One thread has a place
// to leave the next one at.
template <typename T, int kValues>
__device__ __forceinline__ bool recall(const Task<T>& task, const Held<T, kValues>& held, Bins& bins,
                                       float left, float* next, SplitOf<Held<T, kValues>>& split) {
  Window window(left);
  // Of the longest rows they are computed anew: registers are short.
  constexpr bool kKept = kValues <= kWideValuesPerThread;
  uint32_t bin[kKept ? kValues : 1];
  uint32_t first = ptx::shared_address(bins.set[0]) - sizeof(uint32_t) * Window::first_bin();
  ptx::keep(first);
  held.for_each_place([&](int i) {
    const uint32_t its = window.bin(held.value(i));
    if (kKept) bin[i] = its;
    ptx::increment_shared(first + sizeof(uint32_t) * its);
  });
  __syncthreads();
  const BinHit hit = locate(task, bins, bins.set[0], bins.set[1], false, task.k);
  if (hit.count > kRankDirectly || hit.bin - 1 > kBins - 3) return false;
  if (next != nullptr) *next = Window::followed(left, hit.bin, bins.group[hit.bin >> kLog2Group]);
  split.rank = task.k - hit.above;
  split.few = hit.count;
  if (!kKept) ptx::keep(window.scale);  // or the compiler would keep them all the same
  // 0 for each below, 1 inside, 2 above.
  int offset = 1 - static_cast<int>(hit.bin + Window::first_bin());
  ptx::keep(offset);
  uint32_t classes[Held<T, kValues>::kWords] = {};
  held.for_each_place([&](int i) {
    const int its = static_cast<int>(kKept ? bin[i] : window.bin(held.value(i)));
    const uint32_t found = __viaddmin_s32_relu(its, offset, 2);
    classes[i / kValuesPerThread] += found << 2 * (i % kValuesPerThread);
  });
#pragma unroll
  for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
    split.above.word[w] = classes[w] >> 1 & kLowerBits;
    split.inside.word[w] = classes[w] & kLowerBits;
  }
  return true;
}

}  // namespace gvr_topk::single
