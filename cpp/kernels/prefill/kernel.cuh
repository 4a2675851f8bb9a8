// Selects the top k of many rows, each a window of its own into the scores: the rows of a prefill chunk.
//
// Grid: as many CTAs of 256 threads as the GPU runs at once, or one for each row. Each CTA takes runs of
// neighbouring rows, one row after the other.
//
// Phases, of each row:
// - guess: an interval that should hold the k-th value, from the row before, or where that predicts badly
//   from a sample of the row (prefill/guess.cuh);
// - collect: each warp streams its part of the row, stores in index order the positions of what is at or
//   above the interval's lower end, and lists what lies inside (prefill/row_stream.cuh);
// - verify: the counts say whether the k-th is among the listed;
// - refine: those of the listed ones that are not selected are dropped (prefill/select.cuh);
// - emit: each warp writes the positions that it has kept.
//
// The tiles of the next row are on their way while this row is refined. A row whose interval has missed is
// streamed again, with an interval by sample; what that does not settle, radix rounds do
// (prefill/settle.cuh).
#pragma once

#include "core/launch.cuh"
#include "core/row_stats.cuh"
#include "gvr_topk/policy.h"
#include "prefill/select.cuh"
#include "prefill/settle.cuh"

namespace gvr_topk::prefill {

// Collects with an interval. The counts are complete behind the next block barrier.
template <typename T>
__device__ __forceinline__ void collect(const PrefillParams& p, Shared& sm, RowStream<T>& stream,
                                        const AlignedWindow<T>& window, const Window& next_window,
                                        const ValueInterval& interval, PositionStore& store, int warp,
                                        int lane) {
  const float bins_per_unit = interval.bins_per_unit();
  const RowPart<T> part(window, warp);
  stream.enter(window, warp, lane);
  int position = part.begin + lane * kValuesPerThread;  // of this lane's first element in the tile
  stream.for_each_tile(p, part.tiles, next_window, warp, lane, [&](int tile, uint32_t slot) {
    uint32_t above;
    uint32_t bits = stream.ring.not_below(interval.lo, interval.hi, slot, above);
    if (position == 0) bits &= ~((1u << window.lead) - 1);
    if (__any_sync(0xffffffffu, bits != 0)) {
      uint32_t inside = bits & ~above;
      // One scan for both counts: a tile has 512 elements.
      const uint32_t mine = __popc(bits) | __popc(inside) << 16;
      const uint32_t upto = ptx::inclusive_scan(mine);
      const uint32_t total = __shfl_sync(0xffffffffu, upto, 31);
      const int first = store.count + static_cast<int>((upto - mine) & 0xffffu);
      const PositionStore::Room old =
          store.make_room(&sm.chunks_used, static_cast<int>(total & 0xffffu), lane);
      if (old.made) {
        int next = first;
#pragma unroll 1
        for (uint32_t left = bits; left != 0; left &= left - 1) {
          sm.positions[store.place(old, next)] = position + __ffs(left) - 1;
          ++next;
        }
        if (total >> 16 != 0) {
          uint32_t listed = 0;
          if (lane == 0) listed = atomicAdd(&sm.listed, total >> 16);
          listed = __shfl_sync(0xffffffffu, listed, 0) + ((upto - mine) >> 16);
#pragma unroll 1
          for (; inside != 0; inside &= inside - 1, ++listed) {
            const float x = stream.ring.value(slot, __ffs(inside) - 1);
            atomicAdd(&sm.fine_bins[interval.bin(x, bins_per_unit)], 1u);
            if (listed >= kMaxListed) break;
            const int earlier = __popc(bits & (inside - 1) & ~inside);
            sm.listed_keys[listed] = order_key(x);
            sm.listed_places[listed] = StorePlace(store.place(old, first + earlier), warp);
          }
        }
      }
    }
    position += kTileElements;
  });
  if (lane == 0) {
    sm.kept[warp] = store.count;
    sm.dropped[warp] = 0;
    if (store.full) sm.is_full = 1;
  }
}

// Makes the lists empty. Block barriers stand before and behind.
__device__ __forceinline__ void reset_lists(Shared& sm) {
  sm.fine_bins[threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  sm.listed = sm.boundary_count = sm.is_full = 0;
  sm.chunks_used = kWarps * PositionStore::initial_chunks(kStoreChunks);
}

// Selects from a row that is longer than k.
template <typename T>
__device__ __forceinline__ void select_row(const PrefillParams& p, Shared& sm, RowStream<T>& stream,
                                           const Window& row, const Window& next_window) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const AlignedWindow<T> window(p, row);
  bool by_value = p.lists && sm.predictor.is_close();
  bool by_sample = p.lists && !by_value && sm.predictor.tie_key == kAbsentKey;
  int passes = 0;
#pragma unroll 1
  while (by_value || by_sample) {
    const ValueInterval interval =
        by_value ? sm.predictor.interval() : guess_by_sample<T>(sm, window, p.k, sm.predictor);
    PositionStore store(sm.positions, sm.chunks[warp], kStoreChunks, warp);
    collect(p, sm, stream, window, next_window, interval, store, warp, lane);
    __syncthreads();
    const ListCount counted = count_kept(sm, p.k, lane);
    ++passes;
    if (threadIdx.x == 0) sm.report.count_pass(by_value, counted.listed, counted.complete);
    if (counted.complete) {
      const float kth = refine(sm, interval, counted, lane, warp);
      __syncthreads();
      reset_lists(sm);  // Nothing of them is read any more.
      if (threadIdx.x == 0) {
        sm.predictor.learn(kth, __fdividef(interval.width(), static_cast<float>(counted.listed)));
      }
      emit(sm, store, window.lead, PrefillOutput(p, row), lane, warp);
      return;
    }
    by_sample = by_value;
    by_value = false;
    __syncthreads();  // All threads have read the counts.
    reset_lists(sm);
    if (by_sample) stream.restart();
    __syncthreads();
  }
  if (passes == 0 && stream.ahead) stream.restart();  // The tiles under way are this row's.
  const Settled settled = settle<T>(sm, window, p.k, sm.predictor.tie_key, PrefillOutput(p, row));
  if (threadIdx.x != 0) return;
  sm.predictor = RowPredictor::unknown();
  sm.predictor.tie_key = settled.tie_key;
  sm.report.rounds = settled.rounds;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kPrefillCtasPerSm)
    prefill_topk(const __grid_constant__ PrefillParams p) {
  Shared& sm = *reinterpret_cast<Shared*>(storage);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  ptx::grid_take_over();
  if (thread == 0) {
    sm.schedule.start_run(p, 0);
    for (int i = 0; i < kWindowsAhead; ++i) {
      sm.windows[i] = WindowLoad(p, sm.schedule.next(p)).window(p);
    }
    sm.predictor = RowPredictor::unknown();
  }
  reset_lists(sm);
  PositionStore(sm.positions, sm.chunks[warp], kStoreChunks, warp).claim_share(lane);
  RowStream<T> stream(sm.ring, warp, lane);
  __syncthreads();
#pragma unroll 1
  for (int turn = 0;;) {
    const Window& row = sm.windows[turn];
    if (row.row < 0) return;
    const int after = turn == kWindowsAhead ? 0 : turn + 1;
    const WindowLoad ahead(p, thread == 0 ? sm.schedule.next(p) : -1);
    const bool is_short = row.n <= p.k;
    if (thread == 0) sm.report = RowReport::begin(p.predicts, is_short);
    if (is_short) {
      const PrefillOutput output(p, row);
#pragma unroll 1
      for (int i = thread; i < p.k; i += kThreads) output.put(i, i < row.n ? i : -1);
    } else {
      select_row(p, sm, stream, row, sm.windows[after]);
    }
    if (thread == 0) {
      if (p.counts != nullptr) p.counts[row.row] = min(row.n, p.k);
      if (p.stats != nullptr) sm.report.write(p.stats + int64_t{row.row} * kStatColumns);
      // Its last readers are two rows behind.
      sm.windows[after == kWindowsAhead ? 0 : after + 1] = ahead.window(p);
    }
    __syncthreads();  // All warps have emitted.
    turn = after;
  }
}

}  // namespace gvr_topk::prefill
