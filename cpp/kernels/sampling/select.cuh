// Finds where a sum over the elements of a row, taken from the largest value down, reaches a target. The sum
// is of ones for top-k and of masses for top-p. All sums are of integers, so their order does not matter.
#pragma once

#include <type_traits>

#include "core/key_range.cuh"
#include "gvr_topk/sampling_arithmetic.h"
#include "sampling/row_part.cuh"

namespace gvr_topk::sampling {

// Elements are measured by one each.
struct Ones {
  static constexpr int kLimbs = 1;
  GVR_DEVICE uint64_t operator()(float) const { return 1; }
};

// A sum of up to 2^9 masses, each given over 2^43 with up to 24 bits. Above the base numbers lie 2^-43 apart,
// so that an addition that rounds down cuts a mass to what it counts.
struct DoubleSum {
  static constexpr double kBase = 512.0;
  double sum = kBase;

  GVR_DEVICE void operator+=(float mass) { sum = __dadd_rd(sum, mass); }
  GVR_DEVICE uint64_t of(uint32_t) const {
    return static_cast<uint64_t>(__double_as_longlong(sum) - __double_as_longlong(kBase));
  }
};

// The same where doubles are slow, in two parts: how often the masses have 2^-22, and the rest. Each mass
// adds a constant to both.
struct PartedSum {
  static constexpr int kLowBits = 21;
  static constexpr float kHighBase = 3.0f, kLowBase = 0x1.8p-20f;  // which lie 2^-22 and 2^-43 from the next
  uint32_t high = 0, low = 0;

  GVR_DEVICE void operator+=(float mass) {
    const float cut = __fadd_rd(mass, kHighBase);
    high += __float_as_uint(cut);
    low += __float_as_uint(__fadd_rd(add_rn(mass, -add_rn(cut, -kHighBase)), kLowBase));
  }
  // The sum, if it is one of `count` masses.
  GVR_DEVICE uint64_t of(uint32_t count) const {
    const uint32_t highs = high - count * __float_as_uint(kHighBase);
    return (static_cast<uint64_t>(highs) << kLowBits) + (low - count * __float_as_uint(kLowBase));
  }
};
static_assert(kMassBits == 22 + PartedSum::kLowBits);

using MassSum = std::conditional_t<kArch == 90, DoubleSum, PartedSum>;

// Elements are measured by their mass.
struct Masses {
  static constexpr int kLimbs = 3;
  float max, scale;

  // Whether `share` makes the masses of the row: no distance is NaN, and scaling it down rounds nothing.
  GVR_DEVICE bool has_shares() const { return max < INFINITY && scale >= 0x1p-100f; }

  // The mass of an element over 2^43, as mass() in sampling_arithmetic.h makes it, but not cut. All
  // instructions but one are of floats: those of integers take twice as long. 64 octaves are 1, so that
  // saturation limits the distance.
  GVR_DEVICE float share(float x) const {
    const float distance = __saturatef(__fmul_rn(add_rn(max, -x), scale * 0x1p-6f));
    const float aligned = __fmaf_ru(distance, 64.0f, kAligned), whole = add_rn(aligned, -kAligned);
    const uint32_t power = __float_as_uint(exp2_fraction(fma_rn(distance, -64.0f, whole)));
    return __uint_as_float(power + __float_as_uint(aligned) * 0xff800000u);
  }

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
// 0 if that is not known. If `ends_with_one`, the sum reaches its target with the one element, of mass `at`,
// that has this key or is the next above it; `above` is the sum above that.
struct Cut {
  uint32_t key;
  uint64_t above, at;
  bool ends_with_one;
};

GVR_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
  return value;
}

// The sum over the lanes, of numbers below 2^54. A thread has at most 2^9 masses.
GVR_DEVICE uint64_t warp_sum(uint64_t value) {
  constexpr int kLow = 27;
  const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value) & ((1u << kLow) - 1));
  const uint32_t high = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(value >> kLow));
  return (static_cast<uint64_t>(high) << kLow) + low;
}

