// Selects the top k of rows that the registers of one cluster hold, 16 or 32 elements per thread: global
// memory is read once, and one exchange joins the CTAs.
//
// Grid: rows * ctas CTAs of 512 threads, in clusters of 2 to 16 along x; cluster r works on row r.
//
// Phases:
// - guess: an interval of keys that is believed to hold the k-th, from the state that the last step left,
//   or from a sample of the row (cluster/guess.cuh);
// - verify: every element is compared with it in registers, and one exchange tells all CTAs the counts;
// - collect: elements inside the interval are listed, as keys, in every CTA (resident/count_and_emit.cuh);
// - refine: the exact k-th key is found among the listed ones (cluster/select.cuh);
// - emit: each CTA writes its selected positions, and one thread the state for the next step.
//
// The code inline in this kernel is that of an interval that holds the k-th key, and is kept short: time is
// instructions issued and fetched at this size. Where intervals miss, resident/resolve_miss.cuh finds the
// k-th key by radix rounds over the row, which still lies in shared memory. A row much shorter than its
// buffer is left to the first CTA (small_row/solo_row.cuh).
#pragma once

#include <algorithm>

#include "cluster/guess.cuh"
#include "cluster/row_job.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "resident/cluster_tile.cuh"
#include "resident/count_and_emit.cuh"
#include "resident/resolve_miss.cuh"
#include "small_row/solo_row.cuh"

