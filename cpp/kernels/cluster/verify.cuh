// Phases 2 and 3, verify and collect: one look at every element, one cluster barrier.
//
// Elements above the bracket are counted, elements inside it are listed (as keys) in every CTA of the
// cluster, so that after the barrier each CTA can finish alone.
#pragma once

#include "cluster/state.cuh"

namespace gvr_topk::cluster {

struct Verdict {
  bool holds;         // the k-th key is in the bracket and everything needed was listed
  uint32_t rank;      // its rank, from the top, among the elements inside
  uint32_t inside;    // elements inside
  uint32_t equal;     // of these, elements equal to the plateau
  bool other_source;  // some CTA guessed from something else than a hint
};

// Writes one key into this CTA's segment of every CTA's list.
template <typename T>
__device__ __forceinline__ void list_key(const Task<T>& task, uint32_t key, uint32_t location) {
  const uint32_t slot = atomicAdd(&task.shared->listed, 1u);
  if (slot >= static_cast<uint32_t>(task.segment)) return;
  if (task.steps > 1) task.location[slot] = location;
  uint32_t* mine = task.list + task.rank * task.segment + slot;
  if (task.ctas == 1) {
    *mine = key;
    return;
  }
  const uint32_t address = ptx::shared_address(mine);
  for (int c = 0; c < task.ctas; ++c) ptx::store_remote(ptx::map_to_rank(address, c), key);
}

template <typename T>
__device__ __forceinline__ void push_header(const Task<T>& task, const Header& header) {
  Header* mine = &task.shared->header[task.rank];
  if (threadIdx.x >= task.ctas) return;
  const uint32_t word[kHeaderWords] = {header.lo,    header.hi,     header.source,
                                       header.above, header.listed, header.equal};
  const uint32_t address = ptx::map_to_rank(ptx::shared_address(mine), threadIdx.x);
#pragma unroll
  for (int i = 0; i < kHeaderWords; ++i) ptx::store_remote(address + 4 * i, word[i]);
}

template <typename T>
__device__ __forceinline__ Verdict read_headers(const Task<T>& task, const Bracket& bracket) {
  const Shared& sm = *task.shared;
  const bool mine = task.lane < task.ctas;
  const Header h = sm.header[mine ? task.lane : 0];
  // CTAs read the hint while another row of the same request may be writing it, so they can have
  // guessed differently; then nothing they counted belongs together.
  const bool agree = h.lo == bracket.lo && h.hi == bracket.hi &&
                     h.listed <= static_cast<uint32_t>(task.segment);
  const uint32_t above = __reduce_add_sync(0xffffffffu, mine ? h.above : 0);
  const uint32_t listed = __reduce_add_sync(0xffffffffu, mine ? h.listed : 0);
  Verdict v;
  v.equal = __reduce_add_sync(0xffffffffu, mine ? h.equal : 0);
  v.inside = listed + v.equal;
  v.rank = static_cast<uint32_t>(task.k) - above;
  v.holds = __all_sync(0xffffffffu, agree) && above < static_cast<uint32_t>(task.k) &&
            v.rank <= v.inside;
  v.other_source = !__all_sync(0xffffffffu, h.source == kGuessHint);
  return v;
}

template <typename T>
__device__ __forceinline__ Verdict verify(const Task<T>& task, const Bracket& bracket,
                                          uint32_t (&key)[kValuesPerThread]) {
  Shared& sm = *task.shared;
  const uint32_t plateau = bracket.plateau();
  uint32_t above = 0, equal = 0;
  task.for_each_word(key, [&](int step, int begin) {
    const uint32_t above_bits =
        match_word<T>(key, begin, task.end, [&](uint32_t x) { return x > bracket.hi; });
    const uint32_t inside_bits = match_word<T>(
        key, begin, task.end, [&](uint32_t x) { return x - bracket.lo <= bracket.hi - bracket.lo; });
    above += __popc(above_bits);
    if (task.steps > 1) {
      task.above_mask[step * kThreads + threadIdx.x] = above_bits;
      task.inside_mask[step * kThreads + threadIdx.x] = inside_bits;
    }
    if (__ballot_sync(0xffffffffu, inside_bits != 0) == 0) return;
#pragma unroll
    for (int i = 0; i < kValuesPerThread; ++i) {
      if ((inside_bits >> i & 1) == 0) continue;
      if (key[i] == plateau) {
        ++equal;
      } else {
        list_key(task, key[i], (step * kThreads + threadIdx.x) * kValuesPerThread + i);
      }
    }
  });
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0) {
    sm.warp_value[0][task.warp] = above;
    sm.warp_value[1][task.warp] = equal;
  }
  __syncthreads();
  if (task.warp == 0) {
    const bool mine = task.lane < kWarps;
    above = __reduce_add_sync(0xffffffffu, mine ? sm.warp_value[0][task.lane] : 0);
    equal = __reduce_add_sync(0xffffffffu, mine ? sm.warp_value[1][task.lane] : 0);
    push_header(task, Header{bracket.lo, bracket.hi, bracket.source, above, sm.listed, equal});
  }
  cluster_sync(task.ctas);
  return read_headers(task, bracket);
}

}  // namespace gvr_topk::cluster