// The sum over this lane and the lower ones.
template <typename T>
GVR_DEVICE T warp_prefix(T value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// One of eight numbers in each lane, and its sum with those before. The warp is converged.
struct Prefix8 {
  uint64_t own, upto;

  // `words` are `kWords` times eight numbers, of which `count` are in use.
  template <int kWords = 1>
  GVR_DEVICE static Prefix8 of(const uint64_t* words, int count, int lane) {
    const uint64_t word = words[min(lane, 8 * kWords - 1)];  // no branch
    Prefix8 sum{};
    sum.own = sum.upto = lane % 8 < count ? word : 0;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum.upto, d);
      if (lane % 8 >= d) sum.upto += other;
    }
    return sum;
  }
  // The sum of the numbers before number `at` of a word, and of all of them.
  GVR_DEVICE uint64_t before(int at, int word = 0) const {
    return __shfl_sync(0xffffffffu, upto - own, 8 * word + at);
  }
  GVR_DEVICE uint64_t all(int word = 0) const { return __shfl_sync(0xffffffffu, upto, 8 * word + 7); }
};

// Sums over the tokens before this CTA's, and over all of the row; the first one over the CTA's own; and the
// words of its warps.
struct WarpSums {
  Record before_cta, all;
  uint64_t cta;
  const Records* warps;

  // The sum over the tokens before this warp's. The warp is converged.
  GVR_DEVICE uint64_t before(const Team& team, int word = 0) const {
    return before_cta.word[word] + Prefix8::of(warps->word[word], kWarps, team.lane).before(team.warp);
  }
};

// The sums that begin with those of a warp. `kWords` words of the record are in use.
template <int kWords>
GVR_DEVICE WarpSums sum_warps(Team& team, const Record& own) {
  WarpSums sums{};
  sums.warps = &team.smem().warps[team.turn & 1];
  const auto prefix_of = [&](const Records& of, int count) {
    return Prefix8::of<kWords>(&of.word[0][0], count, team.lane);
  };
  const auto sum_of_word = [&](const Records& warps) {
    return __shfl_sync(0xffffffffu, prefix_of(warps, kWarps).upto, team.lane | 7);
  };
  const Prefix8 ctas = prefix_of(team.exchange<kWords>(own, sum_of_word), team.ctas);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    sums.before_cta.word[i] = ctas.before(team.rank, i), sums.all.word[i] = ctas.all(i);
  }
  sums.cta = __shfl_sync(0xffffffffu, ctas.own, team.rank);
  return sums;
}

// The sums of what each thread has. Lanes may come to it apart.
GVR_DEVICE WarpSums sum_threads(Team& team, uint64_t own) {
  ptx::reconverge(team.zero);
  return sum_warps<1>(team, Record{{warp_sum(own)}});
}

// The sum of a number over the threads before this one, and over all. A block barrier stands within, and
// another behind the last call. Lanes may come to it apart.
GVR_DEVICE uint64_t next_block_prefix(const Team& team, uint64_t value, uint64_t& total) {
  ptx::reconverge(team.zero);
  const uint64_t before = warp_prefix(value, team.lane);
  if (team.lane == 31) team.smem().of_warp[team.warp] = before;
  ptx::reconverge(team.zero);
  __syncthreads();
  const Prefix8 warps = Prefix8::of(team.smem().of_warp, kWarps, team.lane);
  total = warps.all();
  return warps.before(team.warp) + before - value;
}
GVR_DEVICE uint64_t block_prefix(const Team& team, uint64_t value, uint64_t& total) {
  __syncthreads();  // All have read the sums of the last call.
  return next_block_prefix(team, value, total);
}

// What one thread has found of its elements, from a limit `least` on and from a lower limit `low` on.
struct MassSums {
  uint64_t all, listed;          // masses of all, and of those from `least` on
  uint64_t steps, inside;        // steps at which there are elements from `low` on, and such below `least`
  uint32_t count, count_inside;  // elements from `least` on, and from `low` to there
};

// How many of a thread's elements are expected from `low` on: few, so that a branch leaves out most vectors,
// or many, so that none does; or that nobody asks.
enum class Listing { kNone, kFew, kMany };

