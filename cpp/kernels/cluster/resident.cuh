// The row stays on chip: one cluster of 1 to 16 CTAs holds it in registers, 16 or 32 elements a thread, so
// global memory is read once and one exchange joins the CTAs.
//
// Only the way a guessed bracket takes is in this kernel's own code, which is kept short: at this size
// time is instructions issued and fetched. Where no bracket holds, `settle_resident` takes the row from where
// it lies in shared memory and settles it by radix rounds, whatever it contains.
#pragma once

#include <algorithm>

#include "cluster/general.cuh"
#include "cluster/place.cuh"

namespace gvr_topk::cluster {

// The consecutive elements of one lane: index order is (CTA, warp, lane, place), and a rank takes a single
// scan over the lanes. They are fetched in coalesced order, and change hands in shared memory. The row's
// groups of 32 vectors are spread evenly over the warps: some have one more than others.
template <typename T, int kValues>
struct Part {
  static constexpr int kVecs = kValues / kPerVec<T>;
  static constexpr int kGroup = 32 * kPerVec<T>;

  int vecs;              // a lane holds
  int begin;             // position of the first element
  int length;            // elements in the row from there on; may be none, or more than it holds
  uint32_t stage;        // shared address of what the warp holds
  float value[kValues];  // -inf behind the row's end

  // The stage lies behind the list, and holds as many bytes as the CTA holds of the row.
  __device__ __forceinline__ Part(const Task<T>& task, const Shape& shape)
      : stage(ptx::shared_address(static_cast<uint4*>(task.list.end(shape.list_capacity())) +
                                  task.warp * 32 * kVecs)) {
    ptx::keep(stage);
  }

  __device__ __forceinline__ static int groups_of(int elements) {
    return (elements + kGroup - 1) >> log2_of(kGroup);
  }

  // Says where this lane's elements lie of a row of so many; returns where those of its warp begin.
  __device__ __forceinline__ int lay_out(const Task<T>& task, int elements) {
    const int groups = groups_of(elements), log2_warps = log2_of(kWarps) + task.log2_ctas;
    const int before = (task.rank * kWarps + task.warp) * groups + (1 << log2_warps) - 1;
    const int first = before >> log2_warps;  // the last warp, which does most else, has no more than others
    vecs = ((before + groups) >> log2_warps) - first;
    begin = first * kGroup + task.lane * vecs * kPerVec<T>;
    return first * kGroup;
  }

  // Starts the loads of a row of so many elements, in a buffer of `width`: of whole vectors where it has
  // them, for what lies behind the row's end costs less than leaving it out.
  __device__ __forceinline__ void fetch(const Task<T>& task, const Shape& shape, int elements, int width) {
    const int warp_begin = lay_out(task, elements);
    const int at_lane = warp_begin + task.lane * kPerVec<T>;
    const T* data = task.row.data + at_lane;
    const int left = elements - at_lane;
    int whole = min(min(left, width - at_lane - kPerVec<T> + 1), vecs * kGroup);
    ptx::keep(whole);
    if (task.row.aligned) {
      // Of `address`, 32 vectors on, only one bit of what is swapped changes.
      const uint32_t even = address(task.lane), odd = address(32 + task.lane) - 32 * sizeof(uint4);
      copy_before(whole, even, odd, data);
    }
    ptx::commit_copies();
    if (shape.has(Shape::kWhole)) return;
#pragma unroll 1
    for (int j = 0; j < vecs; ++j) {
      const int at = j * kGroup;
      if (at < left && (!task.row.aligned || at >= whole)) {
        ptx::store_shared(address(32 * j + task.lane), load_elements(data + at, left - at));
      }
    }
  }

  template <int kVec = 0>
  __device__ __forceinline__ static void copy_before(int whole, uint32_t even, uint32_t odd, const T* data) {
    if constexpr (kVec < kVecs) {
      constexpr int kGroupBytes = kGroup * sizeof(T);
      ptx::copy_async_before<kVec * kGroupBytes>(kVec * kGroup, whole, kVec % 2 == 0 ? even : odd, data);
      copy_before<kVec + 1>(whole, even, odd, data);
    }
  }

