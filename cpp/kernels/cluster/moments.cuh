// The quickest guess: the k-th value stands as many standard deviations from the mean of a sample of the row
// as it did after the last step. The sample is of the same places of the buffer in every step, so that what
// it has of chance stays; its loads need neither hint nor length, and no CTA needs another.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/row_sample.cuh"

namespace gvr_topk::cluster {

// What one step leaves for the next in `guess_state`: a share of the hint, from 0 to 1, or a place, so far
// from this. The last bits of a place are its reach.
constexpr float kPlaceOrigin = 64.0f, kMostPlace = 16.0f;
constexpr float kNoFeedback = -1.0f;
constexpr uint32_t kReachBits = 0x3f;
constexpr float kReachUnit = 1.0f / 256;

__device__ __forceinline__ bool is_place(float feedback) {
  return fabsf(feedback - kPlaceOrigin) <= kMostPlace;  // not of NaN
}

// A bracket reaches so many of a sample's standard deviations to either side of a place at the mean, and as
// many more for each of them further out, for the deviation is known no better than the mean. It follows how
// far values turn out from where they were expected: so many times as far, and from there by a tenth less
// with every step. Where elements are dense it reaches only as far as so many are expected inside, for each
// takes time to list. The expectation itself moves a part of the way only: most of what moves it is chance.
//
// The constants come of a sweep simulated on the real traces, the paper's layers and Gaussian chains, where a
// miss costs 3 us and a listed element 0.7 to 1.0 ns; wider brackets were slower on the H200.
struct Reach {
  float least, first, most, of_move, inside;
};
constexpr float kReachKept = 0.9f, kCentreMoves = 0.5f;
constexpr Reach kReach{0.016f, 0.05f, 0.12f, 1.6f, 1500.0f};
// Rows with few CTAs take longest to be read again, and have most others to keep waiting. Of more looks at a
// row, a sample moves less.
template <int kLooks>
constexpr Reach kReachOfFew{kLooks > 1 ? 0.02f : 0.03f, 0.08f, 0.12f, 2.0f, 3000.0f};
constexpr int kLog2FewCtas = 2;
static_assert(kReachOfFew<1>.most < kReachBits * kReachUnit);
// Of values whose mean is further from zero than so many deviations, sums of squares leave no deviation to
// speak of.
constexpr float kMostOffset = 64.0f;
// More than so many inside of such a bracket take longer than another guess does.
constexpr float kCrowd = 8192.0f;

constexpr int kMostLooks = 2;

// This thread's looks at the row, before its length is known: `row.n` is that of the buffer. All CTAs look at
// the same places if `alike`, else each at its own part of a larger sample, and once. What they see lands in
// memory that no other CTA stores to: a copy may come late, and a peer's store early.
template <typename T, int kLooks>
struct Ahead {
  static_assert(kLooks <= kMostLooks);
  bool alike;
  int span;
  int at[kLooks];
  uint4* zone[kLooks];  // where this thread's looks land

  // Starts to fetch it: to shared memory, or what waits for the length would wait for it too. The second look
  // lands in `store`, kThreads vectors that this CTA alone uses, and for something else only later.
  __device__ __forceinline__ Ahead(const Task<T>& task, const Shape& shape, uint4* store = nullptr)
      : alike(shape.has(Shape::kFed)) {
    zone[0] = task.shared->landing + task.thread;
    if constexpr (kLooks > 1) zone[1] = store + task.thread;
    fetch(task, shape);
  }

  // Out of what is known to be in the row.
  __device__ __forceinline__ void fetch(const Task<T>& task, const Shape& shape) {
    span = task.row.n;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      if (i > 0 && !alike) break;
      if (alike) {
        const int line =
            RowSampling::place((i * kThreads + task.thread) / kLookLanes, span & -kLook) & -kLook;
        at[i] = line + kNeighbours * (task.thread % kLookLanes);
      } else {
        at[i] = RowSampling::place((task.thread << task.log2_ctas) + task.rank, span);
      }
      if (!shape.has(Shape::kAligned)) continue;
      const uint32_t target = ptx::shared_address(zone[i]);
      if constexpr (sizeof(T) == 4) {
        ptx::copy_async(target, task.row.data + at[i]);
      } else {
        ptx::copy_half_async(target, task.row.data + at[i]);
      }
    }
    ptx::commit_copies();
  }

  // When it has come.
  __device__ __forceinline__ Neighbours<T> seen(int look = 0) const {
    Neighbours<T> neighbours;
    neighbours.load(zone[look]);
    return neighbours;
  }

  // Whether it is as good as a look at a row of known length: when hardly any of it lies behind the end.
  __device__ __forceinline__ bool serves(const Shape& shape, int n) const {
    return shape.has(Shape::kAligned) && !alike && n > span - span / 16;
  }
};

// A sample says too little when less of it counts than this share: looks count where all they see is finite.
// Of a row that is masked nearly everywhere none does.
constexpr float kLeastCounted = 0.125f;
constexpr float kTooFew = -1.0f, kNone = -2.0f;

struct Moments {
  float mean = 0.0f, deviation = 0.0f;  // the deviation is kTooFew or kNone where too little counts