namespace gvr_topk::resident {

// The staging area of the row follows the list. Behind it lies what a row much shorter than its buffer needs:
// memory of the first CTA, which selects alone, or another staging area and landing zone of the sample.
template <typename T, int kValues>
inline size_t resident_bytes(const LaunchTraits& traits) {
  using Tile = ClusterTile<T, kValues>;
  constexpr size_t kBehind =
      std::max(small_row::kSoloBytes, Tile::kSecondStagingBytes + sizeof(uint4) * kThreads);
  return fixed_bytes(traits.list_capacity(), 0) + Tile::kStagingBytes + kBehind;
}

// A row has at least two CTAs, because the kernel of short rows takes every row that the registers of one CTA
// hold here (choose_family in gvr_topk/policy.h).
static_assert(kSmallRowFixedBytes + 2 * kThreads * kWideValuesPerThread <= shared_bytes_of_block(kMinArch) &&
              kSmallRowFixedBytes + 2 * kThreads * kValuesPerThread <= shared_bytes_of_block(120));

// `kCommonSizes`: the largest cluster and the long list are taken for granted, too.
template <typename T, int kValues, Specialization kSpecialization, bool kCommonSizes>
__global__ void __launch_bounds__(kThreads, 1)
    resident_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p) {
  if constexpr (kValues > max_resident_values(kArch) ||
                (kCommonSizes && max_cluster_size(kArch) < kMaxClusterSize)) {
    __trap();
    return;
  }
  constexpr bool kOptions = kSpecialization == Specialization::kGeneric;
  constexpr bool kWholeRows = has_whole_rows(kSpecialization);
  const LaunchTraits traits = launch_traits.in_registers<kSpecialization, kCommonSizes>();
  constexpr auto kStartOver = start_over<T, kValues, kOptions, kWholeRows>;
  ptx::grid_take_over();
  RowJob<T, kOptions> job(p, traits, ptx::opaque_shared(storage), kCommonSizes);
  const RowContext<T>& ctx = job.ctx;
  // From one lane, so that the compiler knows what a warp has in common. The copies do not wait for it.
  const int warp = __shfl_sync(0xffffffffu, ctx.warp, 0);
  StepState state = job.load_state_early(p, traits);
  __syncwarp();  // Otherwise the compiler would issue the loads of the state behind those of the row.
  RowProbe<T> probe(ctx, traits);
  ClusterTile<T, kValues> tile(ctx, traits);
  int elements = p.width;
  tile.fetch(ctx, traits, elements, p.width);
  job.ctx.warp = warp;
  tile.lay_out(ctx, elements);
  job.load_state_late(p, traits, state);
  prepare_exchange(ctx);
  arrive_at_start(ctx);
  job.publish_state(p, traits, state);
  job.agree_on_length(p, traits);
  const bool is_solo = is_solo_row(Family::kResident, p.width, ctx.row.n, ctx.k, ctx.row.lead);
  if (job.is_short() || is_solo) {
    const small_row::SoloRow solo{
        ctx.row.n, job.requested_slot,
        static_cast<uint32_t>(fixed_bytes(traits.list_capacity(), 0)) + tile.kStagingBytes,
        tile.staged_row(ctx, ctx.row.n, p.width), !traits.has(LaunchTraits::kReadsState)};
    const bool agreed =
        small_row::finish_alone<Family::kResident, kWholeRows>(p, launch_traits, job, is_solo, solo);
    if (!agreed) kStartOver(p, launch_traits, kGuessNone, 1);
    return;
  }
  // A row of at most half the buffer's width is laid out again, or half of the warps would hold all of it.
  if (2 * tile.groups_of(ctx, ctx.row.n) <= tile.groups_of(ctx, p.width)) {
    elements = ctx.row.n;
    tile.stage_in_second_area(ctx, traits);
    probe.fetch(tile.behind(ctx, traits), ctx, traits);
    tile.fetch(ctx, traits, elements, p.width);
  }
  ptx::cluster_wait();  // The sample is on its way meanwhile.

  // Guess.
  Moments moments;
  KeyInterval interval;
  bool sampled = true;  // If false, only the next step needs the moments, and they are taken later.
  if (traits.has(LaunchTraits::kReadsState)) {
    state = shared_state(ctx.shared->facts.state);
    sampled = !uses_value(state);
    if (sampled) {
      ptx::wait_copies<1>();
      moments = Moments(ctx, probe);
    }
    interval = guess(ctx, job.hint_reason(p, traits, is_known(state)), state, moments);
    tile.load(ctx);
  } else {
    const RowSampler sampling = sampling_of(ctx, probe);
    ptx::wait_copies<1>();
    interval = guess_without_state(ctx, probe, sampling, [] {}, [&] { tile.load(ctx); });
  }
  const uint32_t source = interval.source;

  // Verify and collect.
  OutputWriter output;
  StepState* next = nullptr;
  CountResult result;
  int passes = 0;
#pragma unroll 1
  while (true) {
    result = exchange(ctx, interval, tile, passes & 1, [&] {
      job.prepare_output(p, traits, output, next);
      if (!sampled) moments = Moments(ctx, probe);
      sampled = true;
    });
    ++passes;
    if (result.complete) break;
    if (!result.agreed) {
      kStartOver(p, launch_traits, source, passes);
      return;
    }
    const KeyInterval missed = interval;
    if (passes > 1 || !move_interval(ctx, result, interval)) {
      if (ctx.thread == 0) {
        ctx.shared->missed =
            MissedGuess{missed, result, passes, ctx.row.n, elements, moments.mean, moments.deviation, source};
      }
      if (is_masked(missed, result, ctx.k)) {
        resolve_miss_masked<T, kValues, kOptions>(p, launch_traits);
      } else {
        resolve_miss_resident<T, kValues, kOptions, kWholeRows>(p, launch_traits);
      }
      return;
    }
    restart_counts(ctx);
  }

  // Refine.
  int snaps = 0;
  const ListedKeys listed(ctx);
  const Threshold threshold = select_kth(ctx, interval, listed, result, snaps);

  // Emit.
  job.count_hint_hits(p, traits, threshold.key);
  count_listed(ctx, listed, threshold);
  const float level = key_to_float(threshold.key);
  const uint32_t selected = tile.not_below(level);
  uint32_t ties = 0;
  if (!threshold.takes_all()) ties = tile.equal(level);
  emit_tile(ctx, interval, threshold, result.above_before, tile, selected, ties, output, [&] {
    job.write_state(traits, next, [&] { return next_state(ctx, moments, threshold.key, interval, result); });
    job.report(p, traits, passes, result.inside, snaps, source, passes == 1, 0);
  });
}

}  // namespace gvr_topk::resident
