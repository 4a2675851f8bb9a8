// What a cluster has to do for its row beside the selection: read its state, and write results and
// statistics.
#pragma once

#include "core/exchange.cuh"
#include "core/guess.cuh"
#include "core/output_writer.cuh"
#include "core/row_context.cuh"
#include "core/step_state.cuh"

namespace gvr_topk {

__device__ __forceinline__ StepState* state_of(const TopkParams& p, int slot) {
  return reinterpret_cast<StepState*>(p.guess_state) + slot;
}

// Starts a load of what the last step has left in a slot, if that is wanted.
__device__ __forceinline__ void load_state(bool requested, const TopkParams& p, int slot, StepState& state) {
  float4 left = make_float4(state.z_score, state.value, state.limit, 0.0f);
  ptx::load_if(requested, left, state_of(p, slot));
  state = StepState{left.x, left.y, left.z, __float_as_uint(left.w)};
}

// Adds to the block's counts how many of these hinted values lie in the row, and how many of those at or
// above the k-th.
template <typename T>
__device__ __forceinline__ void count_hint(const RowContext<T>& ctx, uint32_t hinted, uint32_t kth) {
  const uint32_t in_row = __popc(__ballot_sync(0xffffffffu, hinted != kAbsentKey));
  const uint32_t at_or_above = __popc(__ballot_sync(0xffffffffu, hinted >= kth));
  if (ctx.lane != 0) return;
  ptx::add_shared(ctx.shared->hinted, in_row, ctx.zero);
  ptx::add_shared(ctx.shared->at_or_above, at_or_above, ctx.zero);
}

// The same for the whole hint, which is still the old one.
template <typename T>
__device__ __forceinline__ void count_hint_in_full(const RowContext<T>& ctx, const HintView& hint,
                                                   uint32_t kth) {
#pragma unroll 1
  for (int first = 0; first < ctx.k; first += kThreads) {
    const int i = first + ctx.thread;
    const bool there = i < ctx.k && hint.prior != nullptr;
    count_hint(ctx, HintedScore<T>(ctx, hint, there ? hint.prior[i] : -1).key(), kth);
  }
}

// The slot a row asks for; it may have to be loaded.
__device__ __forceinline__ int load_requested_slot(const TopkParams& p, const LaunchTraits& traits, int row,
                                                   int request) {
  int slot = request;
  const int32_t* slots = p.seq_lens;  // at hand, for a load that will not be
  if (traits.has(LaunchTraits::kRowSlots)) slots = p.row_slot;
  ptx::load_if(traits.has(LaunchTraits::kRowSlots), slot, slots + row);
  return slot;
}

// The same if there is one, or a negative number.
__device__ __forceinline__ int checked_slot(const TopkParams& p, const LaunchTraits& traits,
                                            int requested_slot) {
  return traits.has(LaunchTraits::kWritesState) && requested_slot < p.num_slots ? requested_slot : -1;
}

__device__ __forceinline__ void write_stats(int32_t* stats, Path path, int passes, int candidates, int snaps,
                                            int hits, int guess, bool guess_hit, int done) {
  stats[kStatPath] = static_cast<int32_t>(path);
  stats[kStatPasses] = passes;
  stats[kStatCandidates] = candidates;
  stats[kStatSnap] = snaps;
  stats[kStatHits] = hits;
  stats[kStatGuess] = guess;
  stats[kStatGuessHit] = guess_hit;
  stats[kStatDone] = done;
}

template <typename T>
__device__ __forceinline__ void reset_counts(const RowContext<T>& ctx) {
  ctx.shared->counts = Counts{};
}

// Before the lists are made anew. A thread that has heard of all CTAs may be ahead of one of its own block
// that is still sending: what is sent must not be reset before; nor may headers, while somebody reads them.
template <typename T>
__device__ __forceinline__ void restart_counts(const RowContext<T>& ctx) {
  __syncthreads();
  if (ctx.thread == 0) reset_counts(ctx);
  cluster_sync(ctx.ctas);
}

template <typename T>
__device__ __forceinline__ void init_barriers(const RowContext<T>& ctx) {
  if (ctx.thread != 0 || ctx.ctas == 1) return;
  ptx::barrier_init(ptx::shared_address(&ctx.shared->counts_barrier), ctx.ctas);
  ptx::barrier_init(ptx::shared_address(&ctx.shared->sample_barrier), ctx.ctas);
}

template <typename T>
__device__ __forceinline__ void reset_counters(const RowContext<T>& ctx) {
  Shared& sm = *ctx.shared;
  if (ctx.thread < kMaxClusterSize) {
    sm.segment_above[ctx.thread] = 0;
    sm.segment_equal[ctx.thread] = 0;
  }
  if (ctx.thread == 0) {
    reset_counts(ctx);
    sm.hinted = 0;
    sm.at_or_above = 0;
  }
  init_barriers(ctx);
}

// Everything the first exchange finds in shared memory, but what it will list.
template <typename T>
__device__ __forceinline__ void prepare_exchange(const RowContext<T>& ctx) {
  Shared& sm = *ctx.shared;
  static_assert(Histogram::kBins == 2 * kThreads);
  reinterpret_cast<uint2*>(sm.keys.fine)[ctx.thread] = make_uint2(0, 0);
  constexpr size_t kBegin = offsetof(Shared, keys) + offsetof(Histogram, coarse);
  constexpr int kWords = (offsetof(Shared, over_range) - kBegin) / sizeof(uint32_t);
  static_assert(kWords <= kThreads);
  if (ctx.thread < kWords) sm.keys.coarse[ctx.thread] = 0;
  init_barriers(ctx);
}

// Shared memory of the other CTAs may be touched only once they are known to run: this says that one does,
// and cluster_wait() that all do.
template <typename T>
__device__ __forceinline__ void arrive_at_start(const RowContext<T>& ctx) {
  if (ctx.ctas > 1) ptx::cluster_arrive_relaxed();
}

__device__ __forceinline__ int request_of(const TopkParams& p, const LaunchTraits& traits, int row) {
  return traits.has(LaunchTraits::kDraftRows) ? row / p.next_n : row;
}

// Rows to a request.
__device__ __forceinline__ int next_n_of(const TopkParams& p, const LaunchTraits& traits) {
  return traits.has(LaunchTraits::kDraftRows) ? p.next_n : 1;
}

__device__ __forceinline__ int32_t* stats_of(const TopkParams& p, const LaunchTraits& traits, int row) {
  return traits.has(LaunchTraits::kStats) ? p.stats + row * kStatColumns : nullptr;
}

// Rows no longer than k need no selection: `threads` threads, of which this is one, write them.
__device__ __forceinline__ void write_short_row(const OutputWriter& output, int n, int k, int thread,
                                                int threads, int32_t* stats) {
  emit_short_row(output, n, k, thread, threads);
  if (stats != nullptr && thread < kStatColumns) stats[thread] = thread == kStatHits ? -1 : 0;
}

// Slots whose state is asked for before it is known which one is needed.
constexpr int kSlotsLoadedEarly = 128;

// What a cluster has to do: its row, the row's hint, and where results go. The row's length is under way, but
// not waited for.
template <typename T>
struct RowJob {
  int row;
  int request;
  int seq_len = 0;     // of thread 0, under way; not to be touched before it is needed
  int requested_slot;  // this thread's idea of the slot, under way likewise
  RowContext<T> ctx;
  bool writer;  // the thread that speaks for the row

