// Selects the top k of a row that is much shorter than its buffer. The first CTA of the cluster does this
// alone, as the kernel of short rows would (small_row/select_row.cuh); the others take part in the exchange.
//
// Another stream may be writing the length, so CTAs of a cluster may have read different lengths, and some
// may be waiting for the list of this CTA. So before it selects, this CTA sends what every CTA sends that
// finds its row too short. After it has selected, it looks at what the others have sent. If all have read the
// same length, they have sent the same and have ended. If not, all CTAs know it from the same headers, and
// all of them start over.
//
// The selection uses memory that only this CTA writes, and not the list, because CTAs that have read another
// length store into the list.
#pragma once

#include "cluster/row_job.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "small_row/select_row.cuh"

namespace gvr_topk::small_row {

constexpr size_t kSoloBytes = select_bytes(kMaxSoloK);

// What finish_alone needs to know about a row. All CTAs use `sampled`, and the rest is for the first CTA of a
// row from which it selects alone.
struct SoloRow {
  int length;
  int requested_slot;
  uint32_t memory;   // offset of kSoloBytes bytes in shared memory
  StagedRow staged;  // the part of the row that this CTA's copies stage in shared memory
  bool sampled;      // whether the CTAs exchange samples as well
};

template <typename T, int kValues, bool kOptions, bool kWholeRows>
__device__ __noinline__ bool select_solo_row_in(const TopkParams& launch_params,
                                                const LaunchTraits& launch_traits, SoloRow solo) {
  const TopkParams p = ptx::kernel_parameter(launch_params);
  const LaunchTraits traits = ptx::kernel_parameter(launch_traits).out_of_line<kOptions, kWholeRows>();
  const KeyInterval everything = KeyInterval::everything();
  // The unknown zero has the same purpose as in small_row/kernel.cuh.
  unsigned char* const memory = storage + ptx::unknown_zero();
  // Returns the job of the whole cluster. It is made again after the selection, because registers are short.
  const auto of_cluster = [&] {
    return RowJob<T, kOptions>(p, traits, memory, solo.requested_slot, solo.length);
  };
  RowJob<T, kOptions> alone = of_cluster();
  alone.ctx.rank = alone.ctx.log2_ctas = 0;
  alone.ctx.ctas = 1;
  const RowContext<T>& ctx = alone.ctx;
  Shared& smem = *ctx.shared;
  SelectShared& own = *reinterpret_cast<SelectShared*>(memory + solo.memory);
  CtaTile<T, kValues> tile;
  const bool staged = solo.staged.vecs != 0;
  uint4* const last_vec = traits.has(LaunchTraits::kWholeVectors) ? nullptr : &own.last_vec;
  if (!staged) {
    // Whole vectors are loaded as far as the buffer has them.
    const int whole = ((ctx.row.lead + ctx.row.n + kPerVec<T> - 1) & -kPerVec<T>)-ctx.row.lead;
    tile.load(ctx.row, min(whole, p.width), last_vec);
  }
  own.bins.clear(ctx.thread);
  OutputWriter output = alone.output(p, traits);
  output.keep(traits);
  StepState* const next = alone.writes_state() ? alone.next_state_slot(p, traits, output) : nullptr;
  __syncthreads();
  if (traits.log2_ctas() > 0) {
    const RowJob<T, kOptions> job = of_cluster();
    ptx::reconverge(ctx.zero);  // Single threads have published the state and cleared memory.
    ptx::cluster_wait();
    if (solo.sampled) send_sample(job.ctx, nullptr);
    store_to_peers(job.ctx, everything);
    ptx::reconverge(ctx.zero);  // Lanes have sent different vectors.
  }
  if (staged) {
    ptx::wait_copies<0>();
    __syncthreads();
    tile.load(solo.staged, ctx.row.lead);
  }
  tile.wait(ctx.row, ctx.lane, last_vec, true);
  const float last_window = traits.has(LaunchTraits::kReadsState) ? smem.facts.state.z_score : kStateUnknown;
  select_row(p, traits, alone, tile, own, output, last_window, next);
  ptx::wait_copies<0>();  // A block must not end before the copies that it has started.
  if (traits.log2_ctas() == 0) return true;
  const RowJob<T, kOptions> job = of_cluster();
  ptx::barrier_wait(ptx::shared_address(&smem.counts_barrier), 0);
  if (solo.sampled) receive_samples(job.ctx);
  ptx::reconverge(ctx.zero);  // Single threads have written the state and the statistics.
  const bool agreed = read_headers(job.ctx, everything).agreed;
  if (!agreed && ctx.thread == 0) smem.hint_hits = smem.few_count = 0;
  return agreed;
}

// Finishes a row that is too short to select from, or from which the first CTA selects alone. Returns whether
// the CTAs agreed. If not, all of them must start over.
template <Family kFamily, bool kWholeRows, typename T, bool kOptions>
GVR_DEVICE bool finish_alone(const TopkParams& p, const LaunchTraits& traits, const RowJob<T, kOptions>& job,
                             bool is_solo, const SoloRow& solo) {
  if (!is_solo || job.ctx.rank != 0) return finish_unselected_row(p, traits, job, solo.sampled);
  constexpr bool kAllAreShort = values_of_solo_row(longest_solo_row(kFamily)) == kValuesPerThread;
  const bool is_wide = !kAllAreShort && values_of_solo_row(job.ctx.row.lead + solo.length) > kValuesPerThread;
  return is_wide ? select_solo_row_in<T, kWideValuesPerThread, kOptions, kWholeRows>(p, traits, solo)
                 : select_solo_row_in<T, kValuesPerThread, kOptions, kWholeRows>(p, traits, solo);
}

}  // namespace gvr_topk::small_row
