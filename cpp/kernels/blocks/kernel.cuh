// Chooses the best blocks of a row, those whose largest scores are largest, and selects the top k in them; or
// selects in blocks that it is given.
//
// Grid: one CTA of 512 threads per row; or, if rows are few, a cluster of such CTAs that chooses blocks.
//
// Phases:
// - read: the row is read once, and the key of each block's largest score goes to shared memory of the CTAs
//   that choose: the only CTA, or two of a cluster (see `Source`);
// - choose: the keys are held in registers (blocks/block_tile.cuh). The newest block is chosen whatever it
//   holds, and radix rounds over the keys find the best others;
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

// Selects the `ctx.k` largest elements of a tile that holds keys of `count` elements, and up to `spare` more,
// without masked ones if it `drops` them, and returns how many they are. `before` becomes the number that
// earlier warps have selected.
template <typename T, typename Tile>
GVR_DEVICE int select_largest(const RowContext<T>& ctx, const Tile& tile, BlocksShared& own, int count,
                              uint32_t spare, bool drops, LaneMask<Tile::kWords>& selected,
                              uint32_t& before) {
  int items = min(count, ctx.k);
  if (count > ctx.k) {
    int rounds = 0;
    uint32_t dense_bin = 0, kth = 0;
    small_row::RankedRange range = small_row::narrow_keys(ctx, tile, own.bins, rounds, dense_bin, spare + 1);
    if (range.count - range.rank <= spare) {
      items += range.count - range.rank;
      range.rank = range.count;
    }
    small_row::PartitionOf<Tile> partition = small_row::partition_at(tile, range);
    small_row::select_inside(ctx, tile, own.bins, partition, partition.boundary_count > kRankDirectly, before,
                             kth, [](uint32_t key) { return key; });
    selected = partition.above;
  } else {
    selected =
        tile.mask_of([](float& sum, uint32_t key, float bit) { ptx::set_bit_if_greater(sum, key, 0, bit); });
    const uint32_t here = __reduce_add_sync(0xffffffffu, selected.count());
    if (ctx.lane == 0) ctx.shared->warp_value[0][ctx.warp] = here;
    __syncthreads();
    before = earlier_warps(ctx, 0);
  }
  return drops ? small_row::drop_masked(ctx, tile, selected, before) : items;
}

// What the candidates of a launch are.
enum class Source {
  kGiven,     // given blocks
  kFewGiven,  // given blocks whose scores half a tile holds
  kRow,       // blocks that the row's only CTA chooses
  // Blocks that the first and the last CTA of a cluster choose, each for itself: the first chooses `block_k`
  // and publishes them, the last chooses as few as hold the top k, or some more, and selects in these.
  kCluster,
};

// Reads this CTA's share of a row's first `blocks` blocks, and gives their keys to the CTAs that choose: the
// first, and that of rank `last`. If the row's only CTA chooses, all keys are there afterwards; in a cluster,
// behind `receive_keys`.
template <Source kSource, typename T>
GVR_DEVICE void send_keys(const RowContext<T>& ctx, const uint32_t* keys, int blocks, int last) {
  constexpr bool kShared = kSource == Source::kCluster;
  const uint32_t address = ptx::shared_address(keys);
  if (kShared) ptx::cluster_wait();  // All CTAs run, so that there is somewhere to send to.
  if (kShared && blocks == 0) return ptx::cluster_arrive_relaxed();  // To publish nothing takes time as well.
  for_each_block_key<8>(ctx.row, ctx.rank * kThreads + ctx.thread, ctx.ctas * kThreads, blocks,
                        [&](int block, uint32_t key) {
                          const uint32_t at = address + sizeof(uint32_t) * block;
                          if (!kShared) return ptx::store_shared(at, key);
                          ptx::store_to_rank(at, 0, key);
                          if (last > 0) ptx::store_to_rank(at, last, key);
                        });
  ptx::reconverge(ctx.zero);
  if (kShared) {
    ptx::cluster_arrive();
  } else {
    __syncthreads();
  }
}

// Waits until all CTAs have sent their keys.
template <typename T>
GVR_DEVICE void receive_keys(const RowContext<T>& ctx) {
  ptx::reconverge(ctx.zero);
  ptx::cluster_wait();
}

