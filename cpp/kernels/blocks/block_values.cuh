// Writes the greatest score of each block of rows that have more blocks than one CTA holds keys of. A decode
// launch then chooses the best `block_k - 1` of a row's values, and `blocks_topk` selects in the chosen
// blocks.
//
// Grid: [rows, parts] CTAs of 512 threads. Each CTA of a row takes every `parts`-th run of 512 blocks.
#pragma once

#include "blocks/block_tile.cuh"
#include "cluster/row_job.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::blocks {

// Returns the greatest score of a whole block, as the number that stands for its key: every NaN and both
// zeros have one number each.
template <typename T>
GVR_DEVICE float block_value(const T* block, bool aligned) {
  if (!aligned) return key_to_float(whole_key<T>(unaligned_block_key(block)));
  uint4 vec[kVecsOfBlock<T>];
  ptx::load_before<0>(0, 1, vec[0], block);
  if constexpr (kVecsOfBlock<T> > 1) ptx::load_before<sizeof(uint4)>(0, 1, vec[1], block);
  return key_to_float(whole_key<T>(block_key<T>(vec)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    block_values(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ BlocksParams p) {
  const LaunchTraits traits(0, 0, launch_traits.flags & kFlags);
  ptx::grid_take_over();
  RowJob<T, false> job(p.topk, traits, storage + ptx::unknown_zero(), true);
  agree_on_row(job, traits, p, *reinterpret_cast<RowShared*>(storage));
  const int blocks = blocks_of(job.ctx.row.n);
  // A row of at least `block_k` blocks has its newest one in the last place, and the decode launch chooses
  // from the others. A shorter row has all of its blocks, which the decode launch writes without reading a
  // value, unless masked ones are dropped.
  const bool chooses = blocks >= (traits.has(LaunchTraits::kDropMasked) ? 1 : p.block_k);
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    ptx::store_global(p.value_lengths + job.row, chooses ? blocks - 1 : blocks);
    ptx::store_global(p.chosen + job.row * p.blocks_stride + p.block_k - 1, chooses ? blocks - 1 : kNoBlock);
  }
  if (!chooses) return;
  float* const values = p.values + job.row * p.values_stride;
#pragma unroll 1
  for (int i = blockIdx.y * kThreads + threadIdx.x; i < blocks - 1; i += gridDim.y * kThreads) {
    values[i] = block_value(job.ctx.row.data + i * kBlockScores, job.ctx.row.aligned);
  }
}

}  // namespace gvr_topk::blocks
