// Phase 2, verify: finds a threshold that at least k and at most 6144 elements reach (paper, section 4.2.2).
// Its steps and their float32 arithmetic are those of gvr_topk.evaluation.paper_reference, so both take the
// same passes. A pass leaves one bit per element, from which phase 3 collects.
#pragma once

#include "paper_gvr/guess.cuh"

namespace gvr_topk::paper_gvr {

struct Point {
  float threshold;
  int count;
};

struct SearchResult {
  SearchEnd done;  // kKey: float arithmetic did not settle the search
  int count;
  int passes;
  uint32_t before;  // how many of `count` lie in earlier warps' parts: the count cache of phase 3
};

GVR_DEVICE bool is_finite(float x) { return fabsf(x) < INFINITY; }

GVR_DEVICE float halfway(float a, float b) { return __fadd_rn(__fmul_rn(0.5f, a), __fmul_rn(0.5f, b)); }

// The threshold at which the line through two points reaches `target`; NaN if both have the same count.
GVR_DEVICE float secant(Point end, Point start, int target) {
  if (end.count == start.count) return NAN;
  const float slope =
      __fdiv_rn(__int2float_rn(target - start.count), __int2float_rn(end.count - start.count));
  return __fadd_rn(start.threshold, __fmul_rn(__fsub_rn(end.threshold, start.threshold), slope));
}

// The next float above, denormals included.
GVR_DEVICE float next_above(float x) {
  return x == 0.0f ? __uint_as_float(1u) : key_to_float(order_key(x) + 1);
}

// Whether a value occurs more than once in the sample: then many elements probably equal it.
template <typename T>
GVR_DEVICE bool repeats(const PaperContext<T>& ctx, const GuessSample& sampled, float value) {
  uint32_t occurrences = 0;
  sampled.for_each([&](uint32_t x) { occurrences += x == order_key(value); });
  return block_sum(ctx, ctx.own.sums[2], occurrences).all > 1;
}

// Counts the elements that reach a threshold, and sets their bits. The caller has started the pass.
// Successive passes sum up in other places.
template <typename T>
GVR_DEVICE BlockSum count_pass(const PaperContext<T>& ctx, float threshold, int pass) {
  const PaperStream<T>& stream = ctx.stream;
  const auto bitmap = reinterpret_cast<uint16_t*>(ctx.own.bitmap) + stream.begin / kValuesPerThread;
  uint32_t count = 0;
  stream.for_each_tile([&](int step, uint32_t slot, uint32_t valid) {
    const uint32_t bits = valid & stream.ring.not_below(threshold, slot);
    count += __popc(bits);
    bitmap[32 * step + ctx.lane] = static_cast<uint16_t>(bits);
  });
  return block_sum(ctx, ctx.own.sums[pass % 2], count);
}

// Closes the open sides of a bracket with the row's finite extremes; with NaN if the row has none.
template <typename T>
GVR_DEVICE void close_bracket(const PaperContext<T>& ctx, float& bottom, float& top) {
  if (is_finite(bottom) && is_finite(top)) return;
  ctx.stream.restart();
  const KeyStatistics finite = key_statistics(ctx, [&](auto visit) {
    ctx.stream.for_each_tile([&](int, uint32_t slot, uint32_t valid) {
#pragma unroll
      for (int i = 0; i < kValuesPerThread; ++i) {
        const uint32_t key = order_key(ctx.stream.ring.value(slot, i));
        if ((valid >> i & 1) != 0 && is_finite_key(key)) visit(key);
      }
    });
  });
  if (!is_finite(bottom)) bottom = key_to_float(finite.least);
  if (!is_finite(top)) top = key_to_float(finite.greatest);
}

// Runs passes until the count fits. The caller has started the first pass.
template <typename T>
GVR_DEVICE SearchResult search(const PaperContext<T>& ctx, const Guess& first, const GuessSample& sampled) {
  const int target = (ctx.k + kCapacity) / 2;
  Point low{-INFINITY, ctx.row.n}, high{INFINITY, 0}, last{}, before{};
  float step = first.threshold;
  SearchResult result{SearchEnd::kGuess, 0, 0, 0};
#pragma unroll 1
  while (true) {
    if (result.passes > 0) ctx.stream.restart();
    const BlockSum counted = count_pass(ctx, step, result.passes);
    const int count = static_cast<int>(counted.all);
    result.before = counted.earlier;
    result.count = count;
    ++result.passes;
    if (ctx.k <= count && count <= kCapacity) return result;
    before = last;
    last = Point{step, count};
    (count > kCapacity ? low : high) = last;

    if (result.passes >= kFloatPasses) break;
    if (count > target && repeats(ctx, sampled, step)) {
      step = next_above(step);
      result.done = SearchEnd::kTie;
      if (!(step < high.threshold)) break;
      continue;
    }
    if (result.passes == 1 && count < target && first.values > 0 && first.least < step &&
        repeats(ctx, sampled, first.least)) {
      step = first.least;
      result.done = SearchEnd::kTie;
      continue;
    }
    float next = NAN;
    if (result.passes > 1 && result.passes <= kSecantPasses) {
      next = secant(before, last, target);
    } else if (result.passes == 1 && first.values > 0) {
      // Half of a step upwards: the count falls steeply above a low threshold, and the secant overshoots.
      next = count < target ? secant(Point{first.least, first.low_count}, last, target)
                            : halfway(step, secant(Point{first.greatest, 1}, last, target));
    }
    result.done = SearchEnd::kSecant;
    if (!(low.threshold < next && next < high.threshold)) {
      float bottom = low.threshold, top = high.threshold;
      close_bracket(ctx, bottom, top);
      next = halfway(bottom, top);
      result.done = SearchEnd::kBisect;
      if (!(bottom < next && next < top)) break;
    }
    step = next;
  }
  result.done = SearchEnd::kKey;
  return result;
}

}  // namespace gvr_topk::paper_gvr
