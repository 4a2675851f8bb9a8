// Predicts the k-th value from the state of a slot, and makes the state for the next step.
//
// Two predictors follow each slot, and the one with the smaller recent error is used. The z-score predictor
// assumes that the k-th value stays the same number of standard deviations away from the mean of the row's
// sample. It follows rows whose scale or level changes. The value predictor assumes that the k-th value
// itself stays the same. It is better on rows that drift slowly, because a sample adds noise of its own. Each
// predictor predicts the average of the values that it has seen and keeps track of its error. The interval is
// a little wider than that error.
//
// Predictions start from the mean and standard deviation of a sample of the row. All steps sample the same
// positions of the buffer, so the sampling error changes little from step to step. The loads need neither
// hint nor length, and no CTA depends on another.
#pragma once

#include "cluster/sample.cuh"
#include "cluster/step_state.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// This thread's probe of the row. It is taken before the row's length is known, so `row.n` is that of the
// buffer. If `alike`, all CTAs probe the same positions; otherwise the CTAs divide a larger sample. Probes
// land in memory that no other CTA stores to, because a copy may land late and another CTA's store may arrive
// early.
template <typename T>
struct RowProbe {
  bool alike;
  int span;
  int at;
  uint4* zone;  // where it lands

  // Starts the copy. It goes to shared memory, because with a load to registers the wait for the length would
  // be a wait for the probe too.
  GVR_DEVICE RowProbe(const RowContext<T>& ctx, const LaunchTraits& traits)
      : alike(traits.has(LaunchTraits::kReadsState)) {
    fetch(ctx.shared->landing, ctx, traits);
  }

  // Probes the first `row.n` elements, without waiting for a copy under way. The probes land in `store`,
  // kThreads vectors that nothing else uses until all threads have read theirs.
  GVR_DEVICE void fetch(uint4* store, const RowContext<T>& ctx, const LaunchTraits& traits) {
    zone = store + ctx.thread;
    span = ctx.row.n;
    const int first = first_probe(ctx.row), elements = behind_first_probe(ctx.row, span);
    if (alike) {
      const int line = RowSampler::hashed_position(ctx.thread / kProbeLanes, elements & -kProbeElements);
      at = first + (line & -kProbeElements) + kSampleVec * (ctx.thread % kProbeLanes);
    } else {
      at = first + RowSampler::hashed_position((ctx.thread << ctx.log2_ctas) + ctx.rank, elements);
    }
    // Only where rows are aligned are all probes known to lie in the buffer.
    const bool there = traits.has(LaunchTraits::kAligned) || at + kSampleVec <= span;
    ptx::copy_async_if<kSampleVec * sizeof(T)>(there, ptx::shared_address(zone), ctx.row.data + at);
    ptx::commit_copies();
  }

  // The elements that the probe has read. The copy must have landed.
  GVR_DEVICE SampleVec<T> seen() const {
    SampleVec<T> neighbours;
    neighbours.load(zone);
    return neighbours;
  }

  // Whether these probes can serve as those of a row of length n, because hardly any of them lies behind the
  // row's end.
  GVR_DEVICE bool serves(int n) const { return !alike && n > span - span / 16; }
};

// A sample says too little if less than this share of its probes count. A probe counts if it lies in the row
// and the sum of its squares is finite. In a row that is masked nearly everywhere, none counts.
constexpr float kLeastCounted = 0.125f;
constexpr float kTooFewCounted = -1.0f, kNoneCounted = -2.0f;

struct Moments {
  // Those of a row that was not sampled at fixed positions.
  float mean = 0.0f, deviation = kTooFewCounted;  // or kNoneCounted if no probe counts

  Moments() = default;

  GVR_DEVICE explicit Moments(const MissedGuess& missed) : mean(missed.mean), deviation(missed.deviation) {}

