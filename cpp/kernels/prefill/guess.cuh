// Phase 1, guess: finds an interval that should hold the k-th value, from a sample of the row. Where the rows
// before predict well, their interval is used instead (`RowPredictor`).
//
// The histogram over a range of keys, in which the bins of two ranks are located, serves radix rounds, too.
#pragma once

#include "core/config.cuh"
#include "core/key_range.cuh"
#include "prefill/config.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

// Two ranks, counted from the greatest key down, among all keys in the range and above it.
struct RankPair {
  uint32_t upper, lower;
};

// Empties the bins. Block barriers separate this from the uses before and after. `Shared` is the shared
// memory of this kernel or of that of slices (prefill_slice/config.cuh).
template <typename Shared>
GVR_DEVICE void empty_key_bins(Shared& smem) {
#pragma unroll
  for (int i = 0; i < kKeyBins / 4; i += kBlockThreads) {
    reinterpret_cast<uint4*>(smem.key_bins)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    smem.above_range = 0;
    smem.hits[0] = smem.hits[1] = BinHit{0, 0, 0};
  }
}

// The same, within block barriers.
template <typename Shared>
GVR_DEVICE void clear_key_bins(Shared& smem) {
  __syncthreads();  // The memory's previous use has ended in all threads.
  empty_key_bins(smem);
  __syncthreads();
}

// Finds the bins of both ranks, and leaves them in `hits` for all threads. `above`: keys that this thread has
// counted above the range. `count` is 0 for a rank that does not lie in the range.
template <typename Shared>
GVR_DEVICE void locate_ranks(Shared& smem, uint32_t above, const RankPair& ranks) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  ptx::reconverge(ptx::unknown_zero());  // Lanes have counted different keys.
  above = __reduce_add_sync(0xffffffffu, above);
  if (lane == 0 && above > 0) atomicAdd(&smem.above_range, above);
  ptx::reconverge(ptx::unknown_zero());
  __syncthreads();
  ThreadBins<kKeyBins / kBlockThreads> own(smem.key_bins, thread);
  if (lane == 0) smem.warp_sums[0][warp] = own.above + own.sum;
  __syncthreads();
  own.add_warps_above(smem.warp_sums[0], kBlockWarps, warp, lane);
  own.above += smem.above_range;
  if (own.holds(ranks.upper)) smem.hits[0] = own.find(ranks.upper);
  if (own.holds(ranks.lower)) smem.hits[1] = own.find(ranks.lower);
  ptx::reconverge(ptx::unknown_zero());
  __syncthreads();
}

// A sample of the row. A probe is four neighbouring elements, and each stratum of the row has one probe. The
// probes of rows of up to 131,072 elements stay in registers for all rounds, because memory latency is long
// while rows stream. So the next row's are loaded before the CTA selects from this one.
template <typename T>
struct RowSample {
  static constexpr int kElements = 4, kInRegisters = 4;  // elements of a probe; probes of a thread

  int32_t row;  // the row sampled, or -1
  const T* data;
  int first, vecs;  // first and number of the whole vectors of four inside the window
  int log2_probes;  // log2 of the probes of each thread
  int loaded;       // first of the probes that are in registers
  uint32_t word[kInRegisters][sizeof(T)];

  GVR_DEVICE RowSample() : row(-1) {}
  GVR_DEVICE RowSample(const AlignedWindow<T>& window, int32_t row_) : row(row_), data(window.data) {
    first = (window.lead + kElements - 1) / kElements;
    vecs = max(window.length / kElements - first, 0);
    // The sample takes one element in 16 to 32. A smaller sample would fluctuate so much that intervals would
    // be wider than the list of candidates has room for.
    constexpr int kLog2OfProbe = 10 + 5;
    static_assert(1 << kLog2OfProbe == 32 * kElements * kBlockThreads);
    log2_probes = max(32 - __clz(window.length - 1) - kLog2OfProbe, 0);
    load(0);
  }

  GVR_DEVICE uint32_t elements() const { return kElements * kBlockThreads << log2_probes; }

  // Calls visit(key) for each element that this thread probes.
  template <typename Visit>
  GVR_DEVICE void for_each(Visit visit) {
    const int probes = 1 << log2_probes;
#pragma unroll 1
    for (int begin = 0; begin < probes; begin += kInRegisters) {
      if (begin != loaded) load(begin);
#pragma unroll
      for (int i = 0; i < kInRegisters; ++i) {
        if (begin + i >= probes) break;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          visit(order_key(to_float(reinterpret_cast<const T*>(word[i])[e])) >> kInvariantBits<T>);
        }
      }
    }
  }

 private:
  GVR_DEVICE void load(int begin) {
    loaded = begin;
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i) {
      ptx::load_if(vecs > 0 && begin + i < 1 << log2_probes, word[i], probe(begin + i));
    }
  }

  // The position within each stratum is hashed, because strided ones would be biased where scores repeat.
  GVR_DEVICE const T* probe(int number_of_thread) const {
    const uint32_t number = number_of_thread * kBlockThreads + threadIdx.x;
    const uint64_t begin = uint64_t{number} * static_cast<uint32_t>(vecs);
    const uint32_t within = __umulhi(number * 2654435761u, static_cast<uint32_t>(vecs));
    const int vec = first + static_cast<int>((begin + within) / kBlockThreads >> log2_probes);
    return data + kElements * static_cast<int64_t>(vec);
  }
};

