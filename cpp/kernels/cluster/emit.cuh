// Emission: every CTA writes its own selected positions, in ascending order, at their final place.
#pragma once

#include "cluster/refine.cuh"
#include "cluster/state.cuh"
#include "common/order_scan.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

// Where results of a row go. Whatever slot is named, nothing but the row's own k places is written: slots
// come of counts, and counts of CTAs that have read a row while it was overwritten do not fit each other.
struct Sink {
  int32_t* indices;
  int32_t* prior;        // null: positions are not handed to the next step
  const int32_t* pages;  // null: positions are written as they are
  int k;
  int page_size;
  int pages_per_request;
  bool leaves;  // whether the row is the one that leaves something for the next step, and has a slot

  // Where everything goes by `put`, pointers are not computed anew for each.
  __device__ __forceinline__ void keep(const Shape& shape) {
    ptx::keep(indices);
    if (shape.has(Shape::kLeaving)) ptx::keep(prior);
  }

  // Whether `count` slots from `first` on are the row's, for those who write them by `put_plain`.
  __device__ __forceinline__ bool has(int first, int count) const { return first >= 0 && count <= k - first; }

  // Where positions are written as they are, to a slot that the row has.
  __device__ __forceinline__ void put_plain(int slot, int position) const {
    ptx::store_global(indices + slot, position);
    if (prior != nullptr) ptx::store_global(prior + slot, position);
  }

  __device__ __forceinline__ void put(int slot, int position) const {
    if (static_cast<uint32_t>(slot) >= static_cast<uint32_t>(k)) return;
    ptx::store_global(indices + slot, pages != nullptr ? translated(position) : position);
    if (prior != nullptr) ptx::store_global(prior + slot, position);
  }

 private:
  // Slot of a position in the paged cache; -1 of padding, of a page that the table does not hold, and of a
  // slot that 32 bits do not.
  __device__ __forceinline__ int translated(int position) const {
    const int page = position / page_size;
    if (position < 0 || page >= pages_per_request) return -1;
    const int64_t first = pages[page];  // read once: another stream may be writing it
    const int64_t slot = first * page_size + position % page_size;
    return first >= 0 && slot <= INT32_MAX ? static_cast<int>(slot) : -1;
  }
};

__device__ __forceinline__ Sink make_sink(const TopkParams& p, int next_n, int row, int request, int slot) {
  Sink sink;
  sink.indices = p.indices + row * p.indices_stride;
  // The last row of a request is the one whose result the next step starts from.
  const bool last = row - request * next_n == next_n - 1;
  sink.leaves = last && slot >= 0;
  sink.prior = sink.leaves && p.prior != nullptr ? p.prior + slot * p.prior_stride : nullptr;
  sink.pages = p.page_table != nullptr ? p.page_table + request * p.page_table_stride : nullptr;
  sink.k = p.k;
  sink.page_size = p.page_size;
  sink.pages_per_request = p.pages_per_request;
  return sink;
}

// All of a row that is no longer than k, then -1.
__device__ __forceinline__ void emit_short_row(const Sink& sink, int n, int k, int first, int stride) {
#pragma unroll 1
  for (int i = first; i < k; i += stride) sink.put(i, i < n ? i : -1);
}

// Adds up listed keys above and equal to the k-th, per CTA.
template <typename T>
__device__ __forceinline__ void count_segments(const Task<T>& task, const Listed& listed, uint32_t kth) {
  uint32_t above = 0, equal = 0;
  listed.for_each([&](uint32_t x) {
    above += x > kth;
    equal += x == kth;
  });
  // A warp never straddles two segments: there are at most as many CTAs as warps.
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0 && (above | equal) != 0) {
    ptx::add_shared(task.shared->segment_above[listed.cta], above, task.zero);
    ptx::add_shared(task.shared->segment_equal[listed.cta], equal, task.zero);
  }
}

// Where the next elements go, and how many more equal to the k-th key may be taken.
struct Share {
  uint32_t first;
  uint32_t ties;

  // Moves past elements, of which `equal` ties were on offer.
  __device__ __forceinline__ void pass(uint32_t above, uint32_t equal) {
    const uint32_t taken = min(equal, ties);
    first += above + taken;
    ties -= taken;
  }
};