  __device__ __forceinline__ RowJob(const TopkParams& p, const LaunchTraits& traits, const SmemLayout& layout,
                                    unsigned char* storage, bool known_sizes = false) {
    row = blockIdx.x >> traits.log2_ctas();
    request = request_of(p, traits, row);
    ptx::load_if(threadIdx.x == 0, seq_len, p.seq_lens + request);  // before all else
    requested_slot = load_requested_slot(p, traits, row, request);
    ctx = make_context<T>(p, traits, layout, row_buffer<T>(p, traits.has(LaunchTraits::kAligned), row),
                          storage, known_sizes);
    writer = ctx.rank == 0 && ctx.thread == 0;
  }

  // Waits for the row's length, which one thread has read, so that all of the block go by the same number
  // though another stream may be writing it. One block barrier: what does not need the length comes before.
  __device__ __forceinline__ void agree_on_length(const TopkParams& p, const LaunchTraits& traits) {
    Shared& sm = *ctx.shared;
    if (ctx.thread == 0) {
      sm.facts.length = visible_length(p, next_n_of(p, traits), row, request, seq_len);
    }
    __syncthreads();
    ctx.set_length(sm.facts.length);
  }

  __device__ __forceinline__ int slot(const TopkParams& p, const LaunchTraits& traits) const {
    return checked_slot(p, traits, requested_slot);
  }

  __device__ __forceinline__ HintView hint(const TopkParams& p, const LaunchTraits& traits) const {
    return hint_view(p, slot(p, traits));
  }

  // Starts the load of what the last step left for the guess, for one thread that tells the others: another
  // row, or stream, may be writing it. Where slots are those of requests, that is the first thread. Otherwise
  // each of the first threads asks for the slot of its own number, before it is known which one is the row's:
  // one load behind the other would take twice the time. Later slots are waited for.
  __device__ __forceinline__ StepState load_state_early(const TopkParams& p, const LaunchTraits& traits,
                                                        int slots_loaded_early = kSlotsLoadedEarly) const {
    StepState state = no_state();
    if (traits.has(LaunchTraits::kSlotIsRequest)) {
      load_state(threadIdx.x == 0, p, request, state);
    } else if (traits.has(LaunchTraits::kReadsState)) {
      load_state(threadIdx.x < min(slots_loaded_early, p.num_slots), p, threadIdx.x, state);
    }
    return state;
  }

