// Takes a sample of the row: one key per thread, each the greatest of a few scattered elements.
//
// Few single elements of a long row belong to its top k, so order statistics of single elements say little
// about the k-th value. The greatest of m elements belongs to the top k with probability 1 - (1 - k/n)^m. The
// CTAs of a cluster need the same sample, so each CTA reads a part of the elements and sends the resulting
// keys to the others.
//
// From some hundred such keys comes an interval for the k-th key: a pair of order statistics around the rank
// where the k-th key is expected. This assumes no distribution.
#pragma once

#include "cluster/row_context.cuh"
#include "core/key_range.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Where the first probe of a row may start: probes are a multiple of kSampleVec elements from the boundary
// ahead of the row.
template <typename T>
GVR_DEVICE int first_probe(const RowView<T>& row) {
  return -row.lead & (kSampleVec - 1);
}

// How many of the first `elements` of a row lie there or behind.
template <typename T>
GVR_DEVICE int behind_first_probe(const RowView<T>& row, int elements) {
  return row.lead == 0 ? elements : max(elements - first_probe(row), 0);
}

// Four consecutive elements of a row as they lie in memory, where a probe may start.
template <typename T>
struct SampleVec {
  static constexpr int kWords = sizeof(T);  // of 32 bits
  uint32_t word[kWords] = {};

  GVR_DEVICE static bool at_once(const RowView<T>& row) {
    return behind_first_probe(row, row.n) >= kSampleVec;
  }

  GVR_DEVICE void load(const uint4* from) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) word[w] = reinterpret_cast<const uint32_t*>(from)[w];
  }

  // Starts the loads. The first use waits for them.
  GVR_DEVICE void fetch(const RowView<T>& row, int at) { ptx::load_if(at_once(row), word, row.data + at); }

  GVR_DEVICE float value(int e) const { return to_float(reinterpret_cast<const T*>(word)[e]); }

  // Raises each key to that of its element, unless the vector crosses the row's end. Rows in which no vector
  // lies are loaded one element at a time, and repeat their last one.
  GVR_DEVICE void take(const RowView<T>& row, int at, uint32_t (&key)[kSampleVec]) const {
    static_assert(kAbsentKey == 0);
    uint32_t there = at + kSampleVec <= row.n || !at_once(row) ? 0xffffffff : 0;
    ptx::keep(there);  // A mask: of a condition the compiler makes a branch, and lanes would come apart.
#pragma unroll
    for (int e = 0; e < kSampleVec; ++e) {
      const float x = at_once(row) ? value(e) : to_float(row.data[min(at + e, row.n - 1)]);
      key[e] = max(key[e], order_key(x) & there);
    }
  }
};

// Chooses and reads the positions of a sample. Each probe reads four neighbouring elements, one for each of
// four samples. Scores of neighbours are alike, so a single sample of all four would seem to hold more
// information than it does.
struct RowSampler {
  static constexpr int kMostLog2Lanes = 3;
  int log2_total;  // Each key is the greatest of 2^log2_total elements: those of 4 lanes or more, or one.
  int log2_lanes;  // These elements come from 4 << log2_lanes lanes,
  int log2_own;    // and from 2^log2_own probes of each thread.
  int log2_parts;  // 2^log2_parts CTAs divide the sample among them.
  int part;        // number of this CTA among those
  int span;        // Probes lie in the first `span` elements. Nearly all belong to the row.

  template <typename T>
  GVR_DEVICE RowSampler(const RowContext<T>& ctx, bool divided, int elements) : span(elements) {
    const int n = ctx.row.n;
    log2_parts = divided ? ctx.log2_ctas : 0;
    part = divided ? ctx.rank : 0;
    // The cost of a sample is the memory lines that it reads from all over the row. The sampler reads only as
    // many lines as leave some of the top k among them, but at least one per thread, because all threads read
    // at the same time.
    log2_total = n < 1 << 18 ? 2 : n < 1 << 19 ? 3 : n <= 1 << 20 ? 4 : 5;
    const int most_lanes = min(log2_parts, kMostLog2Lanes);  // besides the four that share the neighbours
    log2_total = max(log2_total, 2 + most_lanes);
    // With more elements per key, nearly all keys would lie in the top k.
    while (log2_total > 0 && ctx.k << log2_total > 2 * n) --log2_total;
    if (log2_total < 2) log2_total = 0;
    log2_lanes = max(min(most_lanes, log2_total - 2), 0);
    log2_own = max(log2_total - 2 - log2_lanes, 0);
  }

