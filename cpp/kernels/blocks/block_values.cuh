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
  // A value is the number that stands for a key: every NaN and both zeros have one number each.
  float* const values = p.values + job.row * p.values_stride;
  for_each_block_key<1>(job.ctx.row, blockIdx.y * kThreads + threadIdx.x, gridDim.y * kThreads, blocks - 1,
                        [&](int block, uint32_t key) { values[block] = key_to_float(whole_key<T>(key)); });
}

}  // namespace gvr_topk::blocks
