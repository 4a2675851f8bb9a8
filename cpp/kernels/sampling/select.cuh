// Finds where a sum over the elements of a row, taken from the largest value down, reaches a target. The sum
// is of ones for top-k and of masses for top-p. All sums are of integers, so their order does not matter.
#pragma once

#include "gvr_topk/sampling_arithmetic.h"
#include "sampling/row_part.cuh"

namespace gvr_topk::sampling {

// Elements are measured by one each.
struct Ones {
  static constexpr int kLimbs = 1;
  GVR_DEVICE uint64_t operator()(float) const { return 1; }
};

// Elements are measured by their mass.
struct Masses {
  static constexpr int kLimbs = 3;
  float max, scale;
  // The minimum is 0 of a NaN, so +inf is at no distance from +inf.
  GVR_DEVICE uint64_t operator()(float x) const { return mass(fminf(add_rn(x, -max), 0.0f), scale); }
};

// The keys from `low` to `high`, of which a bin holds neighbouring ones.
struct Span {
  uint32_t low, high;

  // Right shift that turns distances from `high` into bins.
  GVR_DEVICE int shift() const { return max(0, 32 - __clz(static_cast<int>(high - low)) - kLog2Bins); }
  GVR_DEVICE Span bin(uint32_t number) const {
    const uint32_t last = high - (number << shift());
    return Span{last - min(last - low, (1u << shift()) - 1), last};
  }
};

// A row's elements with keys above `key`, whose sum is `above`, and those equal to it, whose sum is `at`, or
// 0 if that is not known.
struct Cut {
  uint32_t key;
  uint64_t above, at;
};

GVR_DEVICE uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
  return value;
}

// The sum over this lane and the lower ones.
GVR_DEVICE uint64_t warp_prefix(uint64_t value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// The sums of a row's elements by bins.
struct RowBins {
  uint64_t bin;   // the bin of this thread's number
  uint64_t rest;  // the elements below all bins
};

// Sums the elements of a span by bins over all CTAs, and those from `floor` to below the span together. Keys
// are those without the bits that keys of T have in common.
template <typename T, typename Measure>
GVR_DEVICE RowBins sum_bins(Team& team, const RowShare<T>& part, Span span, uint32_t floor,
                            const Measure& measure) {
  SampleShared& smem = *team.smem;
  const float low = key_to_float(whole_key<T>(span.low)), high = key_to_float(whole_key<T>(span.high));
  const float least = key_to_float(whole_key<T>(floor));
  const int shift = span.shift();
  uint64_t rest = 0;
  part.for_each_vector(team.lane, [&](int, const uint4& vec) {
    bool any = false;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      any |= x >= least && x <= high;
    }
    if (!any) return;
    // All elements are measured, so that the masses of several are computed at once.
    uint64_t value[kPerVec<T>];
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) value[e] = measure(element<T>(vec, e));
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      if (Measure::kLimbs > 1) rest += x >= least && x < low ? value[e] : 0;
      const uint32_t below = span.high - (order_key(x) >> kInvariantBits<T>);
      if (below > span.high - span.low) continue;
      const uint32_t bin = below >> shift;
#pragma unroll
      for (int i = 0; i < Measure::kLimbs; ++i) {
        const uint32_t digit = static_cast<uint32_t>(value[e] >> (i * kLimbBits)) & ((1u << kLimbBits) - 1);
        ptx::add_shared(smem.limbs[i][bin], digit, team.zero);
      }
    }
  });
  ptx::reconverge(team.zero);
  if (Measure::kLimbs > 1) {
    rest = warp_sum(rest);
    if (team.lane == 0) smem.warp_record[team.warp].word[0] = rest;
  }
  __syncthreads();
  uint64_t own = 0;
#pragma unroll
  for (int i = Measure::kLimbs - 1; i >= 0; --i) {
    own = (own << kLimbBits) + smem.limbs[i][team.thread];
    smem.limbs[i][team.thread] = 0;
  }
  uint64_t* const bins = smem.bins[team.turn & 1];
  bins[team.thread] = own;
  Record mine{};
  if (Measure::kLimbs > 1) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) mine.word[0] += smem.warp_record[w].word[0];
  }
  const Record* const theirs = team.exchange(mine);
  team.sync();  // All bins are there.
  RowBins sums{};
