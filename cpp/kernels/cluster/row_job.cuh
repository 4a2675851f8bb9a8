// Everything that a kernel does for its row besides the selection: it reads the length, slot and state, and
// writes results, statistics and the next state.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/guess.cuh"
#include "cluster/row_context.cuh"
#include "cluster/row_options.cuh"
#include "cluster/step_state.cuh"
#include "core/output_writer.cuh"
#include "core/row_report.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace gvr_topk {

GVR_DEVICE StepState* state_of(const TopkParams& p, int slot) {
  return reinterpret_cast<StepState*>(p.state) + slot;
}

// Starts to load the state of a slot, if `requested`.
GVR_DEVICE void load_state(bool requested, const TopkParams& p, int slot, StepState& state) {
  float4 loaded = make_float4(state.z_score, state.value, state.limit, __uint_as_float(state.packed_errors));
  ptx::load_if(requested, loaded, state_of(p, slot));
  state = StepState{loaded.x, loaded.y, loaded.z, __float_as_uint(loaded.w)};
}

// The slot that a row names. It is loaded if the launch has `row_slot`; otherwise it is the request's number.
GVR_DEVICE int load_requested_slot(const TopkParams& p, const LaunchTraits& traits, int row, int request) {
  int slot = request;
  const int32_t* slots = p.seq_lens;  // any valid address serves a load that is predicated off
  if (traits.has(LaunchTraits::kRowSlots)) slots = p.row_slot;
  ptx::load_if(traits.has(LaunchTraits::kRowSlots), slot, slots + row);
  return slot;
}

// The slot if it exists and is in use, or else a negative number.
GVR_DEVICE int checked_slot(const TopkParams& p, const LaunchTraits& traits, int requested_slot) {
  return traits.has(LaunchTraits::kWritesState) && requested_slot < p.num_slots ? requested_slot : -1;
}

template <typename T>
GVR_DEVICE void reset_counts(const RowContext<T>& ctx) {
  constexpr int kWords = sizeof(Counts) / sizeof(uint32_t);
  if (ctx.thread < kWords) reinterpret_cast<uint32_t*>(&ctx.shared->counts)[ctx.thread] = 0;
}

// Clears the shared memory from which a second pass over the row starts. A block barrier precedes this, and
// another follows.
template <typename T>
GVR_DEVICE void clear_selection(const RowContext<T>& ctx) {
  ctx.shared->keys.template clear<kThreads>();
  reset_counts(ctx);
  if (ctx.thread == 0) ctx.shared->few_count = 0;
}

// Allows the lists to be made again. A thread that has received from all CTAs may be ahead of a thread of its
// own block that is still sending. So counts and lists must not be reset before the block barrier, and no
// header may be sent before the cluster barrier, because another CTA may still be reading the last one.
template <typename T>
GVR_DEVICE void restart_counts(const RowContext<T>& ctx) {
  __syncthreads();
  reset_counts(ctx);
  cluster_sync(ctx.ctas);
}

template <typename T>
GVR_DEVICE void init_barriers(const RowContext<T>& ctx) {
  if (ctx.thread != 0 || ctx.ctas == 1) return;
  ptx::barrier_init(ptx::shared_address(&ctx.shared->counts_barrier), ctx.ctas);
  ptx::barrier_init(ptx::shared_address(&ctx.shared->sample_barrier), ctx.ctas);
}

// Clears the shared memory that the first exchange expects to be zero, and initializes the transaction
// barriers. The list needs no clearing.
template <typename T>
GVR_DEVICE void prepare_exchange(const RowContext<T>& ctx) {
  Shared& smem = *ctx.shared;
  static_assert(Histogram::kBins == 2 * kThreads);
  reinterpret_cast<uint2*>(smem.keys.fine)[ctx.thread] = make_uint2(0, 0);
  constexpr size_t kBegin = offsetof(Shared, keys) + offsetof(Histogram, coarse);
  constexpr int kWords = (offsetof(Shared, over_range) - kBegin) / sizeof(uint32_t);
  static_assert(kWords <= kThreads);
  const auto cleared = reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(&smem) + kBegin);
  if (ctx.thread < kWords) cleared[ctx.thread] = 0;
  init_barriers(ctx);
}

