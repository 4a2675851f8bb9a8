// What the kernels of the cluster family have in common: the row a cluster works on, and what is written
// beside the result.
#pragma once

#include "cluster/emit.cuh"
#include "cluster/guess.cuh"
#include "cluster/shape.cuh"
#include "cluster/state.cuh"

namespace gvr_topk::cluster {

// Of a row whose length is not known yet: `agree_on_length` comes next.
template <typename T>
__device__ __forceinline__ Task<T> make_task(const TopkParams& p, const Shape& shape, const Room& room,
                                             const Row<T>& row, unsigned char* storage,
                                             bool known_sizes = false) {
  const auto keep = [&](int& size) {  // or it would not stay known
    if (!known_sizes) ptx::keep(size);
  };
  Task<T> task;
  task.row = row;
  task.k = p.k;
  ptx::keep(task.k);
  ptx::keep(task.row.data);
  task.rank = shape.log2_ctas() > 0 ? ptx::cluster_rank() : 0;
  task.log2_ctas = shape.log2_ctas();
  keep(task.log2_ctas);
  task.ctas = 1 << task.log2_ctas;
  keep(task.ctas);
  task.thread = threadIdx.x;
  ptx::keep(task.thread);
  task.zero = ptx::unknown_zero();
  task.lane = task.thread & 31;
  task.warp = task.thread >> 5;
  task.shared = reinterpret_cast<Shared*>(storage);
  int segment = shape.list_capacity() >> task.log2_ctas;
  keep(segment);
  task.list = KeyList(reinterpret_cast<uint32_t*>(storage + sizeof(Shared)), segment, task.rank);
  uint4* ring = static_cast<uint4*>(task.list.end(shape.list_capacity()));
  task.ring = shape.has(Shape::kRing) ? ring : nullptr;
  task.masks = reinterpret_cast<uint16_t*>(
      shape.has(Shape::kRing) ? ring + kRingDepth * kThreads * Word<T>::kVecs : ring);
  task.candidates = reinterpret_cast<Candidate*>(task.masks + room.masks);
  task.candidate_capacity = room.candidate_capacity;
  return task;
}

__device__ __forceinline__ Feedback* feedback_of(const TopkParams& p, int slot) {
  return reinterpret_cast<Feedback*>(p.guess_state) + slot;
}

// Starts a load of what the last step has left in a slot, if that is wanted.
__device__ __forceinline__ void load_feedback(bool wanted, const TopkParams& p, int slot,
                                              Feedback& feedback) {
  float4 left = make_float4(feedback.place, feedback.value, feedback.limit, 0.0f);
  ptx::load_if(wanted, left, feedback_of(p, slot));
  feedback = Feedback{left.x, left.y, left.z, __float_as_uint(left.w)};
}

// Adds to the block's counts how many of these hinted values lie in the row, and how many of those at or
// above the k-th.
template <typename T>
__device__ __forceinline__ void count_hint(const Task<T>& task, uint32_t hinted, uint32_t kth) {
  const uint32_t in_row = __popc(__ballot_sync(0xffffffffu, hinted != kAbsentKey));
  const uint32_t at_or_above = __popc(__ballot_sync(0xffffffffu, hinted >= kth));
  if (task.lane != 0) return;
  ptx::add_shared(task.shared->hinted, in_row, task.zero);
  ptx::add_shared(task.shared->at_or_above, at_or_above, task.zero);
}

// The same for the whole hint, which is still the old one.
template <typename T>
__device__ __forceinline__ void audit_hint(const Task<T>& task, const HintView& hint, uint32_t kth) {
#pragma unroll 1
  for (int first = 0; first < task.k; first += kThreads) {
    const int i = first + task.thread;
    const bool there = i < task.k && hint.prior != nullptr;
    count_hint(task, HintedScore<T>(task, hint, there ? hint.prior[i] : -1).key(), kth);
  }
}

// The slot a row asks for; it may have to be loaded.
__device__ __forceinline__ int asked_slot(const TopkParams& p, const Shape& shape, int row, int request) {
  int slot = request;
  const int32_t* slots = p.seq_lens;  // at hand, for a load that will not be
  if (shape.has(Shape::kSlotted)) slots = p.row_slot;
  ptx::load_if(shape.has(Shape::kSlotted), slot, slots + row);
  return slot;
}

// The same if there is one, or a negative number.
__device__ __forceinline__ int checked_slot(const TopkParams& p, const Shape& shape, int asked) {
  return shape.has(Shape::kLeaving) && asked < p.num_slots ? asked : -1;
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
__device__ __forceinline__ void reset_lists(const Task<T>& task) {
  task.shared->counts = Counts{};
}

// Before the lists are made anew. A thread that has heard of all CTAs may be ahead of one of its own block
// that is still sending: what is sent must not be reset before; nor may headers, while somebody reads them.
template <typename T>
__device__ __forceinline__ void start_again(const Task<T>& task) {
  __syncthreads();
  if (task.thread == 0) reset_lists(task);
  cluster_sync(task.ctas);
}

template <typename T>
__device__ __forceinline__ void init_mailboxes(const Task<T>& task) {
  if (task.thread != 0 || task.ctas == 1) return;
  ptx::mailbox_init(ptx::shared_address(&task.shared->mailbox), task.ctas);
  ptx::mailbox_init(ptx::shared_address(&task.shared->sample_mailbox), task.ctas);
}

template <typename T>
__device__ __forceinline__ void reset_counters(const Task<T>& task) {
  Shared& sm = *task.shared;
  if (task.thread < kMaxClusterSize) {
    sm.segment_above[task.thread] = 0;
    sm.segment_equal[task.thread] = 0;
  }
  if (task.thread == 0) {
    reset_lists(task);
    sm.hinted = 0;
    sm.at_or_above = 0;
  }
  init_mailboxes(task);
}

// Everything the first exchange finds in shared memory, but what it will list.
template <typename T>
__device__ __forceinline__ void prepare_exchange(const Task<T>& task) {
  Shared& sm = *task.shared;
  static_assert(Histogram::kBins == 2 * kThreads);
  reinterpret_cast<uint2*>(sm.keys.fine)[task.thread] = make_uint2(0, 0);
  constexpr size_t kBegin = offsetof(Shared, keys) + offsetof(Histogram, coarse);
  constexpr int kWords = (offsetof(Shared, over_range) - kBegin) / sizeof(uint32_t);
  static_assert(kWords <= kThreads);
  if (task.thread < kWords) sm.keys.coarse[task.thread] = 0;
  init_mailboxes(task);
}

// Shared memory of the other CTAs may be touched only once they are known to run: this says that one does,
// and cluster_wait() that all do.
template <typename T>
__device__ __forceinline__ void announce(const Task<T>& task) {
  if (task.ctas > 1) ptx::cluster_arrive_relaxed();
}

__device__ __forceinline__ int request_of(const TopkParams& p, const Shape& shape, int row) {
  return shape.has(Shape::kSeveral) ? row / p.next_n : row;
}

// Rows to a request.
__device__ __forceinline__ int next_n_of(const TopkParams& p, const Shape& shape) {
  return shape.has(Shape::kSeveral) ? p.next_n : 1;
}

__device__ __forceinline__ int32_t* stats_of(const TopkParams& p, const Shape& shape, int row) {
  return shape.has(Shape::kAudited) ? p.stats + row * kStatColumns : nullptr;
}

// Rows no longer than k need no selection: `threads` threads, of which this is one, write them.
__device__ __forceinline__ void finish_short_row(const Sink& sink, int n, int k, int thread, int threads,
                                                 int32_t* stats) {
  emit_short_row(sink, n, k, thread, threads);
  if (stats != nullptr && thread < kStatColumns) stats[thread] = thread == kStatHits ? -1 : 0;
}

// Slots whose state is asked for before it is known which one is needed.
constexpr int kSlotsAhead = 128;

// What a cluster has to do: its row, the row's hint, and where results go. The row's length is under way, but
// not waited for.
template <typename T>
struct Job {
  int row;
  int request;
  int seq_len = 0;  // of thread 0, under way; not to be touched before it is needed
  int asked;        // this thread's idea of the slot, under way likewise
  Task<T> task;
  bool writer;  // the thread that speaks for the row

  __device__ __forceinline__ Job(const TopkParams& p, const Shape& shape, const Room& room,
                                 unsigned char* storage, bool known_sizes = false) {
    row = blockIdx.x >> shape.log2_ctas();
    request = request_of(p, shape, row);
    ptx::load_if(threadIdx.x == 0, seq_len, p.seq_lens + request);  // before all else
    asked = asked_slot(p, shape, row, request);
    task =
        make_task<T>(p, shape, room, row_buffer<T>(p, shape.has(Shape::kAligned), row), storage, known_sizes);
    writer = task.rank == 0 && task.thread == 0;
  }

  // Waits for the row's length, which one thread has read, so that all of the block go by the same number
  // though another stream may be writing it. One block barrier: what does not need the length comes before.
  __device__ __forceinline__ void agree_on_length(const TopkParams& p, const Shape& shape) {
    Shared& sm = *task.shared;
    if (task.thread == 0) {
      sm.facts.length = visible_length(p, next_n_of(p, shape), row, request, seq_len);
    }
    __syncthreads();
    task.measure(sm.facts.length);
  }

  __device__ __forceinline__ int slot(const TopkParams& p, const Shape& shape) const {
    return checked_slot(p, shape, asked);
  }

  __device__ __forceinline__ HintView hint(const TopkParams& p, const Shape& shape) const {
    return hint_view(p, slot(p, shape));
  }

  // Starts the load of what the last step left for the guess, for one thread that tells the others: another
  // row, or stream, may be writing it. Where slots are those of requests, that is the first thread. Otherwise
  // each of the first threads asks for the slot of its own number, before it is known which one is the row's:
  // one load behind the other would take twice the time. Later slots are waited for.
  __device__ __forceinline__ Feedback early_feedback(const TopkParams& p, const Shape& shape,
                                                     int slots_ahead = kSlotsAhead) const {
    Feedback feedback = nothing();
    if (shape.has(Shape::kPrompt)) {
      load_feedback(threadIdx.x == 0, p, request, feedback);
    } else if (shape.has(Shape::kFed)) {
      load_feedback(threadIdx.x < min(slots_ahead, p.num_slots), p, threadIdx.x, feedback);
    }
    return feedback;
  }

  __device__ __forceinline__ void late_feedback(const TopkParams& p, const Shape& shape, Feedback& feedback,
                                                uint32_t slots_ahead = kSlotsAhead) const {
    if (!shape.has(Shape::kFed) || shape.has(Shape::kPrompt)) return;
    const uint32_t wanted = slot(p, shape);
    if (task.thread != 0 || wanted < slots_ahead) return;
    feedback = nothing();
    load_feedback(static_cast<int>(wanted) >= 0, p, wanted, feedback);
  }

  // Tells the block what the last step left, behind its next barrier: the thread does that has it, or knows
  // that there is nothing. Should `row_slot` be overwritten meanwhile, it may be none, or several.
  __device__ __forceinline__ void tell_feedback(const TopkParams& p, const Shape& shape,
                                                const Feedback& feedback,
                                                uint32_t slots_ahead = kSlotsAhead) const {
    uint32_t teller = 0;
    if (shape.has(Shape::kFed) && !shape.has(Shape::kPrompt)) {
      teller = slot(p, shape);
      if (teller >= slots_ahead) teller = 0;
    }
    if (task.thread == teller) task.shared->facts.feedback = feedback;
  }

  __device__ __forceinline__ Sink sink(const TopkParams& p, const Shape& shape) const {
    return make_sink(p, next_n_of(p, shape), row, request, slot(p, shape));
  }

  // Whether the block finds its row too short to select from.
  __device__ __forceinline__ bool is_short() const { return task.row.n <= task.k; }

  // Writes a row that is too short to select from.
  __device__ __forceinline__ void write_short(const TopkParams& p, const Shape& shape) const {
    finish_short_row(sink(p, shape), task.row.n, task.k, task.rank * kThreads + task.thread,
                     task.ctas * kThreads, stats_of(p, shape, row));
  }

  // What share of the hint is at or above the k-th value: when statistics are wanted, of all of it, which has
  // to be looked at before it is overwritten. Whether it was.
  __device__ __forceinline__ bool audit(const TopkParams& p, const Shape& shape, uint32_t kth) const {
    if (!shape.has(Shape::kAudited)) return false;
    const HintView whole = hint(p, shape);
    const bool hinted = __syncthreads_or(whole.prior != nullptr);  // threads may have found different slots
    if (hinted && task.rank == 0) audit_hint(task, whole, kth);
    cluster_sync(task.ctas);  // in any case: CTAs may have found different slots
    return hinted;
  }

  // Or else of its sample, for the next step's guess.
  __device__ __forceinline__ void count(const TopkParams& p, const Shape& shape, uint32_t hinted,
                                        uint32_t kth) const {
    if (!audit(p, shape, kth) && task.rank == 0) count_hint(task, hinted, kth);
  }

  // That share, when it has been counted.
  __device__ __forceinline__ float share() const {
    const Shared& sm = *task.shared;
    // The quick division may end beside 1 for equal numbers.
    const float share = __fdividef(static_cast<float>(sm.at_or_above), static_cast<float>(sm.hinted));
    return sm.hinted > 0 ? fminf(share, 1.0f) : kNoFeedback;
  }

  // Of those that all know the result: its warp has the end of the row, if it has any of it.
  __device__ __forceinline__ bool is_least_busy() const {
    return task.thread == kThreads - 32 && task.rank == task.ctas - 1;
  }

  // Where what the next step's guess starts from goes, or nowhere.
  __device__ __forceinline__ Feedback* next_feedback(const TopkParams& p, const Shape& shape,
                                                     const Sink& sink) const {
    return p.guess_state != nullptr && sink.leaves ? feedback_of(p, slot(p, shape)) : nullptr;
  }

  __device__ __forceinline__ void report(const TopkParams& p, const Shape& shape, int passes, uint32_t inside,
                                         int snaps, uint32_t source, bool guess_hit, int rounds) const {
    if (!writer || !shape.has(Shape::kAudited)) return;
    const int hits = hint(p, shape).prior != nullptr ? static_cast<int>(task.shared->at_or_above) : -1;
    write_stats(stats_of(p, shape, row), shape.has(Shape::kUseHint) ? Path::kCluster : Path::kRadix, passes,
                static_cast<int>(inside), snaps, hits, static_cast<int>(source), guess_hit, rounds);
  }
};

}  // namespace gvr_topk::cluster