  // Neighbouring lanes read vectors that lie `vecs` apart, out of different banks: odd numbers see to that
  // themselves.
  __device__ __forceinline__ uint32_t address(uint32_t vec) const {
    return stage + sizeof(uint4) * (vec ^ (vec >> 3 & (vecs % 2 - 1) & 7));
  }

  // Waits for the loads of the whole warp.
  __device__ __forceinline__ void take(int lane, int n) {
    length = n - begin;
    ptx::wait_copies<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
      const uint4 vec = ptx::load_shared(address(lane * vecs + j));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) value[j * kPerVec<T> + e] = element<T>(vec, e);
    }
    if (length >= vecs * kPerVec<T>) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i >= length) value[i] = -INFINITY;
    }
  }

  // Key of one element of a lane, by a place known only at run time.
  __device__ __forceinline__ uint32_t key(int lane, uint32_t place) const {
    const uint32_t vec = address(lane * vecs + place / kPerVec<T>);
    return order_key(to_float(ptx::load_shared_element<T>(vec + sizeof(T) * (place % kPerVec<T>))));
  }

  // Bits of the elements that mark(marks, value, bit) marks; it does not mark -inf.
  template <typename Mark>
  __device__ __forceinline__ uint32_t bits(Mark mark) const {
    ptx::Marks marks[kValues / kValuesPerThread];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const int i = j * kPerVec<T> + e;
        mark(marks[i / kValuesPerThread].of[j % 2], value[i], 1u << i % kValuesPerThread);
      }
    }
    uint32_t found = 0;
#pragma unroll
    for (int w = 0; w < kValues / kValuesPerThread; ++w) found |= marks[w].bits() << (kValuesPerThread * w);
    return found;
  }

  __device__ __forceinline__ uint32_t not_below(float bound) const {
    return bits([&](float& marks, float x, float bit) { ptx::mark_unless_less(marks, x, bound, bit); });
  }

  __device__ __forceinline__ uint32_t equal(float level) const {
    return bits([&](float& marks, float x, float bit) { ptx::mark_if_equal(marks, x, level, bit); });
  }
};

// The stage lies behind the list, where a fallback, which comes later, has other things.
template <typename T, int kValues>
inline size_t resident_bytes(const Shape& shape, const Room& room) {
  constexpr size_t kStage = sizeof(T) * kThreads * kValues;
  return std::max(shared_bytes(shape, room), fixed_bytes(shape.list_capacity(), 0) + kStage);
}

// Counts a lane's elements above the bracket and on its plateau, and lists those inside, as bits of its part.
template <typename T, int kValues>
__device__ __forceinline__ void count_and_list(const Task<T>& task, const Part<T, kValues>& part,
                                               bool has_plateau, uint32_t above, uint32_t on_plateau,
                                               uint32_t inside) {
  Shared& sm = *task.shared;
  if (has_plateau) {
    const uint32_t equal = __reduce_add_sync(0xffffffffu, __popc(on_plateau));
    if (task.lane == 0) ptx::add_shared(sm.counts.equal, equal, task.zero);
  }
  const uint32_t above_count = __reduce_add_sync(0xffffffffu, __popc(above));
  if (task.lane == 0) ptx::add_shared(sm.counts.above, above_count, task.zero);
  if (inside != 0) {
    uint32_t slot = atomicAdd(&sm.counts.listed, static_cast<uint32_t>(__popc(inside)));
#pragma unroll 1
    while (inside != 0) {  // two at a time, so that their loads overlap: scores bunch
      const int first = __ffs(inside) - 1, last = 31 - __clz(inside);
      inside = (inside & (inside - 1)) & ~(1u << last);
      const uint32_t one = part.key(task.lane, first), other = part.key(task.lane, last);
      task.list.put(slot++, one);
      if (last != first) task.list.put(slot++, other);
    }
  }
}