#pragma unroll
  for (int rank = 0; rank < kMaxSampleCtas; ++rank) {
    if (rank >= team.ctas) break;
    sums.bin += ptx::load_from_rank(ptx::shared_address(&bins[team.thread]), rank);
    sums.rest += theirs[rank].word[0];
  }
  return sums;
}

// The first bin at which the sum of bins reaches a target, and what that bin holds. Targets are above 0.
struct BinSearch {
  uint64_t before, total;  // the bins before this thread's, and all bins

  GVR_DEVICE BinSearch(const Team& team, uint64_t bin) {
    SampleShared& smem = *team.smem;
    const uint64_t upto = warp_prefix(bin, team.lane);
    if (team.lane == 31) smem.warp_record[team.warp].word[1] = upto;
    if (team.thread == 0) smem.found.bin = kBins;
    __syncthreads();
    before = upto - bin, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint64_t sum = smem.warp_record[w].word[1];
      if (w < team.warp) before += sum;
      total += sum;
    }
  }

  // The bin at which the sum reaches `target`, in all threads behind a block barrier.
  GVR_DEVICE FoundBin find(const Team& team, uint64_t bin, uint64_t target) const {
    if (before < target && target <= before + bin) {
      team.smem->found = FoundBin{before, bin, static_cast<uint32_t>(team.thread)};
    }
    __syncthreads();
    return team.smem->found;
  }
};

// The least key of T, without the bits that its keys have in common, that is not below `key`.
template <typename T>
GVR_DEVICE uint32_t least_narrow(uint32_t key) {
  const uint32_t narrow = key >> kInvariantBits<T>;
  return narrow + (whole_key<T>(narrow) < key);
}

// Finds the key at which the sum over the elements from `floor` to `top`, and `extra` behind them, reaches a
// target, which `target_of` makes of the whole sum. The boundary is expected at or above `guess`, and is
// found wherever it is. If it lies in `extra`, the key is `floor` - 1. If `sums_rest` is false, the elements
// below the guess are not added to the whole sum, and `target_of` does not need it.
template <typename T, typename Measure, typename TargetOf>
GVR_DEVICE Cut find_cut(Team& team, const RowShare<T>& part, uint32_t floor, uint32_t guess, uint32_t top,
                        uint64_t extra, const Measure& measure, const TargetOf& target_of, bool sums_rest,
                        uint64_t& target) {
  const uint32_t first = least_narrow<T>(floor), last = top >> kInvariantBits<T>;
  Span span{min(max(guess >> kInvariantBits<T>, first), last), last};
  Cut cut{floor - 1, 0, 0};
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    const RowBins sums = sum_bins(team, part, span, is_first && sums_rest ? first : span.low, measure);
    const BinSearch search(team, sums.bin);
    if (is_first) target = target_of(search.total + sums.rest + extra);
    const FoundBin found = search.find(team, sums.bin, target - cut.above);
    if (found.bin < kBins) {
      cut.above += found.above;
      span = span.bin(found.bin);
      if (span.low == span.high) return Cut{whole_key<T>(span.high), cut.above, found.at};
      continue;
    }
    cut.above += search.total;
    // The target is not reached in this span. Below the first one there may be another.
    const bool below = is_first && span.low > first;
    if (!below || (sums_rest && target > cut.above + sums.rest)) {
      if (is_first) cut.above += sums.rest;
      return cut;
    }
    span = Span{first, span.low - 1};
  }
}

// The least key up to `high`, for which it holds, of which a rising condition holds. Every warp finds it.
template <typename Holds>
GVR_DEVICE uint32_t least_key(uint32_t high, const Team& team, const Holds& holds) {
  uint32_t low = kNegInfKey;
  while (low < high) {
    const uint32_t step = (high - low) / 32 + 1;
    const uint32_t key = min(high, low + step * team.lane);
    const uint32_t there = __ballot_sync(0xffffffffu, holds(key_to_float(key)));
    const int lane = __ffs(static_cast<int>(there)) - 1;  // -1: in the rest behind the last lane
    if (lane < 0) {
      low = min(high, low + step * 31 + 1);
    } else {
      high = min(high, low + step * lane);
      if (lane > 0) low = low + step * (lane - 1) + 1;
    }
  }
  return high;
}

}  // namespace gvr_topk::sampling