// Announces that this CTA runs. cluster_wait() waits until all CTAs of the cluster do; before that, no shared
// memory of other CTAs may be touched.
template <typename T>
GVR_DEVICE void arrive_at_start(const RowContext<T>& ctx) {
  if (ctx.ctas > 1) ptx::cluster_arrive_relaxed();
}

GVR_DEVICE int request_of(const TopkParams& p, const LaunchTraits& traits, int row) {
  return traits.has(LaunchTraits::kDraftRows) ? row / p.next_n : row;
}

// Number of scores that a row may select from. A length given by row counts exactly the keys that the row
// sees. A length given by request also counts those of the later draft rows, which the row does not see.
GVR_DEVICE int visible_length(const TopkParams& p, const LaunchTraits& traits, int row, int request,
                              int length) {
  int unseen = 0;
  if (traits.has(LaunchTraits::kDraftRows) && !traits.has(LaunchTraits::kRowLengths)) {
    unseen = p.next_n - 1 - (row - request * p.next_n);
  }
  const int keys = max(length, unseen) - unseen;  // No overflow, whatever the length is.
  return min(traits.has(LaunchTraits::kCompressed) ? keys / p.compress_ratio : keys, p.width);
}

GVR_DEVICE int32_t* stats_of(const TopkParams& p, const LaunchTraits& traits, int row) {
  return traits.has(LaunchTraits::kStats) ? p.stats + row * kStatColumns : nullptr;
}

// The states of this many slots are loaded before it is known which one is needed.
constexpr uint32_t kSlotsLoadedEarly = 128;

// The row of a cluster, its hint and its outputs. The row's length is still being loaded after construction.
// `kOptions`: whether there is code for options off the common path (LaunchTraits::kSharedSlots,
// kClaimedSlots, kDropMasked). Only kGeneric serves launches with such an option. The other specializations,
// and the functions that they call out of line, are compiled without this code.
template <typename T, bool kOptions>
struct RowJob {
  int row;
  int request;
  int seq_len = 0;     // only in thread 0; still being loaded, and the first use waits for it
  int requested_slot;  // the slot as this thread has read it; still being loaded too
  RowContext<T> ctx;
  bool writer;  // whether this thread writes the outputs that exist once per row

  GVR_DEVICE RowJob(const TopkParams& p, const LaunchTraits& traits, unsigned char* storage,
                    bool known_sizes = false) {
    row = blockIdx.x >> traits.log2_ctas();
    request = request_of(p, traits, row);
    const int32_t* lengths = p.seq_lens + (traits.has(LaunchTraits::kRowLengths) ? row : request);
    ptx::load_if(threadIdx.x == 0, seq_len, lengths);  // This load is issued first.
    requested_slot = load_requested_slot(p, traits, row, request);
    ctx = make_context<T>(p, traits, row_buffer<T>(p, traits.has(LaunchTraits::kAligned), row), storage,
                          known_sizes);
    writer = ctx.rank == 0 && ctx.thread == 0;
  }

  // The job of a row whose slot and length have already been read, for out-of-line functions.
  GVR_DEVICE RowJob(const TopkParams& p, const LaunchTraits& traits, unsigned char* storage, int slot,
                    int length)
      : row(blockIdx.x >> traits.log2_ctas()), requested_slot(slot) {
    request = request_of(p, traits, row);
    ctx = make_context<T>(p, traits, row_buffer<T>(p, traits.has(LaunchTraits::kAligned), row), storage);
    ctx.row.n = length;
    writer = ctx.rank == 0 && ctx.thread == 0;
  }

  // Waits for the row's length. One thread has read it, so that the whole block uses the same number although
  // another stream may be writing it. This contains one block barrier, so work that does not need the length
  // comes before the call.
  GVR_DEVICE void agree_on_length(const TopkParams& p, const LaunchTraits& traits) {
    Shared& smem = *ctx.shared;
    // Single threads have loaded and published the state.
    if (traits.has(LaunchTraits::kReadsState)) ptx::reconverge(ctx.zero);
    const int length = visible_length(p, traits, row, request, seq_len);
    ptx::store_shared_if(ctx.thread == 0, ptx::shared_address(&smem.facts.length), length);
    if (kOptions && ctx.thread == 0) smem.facts.owns_slot = owns_slot(p, traits);
    if (traits.has(LaunchTraits::kCounts) && writer) p.counts[row] = min(length, ctx.k);
    if (kOptions) ptx::reconverge(ctx.zero);  // One thread has published what the row owns.
    __syncthreads();
    ctx.row.n = smem.facts.length;
  }

