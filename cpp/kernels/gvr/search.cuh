// Phase 2, verify: a threshold that at least k and at most 6144 elements reach (paper, section 4.2.2).
// The steps, and their float32 arithmetic, are gvr_topk.reference's, so both take the same passes.
#pragma once

#include "gvr/guess.cuh"

namespace gvr_topk::gvr {

struct Point {
  float threshold;
  int count;
};

struct Found {
  Done done;  // kKey: floats did not settle it
  float threshold;
  int count;
  int passes;
  uint32_t thread_count;  // this thread's part of `count`: the count cache of phase 3
};

__device__ __forceinline__ bool is_finite(float x) {
  return negative_infinity() < x && x < positive_infinity();
}

__device__ __forceinline__ float halfway(float a, float b) {
  return __fadd_rn(__fmul_rn(0.5f, a), __fmul_rn(0.5f, b));
}

// Where the line through two points reaches `target`; NaN when it does not.
__device__ __forceinline__ float secant(Point end, Point start, int target) {
  if (end.count == start.count) return not_a_number();
  const float slope =
      __fdiv_rn(static_cast<float>(target - start.count), static_cast<float>(end.count - start.count));
  return __fadd_rn(start.threshold, __fmul_rn(__fsub_rn(end.threshold, start.threshold), slope));
}

// The next float above, denormals included.
__device__ __forceinline__ float next_above(float x) {
  return x == 0.0f ? __uint_as_float(1u) : key_to_float(order_key(x) + 1);
}

// Whether a value occurs more than once in the sample: then it is probably a plateau.
__device__ __forceinline__ bool repeats(const Sampled& sampled, float x) {
  const uint32_t key = order_key(x);
  int found = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) found += __syncthreads_count(sampled.key[i] == key);
  return found > 1;
}

template <typename T>
__device__ __forceinline__ uint32_t count_pass(const cluster::Task<T>& task, Word<T>& word, float threshold) {
  uint32_t count = 0;
  const bool finite = negative_infinity() < threshold;
  task.for_each_word(word, [&](int, int begin) {
    uint32_t bits = match_word(word, begin, task.end, [&](float x) { return !(x < threshold); });
    if (!finite) bits &= valid_bits<T>(begin, task.end, task.lane);
    count += __popc(bits);
  });
  return count;
}

// Smallest and largest finite value of the row; NaN when there is none.
template <typename T>
__device__ __forceinline__ void finite_extremes(Shared& sm, const cluster::Task<T>& task, Word<T>& word,
                                                float& least, float& greatest) {
  uint32_t low = 0xffffffffu, high = 0;
  task.for_each_word(word, [&](int, int begin) {
    match_word(word, begin, task.end, [&](float x) {
      if (is_finite(x)) {
        low = min(low, order_key(x));
        high = max(high, order_key(x));
      }
      return false;
    });
  });
  low = block_reduce<Reduce::kMin>(sm, low);
  high = block_reduce<Reduce::kMax>(sm, high);
  least = high == 0 ? not_a_number() : key_to_float(low);
  greatest = high == 0 ? not_a_number() : key_to_float(high);
}

template <typename T>
__device__ __forceinline__ Found search(Shared& sm, const cluster::Task<T>& task, Word<T>& word,
                                        const Guess& first, const Sampled& sampled) {
  const int k = task.k;
  const int target = (k + kCapacity) / 2;
  Point low{negative_infinity(), task.row.n}, high{positive_infinity(), 0};
  Point last{}, before{};
  float step = first.threshold;
  Found found{Done::kGuess, step, 0, 0, 0};
  while (true) {
    found.thread_count = count_pass(task, word, step);
    const int count = static_cast<int>(block_reduce<Reduce::kAdd>(sm, found.thread_count));
    before = last;
    last = Point{step, count};
    found.threshold = step;
    found.count = count;
    ++found.passes;
    if (k <= count && count <= kCapacity) return found;
    (count > kCapacity ? low : high) = last;

    if (found.passes >= kFloatPasses) break;
    if (count > target && repeats(sampled, step)) {
      step = next_above(step);
      found.done = Done::kTie;
      if (!(step < high.threshold)) break;
      continue;
    }
    if (found.passes == 1 && count < target && first.values > 0 && first.least < step &&
        repeats(sampled, first.least)) {
      step = first.least;
      found.done = Done::kTie;
      continue;
    }
    float next;
    if (found.passes > kSecantPasses) {
      next = not_a_number();
    } else if (found.passes > 1) {
      next = secant(before, last, target);
    } else if (first.values == 0) {
      next = not_a_number();
    } else if (count < target) {
      next = secant(Point{first.least, first.low_count}, last, target);
    } else {
      // The count falls steeply from a low threshold and the chord overshoots: half the step.
      next = halfway(step, secant(Point{first.greatest, 1}, last, target));
    }
    found.done = Done::kSecant;
    if (!(low.threshold < next && next < high.threshold)) {
      float bottom = low.threshold, top = high.threshold;
      if (!is_finite(bottom) || !is_finite(top)) {
        float least, greatest;
        finite_extremes(sm, task, word, least, greatest);
        if (!is_finite(bottom)) bottom = least;
        if (!is_finite(top)) top = greatest;
      }
      next = halfway(bottom, top);
      found.done = Done::kBisect;
      if (!(bottom < next && next < top)) break;
    }
    step = next;
  }
  found.done = Done::kKey;
  return found;
}

}  // namespace gvr_topk::gvr
