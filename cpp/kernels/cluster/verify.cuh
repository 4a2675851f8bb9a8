// Phases 2 and 3, verify and collect: one look at every element, one exchange.
//
// Elements above the bracket are counted, elements inside it are listed (as keys) in every CTA of the
// cluster. While that is under way each CTA collects its own candidates, in index order.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/state.cuh"
#include "common/order_scan.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

// Appends the marked elements of a warp's word, as keys, to this CTA's own segment of its own list.
template <typename T>
__device__ __forceinline__ void list_keys(const Task<T>& task, const Word<T>& word, uint32_t marked) {
  if (marked == 0) return;
  uint32_t slot = atomicAdd(&task.shared->counts.listed, static_cast<uint32_t>(__popc(marked)));
#pragma unroll 1  // a lane marks one element at most, nearly always
  for (; marked != 0; marked &= marked - 1) {
    const uint32_t key = order_key(word.value_at(__ffs(marked) - 1));
    task.list.put(slot++, key);
  }
}

// Counts and lists this CTA's elements; the candidates' bits stay in `bits` (one word) or in the masks.
template <typename T>
__device__ __forceinline__ void classify(const Task<T>& task, const Bracket& bracket, Word<T>& word,
                                         uint32_t& bits) {
  Shared& sm = *task.shared;
  // Finite bounds compare as values, which needs no conversion; NaN fails both comparisons and so
  // counts as above.
  const bool finite = kNegInfKey < bracket.lo && bracket.hi < kPosInfKey;
  const float lo = bracket.low(), hi = bracket.high();
  const uint32_t plateau = bracket.plateau();
  uint32_t above = 0, equal = 0;
  task.for_each_word(word, [&](int step, int begin) {
    bits = finite ? match_word(word, begin, task.end, [&](float x) { return !(x < lo); })
                  : task.match_keys(word, begin, [&](uint32_t x) { return x >= bracket.lo; });
    if (task.steps > 1) task.mask(step) = static_cast<uint16_t>(bits);
    const uint32_t candidates = __reduce_add_sync(0xffffffffu, __popc(bits));
    if (task.lane == 0) sm.word_candidates[step * kWarps + task.warp] = candidates;
    if (candidates == 0) return;
    const uint32_t above_bits =
        finite ? match_word(word, begin, task.end, [&](float x) { return !(x <= hi); })
               : task.match_keys(word, begin, [&](uint32_t x) { return x > bracket.hi; });
    above += __popc(above_bits);
    uint32_t inside = bits & ~above_bits;
    if (plateau != kAbsentKey) {
      const uint32_t on_plateau =
          inside & task.match_keys(word, begin, [&](uint32_t x) { return x == plateau; });
      equal += __popc(on_plateau);
      inside &= ~on_plateau;
    }
    list_keys(task, word, inside);
  });
  above = __reduce_add_sync(0xffffffffu, above);
  if (task.lane == 0 && above != 0) ptx::add_shared(sm.counts.above, above, task.zero);
  if (plateau == kAbsentKey) return;
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0) ptx::add_shared(sm.counts.equal, equal, task.zero);
}

// Turns `word_candidates` from counts into the counts of all earlier words; returns the CTA's total. Beyond
// 2^16 they wrap: nobody looks at the places of more candidates than can be collected.
template <typename T>
__device__ __forceinline__ uint32_t scan_words(const Task<T>& task) {
  Shared& sm = *task.shared;
  static_assert(kMaxSteps * kWarps <= 4 * kThreads, "four words per thread");
  ushort4& mine = reinterpret_cast<ushort4*>(sm.word_candidates)[task.thread];
  const ushort4 count = 4 * task.thread < task.steps * kWarps ? mine : make_ushort4(0, 0, 0, 0);
  const uint32_t sum = count.x + count.y + count.z + count.w;
  const uint32_t upto = inclusive_scan(sum);
  if (task.lane == 31) sm.warp_value[2][task.warp] = upto;
  __syncthreads();
  const uint32_t first = earlier_warps(task, 2) + upto - sum;
  const uint32_t second = first + count.x, third = second + count.y;
  mine = make_ushort4(first, second, third, third + count.z);
  const uint32_t all = __reduce_add_sync(0xffffffffu, task.lane < kWarps ? sm.warp_value[2][task.lane] : 0);
  __syncthreads();
  return all;
}

// Collects this CTA's candidates in index order: first the positions, then, each thread for the ones it
// will emit, their keys. Keys are read again, from cache: the registers that hold them cannot be indexed
// by a bit's place, and reading them inside the first loop would wait for each in turn.
template <typename T>
__device__ __forceinline__ uint32_t collect(const Task<T>& task, uint32_t bits) {
  Shared& sm = *task.shared;
  uint32_t all, place = 0;
  if (task.steps == 1) {
    const uint32_t count = task.lane < kWarps ? sm.word_candidates[task.lane] : 0;
    all = __reduce_add_sync(0xffffffffu, count);
    place = __reduce_add_sync(0xffffffffu, task.lane < task.warp ? count : 0);
  } else {
    all = scan_words(task);
  }
  const bool fits = all <= static_cast<uint32_t>(task.candidate_capacity);
  if (fits) {
    for (int step = 0; step < task.steps; ++step) {
      if (task.steps > 1) {
        bits = task.mask(step);
        place = sm.word_candidates[step * kWarps + task.warp];
      }
      for_each_in_order<T>(bits, task.word_vecs(step), task.lane, [&](int bit, uint32_t rank) {
        task.candidates[place + rank].position = bit_position<T>(task.word_begin(step), bit, task.lane);
      });
    }
  }
  __syncthreads();
  if (fits) {
    task.for_each_candidate(all, [&](int i, bool there) {
      if (there) task.candidates[i].key = task.row.key(task.candidates[i].position);
    });
  }
  return all;
}

template <typename T>
__device__ __forceinline__ Verdict verify(const Task<T>& task, const Bracket& bracket, Word<T>& word,
                                          uint32_t parity, PhaseClock& clock) {
  Shared& sm = *task.shared;
  uint32_t bits = 0;
  classify(task, bracket, word, bits);
  __syncthreads();
  uint32_t collected = 0;
  send_and_wait(task, bracket, parity, [&] {
    // For the refinement, behind the barriers inside `collect`.
    sm.keys.template clear<kThreads>();
    if (task.thread == 0) sm.small_count = 0;
    clock.stamp();
    collected = collect(task, bits);
  });
  Verdict verdict = read_headers(task, bracket);
  verdict.collected = collected;
  return verdict;
}

}  // namespace gvr_topk::cluster