  GVR_DEVICE int slot(const TopkParams& p, const LaunchTraits& traits) const {
    return checked_slot(p, traits, requested_slot);
  }

  GVR_DEVICE HintView hint(const TopkParams& p, const LaunchTraits& traits) const {
    const int named = slot(p, traits);
    const bool hinted = named >= 0 && p.state_indices != nullptr;
    return HintView{hinted ? p.state_indices + named * p.state_indices_stride : nullptr, p.hint_offset};
  }

  // Starts to load the state. Only one thread's copy is published to the block, because another row or stream
  // may be writing the state. If slots are those of requests, thread 0 loads it. Otherwise each of the first
  // kSlotsLoadedEarly threads loads the slot of its own number, before it is known which slot is the row's,
  // because two dependent loads would take twice the time. Slots with higher numbers are left to
  // `load_state_late`.
  GVR_DEVICE StepState load_state_early(const TopkParams& p, const LaunchTraits& traits) const {
    StepState state = no_state();
    if (traits.has(LaunchTraits::kSlotIsRequest)) {
      load_state(threadIdx.x == 0, p, request, state);
    } else if (traits.has(LaunchTraits::kReadsState)) {
      load_state(threadIdx.x < min(kSlotsLoadedEarly, static_cast<uint32_t>(p.num_slots)), p, threadIdx.x,
                 state);
    }
    return state;
  }

  GVR_DEVICE void load_state_late(const TopkParams& p, const LaunchTraits& traits, StepState& state) const {
    if (!traits.has(LaunchTraits::kReadsState) || traits.has(LaunchTraits::kSlotIsRequest)) return;
    const uint32_t requested = slot(p, traits);
    const bool is_late = ctx.thread == 0 && requested >= kSlotsLoadedEarly;
    if (is_late) state = no_state();
    load_state(is_late && static_cast<int>(requested) >= 0, p, requested, state);
  }

  // Publishes the state to the block; other threads may read it after the next block barrier. The publisher
  // is the thread that has loaded the state, or thread 0 if there is none. If `row_slot` is overwritten
  // meanwhile, threads may disagree on the slot, so that no thread or several threads publish.
  GVR_DEVICE void publish_state(const TopkParams& p, const LaunchTraits& traits,
                                const StepState& state) const {
    if (!traits.has(LaunchTraits::kStateFlags)) return;  // Nobody reads it.
    uint32_t publisher = 0;
    if (traits.has(LaunchTraits::kReadsState) && !traits.has(LaunchTraits::kSlotIsRequest)) {
      publisher = slot(p, traits);
      if (publisher >= kSlotsLoadedEarly) publisher = 0;
    }
    const RowFacts& facts = ctx.shared->facts;
    ptx::store_shared_if(ctx.thread == publisher, ptx::shared_address(&facts.state), state);
    ptx::store_shared_if(ctx.thread == publisher, ptx::shared_address(&facts.slot), slot(p, traits));
  }

  // Whether the row has the claim of its slot, if slots are claimed. The claim is there until the first CTA
  // of the row writes the row's first position, so it is read before the CTAs exchange anything.
  GVR_DEVICE bool owns_slot(const TopkParams& p, const LaunchTraits& traits) const {
    if (!kOptions || !traits.has(LaunchTraits::kClaimedSlots)) return true;
    const int named = slot(p, traits);
    return named >= 0 && *claim_at(p, named) == claim_of(row);
  }

  // Before `agree_on_length` the caller says whether the row owns its slot.
  GVR_DEVICE OutputWriter output(const TopkParams& p, const LaunchTraits& traits, bool owns) const {
    const int next_n = traits.has(LaunchTraits::kDraftRows) ? p.next_n : 1;
    return make_output_writer<kOptions>(p, traits, next_n, row, request, slot(p, traits), owns);
  }
  GVR_DEVICE OutputWriter output(const TopkParams& p, const LaunchTraits& traits) const {
    return output(p, traits, ctx.shared->facts.owns_slot);
  }

