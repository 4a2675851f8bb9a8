// Emission: every CTA writes its own selected positions, in ascending order, at their final place.
#pragma once

#include "cluster/refine.cuh"
#include "cluster/state.cuh"
#include "common/order_scan.cuh"

namespace gvr_topk::cluster {

// Where results of a row go.
struct Sink {
  int32_t* indices;
  int32_t* prior;           // null: nothing is handed to the next step
  const int32_t* pages;     // null: positions are written as they are
  int page_size;
  int pages_per_request;

  __device__ __forceinline__ void put(int slot, int position) const {
    int out = position;
    if (pages != nullptr && position >= 0) {
      const int page = position / page_size;
      out = page < pages_per_request ? pages[page] * page_size + position % page_size : -1;
    }
    indices[slot] = out;
    if (prior != nullptr) prior[slot] = position;
  }
};

__device__ __forceinline__ Sink make_sink(const TopkParams& p, int row, int slot) {
  Sink sink;
  sink.indices = p.indices + row * p.indices_stride;
  // The last row of a request is the one whose result the next step starts from.
  const bool last = row % p.next_n == p.next_n - 1;
  sink.prior = last && slot >= 0 && p.prior != nullptr ? p.prior + slot * p.prior_stride : nullptr;
  sink.pages =
      p.page_table != nullptr ? p.page_table + (row / p.next_n) * p.page_table_stride : nullptr;
  sink.page_size = p.page_size;
  sink.pages_per_request = p.pages_per_request;
  return sink;
}

// All of a row that is no longer than k, then -1.
__device__ __forceinline__ void emit_short_row(const Sink& sink, int n, int k, int first, int stride) {
  for (int i = first; i < k; i += stride) sink.put(i, i < n ? i : -1);
}

// Several words per warp: settle the listed elements in the masks, so that `above_mask` holds the
// elements above the k-th key and `inside_mask` those equal to it.
template <typename T>
__device__ __forceinline__ void settle_masks(const Task<T>& task, const Bracket& bracket,
                                             uint32_t kth) {
  const bool plateau = kth == bracket.plateau();
  if (!plateau) {
    for (int i = threadIdx.x; i < task.steps * kThreads; i += kThreads) task.inside_mask[i] = 0;
  }
  // One key in the bracket: nothing was listed, and the masks are right as they are.
  if (bracket.lo == bracket.hi) return;
  __syncthreads();
  const int count = static_cast<int>(task.shared->header[task.rank].listed);
  const uint32_t* keys = task.list + task.rank * task.segment;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t word = task.location[i] / kValuesPerThread;
    const uint32_t bit = 1u << task.location[i] % kValuesPerThread;
    if (keys[i] > kth) atomicOr(&task.above_mask[word], bit);
    if (plateau) {
      atomicAnd(&task.inside_mask[word], ~bit);
    } else if (keys[i] == kth) {
      atomicOr(&task.inside_mask[word], bit);
    }
  }
  __syncthreads();
}

// Listed keys above and equal to the k-th, per CTA.
template <typename T>
__device__ __forceinline__ void count_segments(const Task<T>& task, uint32_t kth) {
  uint32_t above = 0, equal = 0;
  for_each_listed(task, [&](uint32_t x) {
    above += x > kth;
    equal += x == kth;
  });
  // A warp never straddles two segments: there are at most as many CTAs as warps.
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  const int c = threadIdx.x / (kThreads / task.ctas);
  if (task.lane == 0 && (above | equal) != 0) {
    atomicAdd(&task.shared->segment_above[c], above);
    atomicAdd(&task.shared->segment_equal[c], equal);
  }
}

struct Share {
  uint32_t first;  // output place of this CTA's first selected element
  uint32_t ties;   // elements equal to the k-th key that this CTA may take, the first ones it has
};

// Ties go to the smallest indices, so earlier CTAs take theirs first.
template <typename T>
__device__ __forceinline__ Share cta_share(const Task<T>& task, const Bracket& bracket, uint32_t kth) {
  const Shared& sm = *task.shared;
  uint32_t above = 0, equal = 0;
  if (task.lane < task.ctas) {
    above = sm.header[task.lane].above + sm.segment_above[task.lane];
    equal = kth == bracket.plateau() ? sm.header[task.lane].equal : sm.segment_equal[task.lane];
    // Listed keys above a plateau were counted per segment; those of a one-key bracket do not exist.
  }
  const uint32_t above_sum = inclusive_scan(above, task.lane);
  const uint32_t equal_sum = inclusive_scan(equal, task.lane);
  const uint32_t wanted = task.k - __shfl_sync(0xffffffffu, above_sum, 31);
  const uint32_t ties_before = min(wanted, equal_sum - equal);
  const uint32_t ties = min(equal, wanted - ties_before);
  Share share;
  share.first = __shfl_sync(0xffffffffu, above_sum - above + ties_before, task.rank);
  share.ties = __shfl_sync(0xffffffffu, ties, task.rank);
  return share;
}

template <typename T>
__device__ __forceinline__ void emit(const Task<T>& task, const Bracket& bracket, uint32_t kth,
                                     const uint32_t (&key)[kValuesPerThread], const Sink& sink) {
  Shared& sm = *task.shared;
  if (task.steps > 1) settle_masks(task, bracket, kth);
  const auto above_bits = [&](int step) {
    return task.steps > 1
               ? task.above_mask[step * kThreads + threadIdx.x]
               : match_word<T>(key, task.begin, task.end, [&](uint32_t x) { return x > kth; });
  };
  const auto equal_bits = [&](int step) {
    return task.steps > 1
               ? task.inside_mask[step * kThreads + threadIdx.x]
               : match_word<T>(key, task.begin, task.end, [&](uint32_t x) { return x == kth; });
  };
  uint32_t above = 0, equal = 0;
  for (int step = 0; step < task.steps; ++step) {
    above += __popc(above_bits(step));
    equal += __popc(equal_bits(step));
  }
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0) {
    sm.warp_value[0][task.warp] = above;
    sm.warp_value[1][task.warp] = equal;
  }
  count_segments(task, kth);
  __syncthreads();

  const Share share = cta_share(task, bracket, kth);
  const bool earlier = task.lane < task.warp;
  above = __reduce_add_sync(0xffffffffu, earlier ? sm.warp_value[0][task.lane] : 0);
  equal = __reduce_add_sync(0xffffffffu, earlier ? sm.warp_value[1][task.lane] : 0);
  uint32_t place = share.first + above + min(equal, share.ties);
  uint32_t ties = share.ties - min(equal, share.ties);  // still to take, in this warp
  for (int step = 0; step < task.steps; ++step) {
    uint32_t selected = above_bits(step);
    if (ties > 0) {
      uint32_t taken = 0;
      const uint32_t found = for_each_in_order<T>(
          equal_bits(step), task.lane, [&](int bit, uint32_t rank) {
            if (rank < ties) taken |= 1u << bit;
          });
      selected |= taken;
      ties -= min(found, ties);
    }
    place += for_each_in_order<T>(selected, task.lane, [&](int bit, uint32_t rank) {
      sink.put(place + rank, bit_position<T>(task.word_begin(step), bit, task.lane));
    });
  }
}

}  // namespace gvr_topk::cluster
