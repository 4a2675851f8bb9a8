// Claims decide, in launches of many rows, which row leaves its positions in a slot that several rows may
// name.
//
// A claim is the number of a row, as a negative number other than -1, in place of the first position that the
// slot keeps. A launch before that of the rows writes the greatest claim to each slot (claims/launch.cu). The
// row whose claim it is writes all positions of the slot, the first one included; every other row then finds
// either another claim or a position.
#pragma once

#include <cstdint>

#include "gvr_topk/params.h"

namespace gvr_topk {

constexpr int32_t kNoClaim = INT32_MIN;  // less than every claim

__device__ __forceinline__ int32_t claim_of(int row) { return kNoClaim + 1 + row; }

__device__ __forceinline__ int32_t* claim_at(const TopkParams& p, int slot) {
  return p.state_indices + slot * p.state_indices_stride;
}

}  // namespace gvr_topk
