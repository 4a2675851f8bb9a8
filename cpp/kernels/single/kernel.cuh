// Short rows: one CTA holds the row in registers, and needs no other CTA, nor the hint.
//
// What the last step has left names a window of values, of which one round of even bins leaves the k-th alone
// with a few others (window.cuh). Without, or where it misses, rounds over the keys find it (rounds.cuh).
#pragma once

#include "single/recall.cuh"
#include "single/rounds.cuh"
#include "single/settle.cuh"

namespace gvr_topk::single {

struct alignas(128) Storage {
  Shared shared;
  Bins bins;
  // [min(k, width)] selected positions, in ascending order; those of a short row fit 16 bits.
  alignas(8) uint16_t staged[1];
};

inline size_t single_bytes(int k) { return sizeof(Storage) + sizeof(uint16_t) * k; }

// None: there is time to wait for the slot while the row comes, and many rows would ask for the same lines.
constexpr int kSlotsAhead = 0;

template <typename T, int kValues, Known kKnown>
__global__ void __launch_bounds__(kThreads, kValues < kValuesPerThread ? 2 : 1)
    single_topk(const __grid_constant__ Shape launch_shape, const __grid_constant__ TopkParams p,
                const Path path) {
  extern __shared__ __align__(128) unsigned char storage[];
  using Row = Held<T, kValues>;
  const Shape shape = launch_shape.alone<kKnown>();
  Storage& own = *reinterpret_cast<Storage*>(storage);
  ptx::grid_take_over();
  // What lanes add to one address the compiler would first add up over the warp. Few do here, and that takes
  // longer.
  Job<T> job(p, shape, Room{}, storage + ptx::unknown_zero(), true);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  Row held;
  if constexpr (Row::kAhead) held.load(task.row, shape.has(Shape::kWhole));
  __syncwarp();  // the row first
  cluster::Feedback left = job.early_feedback(p, shape, kSlotsAhead);
  job.late_feedback(p, shape, left, kSlotsAhead);
  PhaseClock clock(p.phase_clocks, blockIdx.x, job.writer);
  clock.stamp();
  own.bins.clear(task.thread);
  Sink sink = job.sink(p, shape);  // here, where there is time for parameters to come
  sink.keep(shape);
  if (task.thread == 0) sm.hinted = sm.at_or_above = sm.small_count = 0;
  job.tell_feedback(p, shape, left, kSlotsAhead);
  float* next = nullptr;
  if (job.is_least_busy()) next = reinterpret_cast<float*>(job.next_feedback(p, shape, sink));
  ptx::keep(next);
  job.agree_on_length(p, shape);
  if (job.is_short()) {
    job.write_short(p, shape);
    return;
  }
  if constexpr (!Row::kAhead) held.load(task.row, false);
  held.take(task.row.n, task.lane);
  clock.stamp();

  SplitOf<Row> split;
  const float window = shape.has(Shape::kFed) ? sm.facts.feedback.place : cluster::kNoFeedback;
  const bool guessed = shape.has(Shape::kFed) && Window::is_known(window);
  uint32_t kth = 0;
  // Writes what is selected, and says how it was found. Inlined twice, so that the usual way is straight.
  const auto conclude = [&](auto key_of, bool tied, bool recalled, int rounds) {
    uint32_t before = 0;
    if (tied) {
      settle_ties(task, held, split, before);
    } else {
      settle_few(task, held, own.bins, split, before, kth, key_of);
    }
    job.audit(p, shape, kth);
    clock.stamp();
    stage(task, held, split.above, before, own.staged);
    __syncthreads();
    write_out(task, shape, own.staged, sink);
    clock.stamp();
    if (task.thread != 0 || !shape.has(Shape::kAudited)) return;
    write_stats(stats_of(p, shape, job.row), path, 1, static_cast<int>(split.few), rounds,
                job.hint(p, shape).prior != nullptr ? static_cast<int>(sm.at_or_above) : -1,
                guessed ? kGuessValue : kGuessNone, recalled, rounds - guessed);
  };
  if (guessed && recall(task, held, own.bins, window, next, split)) {
    if (split.rank == split.few && !shape.has(Shape::kAudited)) split.take_all();  // no need to know the k-th
    clock.stamp();
    conclude([](uint32_t bits) { return order_key(__uint_as_float(bits)); }, false, true, guessed);
    return;
  }
  held.make_keys();
  int rounds = guessed;
  uint32_t crowd = 0;
  const Range range = narrow(task, held, own.bins, rounds, crowd);
  split = split_at(held, range);
  kth = whole_key<T>(range.base);
  clock.stamp();
  const bool tied = split.few > kRankDirectly;
  if (next != nullptr) *next = window_around<T>(range.base, crowd, tied);
  conclude([](uint32_t bits) { return whole_key<T>(bits); }, tied, false, rounds);
}

}  // namespace gvr_topk::single
