// Phase 3, collect: gathers the candidates in index order, without ballots or atomics (paper, section 4.2.3).
#pragma once

#include "paper_gvr/verify.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk::paper_gvr {

// Collects the positions of the elements whose bits the last pass has set. The count cache (`result.before`)
// says where this warp's positions go.
template <typename T>
__device__ __forceinline__ void collect(const Block& block, const PaperStream<T>& stream,
                                        const SearchResult& result, Candidates& candidates) {
  const int words = (stream.length + 31) / 32;
  const int each = (words + 31) / 32 | 1;  // Odd, so that lanes read from different banks.
  const int first = min(block.lane * each, words), last = min(first + each, words);
  const uint32_t* const map = block.smem.bitmap + stream.begin / 32;
  uint32_t count = 0;
#pragma unroll 4
  for (int w = first; w < last; ++w) count += __popc(map[w]);
  ptx::reconverge(ptx::unknown_zero());
  const uint32_t upto = result.before + ptx::inclusive_scan(count);
  int32_t* next = candidates.position + upto - count;
  int32_t* const end = candidates.position + upto;
  const uint32_t* at = map + first;
  int position = stream.begin - stream.shift + 32 * first;
  uint32_t bits = count > 0 ? *at : 0;
  // Each iteration takes one candidate or one empty word, so that lanes do not wait for each other at every
  // word. What an empty word writes is overwritten by the next candidate.
#pragma unroll 1
  while (next != end) {
    *next = position + __ffs(bits) - 1;
    next += bits != 0;
    bits &= bits - 1;
    if (bits == 0 && next != end) {
      bits = *++at;
      position += 32;
    }
  }
}

// This thread's candidates. Warps own contiguous runs of candidates, and a lane takes every 32nd of a run.
struct ThreadCandidates {
  static constexpr int kAtOnce = 4;

  int first, limit;
  uint32_t key[kPerThread];  // absent keys beyond the limit

  template <typename T>
  __device__ __forceinline__ ThreadCandidates(const Block& block, const RowView<T>& row, int count,
                                              Candidates& candidates) {
    const int run = (count + kThreads - 1) / kThreads * 32;
    first = block.warp * run + block.lane;
    limit = min((block.warp + 1) * run, count);
    const T* data = row.data;
    ptx::keep(data);  // Otherwise the compiler would recompute the row's address for every candidate.
    T value[kPerThread];
    for_each_index([&](int r, int i) {
      value[r] = __ldg(data + static_cast<uint32_t>(candidates.position[min(i, limit - 1)]));
    });
    for_each_index([&](int r, int i) {
      key[r] = order_key(to_float(value[r]));
      if (i >= limit) key[r] = kAbsentKey;
      if (i < limit) candidates.key[i] = key[r];
    });
  }

  // Calls visit(r, i) for this thread's r-th candidate, where i is its index among all. Some calls pass an i
  // beyond the limit.
  template <typename Visit>
  __device__ __forceinline__ void for_each_index(Visit visit) const {
#pragma unroll
    for (int group = 0; group < kPerThread; group += kAtOnce) {
      if (first - (threadIdx.x & 31) + 32 * group >= limit) break;
#pragma unroll
      for (int r = group; r < group + kAtOnce; ++r) visit(r, first + 32 * r);
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    for_each_index([&](int r, int) { visit(r, key[r]); });
  }
};

}  // namespace gvr_topk::paper_gvr
