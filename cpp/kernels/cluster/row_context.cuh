// One row as one thread of its cluster sees it: where the row and shared memory lie, and which elements this
// thread owns.
#pragma once

#include <cstdint>

#include "cluster/messages.cuh"
#include "cluster/smem_layout.cuh"
#include "core/config.cuh"
#include "core/launch_traits.cuh"
#include "core/row_view.cuh"
#include "gvr_topk/params.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

template <typename T>
struct RowContext {
  using Element = T;

  RowView<T> row;
  int k;
  int rank;  // rank of this CTA in the cluster
  int ctas;  // CTAs in the cluster
  int log2_ctas;
  int thread;
  int lane;
  int warp;
  uint32_t zero;  // see ptx::unknown_zero
  Shared* shared;
  KeyList list;

  // The block's threads form one team for each CTA of the cluster. A team sends to the CTA `team_target`.
  GVR_DEVICE int team_size() const { return kThreads >> log2_ctas; }
  GVR_DEVICE int team_target() const { return thread >> (kLog2Threads - log2_ctas); }
  GVR_DEVICE int team_index() const { return thread & (team_size() - 1); }
};

// The context of a row whose length is not known yet; `RowJob::agree_on_length` sets it.
// `known_sizes`: the sizes in `traits` are constants.
template <typename T>
GVR_DEVICE RowContext<T> make_context(const TopkParams& p, const LaunchTraits& traits, const RowView<T>& row,
                                      unsigned char* storage, bool known_sizes = false) {
  // A size that is a constant must remain visible to the compiler as one.
  const auto keep = [&](int& size) {
    if (!known_sizes) ptx::keep(size);
  };
  RowContext<T> ctx;
  ctx.row = row;
  ctx.k = p.k;
  ptx::keep(ctx.k);
  ptx::keep(ctx.row.data);
  ctx.rank = traits.log2_ctas() > 0 ? ptx::cluster_rank() : 0;
  ctx.log2_ctas = traits.log2_ctas();
  keep(ctx.log2_ctas);
  ctx.ctas = 1 << ctx.log2_ctas;
  keep(ctx.ctas);
  ctx.thread = threadIdx.x;
  ptx::keep(ctx.thread);
  ctx.zero = ptx::unknown_zero();
  ctx.lane = ctx.thread & 31;
  ctx.warp = ctx.thread >> 5;
  ctx.shared = reinterpret_cast<Shared*>(storage);
  int segment = traits.list_capacity() >> ctx.log2_ctas;
  keep(segment);
  ctx.list = KeyList(reinterpret_cast<uint32_t*>(storage + sizeof(Shared)), segment, ctx.rank);
  return ctx;
}

GVR_DEVICE void cluster_sync(int ctas) {
  if (ctas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

// Sum of the numbers that earlier warps have stored in `warp_value[which]`.
template <typename Context>
GVR_DEVICE uint32_t earlier_warps(const Context& ctx, int which) {
  return __reduce_add_sync(0xffffffffu, ctx.lane < ctx.warp ? ctx.shared->warp_value[which][ctx.lane] : 0);
}

}  // namespace gvr_topk