  // Whether the row is too short to select from, by the length that this block has read.
  GVR_DEVICE bool is_short() const { return ctx.row.n <= ctx.k; }

  // The gate's answer for this row. It is the same in the whole block after the barrier that follows
  // `publish_state`. `is_state_known`: whether this kernel can predict from the published state.
  GVR_DEVICE HintReason hint_reason(const TopkParams& p, const LaunchTraits& traits,
                                    bool is_state_known) const {
    const bool reads_state = traits.has(LaunchTraits::kReadsState);
    __builtin_assume(ctx.row.n >= 0 && ctx.row.n <= kMaxWidth);  // A launch has no length limits of its own.
    HintQuery query{};
    query.enabled = traits.has(LaunchTraits::kUseHint);
    query.has_state = reads_state || p.state != nullptr;
    // `slot` has been checked: a slot that does not exist has become a negative number.
    query.slot = reads_state ? ctx.shared->facts.slot : slot(p, traits);
    if (traits.has(LaunchTraits::kSlotIsRequest)) query.slot = 0;
    query.slots = int64_t{INT32_MAX} + 1;
    query.length = ctx.row.n;
    query.k = ctx.k;
    query.max_length = kMaxWidth;
    query.known = reads_state && is_state_known;
    return can_use_heuristic(query);
  }

  // Writes a row that is too short to select from.
  GVR_DEVICE void write_short(const TopkParams& p, const LaunchTraits& traits) const {
    if (kOptions && traits.has(LaunchTraits::kDropMasked)) {
      write_short_dropped_row(p, traits, ctx, row, output(p, traits));
    } else {
      const OutputWriter writer_of_row = output(p, traits);
#pragma unroll 1
      for (int i = ctx.rank * kThreads + ctx.thread; i < ctx.k; i += ctx.ctas * kThreads) {
        writer_of_row.put(i, i < ctx.row.n ? i : -1);
      }
    }
    if (writer && traits.has(LaunchTraits::kStats)) {
      write_stats(stats_of(p, traits, row), hint_reason(p, traits, false), 0, 0, 0, -1, kGuessNone, false, 0);
    }
    if (traits.has(LaunchTraits::kStateByRow) && writer) *state_by_row(p) = no_state();
  }

  // Number of items of a row whose k-th key is `kth`, with `above` elements above it.
  GVR_DEVICE int count_items(const LaunchTraits& traits, uint32_t kth, uint32_t above) const {
    return kOptions ? gvr_topk::count_items(traits, ctx.k, kth, above) : ctx.k;
  }

  // Completes a row that has been emitted, if masked elements are dropped: writes -1 behind the row's items,
  // and the number of items. The same thread has already written a number there that is at least as large,
  // when it read the row's length.
  GVR_DEVICE void finish_dropped(const TopkParams& p, const LaunchTraits& traits, const OutputWriter& output,
                                 int items) const {
    if constexpr (kOptions) {
      if (!traits.has(LaunchTraits::kDropMasked)) return;
#pragma unroll 1
      for (int i = items + ctx.rank * kThreads + ctx.thread; i < ctx.k; i += ctx.ctas * kThreads) {
        output.put(i, -1);
      }
      if (traits.has(LaunchTraits::kCounts) && ctx.rank == 0 && ctx.thread == 0) p.counts[row] = items;
    }
  }

  // Counts hits of the last step's positions for the statistics, before this step's positions overwrite them.
  GVR_DEVICE void count_hint_hits(const TopkParams& p, const LaunchTraits& traits, uint32_t kth) const {
    if (!traits.has(LaunchTraits::kStats)) return;
    const HintView view = hint(p, traits);
    // Threads and CTAs may have read different slots, and still have to take part in every barrier.
    const bool hinted = __syncthreads_or(view.indices != nullptr);
    if (hinted && ctx.rank == 0) count_hits(ctx, view, kth);
    cluster_sync(ctx.ctas);
  }