  // The moments of a sample that is the same in all CTAs. The computation contains one block barrier.
  template <typename T>
  GVR_DEVICE Moments(const RowContext<T>& ctx, const RowProbe<T>& probe) {
    Shared& smem = *ctx.shared;
    float sum = 0.0f, squares = 0.0f;
    const SampleVec<T> seen = probe.seen();
#pragma unroll
    for (int e = 0; e < kSampleVec; ++e) {
      sum += seen.value(e);
      squares = fmaf(seen.value(e), seen.value(e), squares);
    }
    bool counts = probe.at + kSampleVec <= ctx.row.n;
    counts &= squares < __int_as_float(0x7f800000);
    // One half of the warp adds up the sums, the other half the squares.
    const bool upper = (ctx.lane & 16) != 0;
    float mine = counts ? (upper ? squares : sum) : 0.0f;
    const float theirs = counts ? (upper ? sum : squares) : 0.0f;
    mine += __shfl_xor_sync(0xffffffffu, theirs, 16);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if ((ctx.lane & 15) == 0) smem.sample_sums[ctx.lane + ctx.warp] = mine;
    const float count = static_cast<float>(kSampleVec * __syncthreads_count(counts));
    // In every group of eight lanes, the lower four take the sums of four warps each, and the upper four take
    // the squares of the same warps: lane i + 4 has the squares for lane i.
    static_assert(kWarps == 16);
    const float4 four = reinterpret_cast<const float4*>(smem.sample_sums)[ctx.lane & 7];
    float all = (four.x + four.y) + (four.z + four.w);
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    const float other = __shfl_xor_sync(0xffffffffu, all, 4);
    const bool squared = (ctx.lane & 4) != 0;
    const float share = ptx::reciprocal(count);
    mean = (squared ? other : all) * share;
    deviation = standard_deviation((squared ? all : other) * share - mean * mean);
    if (count < kLeastCounted * kSampleVec * kThreads) deviation = count > 0 ? kTooFewCounted : kNoneCounted;
  }

  GVR_DEVICE bool are_known() const { return deviation >= 0.0f; }
  GVR_DEVICE bool counted_none() const { return deviation == kNoneCounted; }
};

// The errors of both predictors, packed as the upper halves of two floats. The error of the z-score is in
// standard deviations of the sample and holds at a z-score of 0. It grows by the same amount again for each
// standard deviation further out.
struct PredictionErrors {
  float z_score, value;

  GVR_DEVICE static PredictionErrors of(const StepState& state) {
    return PredictionErrors{__uint_as_float(state.packed_errors & 0xffff0000u),
                            __uint_as_float(state.packed_errors << 16)};
  }

  // The lowest bit says which predictor is in use.
  GVR_DEVICE uint32_t packed(bool by_value) const {
    const uint32_t both = __byte_perm(__float_as_uint(value), __float_as_uint(z_score), 0x7632);
    return (both & ~1u) | static_cast<uint32_t>(by_value);
  }
};

// The interval of the predictor in use. `StepState::limit` bounds its half-width, in that predictor's own
// unit, because each element inside takes time to list.
GVR_DEVICE KeyInterval predicted_interval(const Moments& moments, const StepState& state) {
  const PredictionErrors errors = PredictionErrors::of(state);
  const bool by_value = (state.packed_errors & 1) != 0;
  float centre = state.value, half_width = errors.value;
  if (by_value) {
    half_width = fminf(half_width, state.limit);
  } else if (moments.are_known()) {
    const float z = state.z_score - kStateZScoreOrigin, error = fminf(errors.z_score, state.limit);
    centre = fmaf(z, moments.deviation, moments.mean);
    half_width = fmaf(error, fabsf(z), error) * moments.deviation;
  }
  return finite_interval(order_key(centre - half_width), order_key(centre + half_width),
                         by_value ? kGuessValue : kGuessZScore);
}

// Constants of the predictors. An error estimate rises at once to `z_factor` or `value_factor` times the last
// error, and decays by a tenth per step. It stays above `min_z_error`, and above the half-width of an
// interval that holds `min_inside` elements. An interval is at most as wide as one that holds `max_inside`
// elements. A prediction moves only part of the way to the newest value, because most of a change is noise.
//
// The constants come from a sweep simulated on real traces, the paper's layers and Gaussian chains. In the
// simulation a miss costs 3 us and a listed element 0.8 ns.
struct PredictorTuning {
  float first_z_error, min_z_error, z_factor, value_factor, first_inside, min_inside, max_inside;
};
constexpr float kErrorDecay = 0.9f, kCentreStep = 0.5f;
constexpr PredictorTuning kTuning{0.05f, 0.016f, 1.6f, 1.3f, 600.0f, 250.0f, 1500.0f};
// Rows with few CTAs take longest to be read again, and most other rows wait behind them. How often
// rows miss was counted on a GPU (eval/results/h200/decode_before_after.log).
constexpr PredictorTuning kTuningFewCtas{0.08f, 0.028f, 2.0f, 1.6f, 900.0f, 600.0f, 3000.0f};
constexpr int kLog2FewCtas = 2;
// Error estimates may exceed the limit of intervals by this factor, so that the estimates still show which
// predictor is better.
constexpr float kBeyondLimit = 4.0f;
// If |mean| exceeds this many standard deviations, the variance is lost to cancellation.
constexpr float kMaxOffsetSigmas = 64.0f;
// Half-width per element, relative to the value, for rows whose density of elements is unknown.
constexpr float kUnknownDensity = 0x1p-13f;