// Counts what is above the bracket and lists what is inside, here and then in every CTA of the cluster.
// `meanwhile` runs while their lists are on their way.
template <typename T, int kValues, typename Meanwhile>
__device__ __forceinline__ Verdict exchange(const Task<T>& task, const Bracket& bracket,
                                            const Part<T, kValues>& part, uint32_t parity, PhaseClock& clock,
                                            Meanwhile meanwhile) {
  const float lo = bracket.low(), hi = bracket.high();
  // NaN fails both comparisons and so counts as above.
  const uint32_t not_below = part.not_below(lo);
  const uint32_t above =
      part.bits([&](float& marks, float x, float bit) { ptx::mark_unless_at_most(marks, x, hi, bit); });
  uint32_t inside = not_below & ~above, on_plateau = 0;
  const uint32_t plateau = bracket.plateau();
  if (plateau != kAbsentKey) {
    on_plateau = inside & part.equal(key_to_float(plateau));
    inside &= ~on_plateau;
  }
  count_and_list(task, part, plateau != kAbsentKey, above, on_plateau, inside);
  return exchange_lists(task, bracket, parity, clock, meanwhile);
}

// Writes this CTA's selected positions, in ascending order, at their final place. `report` runs before that,
// when all of the CTA have counted.
// `chosen`: bits of this lane's elements at or above the k-th; `ties`: of those equal to it, where not all
// are selected.
template <typename T, int kValues, typename Report>
__device__ __forceinline__ void emit_part(const Task<T>& task, const Bracket& bracket, const Cut& cut,
                                          uint32_t before, const Part<T, kValues>& part, uint32_t chosen,
                                          uint32_t ties, const Sink& sink, PhaseClock& clock, Report report) {
  const uint32_t mine = __popc(chosen & ~ties) | __popc(ties) << 16;
  const uint32_t upto = inclusive_scan(mine);
  if (task.lane == 31) task.shared->selected[1][task.warp] = upto;
  __syncthreads();
  clock.stamp();
  report();
  Place place(task, bracket, cut, before, upto - mine);
  if (ties == 0 && sink.pages == nullptr) {
    const int count = __popc(chosen);
    if (!sink.has(place.next, count)) return;
    int next = place.next + count;  // from the last on, which is found sooner than the first
#pragma unroll 1
    while (chosen != 0) {
      const int bit = 31 - __clz(chosen);
      chosen ^= 1u << bit;
      sink.put_plain(--next, part.begin + bit);
    }
    return;
  }
#pragma unroll 1
  for (; chosen != 0; chosen &= chosen - 1) {
    const int bit = __ffs(chosen) - 1;
    if (place.take(ties >> bit & 1)) sink.put(place.next++, part.begin + bit);
  }
}

// The rest of a row whose k-th value is -inf, as the headers say: all that is greater is selected, and of the
// others the first ones. What each CTA has of either follows from what it has counted.
template <typename T, int kValues>
__device__ __noinline__ void settle_masked(const TopkParams& p, const Shape& shape, const Room& room,
                                           unsigned char* storage) {
  using RowPart = Part<T, kValues>;
  Job<T> job(p, shape, room, storage);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  const Missed& missed = sm.missed;
  const Verdict& verdict = missed.verdict;
  PhaseClock clock(nullptr, 0, false);
  job.task.measure(missed.length);
  RowPart part(task, shape);
  part.lay_out(task, missed.elements);
  part.take(task.lane, task.row.n);
  const uint32_t greater = verdict.above + verdict.inside;
  const Cut cut{kNegInfKey, task.k - greater, task.row.n - greater};
  // Listed keys and ties of the earlier CTAs.
  const int log2_warps = log2_of(kWarps) + task.log2_ctas, groups = part.groups_of(missed.elements);
  const auto first_of = [&](int cta) {
    const int first = (cta * kWarps * groups + (1 << log2_warps) - 1) >> log2_warps;
    return min(first * RowPart::kGroup, task.row.n);
  };
  const Counts& counts = sm.header[task.lane & (task.ctas - 1)].counts;
  const bool earlier = task.lane < task.rank;
  const uint32_t in_cta = counts.above + counts.listed + counts.equal;
  const uint32_t ties_in_cta = first_of(task.lane + 1) - first_of(task.lane) - in_cta;
  const uint32_t listed = __reduce_add_sync(0xffffffffu, earlier ? counts.listed : 0);
  const uint32_t ties_before = __reduce_add_sync(0xffffffffu, earlier ? ties_in_cta : 0);
  if (task.lane == 0) {
    sm.selected[0][task.warp] = task.warp == 0 ? listed | min(ties_before, cut.quota) << 16 : 0;
  }
  const Sink sink = job.sink(p, shape);
  Feedback* const next = job.next_feedback(p, shape, sink);
  job.audit(p, shape, cut.key);
  const uint32_t chosen = part.not_below(key_to_float(kLeastFiniteKey));
  const int held = min(max(part.length, 0), part.vecs * kPerVec<T>);
  const uint32_t ties = (held < 32 ? (1u << held) - 1 : ~0u) & ~chosen;
  emit_part(task, missed.bracket, cut, verdict.before, part, chosen | ties, ties, sink, clock, [&] {
    if (job.is_least_busy() && next != nullptr) *next = Feedback{kMasked, 0.0f, 0.0f, 0};
    job.report(p, shape, missed.passes, verdict.inside, 0, missed.source, false, 0);
  });
}