  GVR_DEVICE static int hashed_position(uint32_t number, int span) {
    const int whole = span >= kSampleVec ? span & -kSampleVec : span;
    return static_cast<int>(__umulhi(hashed(number), whole)) & -kSampleVec;
  }

  // The position of the i-th of this thread's 2^log2_own probes.
  template <typename T>
  GVR_DEVICE int position_of(const RowContext<T>& ctx, int i) const {
    const uint32_t number = ((i * kThreads + ctx.thread) << log2_parts) + part;
    return first_probe(ctx.row) + hashed_position(number, behind_first_probe(ctx.row, span));
  }

  // Probes, and returns the greatest key of this lane's group, which is the same in 2^log2_lanes neighbouring
  // lanes.
  template <typename T>
  GVR_DEVICE uint32_t probe(const RowContext<T>& ctx) const {
    uint32_t key[kSampleVec] = {};
    probe_from(ctx, 0, key);
    return greatest(ctx, key);
  }

  // Does the same as the other overload, with a first probe that has been read before.
  template <typename T>
  GVR_DEVICE uint32_t probe(const RowContext<T>& ctx, const SampleVec<T>& first) const {
    uint32_t key[kSampleVec] = {};
    first.take(ctx.row, position_of(ctx, 0), key);
    probe_from(ctx, 1, key);
    return greatest(ctx, key);
  }

  template <typename T>
  GVR_DEVICE void probe_from(const RowContext<T>& ctx, int first, uint32_t (&key)[kSampleVec]) const {
    if (SampleVec<T>::at_once(ctx.row)) {
#pragma unroll 4  // so that the loads overlap
      for (int i = first; i < 1 << log2_own; ++i) probe_at(ctx.row, position_of(ctx, i), key);
    } else {
#pragma unroll 1
      for (int i = first; i < 1 << log2_own; ++i) probe_at(ctx.row, position_of(ctx, i), key);
    }
  }

  template <typename T>
  GVR_DEVICE static void probe_at(const RowView<T>& row, int at, uint32_t (&key)[kSampleVec]) {
    SampleVec<T> vec;
    vec.fetch(row, at);
    vec.take(row, at, key);
  }

  // Reduces the keys of the group's lanes to the greatest.
  template <typename T>
  GVR_DEVICE uint32_t greatest(const RowContext<T>& ctx, const uint32_t (&key)[kSampleVec]) const {
    if (log2_total == 0) return key[0];
    // In each pair of lanes 16 apart, the lower takes the first two keys and the upper the last two. Then, in
    // each pair 8 apart, the lower takes the first of its two keys and the upper the second.
    const bool second = (ctx.lane & 16) != 0, odd = (ctx.lane & 8) != 0;
    const uint32_t one = max(second ? key[2] : key[0], swapped(second ? key[0] : key[2], 16));
    const uint32_t other = max(second ? key[3] : key[1], swapped(second ? key[1] : key[3], 16));
    uint32_t greatest = max(odd ? other : one, swapped(odd ? one : other, 8));
#pragma unroll
    for (int i = 0; i < kMostLog2Lanes; ++i) {
      const uint32_t other = swapped(greatest, 1 << i);
      if (i < log2_lanes) greatest = max(greatest, other);
    }
    return greatest;
  }

  // Hashed (pseudo-random) positions. Strided positions would be biased where the top k cluster: the greatest
  // of elements from all parts of the row lies among the top k more often than `share` says.
  GVR_DEVICE static uint32_t hashed(uint32_t number) {
    number *= 2654435761u;
    return (number ^ number >> 15) * 2246822519u;
  }

