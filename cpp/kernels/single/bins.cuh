// Bins of one round over a short row, and the one that the k-th element lies in.
#pragma once

#include "common/histogram.cuh"
#include "single/held.cuh"

namespace gvr_topk::single {

constexpr int kLog2Bins = 11;
constexpr int kBins = 1 << kLog2Bins;
static_assert(kBins == 4 * kThreads, "four bins are summed up by each thread");
constexpr int kLog2Group = kLog2Bins - log2_of(kWarps);  // bins of a warp

struct alignas(128) Bins {
  uint32_t set[2][kBins + 4];  // in turn; one bin more counts what is outside the range
  uint32_t group[kWarps];
  BinHit hit;
  // Elements that are few enough to be compared with each other: the key, then the position's complement.
  alignas(16) uint64_t few[kRankDirectly];

  __device__ __forceinline__ void clear(int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) reinterpret_cast<uint4*>(set[i])[thread] = make_uint4(0, 0, 0, 0);
    if (thread < kRankDirectly) few[thread] = 0;
  }
};

__device__ __forceinline__ uint32_t sum_of(const uint4& four) { return four.x + four.y + four.z + four.w; }

// Bin of the rank-th largest of what all warps have counted in `set`, behind a block barrier: the thread that
// finds it tells the others. `other` is not looked at any more, and cleared if `clear`.
template <typename T>
__device__ __forceinline__ BinHit locate(const Task<T>& task, Bins& bins, const uint32_t* set,
                                         uint32_t* other, bool clear, uint32_t rank) {
  const uint4 four = reinterpret_cast<const uint4*>(set)[task.thread];
  const uint32_t sum = sum_of(four);
  const uint32_t upto = suffix_sum(sum);
  if (task.lane == 0) bins.group[task.warp] = upto;
  if (clear) reinterpret_cast<uint4*>(other)[task.thread] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const bool higher = task.warp < task.lane && task.lane < kWarps;
  uint32_t above = __reduce_add_sync(0xffffffffu, higher ? bins.group[task.lane] : 0) + upto - sum;
  if (above < rank && rank <= above + sum) {
    uint32_t bin = 4 * task.thread + 3, count = four.w;
    if (rank > above + count) above += count, --bin, count = four.z;
    if (rank > above + count) above += count, --bin, count = four.y;
    if (rank > above + count) above += count, --bin, count = four.x;
    bins.hit = BinHit{bin, above, count};
  }
  __syncthreads();
  return bins.hit;
}

}  // namespace gvr_topk::single