// The rest of a row that lies in shared memory: radix rounds over its keys, then one exchange that is certain
// to hold. Nothing is read from global memory again.
template <typename T, int kValues>
__device__ __noinline__ void settle_resident(const TopkParams& p, const Shape& shape, const Room& room,
                                             unsigned char* storage) {
  Job<T> job(p, shape, room, storage);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  const Missed& missed = sm.missed;
  PhaseClock clock(nullptr, 0, false);
  start_again(task);
  job.task.measure(missed.length);
  Part<T, kValues> part(task, shape);
  part.lay_out(task, missed.elements);
  part.take(task.lane, task.row.n);
  uint32_t key[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const bool there = i < part.vecs * kPerVec<T> && i < part.length;
    key[i] = there ? order_key(part.value[i]) : kAbsentKey;
  }
  uint32_t exchanges = missed.passes;
  int rounds = 0, snaps = 0;
  const Bracket range = range_of(missed.verdict, missed.bracket, task.k);
  const Bracket bracket = radix_bracket(task, range, exchanges, rounds, [&](RadixBins& bins) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) bins.add(key[i]);
  });
  sm.keys.template clear<kThreads>();
  if (task.thread == 0) {
    reset_lists(task);
    sm.small_count = 0;
  }
  __syncthreads();
  const auto bits_of = [&](auto mark) {
    ptx::Marks marks[kValues / kValuesPerThread];
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      mark(marks[i / kValuesPerThread].of[i / 4 % 2], key[i], static_cast<float>(1u << i % kValuesPerThread));
    }
#pragma unroll
    for (int w = 0; w < kValues / kValuesPerThread; ++w) found |= marks[w].bits() << (kValuesPerThread * w);
    return found;
  };
  const auto above_key = [&](uint32_t bound) {
    return bits_of([&](float& marks, uint32_t x, float bit) { ptx::mark_if_greater(marks, x, bound, bit); });
  };
  const auto equal_to = [&](uint32_t bound) {
    return bits_of(
        [&](float& marks, uint32_t x, float bit) { ptx::mark_if_at_most(marks, x - bound, 0, bit); });
  };
  const uint32_t plateau = bracket.plateau(), above = above_key(bracket.hi);
  const uint32_t inside = above_key(bracket.lo - 1) & ~above;
  const uint32_t on_plateau = plateau != kAbsentKey ? inside & equal_to(plateau) : 0;
  count_and_list(task, part, plateau != kAbsentKey, above, on_plateau, inside & ~on_plateau);
  Sink sink;
  Feedback* next = nullptr;
  const Verdict verdict = exchange_lists(task, bracket, exchanges & 1, clock, [&] {
    sink = job.sink(p, shape);
    next = job.next_feedback(p, shape, sink);
  });
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  job.audit(p, shape, cut.key);
  count_listed(task, listed, cut);
  const uint32_t chosen = above_key(cut.key - 1);
  const uint32_t ties = cut.takes_all() ? 0 : equal_to(cut.key);
  emit_part(task, bracket, cut, verdict.before, part, chosen, ties, sink, clock, [&] {
    if (job.is_least_busy() && next != nullptr) {
      *next = left_by(task, Moments(missed), cut.key, bracket, verdict);
    }
    job.report(p, shape, missed.passes + rounds + 1, verdict.inside, snaps, missed.source, false, rounds);
  });
}