  GVR_DEVICE static uint32_t swapped(uint32_t key, int lanes) {
    return __shfl_xor_sync(0xffffffffu, key, lanes);
  }

  // Expected share of the sample's keys that belong to the top k.
  template <typename T>
  GVR_DEVICE float share(const RowContext<T>& ctx) const {
    const float n = static_cast<float>(ctx.row.n);
    const float elements = __fdividef(n, static_cast<float>(span)) * static_cast<float>(1 << log2_total);
    return 1.0f - ptx::power(1.0f - __fdividef(static_cast<float>(ctx.k), n), elements);
  }
};

// Sends every CTA of the cluster one key per thread of the team that sends to it; without `keys` none. CTAs
// that sample have then read another length, so that headers will differ, and take whatever shared memory
// held before for keys, which is as safe as any others. Stores from one warp to many CTAs would take longer.
template <typename T>
GVR_DEVICE void send_sample(const RowContext<T>& ctx, const uint32_t* keys) {
  const Shared& smem = *ctx.shared;
  const uint32_t target = ctx.team_target(), index = ctx.team_index();
  const uint32_t barrier = ptx::map_to_rank(ptx::shared_address(&smem.sample_barrier), target);
  ptx::barrier_expect_tx_if(index == 0, barrier, keys == nullptr ? 0 : sizeof(uint32_t) * ctx.team_size());
  const int there = ctx.rank * ctx.team_size() + index;
  if (keys != nullptr) ptx::store_async(smem.received.address_in(target, there), keys[index], barrier);
}

template <typename T>
GVR_DEVICE void receive_samples(const RowContext<T>& ctx) {
  ptx::barrier_wait(ptx::shared_address(&ctx.shared->sample_barrier), 0);
}

// One key of a sample per thread.
struct Sample {
  uint32_t key;          // this thread's
  const uint4* of_warp;  // those of its warp
};

// The sample of a CTA that samples alone.
template <typename T>
GVR_DEVICE Sample sample_of_cta(const RowContext<T>& ctx, uint32_t greatest) {
  uint4* const of_warp = ctx.shared->sample + 8 * ctx.warp;
  reinterpret_cast<uint32_t*>(of_warp)[ctx.lane] = greatest;
  __syncwarp();
  return Sample{greatest, of_warp};
}

// The sample that CTAs of a cluster have in common if all have read the same length. `greatest`: the key of
// this thread's group of lanes. `meanwhile` runs while keys are under way.
template <typename T, typename Meanwhile>
GVR_DEVICE Sample sample_of_cluster(const RowContext<T>& ctx, uint32_t greatest, Meanwhile meanwhile) {
  Shared& smem = *ctx.shared;
  if ((ctx.lane & (ctx.ctas - 1)) == 0) {
    smem.sent[(ctx.warp * 32 + ctx.lane) >> ctx.log2_ctas] = greatest;
  }
  __syncthreads();
  send_sample(ctx, smem.sent);
  meanwhile();
  receive_samples(ctx);
  return Sample{smem.received[ctx.thread], reinterpret_cast<const uint4*>(&smem.received[32 * ctx.warp])};
}

// If a greater share of a sample lies above the k-th value, the sample shows hardly anything below that
// value.
constexpr float kNearlyAllAbove = 0.96f;
// Every warp names two order statistics of its keys, this many standard deviations above and below the
// expected rank. So the 16 warps name 16 upper and 16 lower ends. The interval takes the third of each from
// outside, and one further in for each doubling of the CTAs: a sign test. For independent keys, and a share
// that was itself measured with 512 of them, one interval in 47,000 misses, or one in 8,000, 1,700, 400 and
// 120 for each step further in. A row of one CTA takes longest to be read again, and most other rows wait for
// it. Where few rows share the chip, each with many CTAs, a narrower interval is worth more.
constexpr float kMarginSigmas = 0.5f;
constexpr int kOutsiders = 2;

// Returns the square root of a variance. A variance that rounding made negative gives a negative result.
GVR_DEVICE float standard_deviation(float variance) {
  return variance * ptx::reciprocal_root(fmaxf(variance, 1e-30f));
}