// Adds up the masses of this thread's elements, or of those from `floor` on if there is one (`kFloor`).
template <bool kShares, bool kFloor, Listing kListing, typename T>
GVR_DEVICE MassSums add_masses_by(const RowShare<T>& part, const Masses& masses, float floor, float low,
                                  float least, int lane) {
  MassSums sums{};
  MassSum all[2], listed;
  uint32_t vectors = 0;
  uint64_t step = 1;
#pragma unroll 1
  for (int j = lane; j < part.vectors; j += 32, step <<= 1) {
    const uint4 vec = ptx::load_shared(part.address + 16 * j);
    if (kFloor && !(largest<T>(vec) >= floor)) continue;
    ++vectors;
    std::conditional_t<kShares, float, uint64_t> mass[kPerVec<T>];
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e), counted = !kFloor || x >= floor ? x : -INFINITY;
      if constexpr (kShares) {
        mass[e] = masses.share(counted);
        all[e % 2] += mass[e];
      } else {
        mass[e] = masses(counted);
        sums.all += mass[e];
      }
    }
    const bool is_listed = kListing != Listing::kNone && largest<T>(vec) >= low;
    if (kListing != Listing::kMany && !is_listed) continue;
    if (is_listed) sums.steps |= step;
    const uint32_t inside_before = sums.count_inside;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      const bool here = x >= least;
      sums.count += here, sums.count_inside += x >= low && !here;
      if constexpr (kShares) {
        if (here) listed += mass[e];
      } else {
        sums.listed += here ? mass[e] : 0;
      }
    }
    if (sums.count_inside != inside_before) sums.inside |= step;
  }
  if constexpr (kShares) {
    const uint32_t half = kPerVec<T> / 2 * vectors;
    sums.all = all[0].of(half) + all[1].of(half), sums.listed = listed.of(sums.count);
  }
  return sums;
}

// The same out of line for all elements, where one limit counts.
template <Listing kListing, typename T>
__device__ __noinline__ MassSums add_masses(RowShare<T> part, Masses masses, float least, int lane) {
  return masses.has_shares()
             ? add_masses_by<true, false, kListing>(part, masses, -INFINITY, least, least, lane)
             : add_masses_by<false, false, kListing>(part, masses, -INFINITY, least, least, lane);
}
template <typename T>
GVR_DEVICE uint64_t add_all_masses(const RowShare<T>& part, const Masses& masses, int lane) {
  return add_masses<Listing::kNone>(part, masses, INFINITY, lane).all;
}

// The sum of what each CTA has in a place of its shared memory. All loads are under way at once. There are 1,
// 2, 4 or 8 CTAs, and eight loads reach each of them equally often. Sums of masses of a part are below 2^60.
GVR_DEVICE uint64_t sum_of_ranks(const Team& team, const uint64_t& place) {
  const uint32_t address = ptx::shared_address(&place);
  uint64_t each[kMaxSampleCtas], sum = 0;
#pragma unroll
  for (int rank = 0; rank < kMaxSampleCtas; ++rank) {
    each[rank] = ptx::load_from_rank(address, rank & (team.ctas - 1));
  }
#pragma unroll
  for (int rank = 0; rank < kMaxSampleCtas; ++rank) sum += each[rank];
  return sum >> __popc(kMaxSampleCtas - team.ctas);
}

// The value up to which elements reach to a key, given without the bits that keys of T have in common.
template <typename T>
GVR_DEVICE float value_of_end(uint32_t key) {
  return KeyInterval::only(whole_key<T>(key)).high();
}

// What has been added to this thread's bin, of which nothing is left there. A block barrier stands within.
GVR_DEVICE uint64_t take_bin(const Team& team) {
  ptx::reconverge(team.zero);
  __syncthreads();
  uint64_t own = 0;
#pragma unroll
  for (int i = Masses::kLimbs - 1; i >= 0; --i) {
    uint32_t& limb = team.smem().limbs[i][team.thread];
    own = (own << kLimbBits) + limb;
    limb = 0;
  }
  return own;
}

// The sum of what the threads of this number have in all CTAs.
GVR_DEVICE uint64_t sum_bin(Team& team, uint64_t own) {
  uint64_t& place = team.smem().bins[team.bins_turn++ & 1][team.thread];
  place = own;
  team.sync();  // All bins are there.
  return sum_of_ranks(team, place);
}

// The elements of a span as values, and how keys make bins.
template <typename T>
struct SpanBins {
  Span span;
  float low, high;
  int shift;

  GVR_DEVICE explicit SpanBins(Span span_)
      : span(span_),
        low(key_to_float(whole_key<T>(span_.low))),
        high(value_of_end<T>(span_.high)),
        shift(span_.shift()) {}
  GVR_DEVICE bool has(float x) const { return x >= low && x <= high; }
  // Adds an element's measure to its bin.
  template <typename Measure>
  GVR_DEVICE void add(const Team& team, const Measure& measure, float x) const {
    const uint32_t bin = min((span.high - (order_key(x) >> kInvariantBits<T>)) >> shift, kBins - 1u);
    const uint64_t value = measure(x);
#pragma unroll
    for (int i = 0; i < Measure::kLimbs; ++i) {
      const uint32_t digit = static_cast<uint32_t>(value >> (i * kLimbBits)) & ((1u << kLimbBits) - 1);
      ptx::add_shared(team.smem().limbs[i][bin], digit, team.zero);
    }
  }
};