// The range of keys around the last row's k-th value, or all keys if there is none. If both ends of the
// interval lie in this range, one histogram round is enough.
template <typename T>
GVR_DEVICE KeyRange range_around(const RowPredictor& last) {
  constexpr float kElements = 8192.0f;
  KeyRange range{0, kMaxKey >> kInvariantBits<T>};
  if (last.rows == 0) return range;
  const float radius = 0.5f * kElements * last.per_element;
  const uint32_t low = order_key(last.value - radius) >> kInvariantBits<T>;
  const uint32_t high = order_key(last.value + radius) >> kInvariantBits<T>;
  return low < high ? KeyRange{low, high - low} : range;
}

// The interval that should hold the k-th value, from a sample of the row. Its ends are order statistics of
// the sample, so many standard deviations above and below the rank expected of the k-th value.
template <typename T, typename Shared>
GVR_DEVICE ValueInterval guess_by_sample(Shared& smem, const AlignedWindow<T> window, int k,
                                         const RowPredictor& last, RowSample<T>& sample) {
  constexpr float kDeviations = 3.5f;
  constexpr float kLoose = 1.1f;  // An interval may hold this multiple of the sample elements intended.
  constexpr int kMaxRounds = 4;
  KeyRange range = range_around<T>(last);
  bool predicted = last.rows > 0;
  const float share = __fdividef(static_cast<float>(k), static_cast<float>(window.length - window.lead));
  const float expected = share * static_cast<float>(sample.elements());
  const float margin = fmaf(kDeviations, sqrtf(expected * (1.0f - share)), 1.0f);
  const uint32_t size = sample.elements();
  const RankPair ranks{expected > margin ? static_cast<uint32_t>(expected - margin) : 0,
                       static_cast<uint32_t>(expected + margin) + 1};
  KeyInterval bins{kLeastFiniteKey, kMostFiniteKey, kGuessRowSample};
  if (sample.vecs > 0) {
#pragma unroll 1
    for (int round = 0; round < kMaxRounds; ++round) {
      const int shift = range.shift<kLog2KeyBins>();
      clear_key_bins(smem);
      RadixBins counted{smem.key_bins, range, shift};
      sample.for_each([&](uint32_t key) { counted.add(key); });
      locate_ranks(smem, counted.above, RankPair{max(ranks.upper, 1u), min(ranks.lower, size)});
      const BinHit upper = smem.hits[0], lower = smem.hits[1];
      if (upper.count == 0 || lower.count == 0) {
        if (!predicted) break;  // The row was overwritten between two rounds.
        predicted = false;
        range = KeyRange{0, kMaxKey >> kInvariantBits<T>};
        continue;
      }
      KeyRange top = range, bottom = range;
      top.narrow(upper.bin, shift);
      bottom.narrow(lower.bin, shift);
      range = KeyRange{bottom.base, top.base + top.length - bottom.base};
      bins.hi = min(whole_key<T>(top.base + top.length), kMostFiniteKey);
      bins.lo = max(whole_key<T>(bottom.base), kLeastFiniteKey);
      const uint32_t inside = lower.above + lower.count - upper.above;
      if (range.length == 0 || static_cast<float>(inside) <= kLoose * 2.0f * margin) break;
    }
  }
  const KeyInterval interval{ranks.lower <= size ? bins.lo : kLeastFiniteKey,
                             ranks.upper > 0 ? bins.hi : kMostFiniteKey, kGuessRowSample};
  __syncthreads();  // All threads have read the hits.
  return ValueInterval{interval.low(), interval.high(), bins.low(), bins.high()};
}

// Moves the interval of a sample that has missed, for another pass (core/key_range.cuh). Returns false if
// radix rounds must decide, as where an end of the interval is no order statistic.
GVR_DEVICE bool move_value_interval(ValueInterval& missed, uint32_t above, uint32_t inside, int k) {
  KeyInterval keys{order_key(missed.first), order_key(missed.last), kGuessNone};
  if (missed.lo != missed.first || missed.hi != missed.last) return false;
  if (!move_by_counts(above, inside, static_cast<uint32_t>(k), kListItems, keys)) return false;
  const float first = keys.low(), last = keys.high();
  missed = ValueInterval{first, last, first, fminf(last, first + missed.width())};
  return true;
}

}  // namespace gvr_topk::prefill