// Where anything is known of a launch, sizes are the usual ones too.
template <typename T, int kValues, Known kKnown>
__global__ void __launch_bounds__(kThreads, 1)
    resident_topk(const __grid_constant__ Shape launch_shape, const __grid_constant__ TopkParams p,
                  const __grid_constant__ Room room) {
  constexpr int kLooks = 1;  // at the row by every thread, for its sample
  extern __shared__ __align__(128) unsigned char storage[];
  constexpr bool kUsualSizes = kKnown != Known::kNothing;
  const Shape shape = launch_shape.kept<kKnown, kUsualSizes>();
  ptx::grid_take_over();
  Job<T> job(p, shape, room, ptx::kept_shared(storage), kUsualSizes);
  const Task<T>& task = job.task;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> shape.log2_ctas(), job.writer);
  clock.stamp();
  Feedback feedback = job.early_feedback(p, shape);
  __syncwarp();  // or they would be asked for behind what comes now
  Ahead<T, kLooks> ahead(task, shape);
  Part<T, kValues> part(task, shape);
  int elements = p.width;
  part.fetch(task, shape, elements, p.width);
  job.late_feedback(p, shape, feedback);
  prepare_exchange(task);
  announce(task);
  job.tell_feedback(p, shape, feedback);
  job.agree_on_length(p, shape);
  if (job.is_short()) {
    settle_short(p, launch_shape, room, storage, job, !shape.has(Shape::kFed));
    return;
  }
  if (2 * part.groups_of(task.row.n) <= part.groups_of(p.width)) {  // or half of the warps would have it all
    elements = task.row.n;
    ptx::wait_copies<0>();
    __syncwarp();  // lanes fetch for each other
    ahead.fetch(task, shape);
    part.fetch(task, shape, elements, p.width);
  }
  if (task.ctas > 1) ptx::cluster_wait();  // while the sample is on its way
  Moments moments;
  Bracket bracket;
  bool sampled = true;  // or the moments are for the next step alone, and have time
  if (shape.has(Shape::kFed)) {
    feedback = task.shared->facts.feedback;
    sampled = !goes_by_value(feedback);
    if (sampled) {
      ptx::wait_copies<1>();
      moments = Moments(task, ahead);
    }
    bracket = guess(task, moments, [&] { return job.hint(p, shape); }, feedback, kWorthlessAtHand, [] {});
  } else {
    const RowSampling sampling = sampling_of(task, shape, ahead);
    ptx::wait_copies<1>();
    bracket = guess_unfed(task, shape, ahead, sampling, [] {});
  }
  const uint32_t source = bracket.source;
  part.take(task.lane, task.row.n);
  clock.stamp();

  Sink sink;
  Feedback* next = nullptr;
  Verdict verdict;
  int passes = 0;
#pragma unroll 1
  while (true) {
    verdict = exchange(task, bracket, part, passes & 1, clock, [&] {
      sink = job.sink(p, shape);
      sink.keep(shape);
      next = job.next_feedback(p, shape, sink);
      if (shape.has(Shape::kLeaving)) ptx::keep(next);
      if (!sampled) moments = Moments(task, ahead);
      sampled = true;
    });
    ++passes;
    if (verdict.holds) break;
    if (!verdict.counted) {
      start_over(p, launch_shape, room, storage, task, source);
      return;
    }
    const Bracket missed = bracket;
    if (passes > 1 || !move_bracket(task, verdict, bracket)) {
      if (task.thread == 0) {
        task.shared->missed =
            Missed{missed, verdict, passes, task.row.n, elements, moments.mean, moments.deviation, source};
      }
      if (is_masked(missed, verdict, task.k)) {
        settle_masked<T, kValues>(p, launch_shape, room, storage);
      } else {
        settle_resident<T, kValues>(p, launch_shape, room, storage);
      }
      return;
    }
    start_again(task);
  }
  clock.stamp();

  int snaps = 0;
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();
  job.audit(p, shape, cut.key);
  count_listed(task, listed, cut);
  const float level = key_to_float(cut.key);
  const uint32_t chosen = part.not_below(level);
  uint32_t ties = 0;
  if (!cut.takes_all()) ties = part.equal(level);
  emit_part(task, bracket, cut, verdict.before, part, chosen, ties, sink, clock, [&] {
    if (job.is_least_busy() && next != nullptr) {
      *next = left_by(task, moments, cut.key, bracket, verdict);
    }
    job.report(p, shape, passes, verdict.inside, snaps, source, passes == 1, 0);
  });
  clock.stamp();
}

}  // namespace gvr_topk::cluster