// The first bin at which the sum of bins reaches a target, and what that bin holds. Targets are above 0.
struct BinSearch {
  uint64_t before, total;  // the bins before this thread's, and all bins

  GVR_DEVICE BinSearch(const Team& team, uint64_t bin) {
    if (team.thread == 0) team.smem().found.bin = kBins;
    before = next_block_prefix(team, bin, total);  // A barrier stands ahead of it.
  }

  // The bin at which the sum reaches `target`, in all threads behind a block barrier.
  GVR_DEVICE FoundBin find(const Team& team, uint64_t bin, uint64_t target) const {
    if (before < target && target <= before + bin) {
      team.smem().found = FoundBin{before, bin, static_cast<uint32_t>(team.thread)};
    }
    __syncthreads();
    return team.smem().found;
  }
};

// The keys between which a share of the mass of all elements ends, very likely. They follow from how many
// elements lie at which distance from the largest, and the masses of those from the bin of `least` on. Below
// `octaves` all elements together have less mass than the share leaves.
template <typename T>
GVR_DEVICE Span expect_boundary(Team& team, const RowShare<T>& part, const Masses& masses, float octaves,
                                float least, float share) {
  SampleShared& smem = team.smem();
  Records& warps = smem.warps[team.turn & 1];
  constexpr float kSteps = 0x1p23f;    // Numbers from here on lie 1 apart.
  const float range = octaves + 8.0f;  // Elements behind it have no mass that matters.
  const float bins = kBins / range * masses.scale;
  const auto bin_of = [&](float x) {
    return min(__float_as_uint(__fmaf_rd(masses.max - x, bins, kSteps)) - __float_as_uint(kSteps),
               kBins - 1u);
  };
  const uint32_t last_listed = min(bin_of(least), kBins - 2u);
  uint32_t* const counts = smem.limbs[0];
  uint64_t listed_here = 0;
#pragma unroll 1
  for (int j = team.lane; j < part.vectors; j += 32) {
    const uint4 vec = ptx::load_shared(part.address + 16 * j);
    uint32_t bin[kPerVec<T>], nearest = kBins;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      bin[e] = bin_of(element<T>(vec, e));
      nearest = min(nearest, bin[e]);
      ptx::increment_shared(ptx::shared_address(counts + bin[e]));
    }
    if (nearest > last_listed) continue;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (bin[e] <= last_listed) listed_here += masses(element<T>(vec, e));
    }
  }
  ptx::reconverge(team.zero);
  listed_here = warp_sum(listed_here);
  if (team.lane == 0) warps.word[2][team.warp] = listed_here;
  uint64_t own = take_bin(team);
  if (team.thread == 0) {  // This bin is a listed one, so there is room for the masses.
    own = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) own += warps.word[2][w];
  }
  const float all = static_cast<float>(sum_bin(team, own));
  const float count = team.thread > last_listed && team.thread < kBins - 1 ? all : 0.0f;
  const float width = range / kBins, weight = exp2f(-width * (team.thread + 0.5f));
  const float mass = count * weight, upto = warp_prefix(mass, team.lane);
  const float squares = warp_sum(mass * weight), lower = __shfl_up_sync(0xffffffffu, upto, 1);
  if (team.lane == 31) {
    warps.word[0][team.warp] = __float_as_uint(upto), warps.word[1][team.warp] = __float_as_uint(squares);
  }
  // The masses of listed elements, the error of the sum, and the distances of the interval's ends, in
  // octaves, as bits of numbers that are not negative. Sums of floats need not rise from thread to thread, so
  // two threads may find one. Which of them counts must not depend on their order, because all CTAs have to
  // agree.
  uint32_t* const found = smem.maxima;
  if (team.thread == 0) {
    found[0] = __float_as_uint(all * 0x1p-43f), found[1] = found[2] = 0, found[3] = __float_as_uint(range);
  }
  __syncthreads();
  float before = 0.0f, total = 0.0f, variance = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == team.warp) before = total;
    total += __uint_as_float(static_cast<uint32_t>(warps.word[0][w]));
    variance += __uint_as_float(static_cast<uint32_t>(warps.word[1][w]));
  }
  const float begin = before + (team.lane > 0 ? lower : 0.0f), end = before + upto;
  // Of the masses in bins, so much is above the boundary.
  const float listed = __uint_as_float(found[0]), middle = fmaxf(share * (listed + total) - listed, 0.0f);
  if (begin <= middle && middle < end) {
    // Four deviations of the sum: a mass is known up to half a bin. A 2^12th more for the slope of the counts
    // within a bin, and so many elements of the boundary's own bin as chance may have put out of place.
    const float error =
        0.8f * width * sqrtf(variance) + 0x1p-12f * total + weight * (2.0f + 2.0f * sqrtf(count));
    atomicMax(&found[1], __float_as_uint(error));
  }
  __syncthreads();
  const float error = __uint_as_float(found[1]), low = middle + error, high = middle - error;
  const auto octave_of = [&](float sum) {
    return __float_as_uint(width * (team.thread + (sum - begin) / (end - begin)));
  };
  if (begin <= high && high < end) atomicMax(&found[2], octave_of(high));
  if (begin <= low && low < end) atomicMin(&found[3], octave_of(low));
  __syncthreads();
  const auto key_at = [&](uint32_t octave) {
    return order_key(masses.max - __uint_as_float(octave) / masses.scale);
  };
  return Span{key_at(found[3]), key_at(found[2])};
}