// Stages the `least - 1` best blocks of a row that has any, without its newest one, and up to `spare` more,
// or fewer if there are none, and returns how many they are.
template <Source kSource, typename T>
GVR_DEVICE int choose_blocks(RowContext<T>& ctx, BlocksShared& own, int least, int spare, bool drops) {
  ctx.k = least - 1;
  const int newest = blocks_of(ctx.row.n) - 1;
  BlockTile tile;
  take_keys<kSource == Source::kCluster>(ctx, own.keys(), newest, tile);
  uint32_t before = 0;
  LaneMask<BlockTile::kWords> selected;
  const int others = select_largest(ctx, tile, own, newest, spare, drops, selected, before);
  small_row::stage_selected(ctx, tile, selected, before, own.staged);
  __syncthreads();
  return others;
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
    own.candidates[thread + i * kThreads] = is_there ? given[i] : kPastRow;
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

// Writes the positions of the `ctx.k` largest scores in the first `listed` candidates, which hold
// `selectable` of them.
template <int kValues, typename T>
GVR_DEVICE void select_in(const RowContext<T>& ctx, BlocksShared& own, int listed, int selectable, bool drops,
                          int32_t* out) {
  small_row::CtaTile<T, kValues> tile;
  gather(ctx, own.candidates, listed, tile);
  uint32_t before = 0;
  LaneMask<decltype(tile)::kWords> selected;
  const int items = select_largest(ctx, tile, own, selectable, 0, drops, selected, before);
  small_row::stage_selected(ctx, tile, selected, before, own.staged);
  __syncthreads();
#pragma unroll 1
  for (int i = ctx.thread; i < ctx.k; i += kThreads) {
    ptx::store_global(out + i, i < items ? position_of_listed(own.candidates, own.staged[i]) : -1);
  }
}

template <typename T, Source kSource>
__global__ void __launch_bounds__(kThreads, 1)
    blocks_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ BlocksParams p) {
  constexpr bool kShared = kSource == Source::kCluster;
  constexpr bool kGiven = kSource == Source::kGiven || kSource == Source::kFewGiven;
  const LaunchTraits traits(kShared ? launch_traits.log2_ctas() : 0, 0, launch_traits.flags & kFlags);
  BlocksShared& own = *reinterpret_cast<BlocksShared*>(storage);
  ptx::grid_take_over();
  if (kShared) ptx::cluster_arrive_relaxed();  // This CTA runs, and has begun no load to wait for.
  RowJob<T, false> job(p.topk, traits, storage + ptx::unknown_zero(), !kShared);
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
  // The row arrives while its length is read. The thread that loads the length prefetches the row behind it;
  // for 16 bits another one, because that one would wait. A wider buffer may hold a short row.
  constexpr int kPrefetcher = sizeof(T) == sizeof(float) ? 0 : kThreads - 1;
  if (kSource == Source::kRow && ctx.thread == kPrefetcher && traits.has(LaunchTraits::kAligned) &&
      p.topk.width <= kThreads * kWideValuesPerThread) {
    ptx::prefetch_to_l2(ctx.row.data, p.topk.width / kPerVec<T> * sizeof(uint4));
  }
  agree_on_row(job, traits, p, own);
  const bool drops = traits.has(LaunchTraits::kDropMasked);
  int listed = p.block_k, selectable;  // candidates, absent ones among them, and scores in them
  bool selects = ctx.k > 0, chooses = false;
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
  } else {
    const int last = selects ? ctx.ctas - 1 : 0;
    const bool publishes = ctx.rank == 0;
    selects = selects && ctx.rank == last;
    const int least = publishes ? p.block_k : ctx.k + 1, most = publishes ? p.block_k : kMaxChosen;
    const int blocks = blocks_of(ctx.row.n);
    int count = min(blocks, most);
    chooses = blocks > (drops ? 0 : most);
    if (kShared || chooses) {
      // If a CTA chooses, the first one does, because `block_k` is the least that any of them looks for.
      const int shared = blocks > (drops ? 0 : p.block_k) ? blocks - 1 : 0;
      send_keys<kSource>(ctx, own.keys(), shared, last);
      if (!publishes && ctx.rank != last) {
        __syncthreads();  // No warp leaves while another one has yet to arrive.
        return;
      }
    }
    if (chooses) {
      if (kShared) receive_keys(ctx);
      count = choose_blocks<kSource>(ctx, own, least, most - least, drops) + 1;
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
    listed = count;
    // Publish.
    int32_t* const chosen = p.chosen + job.row * p.blocks_stride;
#pragma unroll
    for (int j = 0; j < kGivenPerThread; ++j) {
      const int i = ctx.thread + j * kThreads;
      int block = i < count ? i : kNoBlock;
      if (chooses && i < count) block = i < count - 1 ? own.staged[i] : blocks_of(n) - 1;
      own.candidates[i] = i < count ? block : kPastRow;
      if (publishes && i < p.block_k) ptx::store_global(chosen + i, block);
    }
    if (selects && n <= ctx.k && !drops) {
      int32_t* const out = positions_of(p, job.row);
#pragma unroll 1
      for (int i = ctx.thread; i < ctx.k; i += kThreads) ptx::store_global(out + i, i < n ? i : -1);
      selects = false;
    }
    __syncthreads();
  }
  if (selects) {
    // Few candidates take half a tile. A kernel of given blocks has the code for one size alone.
    const bool few = kGiven ? kSource == Source::kFewGiven : are_few(listed);
    if (few) {
      select_in<kValuesPerThread>(ctx, own, listed, selectable, drops, positions_of(p, job.row));
    } else {
      select_in<kWideValuesPerThread>(ctx, own, listed, selectable, drops, positions_of(p, job.row));
    }
  }
  // CTAs that have read another length may still be sending.
  if (kShared && !chooses) receive_keys(ctx);
}

}  // namespace gvr_topk::blocks