// The share of a sample that lies above the k-th key, and the margin around the expected rank among 32 keys.
struct SampleRank {
  float share = 0.0f, margin = 0.0f;

  SampleRank() = default;

  GVR_DEVICE explicit SampleRank(float tail)
      : share(tail), margin(kMarginSigmas * standard_deviation(32.0f * tail * (1.0f - tail))) {
    ptx::keep(share);
    ptx::keep(margin);
  }
};

// Returns how many of the 4 * kVecs keys are greater than `mine`.
template <int kVecs, int kStride = 1>
GVR_DEVICE int rank_among(const uint4* keys, uint32_t mine) {
  float rank = ptx::kIntegerBase;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint4 other = keys[i * kStride];
    ptx::count_if_greater(rank, other.x, mine);
    ptx::count_if_greater(rank, other.y, mine);
    ptx::count_if_greater(rank, other.z, mine);
    ptx::count_if_greater(rank, other.w, mine);
  }
  return static_cast<int>(ptx::integer_of_sum(rank));
}

// Makes an interval whose ends are finite, or both infinity. Radix rounds handle the keys that such an
// interval leaves out.
GVR_DEVICE KeyInterval finite_interval(uint32_t lo, uint32_t hi, uint32_t source) {
  if (min(lo, hi) >= kPosInfKey) return KeyInterval{kPosInfKey, kPosInfKey, source};
  hi = min(max(hi, kLeastFiniteKey), kMostFiniteKey);  // A sample of hardly any keys may give the absent key.
  return KeyInterval{max(min(lo, hi), kLeastFiniteKey), hi, source};
}

// Publishes the ends that this warp names, and returns those of all warps: the upper ends to the warp's lower
// lanes, and the lower ends to the others. It takes one block barrier.
template <typename T>
GVR_DEVICE uint32_t exchange_ends(const RowContext<T>& ctx, uint32_t top, uint32_t bottom) {
  static_assert(2 * kWarps == 32);
  // All lanes store the same, so that none branches.
  ctx.shared->interval_ends[0][ctx.warp] = top;
  ctx.shared->interval_ends[1][ctx.warp] = bottom;
  __syncthreads();
  return ctx.shared->interval_ends[ctx.lane / kWarps][ctx.lane % kWarps];
}