// The least key of T, without the bits that its keys have in common, that is not below `key`.
template <typename T>
GVR_DEVICE uint32_t least_narrow(uint32_t key) {
  const uint32_t narrow = key >> kInvariantBits<T>;
  return narrow + (whole_key<T>(narrow) < key);
}

// What a thread knows of its elements when the boundary has been found: those from `low` on lie at `steps`,
// and those from there to `high` at `inside`; of those above `high` there are `count`, with mass `above`.
struct Border {
  float low, high;
  uint64_t steps, inside;
  uint64_t above;
  uint32_t count;

  // The steps at which elements from `least` on lie that are at most `high`, or any from there on.
  GVR_DEVICE uint64_t steps_of(float least) const { return least <= high ? inside : steps; }
};

// All of a thread's elements from `low` on.
template <typename Part>
GVR_DEVICE Border border_from(const Team& team, const Part& part, float low) {
  const uint64_t steps = part.steps_from(low, team.lane);
  return Border{low, INFINITY, steps, steps, 0, 0};
}

// Most elements of an interval that come to all CTAs, in place of bins: searching a list takes no exchange.
constexpr uint32_t kMaxListed = 4 * kBins;
static_assert(kMaxListed * sizeof(float) <= sizeof(SampleShared::bins));

// Sends this thread's elements from `low` on and below `end`, which lie at `steps`, to all CTAs, as numbers
// from `place` on of a list, and returns the list when all `count` elements of the row are there. An exchange
// between all CTAs stands before, so none of them reads bins any more. It is called once in a row, and not in
// one whose candidates are sent: they have the same barrier.
template <typename T>
GVR_DEVICE const float* list_elements(const Team& team, const RowShare<T>& part, uint64_t steps, float low,
                                      float end, uint32_t place, uint32_t count) {
  const uint64_t& barrier = team.smem().barriers[kCandidatesBarrier];
  float* const list = reinterpret_cast<float*>(team.smem().bins);
  if (team.ctas > 1 && team.thread == 0) {
    ptx::barrier_expect_tx(team.address_of(barrier, team.rank), count * sizeof(float));
  }
  part.for_each(
      steps, team.lane, [&](float x, int) { return x >= low && !(x >= end); },
      [&](float x, int) {
        float& item = list[min(place++, kMaxListed - 1)];
        if (team.ctas == 1) {
          item = x;
          return;
        }
        for (int rank = 0; rank < team.ctas; ++rank) {
          ptx::store_async(ptx::map_to_rank(ptx::shared_address(&item), rank), __float_as_uint(x),
                           team.address_of(barrier, rank));
        }
      });
  ptx::reconverge(team.zero);
  if (team.ctas > 1) {
    ptx::barrier_wait(ptx::shared_address(&barrier), 0);
  } else {
    __syncthreads();
  }
  ptx::reconverge(team.zero);
  return list;
}

