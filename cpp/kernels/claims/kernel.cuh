// Claims slots for the rows that are the last to name them (core/output_writer.cuh).
//
// Grid: one CTA of 1,024 threads. It reads 8 bytes for each request, and so takes little of the rows' own
// time.
#pragma once

#include "core/output_writer.cuh"

namespace gvr_topk::claims {

constexpr int kClaimThreads = 1024;

// Calls visit(row, claim) with the last row of each request and the claim of the slot that it names, if there
// is such a slot. Another stream may be writing `row_slot`, so two calls of this may see different slots.
template <typename Visit>
GVR_DEVICE void for_each_claim(const TopkParams& p, Visit visit) {
#pragma unroll 8  // so that the loads overlap
  for (int row = p.next_n * (static_cast<int>(threadIdx.x) + 1) - 1; row < p.rows;
       row += p.next_n * kClaimThreads) {
    const int slot = __ldg(p.row_slot + row);
    if (static_cast<uint32_t>(slot) < static_cast<uint32_t>(p.num_slots)) visit(row, claim_at(p, slot));
  }
}

static __global__ void __launch_bounds__(kClaimThreads) claim_slots(const __grid_constant__ TopkParams p) {
  for_each_claim(p, [](int, int32_t* claim) { *claim = kNoClaim; });
  __syncthreads();
  for_each_claim(p, [](int row, int32_t* claim) { atomicMax(claim, claim_of(row)); });
}

}  // namespace gvr_topk::claims
