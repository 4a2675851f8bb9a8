// One exchange joins the CTAs of a cluster: what each counted and listed arrives in every other, which can
// then finish alone.
#pragma once

#include "cluster/row_sample.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

// Sends this CTA's segment and its header to the same place in every CTA of the cluster, each by a team
// of threads. The receiver's mailbox counts one arrival and the bytes it announces per sender.
template <typename T>
__device__ __forceinline__ void push(const Task<T>& task, const Bracket& bracket) {
  const Shared& sm = *task.shared;
  const uint32_t target = task.team_target(), place = task.team_place();
  const uint32_t mailbox = ptx::map_to_rank(ptx::shared_address(&sm.mailbox), target);
  const uint32_t header = sm.header.address_in(target, task.rank);
  const auto mine = reinterpret_cast<const uint4*>(task.list.of(task.rank));
  const uint32_t list = task.list.own_address_in(target);
  const Counts counts = sm.counts;
  // A CTA's own copy of the list is in place. What the last vector has too many nobody reads.
  const uint32_t listed =
      target == task.rank ? 0 : min(counts.listed, static_cast<uint32_t>(task.list.segment()));
  const uint32_t sent = (listed + kKeysPerVec - 1) / kKeysPerVec;
  if (place == 0) ptx::mailbox_announce(mailbox, sizeof(uint4) * (kHeaderVecs + sent));
  if (place < kHeaderVecs) {
    const uint32_t length = static_cast<uint32_t>(task.row.n);
    const uint4 vec = place == 0 ? make_uint4(counts.above, counts.listed, counts.equal, length)
                                 : make_uint4(bracket.lo, bracket.hi, 0, 0);
    ptx::mailbox_store(header + sizeof(uint4) * place, vec, mailbox);
  }
#pragma unroll 1
  for (uint32_t i = place; i < sent; i += task.team_size()) {
    ptx::mailbox_store(list + sizeof(uint4) * i, mine[i], mailbox);
  }
}

// Sends what this CTA has, and waits for all others; a cluster of one keeps it. Each exchange of a launch
// takes the next parity. Every CTA of a cluster takes part in every exchange, whatever it has read: a wait
// that one of them skipped would have no sender.
template <typename T, typename Meanwhile>
__device__ __forceinline__ void send_and_wait(const Task<T>& task, const Bracket& bracket, uint32_t parity,
                                              Meanwhile meanwhile) {
  Shared& sm = *task.shared;
  if (task.ctas > 1) {
    push(task, bracket);
  } else if (task.thread == 0) {
    sm.header.put_alone(Header{sm.counts, task.row.n, bracket.lo, bracket.hi, {}});
  }
  meanwhile();
  if (task.ctas > 1) {
    ptx::mailbox_wait(ptx::shared_address(&sm.mailbox), parity);
  } else {
    __syncthreads();
  }
}

// What all headers say together. All CTAs have the same headers and so come to the same verdict.
template <typename T>
__device__ __forceinline__ Verdict read_headers(const Task<T>& task, const Bracket& bracket) {
  const Shared& sm = *task.shared;
  const bool mine = task.lane < task.ctas;
  const Header& header = sm.header[mine ? task.lane : 0];
  const Counts counts = header.counts;
  // Where CTAs have read different lengths, hints or samples, nothing they counted belongs together.
  const bool same = header.length == task.row.n && header.lo == bracket.lo && header.hi == bracket.hi;
  const bool fits = counts.listed <= static_cast<uint32_t>(task.list.segment());
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
  __syncthreads();
  clock.stamp();
  send_and_wait(task, bracket, parity, meanwhile);
  return read_headers(task, bracket);
}

// A second bracket beside one that just missed. Above it: all that lies there, if that is not much. Below it:
// as far down as the counts at its two ends point, taken as a tail that falls exponentially, and a margin
// further, for what lies below has to be read again. False where neither is likely to hold; then radix rounds
// decide. All CTAs have the same counts, and so the same bracket.
template <typename T>
__device__ __forceinline__ bool move_bracket(const Task<T>& task, const Verdict& verdict, Bracket& missed) {
  Bracket bracket = missed;
  const uint32_t k = task.k, room = static_cast<uint32_t>(task.list.segment() << task.log2_ctas) / 2;
  if (!verdict.counted || verdict.contains) return false;
  if (verdict.above >= k) {
    if (verdict.above > room) return false;
    bracket.lo = bracket.hi + 1;
    bracket.hi = kMostFiniteKey;
  } else {
    const uint32_t reached = verdict.above + verdict.inside;  // elements from the lower end on
    const uint32_t wanted = k + (k - reached) + k / 6;
    if (verdict.inside == 0 || wanted - reached > room) return false;
    const float lo = bracket.low(), hi = bracket.high();
    const float per_fold =
        ptx::log2(__fdividef(static_cast<float>(reached), fmaxf(static_cast<float>(verdict.above), 0.5f)));
    const float folds = ptx::log2(__fdividef(static_cast<float>(wanted), static_cast<float>(reached)));
    bracket.hi = bracket.lo - 1;
    bracket.lo = max(kLeastFiniteKey, order_key(lo - (hi - lo) * __fdividef(folds, per_fold)));
  }
  const bool is_sound = kNegInfKey < bracket.lo && bracket.lo <= bracket.hi && bracket.hi < kPosInfKey;
  if (is_sound) missed = bracket;
  return is_sound;
}

// Whether a bracket's counts say that the k-th value is -inf: less than k elements are finite, or above that.
__device__ __forceinline__ bool is_masked(const Bracket& bracket, const Verdict& verdict, int k) {
  return bracket.lo == kLeastFiniteKey && verdict.above + verdict.inside < static_cast<uint32_t>(k);
}

// Where the k-th key lies when a bracket has missed it, by counts that belong together.
__device__ __forceinline__ Bracket range_of(const Verdict& verdict, const Bracket& bracket, int k) {
  if (verdict.contains) return bracket;
  if (verdict.above >= static_cast<uint32_t>(k)) return Bracket{bracket.hi + 1, kMaxKey, kGuessNone};
  return Bracket{kMinKey, bracket.lo - 1, kGuessNone};
}

}  // namespace gvr_topk::cluster