// Finds the key at which the sum over the elements from `floor` to `top`, and `extra` behind them, reaches a
// target, which `target_of` makes of the whole sum, or of 0 if elements are counted. The boundary is expected
// between two keys, and is found wherever it is. If it lies in `extra`, the key is `floor` - 1. The search
// ends with any key behind the boundary whose sum is at most `enough`.
template <typename T, typename Part, typename Measure, typename TargetOf>
GVR_DEVICE Cut find_cut(Team& team, const Part& part, uint32_t floor, Span expected, uint32_t top,
                        uint64_t extra, const Measure& measure, const TargetOf& target_of, uint64_t& target,
                        Border& border, uint64_t enough = 0) {
  constexpr bool kMasses = Measure::kLimbs > 1;
  const uint32_t first = least_narrow<T>(floor), last = top >> kInvariantBits<T>;
  const auto narrow = [&](uint32_t key) { return min(max(key >> kInvariantBits<T>, first), last); };
  const auto value = [](uint32_t key) { return key_to_float(whole_key<T>(key)); };
  // What is expected of masses may be narrower than a key of 16 bits.
  constexpr uint32_t kWider = kMasses && kInvariantBits<T> > 0;
  const uint32_t high = min(narrow(expected.high) + kWider, last);
  Span span{min(max(narrow(expected.low), first + kWider) - kWider, high), high};
  const float low = value(span.low);
  Cut cut{floor - 1, 0, 0, false};
  uint64_t steps;
  // Searches the span by sums of bins, which sum_of(span) makes. Returns whether the cut is found.
  const auto search = [&](const auto& sum_of) {
#pragma unroll 1
    while (true) {
      const uint64_t bin = sum_of(SpanBins<T>(span));
      const BinSearch bins(team, bin);
      const FoundBin found = bins.find(team, bin, target - cut.above);
      if (found.bin == kBins) {
        cut.above += bins.total;
        return false;
      }
      cut.above += found.above, cut.at = found.at;
      span = span.bin(found.bin);
      cut.key = whole_key<T>(span.low);
      if (span.low == span.high || cut.above + found.at <= enough) return true;
      // Two elements of the bin would have more.
      cut.ends_with_one = kMasses && found.at < 2 * measure(value(span.low));
      if (cut.ends_with_one) return true;
    }
  };
  const auto search_row = [&] {
    return search([&](const SpanBins<T>& bins) {
      part.for_each(
          steps, team.lane, [&](float x, int) { return bins.has(x); },
          [&](float x, int) { bins.add(team, measure, x); });
      return sum_bin(team, take_bin(team));
    });
  };
  bool found = false;
  if constexpr (kMasses) {
    const float begin = value(first), end = value(span.high + 1);
    const bool all_count = floor == kLeastFiniteKey;
    const MassSums mine =
        measure.has_shares()
            ? all_count
                  ? add_masses_by<true, false, Listing::kMany>(part, measure, begin, low, end, team.lane)
                  : add_masses_by<true, true, Listing::kMany>(part, measure, begin, low, end, team.lane)
            : add_masses_by<false, true, Listing::kMany>(part, measure, begin, low, end, team.lane);
    border = Border{low, value_of_end<T>(span.high), mine.steps, mine.inside, mine.listed, mine.count};
    steps = border.inside;
    ptx::reconverge(team.zero);
    const uint32_t upto = ptx::inclusive_scan(mine.count_inside);
    const WarpSums sums = sum_warps<3>(
        team, Record{{warp_sum(mine.all), warp_sum(mine.listed), __shfl_sync(0xffffffffu, upto, 31)}});
    const uint64_t all = sums.all.word[0], above = sums.all.word[1], listed = sums.all.word[2];
    target = target_of(all + extra);
    if (target > all) return Cut{floor - 1, all, 0, false};
    if (target <= above) {
      border = border_from(team, part, end), steps = border.steps;
      span = Span{span.high + 1, last};
      search_row();
      return cut;
    }
    cut.above = above;
    if (listed <= kMaxListed) {
      const uint32_t place = static_cast<uint32_t>(sums.before(team, 2)) + upto - mine.count_inside;
      const float* const list =
          list_elements(team, part, steps, low, end, place, static_cast<uint32_t>(listed));
      found = search([&](const SpanBins<T>& bins) {
#pragma unroll 1
        for (uint32_t i = team.thread; i < listed; i += kThreads) {
          if (bins.has(list[i])) bins.add(team, measure, list[i]);
        }
        return take_bin(team);
      });
    } else {
      found = search_row();
    }
  } else {
    target = target_of(0);
    border = border_from(team, part, low), steps = border.inside;
    found = search_row();
  }
  if (found || span.low == first) return cut;
  // Below this span there is another.
  span = Span{first, span.low - 1};
  border = border_from(team, part, value(first)), steps = border.steps;
  search_row();
  return cut;
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