  __device__ __forceinline__ void load_state_late(const TopkParams& p, const LaunchTraits& traits,
                                                  StepState& state,
                                                  uint32_t slots_loaded_early = kSlotsLoadedEarly) const {
    if (!traits.has(LaunchTraits::kReadsState) || traits.has(LaunchTraits::kSlotIsRequest)) return;
    const uint32_t requested = slot(p, traits);
    if (ctx.thread != 0 || requested < slots_loaded_early) return;
    state = no_state();
    load_state(static_cast<int>(requested) >= 0, p, requested, state);
  }

  // Tells the block what the last step left, behind its next barrier: the thread does that has it, or knows
  // that there is nothing. Should `row_slot` be overwritten meanwhile, it may be none, or several.
  __device__ __forceinline__ void publish_state(const TopkParams& p, const LaunchTraits& traits,
                                                const StepState& state,
                                                uint32_t slots_loaded_early = kSlotsLoadedEarly) const {
    uint32_t teller = 0;
    if (traits.has(LaunchTraits::kReadsState) && !traits.has(LaunchTraits::kSlotIsRequest)) {
      teller = slot(p, traits);
      if (teller >= slots_loaded_early) teller = 0;
    }
    if (ctx.thread == teller) ctx.shared->facts.state = state;
  }

  __device__ __forceinline__ OutputWriter output(const TopkParams& p, const LaunchTraits& traits) const {
    return make_output_writer(p, next_n_of(p, traits), row, request, slot(p, traits));
  }

  // Whether the block finds its row too short to select from.
  __device__ __forceinline__ bool is_short() const { return ctx.row.n <= ctx.k; }

  // Writes a row that is too short to select from.
  __device__ __forceinline__ void write_short(const TopkParams& p, const LaunchTraits& traits) const {
    write_short_row(output(p, traits), ctx.row.n, ctx.k, ctx.rank * kThreads + ctx.thread,
                    ctx.ctas * kThreads, stats_of(p, traits, row));
  }

  // What share of the hint is at or above the k-th value: when statistics are wanted, of all of it, which has
  // to be looked at before it is overwritten. Whether it was.
  __device__ __forceinline__ bool count_whole_hint(const TopkParams& p, const LaunchTraits& traits,
                                                   uint32_t kth) const {
    if (!traits.has(LaunchTraits::kStats)) return false;
    const HintView whole = hint(p, traits);
    const bool hinted = __syncthreads_or(whole.prior != nullptr);  // threads may have found different slots
    if (hinted && ctx.rank == 0) count_hint_in_full(ctx, whole, kth);
    cluster_sync(ctx.ctas);  // in any case: CTAs may have found different slots
    return hinted;
  }

  // Or else of its sample, for the next step's guess.
  __device__ __forceinline__ void count(const TopkParams& p, const LaunchTraits& traits, uint32_t hinted,
                                        uint32_t kth) const {
    if (!count_whole_hint(p, traits, kth) && ctx.rank == 0) count_hint(ctx, hinted, kth);
  }

  // That share, when it has been counted.
  __device__ __forceinline__ float share() const {
    const Shared& sm = *ctx.shared;
    // The quick division may end beside 1 for equal numbers.
    const float share = __fdividef(static_cast<float>(sm.at_or_above), static_cast<float>(sm.hinted));
    return sm.hinted > 0 ? fminf(share, 1.0f) : kNoState;
  }

  // Of those that all know the result: its warp has the end of the row, if it has any of it.
  __device__ __forceinline__ bool is_least_busy() const {
    return ctx.thread == kThreads - 32 && ctx.rank == ctx.ctas - 1;
  }

  // Where what the next step's guess starts from goes, or nowhere.
  __device__ __forceinline__ StepState* next_state_slot(const TopkParams& p, const LaunchTraits& traits,
                                                        const OutputWriter& output) const {
    return p.guess_state != nullptr && output.writes_state ? state_of(p, slot(p, traits)) : nullptr;
  }

  __device__ __forceinline__ void report(const TopkParams& p, const LaunchTraits& traits, int passes,
                                         uint32_t inside, int snaps, uint32_t source, bool guess_hit,
                                         int rounds) const {
    if (!writer || !traits.has(LaunchTraits::kStats)) return;
    const int hits = hint(p, traits).prior != nullptr ? static_cast<int>(ctx.shared->at_or_above) : -1;
    write_stats(stats_of(p, traits, row), traits.has(LaunchTraits::kUseHint) ? Path::kCluster : Path::kRadix,
                passes, static_cast<int>(inside), snaps, hits, static_cast<int>(source), guess_hit, rounds);
  }
};

}  // namespace gvr_topk