// The CTA's share. Ties go to the smallest indices, so earlier CTAs take theirs first.
template <typename T>
__device__ __forceinline__ Share cta_share(const Task<T>& task, const Bracket& bracket, uint32_t kth) {
  const Shared& sm = *task.shared;
  uint32_t above = 0, equal = 0;
  if (task.lane < task.ctas) {
    // The plateau's elements are not listed: they are above the k-th key, equal to it, or below.
    const uint32_t plateau = bracket.plateau();
    const Counts& counts = sm.header[task.lane].counts;
    above = counts.above + sm.segment_above[task.lane] + (plateau > kth ? counts.equal : 0);
    equal = plateau == kth ? counts.equal : sm.segment_equal[task.lane];
  }
  const bool earlier = task.lane < task.rank;
  Share share{0, task.k - __reduce_add_sync(0xffffffffu, above)};
  share.pass(__reduce_add_sync(0xffffffffu, earlier ? above : 0),
             __reduce_add_sync(0xffffffffu, earlier ? equal : 0));
  return share;
}

template <typename T>
__device__ __forceinline__ void leave_counts(const Task<T>& task, uint32_t above, uint32_t equal) {
  if (task.lane != 0) return;
  task.shared->warp_value[0][task.warp] = above;
  task.shared->warp_value[1][task.warp] = equal;
}

// The usual way: select among the collected candidates, about one per thread.
template <typename T>
__device__ __forceinline__ void emit_candidates(const Task<T>& task, const Bracket& bracket,
                                                const Listed& listed, uint32_t kth, uint32_t collected,
                                                const Sink& sink, PhaseClock& clock) {
  uint32_t above = 0, equal = 0;
  task.for_each_candidate(collected, [&](int i, bool there) {
    const uint32_t key = there ? task.candidates[i].key : kAbsentKey;
    above += __popc(__ballot_sync(0xffffffffu, key > kth));
    equal += __popc(__ballot_sync(0xffffffffu, key == kth));
  });
  leave_counts(task, above, equal);
  count_segments(task, listed, kth);
  __syncthreads();
  clock.stamp();
  Share share = cta_share(task, bracket, kth);
  share.pass(earlier_warps(task, 0), earlier_warps(task, 1));
  const uint32_t before = (1u << task.lane) - 1;
  task.for_each_candidate(collected, [&](int i, bool there) {
    const Candidate c = there ? task.candidates[i] : Candidate{0, kAbsentKey};
    const uint32_t above_lanes = __ballot_sync(0xffffffffu, c.key > kth);
    const uint32_t equal_lanes = __ballot_sync(0xffffffffu, c.key == kth);
    const uint32_t tie = __popc(equal_lanes & before);
    if (c.key > kth || (c.key == kth && tie < share.ties)) {
      sink.put(share.first + __popc(above_lanes & before) + min(tie, share.ties), c.position);
    }
    share.pass(__popc(above_lanes), __popc(equal_lanes));
  });
}

// Too many candidates to collect (a plateau at the k-th value, or a very large k): compare every
// element with the k-th key.
template <typename T>
__device__ __forceinline__ void emit_elements(const Task<T>& task, const Bracket& bracket,
                                              const Listed& listed, uint32_t kth, Word<T>& word,
                                              const Sink& sink, PhaseClock& clock) {
  const Shared& sm = *task.shared;
  count_segments(task, listed, kth);
  __syncthreads();
  clock.stamp();
  Share cta = cta_share(task, bracket, kth);
  task.for_each_word(word, [&](int step, int begin) {
    uint32_t selected = task.match_keys(word, begin, [&](uint32_t x) { return x > kth; });
    const uint32_t ties = task.match_keys(word, begin, [&](uint32_t x) { return x == kth; });
    leave_counts(task, __reduce_add_sync(0xffffffffu, __popc(selected)),
                 __reduce_add_sync(0xffffffffu, __popc(ties)));
    __syncthreads();
    Share share = cta;
    share.pass(earlier_warps(task, 0), earlier_warps(task, 1));
    const int w = task.lane % kWarps;
    const bool once = task.lane < kWarps;
    cta.pass(__reduce_add_sync(0xffffffffu, once ? sm.warp_value[0][w] : 0),
             __reduce_add_sync(0xffffffffu, once ? sm.warp_value[1][w] : 0));
    const int vecs = task.word_vecs(step);
    if (share.ties > 0) {
      for_each_in_order<T>(ties, vecs, task.lane, [&](int bit, uint32_t rank) {
        if (rank < share.ties) selected |= 1u << bit;
      });
    }
    for_each_in_order<T>(selected, vecs, task.lane, [&](int bit, uint32_t rank) {
      sink.put(share.first + rank, bit_position<T>(begin, bit, task.lane));
    });
    __syncthreads();  // the counts are left anew for the next words
  });
}

}  // namespace gvr_topk::cluster
