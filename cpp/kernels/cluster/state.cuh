// Shared memory of one CTA of the cluster kernel, and the task it works on.
#pragma once

#include "common/row.cuh"
#include "ptx/cluster.cuh"

namespace gvr_topk::cluster {

constexpr int kThreads = kClusterThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kRadixBins = 1024;
constexpr int kRadixBits = 10;
constexpr int kRankDirectly = 32;  // few enough items for one warp to rank by comparison

enum GuessSource : uint32_t { kGuessNone = 0, kGuessHint = 1, kGuessRowSample = 2 };

// An inclusive range of keys. The k-th key is believed (or known) to lie in it.
struct Bracket {
  uint32_t lo;
  uint32_t hi;
  uint32_t source;

  // The one key inside the bracket that is counted instead of listed, because a plateau of it is
  // expected: the only key there is, or zero, which ReLU indexers give to most of a row.
  __device__ __forceinline__ uint32_t plateau() const {
    if (lo == hi) return lo;
    return lo <= kZeroKey && kZeroKey <= hi ? kZeroKey : kAbsentKey;
  }
};

// What one CTA tells all others about its part of the row.
struct Header {
  uint32_t lo, hi, source;  // its bracket: all CTAs must have used the same one
  uint32_t above;           // elements above the bracket
  uint32_t listed;          // elements inside, the plateau's apart; may exceed the list's capacity
  uint32_t equal;           // elements equal to the plateau
};
constexpr int kHeaderWords = sizeof(Header) / 4;

struct alignas(16) Shared {
  uint32_t hist[2][kRadixBins];  // read by other CTAs in the radix rounds, hence two in turn
  uint32_t total[kRadixBins];    // cluster-wide sums of one radix round
  uint32_t bins[256];            // local histograms
  Header header[kMaxClusterSize];
  uint32_t segment_above[kMaxClusterSize];  // listed keys above the k-th, per CTA
  uint32_t segment_equal[kMaxClusterSize];  // listed keys equal to it
  uint32_t warp_value[3][kWarps];
  uint32_t small[kRankDirectly];
  uint32_t small_count;
  uint32_t listed;
  uint32_t at_or_above;  // hinted values at or above the k-th
  uint32_t hinted;       // hinted values that lie in the row
};

template <typename T>
struct Task {
  Row<T> row;
  int k;
  int rank;   // of this CTA in the cluster
  int ctas;   // in the cluster
  int begin;  // this warp's span of the row
  int end;
  int steps;  // words per warp; one word stays in registers
  int lane;
  int warp;
  Shared* shared;
  uint32_t* list;      // [ctas][segment] keys, one segment written by each CTA
  uint32_t* location;  // [segment] word index * 32 + bit of this CTA's own keys; several words only
  uint32_t* above_mask;   // [steps][kThreads] bits above the bracket; several words only
  uint32_t* inside_mask;  // [steps][kThreads] bits inside the bracket; several words only
  int segment;            // keys one CTA may list

  __device__ __forceinline__ int word_begin(int step) const { return begin + step * kWordElements; }

  // Calls visit(step, begin of the word); the word's keys are in `key` then.
  template <typename Visit>
  __device__ __forceinline__ void for_each_word(uint32_t (&key)[kValuesPerThread], Visit visit) const {
    for (int step = 0; step < steps; ++step) {
      if (steps > 1) load_word<T>(row, word_begin(step), end, lane, key);
      visit(step, word_begin(step));
    }
  }
};

__device__ __forceinline__ void cluster_sync(int ctas) {
  if (ctas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace gvr_topk::cluster