// The state for the next step. `interval` is the last interval tried, and `result` holds its counts. Zeros
// are counted instead of listed in any interval that holds them, and say nothing about the density of other
// elements, so they are left out of `inside`.
template <typename T>
GVR_DEVICE StepState next_state(const RowContext<T>& ctx, const Moments& moments, uint32_t kth,
                                const KeyInterval& interval, const CountResult& result) {
  if (kth > kMostFiniteKey) return StepState{kStateInfinite, 0.0f, 0.0f, 0};
  if (kth < kLeastFiniteKey) return StepState{kStateMasked, 0.0f, 0.0f, 0};
  const StepState last = ctx.shared->facts.state;
  const PredictionErrors last_errors = PredictionErrors::of(last);
  const PredictorTuning tuning = ctx.log2_ctas < kLog2FewCtas ? kTuningFewCtas : kTuning;
  const float value = key_to_float(kth);
  const uint32_t inside = result.inside - (interval.tie_key() == kZeroKey ? result.equal : 0);
  // Half-width of the interval per element inside. An interval of all finite values says nothing about the
  // density. The next interval will.
  const float width = fmaf(fabsf(value), kEpsilon<T>, interval.high() - interval.low());
  const float per_element = width < key_to_float(kMostFiniteKey)
                                ? 0.5f * width * ptx::reciprocal(fmaxf(static_cast<float>(inside), 1.0f))
                                : kUnknownDensity * fabsf(value);
  float limit = tuning.max_inside * per_element;

  PredictionErrors errors{0.0f, tuning.first_inside * per_element};
  float expected = value;
  if (has_value(last)) {
    const float move = value - last.value;
    errors.value = fmaxf(kErrorDecay * last_errors.value, tuning.value_factor * fabsf(move));
    expected = fmaf(kCentreStep, move, last.value);
  }
  // A k-th value of zero, as behind a ReLU, is expected to stay zero, and few other scores lie around it.
  const bool is_zero = kth == kZeroKey;
  const float least = is_zero ? 0.0f : tuning.min_inside * per_element;
  errors.value = fminf(fmaxf(errors.value, least), kBeyondLimit * limit);

  bool by_value = true;
  float z_score = kStateValueOnly;
  if (moments.are_known() && fabsf(moments.mean) <= kMaxOffsetSigmas * moments.deviation) {
    const float z = (value - moments.mean) * ptx::reciprocal(moments.deviation);
    const float further = 1.0f + fabsf(z);
    const float unit = ptx::reciprocal(further * moments.deviation);
    const float z_limit = fmaxf(limit * unit, tuning.min_z_error);
    float centre = z;
    errors.z_score = tuning.first_z_error;
    if (is_z_score(last.z_score)) {
      const float move = z - (last.z_score - kStateZScoreOrigin);
      errors.z_score =
          fmaxf(kErrorDecay * last_errors.z_score, tuning.z_factor * fabsf(move) * ptx::reciprocal(further));
      centre = z - (1.0f - kCentreStep) * move;
    }
    errors.z_score = fminf(fmaxf(errors.z_score, tuning.min_z_error), kBeyondLimit * z_limit);
    if (fabsf(centre) < kStateMaxZScore) {
      z_score = kStateZScoreOrigin + centre;
      by_value = errors.value * unit <= errors.z_score;
      if (!by_value) limit = z_limit;
    }
  }
  if (is_zero) expected = 0.0f;
  if (is_zero && by_value) errors.value = 0.0f;  // Only zeros are counted then, and nothing is listed.
  return StepState{z_score, expected, limit, errors.packed(by_value)};
}

}  // namespace gvr_topk
