// Chooses the best blocks of a row, those whose largest scores are largest, and selects the top k in them; or
// selects in blocks that it is given.
//
// Grid: one CTA of 512 threads per row.
//
// Phases:
// - choose: the row is read once, and the key of each block's largest score stays in registers
//   (blocks/block_tile.cuh). The newest block is chosen whatever it holds, and radix rounds over the keys
//   find the best others;
// - publish: the chosen blocks are written, in ascending order;
// - gather: the scores of the candidates, which are the chosen or the given blocks, are loaded into registers
//   (blocks/block_tile.cuh). More than k blocks are chosen, so the top k are among them
//   (gvr_topk/policy.h);
// - select: radix rounds find the k-th of them. Masked elements are dropped from either selection if that is
//   asked for;
// - emit: their positions are staged in shared memory in ascending order, and written.
//
// Rounds and their end are those of short rows (small_row/key_rounds.cuh, small_row/partition.cuh), in both
// selections.
#pragma once

#include "blocks/block_tile.cuh"
#include "cluster/row_job.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "small_row/key_rounds.cuh"

namespace gvr_topk::blocks {

// Clears the shared memory from which a selection starts. A block barrier precedes this, and another follows.
GVR_DEVICE void prepare_selection(BlocksShared& own, int thread) {
  own.bins.clear(thread);
  if (thread == 0) own.shared.few_count = 0;
}

// Selects the `ctx.k` largest elements of a tile that holds keys of `count` elements, without masked ones if
// it `drops` them, and returns how many they are. `before` becomes the number that earlier warps have
// selected.
template <typename T, typename Tile>
GVR_DEVICE int select_largest(const RowContext<T>& ctx, const Tile& tile, BlocksShared& own, int count,
                              bool drops, LaneMask<Tile::kWords>& selected, uint32_t& before) {
  if (count > ctx.k) {
    int rounds = 0;
    uint32_t dense_bin = 0, kth = 0;
    small_row::PartitionOf<Tile> partition =
        small_row::partition_at(tile, small_row::narrow_keys(ctx, tile, own.bins, rounds, dense_bin));
    small_row::select_inside(ctx, tile, own.bins, partition, partition.boundary_count > kRankDirectly, before,
                             kth, [](uint32_t key) { return key; });
    selected = partition.above;
  } else {
    selected =
        tile.mask_of([](float& sum, uint32_t key, float bit) { ptx::set_bit_if_greater(sum, key, 0, bit); });
    ptx::reconverge(ctx.zero);  // Lanes may have loaded blocks one by one.
    const uint32_t here = __reduce_add_sync(0xffffffffu, selected.count());
    if (ctx.lane == 0) ctx.shared->warp_value[0][ctx.warp] = here;
    __syncthreads();
    before = earlier_warps(ctx, 0);
  }
  return drops ? small_row::drop_masked(ctx, tile, selected, before) : min(count, ctx.k);
}

// Stages up to `block_k` blocks of a row that has any, its newest one and the best of the others, and returns
// how many they are.
template <typename T>
GVR_DEVICE int choose_blocks(RowContext<T>& ctx, BlocksShared& own, int block_k, bool drops) {
  ctx.k = block_k - 1;
  const int newest = blocks_of(ctx.row.n) - 1;
  BlockTile<T> tile;
  tile.load(ctx.row, newest);
  uint32_t before = 0;
  LaneMask<BlockTile<T>::kWords> selected;
  const int others = select_largest(ctx, tile, own, newest, drops, selected, before);
  stage_selected(ctx, tile, selected, before, own.staged);
  if (ctx.thread == 0) own.staged[others] = static_cast<uint16_t>(blocks_of(own.shared.facts.length) - 1);
  __syncthreads();
  return others + 1;
}

// The number of scores in `count` blocks of a row of `n`, `newest` of which are its newest block.
GVR_DEVICE int scores_in(int count, int newest, int n) {
  return count * kBlockScores - newest * (blocks_of(n) * kBlockScores - n);
}

// Takes the given blocks that the row has as candidates, and counts them. It takes one block barrier.
GVR_DEVICE void accept_given(BlocksShared& own, const int (&given)[kGivenPerThread], int thread, int n) {
  const int blocks = blocks_of(n);
  uint32_t count = 0, newest = 0;
#pragma unroll
  for (int i = 0; i < kGivenPerThread; ++i) {
    const bool is_there = static_cast<uint32_t>(given[i]) < static_cast<uint32_t>(blocks);
    own.candidates[thread + i * kThreads] = is_there ? given[i] : kNoBlock;
    count += is_there;
    newest += is_there && given[i] == blocks - 1;
  }
  count = __reduce_add_sync(0xffffffffu, count);
  newest = __reduce_add_sync(0xffffffffu, newest);
  if (thread % 32 == 0) {
    atomicAdd(&own.given_count, count);
    atomicAdd(&own.given_newest, newest);
  }
  __syncthreads();
}

GVR_DEVICE int32_t* positions_of(const BlocksParams& p, int row) {
  return p.topk.indices + row * p.topk.indices_stride;
}

template <typename T, bool kGiven>
__global__ void __launch_bounds__(kThreads, 1)
    blocks_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ BlocksParams p) {
  const LaunchTraits traits(0, 0, launch_traits.flags & kFlags);
  BlocksShared& own = *reinterpret_cast<BlocksShared*>(storage);
  ptx::grid_take_over();
  RowJob<T, false> job(p.topk, traits, storage + ptx::unknown_zero(), true);
  RowContext<T>& ctx = job.ctx;
  int given[kGivenPerThread];
  if constexpr (kGiven) {
    // Each given block is read once, and before the length is known.
    const int32_t* const row = p.given + job.row * p.blocks_stride;
#pragma unroll
    for (int i = 0; i < kGivenPerThread; ++i) {
      const int at = ctx.thread + i * kThreads;
      given[i] = kNoBlock;
      ptx::load_if(at < p.block_k, given[i], row + at);
    }
    if (ctx.thread == 0) own.given_count = own.given_newest = 0;
  }
  prepare_selection(own, ctx.thread);
  agree_on_row(job, traits, p, own);
  const bool drops = traits.has(LaunchTraits::kDropMasked);
  int selectable;  // scores in the candidates
  if constexpr (kGiven) {
    accept_given(own, given, ctx.thread, ctx.row.n);
    const int count = static_cast<int>(own.given_count);
    selectable = scores_in(count, static_cast<int>(own.given_newest), ctx.row.n);
    // Blocks that the decode launch has chosen end in the newest one, which moves up to the others.
    if (p.chosen != nullptr && ctx.thread == 0 && 0 < count && count < p.block_k) {
      int32_t* const chosen = p.chosen + job.row * p.blocks_stride;
      ptx::store_global(chosen + p.block_k - 1, kNoBlock);
      ptx::store_global(chosen + count - 1, blocks_of(ctx.row.n) - 1);
    }
    if (ctx.k == 0) return;
  } else {
    int count = min(blocks_of(ctx.row.n), p.block_k);
    const bool chooses = blocks_of(ctx.row.n) > (drops ? 0 : p.block_k);
    if (chooses) {
      count = choose_blocks(ctx, own, p.block_k, drops);
      // Registers are short until here, so values that are not needed meanwhile are computed again. The
      // unknown zero keeps the compiler from holding the old ones.
      job.row += ptx::unknown_zero();
      ctx.thread = threadIdx.x + ptx::unknown_zero();
      ctx.lane = ctx.thread & 31;
      ctx.warp = ctx.thread >> 5;
      ctx.row = started_row<T>(p, traits, job.row, own);
      ctx.k = p.topk.k;
      prepare_selection(own, ctx.thread);
    }
    const int n = ctx.row.n;
    selectable = scores_in(count, 1, n);
    // Publish.
    int32_t* const chosen = p.chosen + job.row * p.blocks_stride;
#pragma unroll 1
    for (int i = ctx.thread; i < p.block_k; i += kThreads) {
      const int block = i >= count ? kNoBlock : chooses ? own.staged[i] : i;
      own.candidates[i] = block;
      ptx::store_global(chosen + i, block);
    }
    if (ctx.k == 0 || (n <= ctx.k && !drops)) {
      int32_t* const out = positions_of(p, job.row);
#pragma unroll 1
      for (int i = ctx.thread; i < ctx.k; i += kThreads) ptx::store_global(out + i, i < n ? i : -1);
      return;
    }
    __syncthreads();
  }

  CandidateTile<T> tile;
  gather(ctx, own.candidates, p.block_k, tile);
  uint32_t before = 0;
  LaneMask<CandidateTile<T>::kWords> selected;
  const int items = select_largest(ctx, tile, own, selectable, drops, selected, before);
  small_row::stage_selected(ctx, tile, selected, before, own.staged);
  __syncthreads();
  int32_t* const out = positions_of(p, job.row);
#pragma unroll 1
  for (int i = ctx.thread; i < ctx.k; i += kThreads) {
    ptx::store_global(out + i, i < items ? position_of_listed(own.candidates, own.staged[i]) : -1);
  }
}

}  // namespace gvr_topk::blocks