  Moments() = default;
  __device__ __forceinline__ explicit Moments(const Missed& missed)
      : mean(missed.mean), deviation(missed.deviation) {}

  // Of a sample that all CTAs have alike. One block barrier, behind which all have `feedback` of the first
  // thread.
  template <typename T, int kLooks>
  __device__ __forceinline__ Moments(const Task<T>& task, const Ahead<T, kLooks>& ahead, float& feedback) {
    Shared& sm = *task.shared;
    float sum = 0.0f, squares = 0.0f;
    bool counts = true;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const Neighbours<T> seen = ahead.seen(i);
      counts &= ahead.at[i] + kNeighbours <= task.row.n;
#pragma unroll
      for (int e = 0; e < kNeighbours; ++e) {
        sum += seen.value(e);
        squares = fmaf(seen.value(e), seen.value(e), squares);
      }
    }
    counts &= squares < __int_as_float(0x7f800000);
    // One half of the warp adds up the one, the other the other.
    const bool upper = (task.lane & 16) != 0;
    float mine = counts ? (upper ? squares : sum) : 0.0f;
    const float theirs = counts ? (upper ? sum : squares) : 0.0f;
    mine += __shfl_xor_sync(0xffffffffu, theirs, 16);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if ((task.lane & 15) == 0) sm.moment[task.lane + task.warp] = mine;
    if (task.thread == 0) sm.facts.feedback = feedback;
    const float count = static_cast<float>(kLooks * kNeighbours * __syncthreads_count(counts));
    feedback = sm.facts.feedback;
    // A lane takes four warps' sums, and one four lanes away what goes with them.
    static_assert(kWarps == 16);
    const float4 four = reinterpret_cast<const float4*>(sm.moment)[task.lane & 7];
    float all = (four.x + four.y) + (four.z + four.w);
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    const float other = __shfl_xor_sync(0xffffffffu, all, 4);
    const bool squared = (task.lane & 4) != 0;
    const float share = ptx::reciprocal(count);
    mean = (squared ? other : all) * share;
    deviation = cluster::deviation((squared ? all : other) * share - mean * mean);
    if (count < kLeastCounted * kLooks * kNeighbours * kThreads) deviation = count > 0 ? kTooFew : kNone;
  }

  __device__ __forceinline__ bool are_known() const { return deviation >= 0.0f; }
  __device__ __forceinline__ bool found_none() const { return deviation == kNone; }

  __device__ __forceinline__ static float reach_of(float feedback) {
    return kReachUnit * static_cast<float>(__float_as_uint(feedback) & kReachBits);
  }

  __device__ __forceinline__ Bracket bracket(float feedback) const {
    const float z = feedback - kPlaceOrigin, reach = reach_of(feedback);
    const float wide = fmaf(reach, fabsf(z), reach);
    return finite_bracket(order_key(fmaf(z - wide, deviation, mean)),
                          order_key(fmaf(z + wide, deviation, mean)), kGuessPlace);
  }

  // What to leave for the next step: where the k-th value stands, or nothing where so many would lie around
  // it that it is not worth knowing. `found` says how many lay inside of `used`, the last bracket: zeros,
  // which are counted in any case, are none of a crowd. `source` is that of the first.
  template <int kLooks, typename T>
  __device__ __forceinline__ float next(const Task<T>& task, float feedback, uint32_t kth,
                                        const Bracket& used, const Verdict& found, uint32_t source) const {
    const uint32_t inside = found.inside - (used.plateau() == kZeroKey ? found.equal : 0);
    const float value = key_to_float(kth);
    const float z = (value - mean) * ptx::reciprocal(deviation);
    const float further = 1.0f + fabsf(z);
    const Reach wanted = task.log2_ctas < kLog2FewCtas ? kReachOfFew<kLooks> : kReach;
    float centre = z, reach = wanted.first;
    if (source == kGuessPlace) {
      const float expected = feedback - kPlaceOrigin;
      const float moved = fabsf(z - expected) * ptx::reciprocal(further);
      reach = fmaxf(kReachKept * reach_of(feedback), wanted.of_move * moved);
      reach = fminf(fmaxf(reach, wanted.least), wanted.most);
      centre = fmaf(kCentreMoves, z - expected, expected);
    }
    const float width = fmaf(fabsf(value), kSpacing<T>, used.high() - used.low());
    // Elements expected inside for each unit of reach.
    const float density = 2.0f * further * deviation * static_cast<float>(inside) * ptx::reciprocal(width);
    reach = fmaxf(fminf(reach, wanted.inside * ptx::reciprocal(density)), wanted.least);
    const bool sharp = fabsf(mean) <= kMostOffset * deviation;
    const bool known = sharp && are_known() && fabsf(centre) < kMostPlace && density * reach <= kCrowd;
    const uint32_t place = __float_as_uint(kPlaceOrigin + centre) & ~kReachBits;
    return known ? __uint_as_float(place | static_cast<uint32_t>(fmaf(reach, 1.0f / kReachUnit, 0.5f)))
                 : kNoFeedback;
  }
};

}  // namespace gvr_topk::cluster