// The interval if less than one key in eight lies above the k-th key, which is too few for each of 16 warps
// to tell much. The greatest eight keys of every warp are ranked together, four threads to a key. If the k-th
// key lies below the interval, the row may have to be read again, so the interval extends further down than
// up. For a small k it may be that no key of the sample belongs to the top k. Then the interval's upper end
// lies above the greatest key, by a multiple of the distance from there to the lower end. The lower end
// stands at least some ranks down, because the distance of two neighbours says little. This contains two
// block barriers.
template <typename T>
GVR_DEVICE KeyInterval tail_interval(const RowContext<T>& ctx, uint32_t key, float share, int rank) {
  constexpr int kOfEach = 8;
  constexpr float kSigmasUp = 3.0f, kSigmasDown = 4.0f;  // standard deviations
  constexpr float kFewExpected = 6.0f, kReach = 4.0f;    // keys above the k-th, and such distances
  constexpr int kLeastSteps = 7;                         // ranks from the greatest key to the lower end
  constexpr int kThreadsPerKey = 4;                      // threads that rank one key together
  constexpr int kVecs = kWarps * kOfEach / (4 * kThreadsPerKey);
  static_assert(kThreads == kThreadsPerKey * kWarps * kOfEach && kGreatestOfSample == kWarps * kOfEach);
  static_assert(kLeastSteps < kOfEach);
  Shared& smem = *ctx.shared;
  uint32_t* const greatest = smem.warp_top8;
  const uint32_t selected = __ballot_sync(0xffffffffu, rank < kOfEach);
  const uint32_t before = (1u << ctx.lane) - 1;
  int place = __popc(selected & before);
  if (__any_sync(0xffffffffu, __popc(selected) > kOfEach)) {
    // The least of these keys are equal, and fill up behind the greater ones: as many as their rank says.
    const int least_rank = __reduce_max_sync(0xffffffffu, rank < kOfEach ? rank : 0);
    const uint32_t above = __ballot_sync(0xffffffffu, rank < least_rank);
    place = rank < least_rank ? __popc(above & before) : least_rank + __popc(selected & ~above & before);
  }
  if (rank < kOfEach && place < kOfEach) greatest[ctx.warp * kOfEach + place] = key;
  __syncthreads();
  const float expected = kThreads * share;
  const float error = standard_deviation(expected * (1.0f - share));
  const int upper = max(static_cast<int>(expected - kSigmasUp * error) - 1, 0);
  const int lower = max(static_cast<int>(ceilf(expected + kSigmasDown * error)), kLeastSteps);
  const uint32_t mine = greatest[ctx.thread / kThreadsPerKey];
  const auto vecs = reinterpret_cast<const uint4*>(greatest) + ctx.thread % kThreadsPerKey;
  int among = rank_among<kVecs, kThreadsPerKey>(vecs, mine);
  among += __shfl_xor_sync(0xffffffffu, among, 1);
  among += __shfl_xor_sync(0xffffffffu, among, 2);
  const uint32_t top = __reduce_min_sync(0xffffffffu, among <= upper ? mine : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, among <= lower ? mine : kMaxKey);
  const uint32_t end = exchange_ends(ctx, top, bottom);
  const bool below = ctx.lane >= kWarps;
  uint32_t hi = __reduce_min_sync(0xffffffffu, below ? kMaxKey : end);
  const uint32_t lo = __reduce_min_sync(0xffffffffu, below ? end : kMaxKey);
  if (expected < kFewExpected) {
    const float greatest_seen = key_to_float(hi);
    hi = max(hi, order_key(greatest_seen + kReach * (greatest_seen - key_to_float(lo))));
  }
  return finite_interval(lo, hi, kGuessRowSample);
}

// An interval around the (1 - share) quantile of a sample of one key per thread. Each warp reads the order
// statistics beside the expected rank off its own 32 keys. A sign test over the warps gives the interval
// (kMarginSigmas). This contains one block barrier.
template <typename T>
GVR_DEVICE KeyInterval sample_interval(const RowContext<T>& ctx, const Sample& sample,
                                       const SampleRank& above) {
  Shared& smem = *ctx.shared;
  const uint32_t key = sample.key;
  const float share = above.share, margin = above.margin;
  const int rank = rank_among<8>(sample.of_warp, key);
  if (share < 1.0f / 8) return tail_interval(ctx, key, share, rank);
  const int present = __popc(__ballot_sync(0xffffffffu, key != kAbsentKey));
  const float expected_rank = share * static_cast<float>(present);
  const int upper = max(static_cast<int>(expected_rank - margin) - 1, 0);
  const int lower = min(static_cast<int>(ceilf(expected_rank + margin)), present - 1);
  // The r-th largest is the smallest key with no more than r greater ones.
  const uint32_t top = __reduce_min_sync(0xffffffffu, rank <= upper ? key : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, rank <= lower ? key : kMaxKey);
  const uint32_t edge = exchange_ends(ctx, top, ~bottom);
  const bool below = ctx.lane >= kWarps;
  const int outsiders = kOutsiders + ctx.log2_ctas;
  const bool near = rank_among<kWarps / 4>(reinterpret_cast<const uint4*>(smem.interval_ends[below]), edge) <=
                    (below && share > kNearlyAllAbove ? 0 : outsiders);
  const uint32_t hi = __reduce_min_sync(0xffffffffu, !below && near ? edge : kMaxKey);
  const uint32_t lo = ~__reduce_min_sync(0xffffffffu, below && near ? edge : kMaxKey);
  KeyInterval interval = finite_interval(lo, hi, kGuessRowSample);
  if (share > kNearlyAllAbove) {
    const float bottom_edge = interval.low();
    const float wider = bottom_edge - (interval.high() - bottom_edge);
    interval.lo = max(min(interval.lo, order_key(wider)), kLeastFiniteKey);
  }
  return interval;
}

}  // namespace gvr_topk
