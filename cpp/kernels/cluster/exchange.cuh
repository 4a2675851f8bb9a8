// One exchange joins the CTAs of a cluster: what each counted and listed arrives in every other, which can
// then finish alone.
#pragma once

#include "cluster/row_sample.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

struct Verdict {
  bool counted;        // all CTAs used this bracket
  bool contains;       // and the k-th key is in it
  bool holds;          // and everything needed was listed
  uint32_t above;      // elements above the bracket,
  uint32_t before;     // and those of earlier CTAs
  uint32_t rank;       // its rank, from the top, among the elements inside
  uint32_t inside;     // elements inside
  uint32_t equal;      // of these, elements equal to the plateau
  uint32_t collected;  // candidates of this CTA; above the capacity they were not collected
};

// Sends this CTA's segment and its header to the same place in every CTA of the cluster, each by a team
// of threads. The receiver's mailbox counts one arrival and the bytes it announces per sender.
template <typename T>
__device__ __forceinline__ void push(const Task<T>& task, const Bracket& bracket) {
  const Shared& sm = *task.shared;
  const uint32_t target = task.team_target(), place = task.team_place();
  const uint32_t mailbox = ptx::map_to_rank(ptx::shared_address(&sm.mailbox), target);
  const uint32_t header = ptx::map_to_rank(ptx::shared_address(&sm.header[task.rank]), target);
  const auto mine = reinterpret_cast<const uint4*>(task.list + task.rank * task.segment);
  const uint32_t list = ptx::map_to_rank(ptx::shared_address(mine), target);
  const Counts counts = sm.counts;
  // A CTA's own copy of the list is in place. What the last vector has too many nobody reads.
  const uint32_t listed = target == task.rank ? 0 : min(counts.listed, static_cast<uint32_t>(task.segment));
  const uint32_t sent = (listed + kKeysPerVec - 1) / kKeysPerVec;
  if (place == 0) ptx::mailbox_announce(mailbox, sizeof(uint4) * (kHeaderVecs + sent));
  if (place < kHeaderVecs) {
    const uint4 vec = place == 0 ? make_uint4(counts.above, counts.listed, counts.equal, 0)
                                 : make_uint4(bracket.lo, bracket.hi, 0, 0);
    ptx::mailbox_store(header + sizeof(uint4) * place, vec, mailbox);
  }
#pragma unroll 1
  for (uint32_t i = place; i < sent; i += task.team_size()) {
    ptx::mailbox_store(list + sizeof(uint4) * i, mine[i], mailbox);
  }
}

template <typename T>
__device__ __forceinline__ Verdict read_headers(const Task<T>& task, const Bracket& bracket) {
  const Shared& sm = *task.shared;
  const bool mine = task.lane < task.ctas;
  const Header& header = sm.header[mine ? task.lane : 0];
  const Counts counts = header.counts;
  // CTAs read the hint while another row of the same request may be writing it, so they can have
  // guessed differently; then nothing they counted belongs together.
  const bool same = !task.contested || (header.lo == bracket.lo && header.hi == bracket.hi);
  const bool fits = counts.listed <= static_cast<uint32_t>(task.segment);
  Verdict v;
  v.above = __reduce_add_sync(0xffffffffu, mine ? counts.above : 0);
  v.before = __reduce_add_sync(0xffffffffu, task.lane < task.rank ? counts.above : 0);
  v.inside = __reduce_add_sync(0xffffffffu, mine ? counts.listed : 0);
  v.equal = 0;
  if (bracket.plateau() != kAbsentKey) {
    v.equal = __reduce_add_sync(0xffffffffu, mine ? counts.equal : 0);
    v.inside += v.equal;
  }
  v.rank = static_cast<uint32_t>(task.k) - v.above;
  const bool there = v.rank - 1 < v.inside;  // not if it is 0, or as an unsigned number less than that
  v.holds = __all_sync(0xffffffffu, same && fits && there);
  v.counted = v.holds || __all_sync(0xffffffffu, same);
  v.contains = v.counted && there;
  return v;
}

// Brings together what every CTA has counted, and listed. `meanwhile` runs while it is on its way.
template <typename T, typename Meanwhile>
__device__ __forceinline__ Verdict exchange_lists(const Task<T>& task, const Bracket& bracket,
                                                  uint32_t parity, PhaseClock& clock, Meanwhile meanwhile) {
  Shared& sm = *task.shared;
  __syncthreads();
  clock.stamp();
  if (task.ctas > 1) {
    push(task, bracket);
  } else if (task.thread == 0) {
    sm.header[0] = Header{sm.counts, bracket.lo, bracket.hi};
  }
  meanwhile();
  if (task.ctas > 1) {
    ptx::mailbox_wait(ptx::shared_address(&sm.mailbox), parity);
    outlast_samples(task);
  } else {
    __syncthreads();
  }
  return read_headers(task, bracket);
}

// A second bracket beside one that just missed: above it, or below it and wider. False where neither is
// likely to hold; then the radix rounds decide.
template <typename T>
__device__ __forceinline__ bool move_bracket(const Task<T>& task, const Verdict& verdict, Bracket& bracket) {
  constexpr float kWiden = 4.0f;
  if (!verdict.counted || verdict.contains) return false;
  if (verdict.above >= static_cast<uint32_t>(task.k)) {
    if (verdict.above > static_cast<uint32_t>(task.segment << task.log2_ctas) / 2) return false;
    bracket.lo = bracket.hi + 1;
    bracket.hi = kPosInfKey - 1;
  } else {
    const float lo = bracket.low(), hi = bracket.high();
    bracket.hi = bracket.lo - 1;
    bracket.lo = max(kNegInfKey + 1, order_key(lo - kWiden * (hi - lo)));
  }
  return kNegInfKey < bracket.lo && bracket.lo <= bracket.hi && bracket.hi < kPosInfKey;
}

}  // namespace gvr_topk::cluster
