// Selects the top k of short rows: one CTA holds the row in registers and needs no other CTA.
//
// Grid: one CTA of 512 threads per row.
//
// Phases, of which all but the first are in small_row/select_row.cuh:
// - guess: the state that the last step left is a window of values around its k-th value;
// - verify: one round of even bins over that window leaves the k-th value alone with a few others
//   (small_row/value_window.cuh). Without a window, or where it misses, radix rounds over the keys find the
//   k-th (small_row/key_rounds.cuh);
// - refine: those few are compared with each other (small_row/partition.cuh);
// - collect: selected positions are staged in shared memory, in ascending order
//   (small_row/cta_tile.cuh);
// - emit: they are written, several at a time.
#pragma once

#include "cluster/row_job.cuh"
#include "ptx/barrier.cuh"
#include "small_row/select_row.cuh"

namespace gvr_topk::small_row {

// `Shared` lies first, and `SelectShared` with `staged` positions follows: min(k, width).
inline size_t small_row_bytes(int staged) { return sizeof(Shared) + select_bytes(staged); }
static_assert(sizeof(Shared) + sizeof(SelectShared) <= kSmallRowFixedBytes);

template <typename T, int kValues, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, kValues < kValuesPerThread ? 2 : 1)
    small_row_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p) {
  using Tile = CtaTile<T, kValues>;
  constexpr bool kOptions = kSpecialization == Specialization::kGeneric;
  const LaunchTraits traits = launch_traits.for_one_cta<kSpecialization>();
  SelectShared& own = *reinterpret_cast<SelectShared*>(storage + sizeof(Shared));
  ptx::grid_take_over();
  // The unknown zero keeps the compiler from adding over the warp before an addition to shared memory: few
  // lanes add to one address here, and that would take longer.
  RowJob<T, kOptions> job(p, traits, storage + ptx::unknown_zero(), true);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  Tile tile;
  // The last vector is surely whole only if the whole buffer is loaded and consists of whole vectors.
  const bool whole = Tile::kLoadsEarly && traits.has(LaunchTraits::kWholeVectors);
  uint4* const last_vec = whole ? nullptr : &own.last_vec;
  if constexpr (Tile::kLoadsEarly) tile.load(ctx.row, p.width, last_vec);
  __syncwarp();  // The loads of the row are issued first.
  StepState state = job.load_state_early(p, traits);
  own.bins.clear(ctx.thread);
  if (ctx.thread == 0) smem.hint_hits = smem.few_count = 0;
  if (kOptions) ptx::reconverge(ctx.zero);  // One thread has cleared counts, and `output` votes.
  // The parameters of the output are fetched here, while there is time.
  OutputWriter output = job.output(p, traits, job.owns_slot(p, traits));
  output.keep(traits);
  StepState* next = job.writes_state() ? job.next_state_slot(p, traits, output) : nullptr;
  if (traits.has(LaunchTraits::kWritesState)) ptx::keep(next);
  job.load_state_late(p, traits, state);
  job.publish_state(p, traits, state);
  job.agree_on_length(p, traits);
  if (__any_sync(0xffffffffu, job.is_short())) {
    job.write_short(p, traits);
    ptx::wait_copies<0>();  // A block must not end before the copies that it has started.
    return;
  }
  if constexpr (!Tile::kLoadsEarly) {
    tile.load(ctx.row, ctx.row.n, last_vec);
    ptx::reconverge(ctx.zero);  // Lanes have loaded different vectors at the row's end.
  }
  tile.wait(ctx.row, ctx.lane, last_vec);

  const float last_window = traits.has(LaunchTraits::kReadsState) ? smem.facts.state.z_score : kStateUnknown;
  select_row(p, traits, job, tile, own, output, last_window, next);
}

}  // namespace gvr_topk::small_row
