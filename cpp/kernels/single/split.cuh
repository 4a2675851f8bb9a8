// What a round leaves of a short row: elements that are selected in any case, and a few to choose from.
#pragma once

#include "single/held.cuh"

namespace gvr_topk::single {

template <int kWords>
struct Split {
  Chosen<kWords> above, inside;
  uint32_t rank;  // so many of those inside are selected
  uint32_t few;   // of so many; none, where nothing is left to choose

  __device__ __forceinline__ void take_all() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      above.word[w] |= inside.word[w];
      inside.word[w] = 0;
    }
    few = 0;
  }
};

template <typename Row>
using SplitOf = Split<Row::kWords>;

}  // namespace gvr_topk::single