  // Returns whether this thread writes the next state. It is the first thread of the last CTA's last warp,
  // because that warp has the fewest elements of the row.
  GVR_DEVICE bool writes_state() const { return ctx.thread == kThreads - 32 && ctx.rank == ctx.ctas - 1; }

  // Returns the address for the next step's state; null: no state is written.
  GVR_DEVICE StepState* next_state_slot(const TopkParams& p, const LaunchTraits& traits,
                                        const OutputWriter& output) const {
    if (traits.has(LaunchTraits::kStateByRow)) return state_by_row(p);
    return p.state != nullptr && output.writes_state ? state_of(p, slot(p, traits)) : nullptr;
  }

  // Prepares the writer of the results, and where the next state goes, and keeps both in registers.
  GVR_DEVICE void prepare_output(const TopkParams& p, const LaunchTraits& traits, OutputWriter& writer_of_row,
                                 StepState*& next) const {
    writer_of_row = output(p, traits);
    writer_of_row.keep(traits);
    next = next_state_slot(p, traits, writer_of_row);
    if (traits.has(LaunchTraits::kWritesState)) ptx::keep(next);
  }

  // Stores the state that make() returns for the next step, if `next` is not null where `writes_state`. All
  // lanes of that warp compute it, so that none comes apart.
  template <typename Make>
  GVR_DEVICE void write_state(const LaunchTraits& traits, StepState* next, Make make) const {
    const bool here = writes_state() && next != nullptr;
    if (traits.has(LaunchTraits::kWritesState) && __any_sync(0xffffffffu, here)) {
      store_state_if(here, next, make());
    }
  }

  GVR_DEVICE StepState* state_by_row(const TopkParams& p) const {
    return reinterpret_cast<StepState*>(p.next_state) + row;
  }

  GVR_DEVICE void report(const TopkParams& p, const LaunchTraits& traits, int passes, uint32_t inside,
                         int snaps, uint32_t source, bool guess_hit, int rounds) const {
    // All lanes of the writer's warp write the same, so that none comes apart.
    if (!traits.has(LaunchTraits::kStats) || !__any_sync(0xffffffffu, writer)) return;
    const int hits = hint(p, traits).indices != nullptr ? static_cast<int>(ctx.shared->hint_hits) : -1;
    const HintReason reason = hint_reason(p, traits, is_known(shared_state(ctx.shared->facts.state)));
    write_stats(stats_of(p, traits, row), reason, passes, static_cast<int>(inside), snaps, hits,
                static_cast<int>(source), guess_hit, rounds);
  }
};

// Finishes a row of which this CTA selects nothing, because it finds the row too short or leaves it to the
// first CTA (small_row/solo_row.cuh). Other CTAs may have read another length and be waiting for this one. So
// this CTA takes part in the exchanges of a first pass, and returns whether the CTAs agreed. If not, all of
// them must start over. `sampled`: the CTAs exchange samples as well.
template <typename T, bool kOptions>
GVR_DEVICE bool finish_unselected_row(const TopkParams& p, const LaunchTraits& traits,
                                      const RowJob<T, kOptions>& job, bool sampled) {
  const RowContext<T>& ctx = job.ctx;
  ptx::wait_copies<0>();  // A block must not end before the copies that it has started.
  // The first CTA writes where the slot's claim stands, so all CTAs must have read the claim.
  const bool writes_late = kOptions && traits.has(LaunchTraits::kClaimedSlots) && ctx.ctas > 1;
  if (job.is_short() && !writes_late) job.write_short(p, traits);
  if (ctx.ctas == 1) return true;
  const KeyInterval everything = KeyInterval::everything();
  ptx::reconverge(ctx.zero);  // One thread has written statistics.
  ptx::cluster_wait();
  if (sampled) send_sample(ctx, nullptr);
  send_and_wait(ctx, everything, 0, [] {});
  if (sampled) receive_samples(ctx);
  ptx::reconverge(ctx.zero);  // Each lane has left the wait for itself.
  const bool agreed = read_headers(ctx, everything).agreed;
  if (agreed && job.is_short() && writes_late) job.write_short(p, traits);
  return agreed;
}

}  // namespace gvr_topk
