// Phase 2, verify: finds a threshold that at least k and at most 6144 elements reach (paper, section 4.2.2).
// Its steps and their float32 arithmetic are those of gvr_topk.evaluation.paper_reference, so both take the
// same passes.
#pragma once

#include <type_traits>

#include "paper_gvr/block.cuh"
#include "paper_gvr/guess.cuh"

namespace gvr_topk::paper_gvr {

struct Point {
  float threshold;
  int count;
};

struct SearchResult {
  SearchEnd done;  // kKey: float arithmetic did not settle the search
  float threshold;
  int count;
  int passes;
  uint32_t before;  // how many of `count` lie in earlier warps' parts: the count cache of phase 3
};

__device__ __forceinline__ bool is_finite(float x) {
  return negative_infinity() < x && x < positive_infinity();
}

__device__ __forceinline__ float halfway(float a, float b) {
  return __fadd_rn(__fmul_rn(0.5f, a), __fmul_rn(0.5f, b));
}

// The threshold at which the line through two points reaches `target`; NaN if both have the same count.
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

// Whether a value occurs more than once in the sample: then many elements probably equal it.
__device__ __forceinline__ bool repeats(Block& block, const GuessSample& sampled, float x) {
  const uint32_t key = order_key(x);
  uint32_t occurrences = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) occurrences += sampled.key[i] == key;
  return block.reduce_all<Reduce::kAdd>(occurrences) > 1;
}

// Writes the bitmap: the bit of an element is set if it reaches the threshold. Returns how many bits this
// thread has set.
template <typename T>
__device__ __forceinline__ uint32_t count_pass(PaperShared& smem, const PaperStream<T>& stream,
                                               float threshold) {
  constexpr int kLane = PaperStream<T>::kLaneElements;
  using LaneBits = std::conditional_t<kLane == 16, uint16_t, uint32_t>;
  static_assert(kLane == 8 * sizeof(LaneBits));
  LaneBits* to = reinterpret_cast<LaneBits*>(smem.bitmap) + stream.begin / kLane + stream.lane;
  // The bits after a warp's part belong to another warp. But all bits of the part's last 32-bit word are
  // read, so this warp writes that word to its end.
  LaneBits* const stop = to - stream.lane + ((stream.length + 31) & ~31) / kLane;
  // An element is below the threshold if the difference is negative. This test takes two instructions on two
  // pipes, and no predicate to wait for. A difference that is NaN has no sign, and neither has -0 + 0.
  const float minus = 0.0f - threshold;
  uint32_t count = 0;
  stream.for_each_tile([&](int, const uint4(&vec)[PaperStream<T>::kVecs], uint32_t valid) {
    uint32_t below = 0xffffffffu;  // The bits above this lane's elements stay set.
#pragma unroll
    for (int i = kLane - 1; i >= 0; --i) {
      const float difference = __fadd_rn(element<T>(vec[i / kPerVec<T>], i % kPerVec<T>), minus);
      below = __funnelshift_l(__float_as_uint(difference), below, 1);
    }
    const uint32_t bits = valid & ~below;
    count += __popc(bits);
    if (to < stop) *to = static_cast<LaneBits>(bits);
    to += 32;
  });
  return count;
}

// Smallest and largest finite value of the row; NaN when there is none.
template <typename T>
__device__ __forceinline__ void finite_extremes(Block& block, const PaperStream<T>& stream, float& least,
                                                float& greatest) {
  uint32_t low = 0xffffffffu, high = 0;
  stream.start();
  stream.for_each_tile([&](int, const uint4(&vec)[PaperStream<T>::kVecs], uint32_t valid) {
#pragma unroll
    for (int i = 0; i < PaperStream<T>::kLaneElements; ++i) {
      const float x = element<T>(vec[i / kPerVec<T>], i % kPerVec<T>);
      if ((valid >> i & 1) != 0 && is_finite(x)) {
        low = min(low, order_key(x));
        high = max(high, order_key(x));
      }
    }
  });
  block.store_partial<Reduce::kMin>(0, low);
  block.store_partial<Reduce::kMax>(1, high);
  block.sync();
  low = block.reduce<Reduce::kMin>(0);
  high = block.reduce<Reduce::kMax>(1);
  least = high == 0 ? not_a_number() : key_to_float(low);
  greatest = high == 0 ? not_a_number() : key_to_float(high);
}

// Runs passes until the count fits. The caller has started the copies of the first pass.
template <typename T>
__device__ __forceinline__ SearchResult search(Block& block, const RowContext<T>& ctx,
                                               const PaperStream<T>& stream, const Guess& first,
                                               const GuessSample& sampled) {
  const int k = ctx.k;
  const int target = (k + kCapacity) / 2;
  Point low{negative_infinity(), ctx.row.n}, high{positive_infinity(), 0};
  Point last{}, before{};
  float step = first.threshold;
  SearchResult result{SearchEnd::kGuess, step, 0, 0, 0};
#pragma unroll 1
  while (true) {
    if (result.passes > 0) stream.start();
    const int count = static_cast<int>(block.reduce_all<Reduce::kAdd>(count_pass(block.smem, stream, step)));
    result.before = block.reduce_earlier(0);
    before = last;
    last = Point{step, count};
    result.threshold = step;
    result.count = count;
    ++result.passes;
    if (k <= count && count <= kCapacity) return result;
    (count > kCapacity ? low : high) = last;

    if (result.passes >= kFloatPasses) break;
    if (count > target && repeats(block, sampled, step)) {
      step = next_above(step);
      result.done = SearchEnd::kTie;
      if (!(step < high.threshold)) break;
      continue;
    }
    if (result.passes == 1 && count < target && first.values > 0 && first.least < step &&
        repeats(block, sampled, first.least)) {
      step = first.least;
      result.done = SearchEnd::kTie;
      continue;
    }
    float next;
    if (result.passes > kSecantPasses) {
      next = not_a_number();
    } else if (result.passes > 1) {
      next = secant(before, last, target);
    } else if (first.values == 0) {
      next = not_a_number();
    } else if (count < target) {
      next = secant(Point{first.least, first.low_count}, last, target);
    } else {
      // The count falls steeply above a low threshold, so the secant overshoots. This takes half of its step.
      next = halfway(step, secant(Point{first.greatest, 1}, last, target));
    }
    result.done = SearchEnd::kSecant;
    if (!(low.threshold < next && next < high.threshold)) {
      float bottom = low.threshold, top = high.threshold;
      if (!is_finite(bottom) || !is_finite(top)) {
        float least, greatest;
        finite_extremes(block, stream, least, greatest);
        if (!is_finite(bottom)) bottom = least;
        if (!is_finite(top)) top = greatest;
      }
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
