// Emission: every CTA writes its own selected positions, in ascending order, at their final place.
#pragma once

#include "cluster/refine.cuh"
#include "cluster/state.cuh"
#include "common/order_scan.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

// Where results of a row go.
struct Sink {
  int32_t* indices;
  int32_t* prior;        // null: nothing is handed to the next step
  const int32_t* pages;  // null: positions are written as they are
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

__device__ __forceinline__ Sink make_sink(const TopkParams& p, int row, int request, int slot) {
  Sink sink;
  sink.indices = p.indices + row * p.indices_stride;
  // The last row of a request is the one whose result the next step starts from.
  const bool last = row - request * p.next_n == p.next_n - 1;
  sink.prior = last && slot >= 0 && p.prior != nullptr ? p.prior + slot * p.prior_stride : nullptr;
  sink.pages = p.page_table != nullptr ? p.page_table + request * p.page_table_stride : nullptr;
  sink.page_size = p.page_size;
  sink.pages_per_request = p.pages_per_request;
  return sink;
}

// All of a row that is no longer than k, then -1.
__device__ __forceinline__ void emit_short_row(const Sink& sink, int n, int k, int first, int stride) {
  for (int i = first; i < k; i += stride) sink.put(i, i < n ? i : -1);
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
  if (task.lane == 0 && (above | equal) != 0) {
    atomicAdd(&task.shared->segment_above[task.team_target()], above);
    atomicAdd(&task.shared->segment_equal[task.team_target()], equal);
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
  }
  const bool earlier = task.lane < task.rank;
  const uint32_t wanted = task.k - __reduce_add_sync(0xffffffffu, above);
  const uint32_t above_before = __reduce_add_sync(0xffffffffu, earlier ? above : 0);
  const uint32_t equal_before = __reduce_add_sync(0xffffffffu, earlier ? equal : 0);
  const uint32_t ties_before = min(wanted, equal_before);
  return Share{above_before + ties_before, wanted - ties_before};
}

// Leaves this warp's counts, closes the block's counting, and says where the warp's elements go.
template <typename T>
__device__ __forceinline__ Share warp_share(const Task<T>& task, const Bracket& bracket, uint32_t kth,
                                            uint32_t above, uint32_t equal, PhaseClock& clock) {
  Shared& sm = *task.shared;
  if (task.lane == 0) {
    sm.warp_value[0][task.warp] = above;
    sm.warp_value[1][task.warp] = equal;
  }
  count_segments(task, kth);
  __syncthreads();
  clock.stamp();
  Share share = cta_share(task, bracket, kth);
  const uint32_t ties_before = min(earlier_warps(task, 1), share.ties);
  share.first += earlier_warps(task, 0) + ties_before;
  share.ties -= ties_before;
  return share;
}

// The usual way: select among the collected candidates, about one per thread.
template <typename T>
__device__ __forceinline__ void emit_candidates(const Task<T>& task, const Bracket& bracket,
                                                uint32_t kth, uint32_t collected,
                                                const Sink& sink,
                                                PhaseClock& clock) {
  uint32_t above = 0, equal = 0;
  task.for_each_candidate(collected, [&](int i, bool there) {
    const uint32_t key = there ? task.candidates[i].key : kAbsentKey;
    above += __popc(__ballot_sync(0xffffffffu, key > kth));
    equal += __popc(__ballot_sync(0xffffffffu, key == kth));
  });
  Share share = warp_share(task, bracket, kth, above, equal, clock);
  const uint32_t before = (1u << task.lane) - 1;
  task.for_each_candidate(collected, [&](int i, bool there) {
    const Candidate c = there ? task.candidates[i] : Candidate{0, kAbsentKey};
    const uint32_t above_lanes = __ballot_sync(0xffffffffu, c.key > kth);
    const uint32_t equal_lanes = __ballot_sync(0xffffffffu, c.key == kth);
    const uint32_t tie = __popc(equal_lanes & before);
    if (c.key > kth || (c.key == kth && tie < share.ties)) {
      sink.put(share.first + __popc(above_lanes & before) + min(tie, share.ties), c.position);
    }
    const uint32_t taken = min(static_cast<uint32_t>(__popc(equal_lanes)), share.ties);
    share.first += __popc(above_lanes) + taken;
    share.ties -= taken;
  });
}

// Too many candidates to collect (a plateau at the k-th value, or a very large k): compare every
// element with the k-th key, once to count and once to write.
template <typename T>
__device__ __forceinline__ void emit_elements(const Task<T>& task, const Bracket& bracket, uint32_t kth,
                                              Word<T>& word, const Sink& sink, PhaseClock& clock) {
  uint32_t above = 0, equal = 0;
  task.for_each_word(word, [&](int, int begin) {
    above += __popc(task.match_keys(word, begin, [&](uint32_t x) { return x > kth; }));
    equal += __popc(task.match_keys(word, begin, [&](uint32_t x) { return x == kth; }));
  });
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  Share share = warp_share(task, bracket, kth, above, equal, clock);
  task.for_each_word(word, [&](int step, int begin) {
    const int vecs = task.word_vecs(step);
    uint32_t selected = task.match_keys(word, begin, [&](uint32_t x) { return x > kth; });
    if (share.ties > 0) {
      const uint32_t ties = task.match_keys(word, begin, [&](uint32_t x) { return x == kth; });
      const uint32_t found = for_each_in_order<T>(ties, vecs, task.lane, [&](int bit, uint32_t rank) {
        if (rank < share.ties) selected |= 1u << bit;
      });
      share.ties -= min(found, share.ties);
    }
    share.first += for_each_in_order<T>(selected, vecs, task.lane, [&](int bit, uint32_t rank) {
      sink.put(share.first + rank, bit_position<T>(begin, bit, task.lane));
    });
  });
}

}  // namespace gvr_topk::cluster
