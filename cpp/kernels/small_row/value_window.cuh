// The predictor of short rows: a window of values around the k-th value of the last step.
//
// Even bins of the window leave the k-th value alone with a few others, so that one round is enough.
#pragma once

#include "cluster/step_state.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "small_row/partition.cuh"

namespace gvr_topk::small_row {

// The window is packed into one negative float (`is_window`); z-scores and hint shares are not negative.
template <int kBins>
struct ValueWindow {
  static constexpr int kUnits = kWindowUnits, kMostCentre = 1 << 22;
  static constexpr uint32_t kExponent = 0x7f800000u, kMantissa = 0x007fffffu, kSign = 0x80000000u;
  static constexpr uint32_t kLowestExponent = 1u << 23;

  float scale, bias;

  // Unpacks a float for which `is_window` holds.
  GVR_DEVICE explicit ValueWindow(float packed_window) {
    const uint32_t bits = __float_as_uint(packed_window);
    const int centre = static_cast<int>(bits << 9) >> 9;
    scale = __uint_as_float(kSign | ((253u << 23) - (bits & kExponent)));  // -1 / (2 radius)
    bias = fmaf(static_cast<float>(centre), 0.5f / kUnits, 0.5f);
  }

  // Returns the bin of a value, plus first_bin(). A greater value, and NaN, lies in no lower bin. Everything
  // above the window falls into the last bin, everything below into the first.
  GVR_DEVICE static uint32_t first_bin() { return __float_as_uint(ptx::kIntegerBase); }
  GVR_DEVICE uint32_t bin(float x) const {
    const float depth = __saturatef(fmaf(x, scale, bias));  // NaN becomes zero.
    return __float_as_uint(fmaf(depth, 1.0f - kBins, ptx::kIntegerBase + (kBins - 1.0f)));
  }

  // Returns the window to leave after a step whose k-th value was found in this bin, with `near` elements in
  // the bins of the same warp. The window moves along with the value. It doubles if the value moved far, and
  // halves if the value hardly moves or elements are dense, until bins hold about one element. The first and
  // the last warp also count the elements outside of the window, so a window whose k-th value is in one of
  // their bins mostly halves, however far the value moved.
  GVR_DEVICE static float updated(float packed_window, uint32_t bin, uint32_t near) {
    constexpr int kSteady = kBins / 128, kFar = kBins / 32;
    constexpr uint32_t kSparse = 1 << kLog2Group, kFew = 4 * kSparse, kDense = 8 * kSparse;
    const int move = static_cast<int>(bin) - kBins / 2;
    const bool wider = abs(move) >= kFar && near < kFew;
    const bool narrower = near > kDense || (abs(move) < kSteady && near > kSparse);
    const uint32_t bits = __float_as_uint(packed_window);
    int centre = (static_cast<int>(bits << 9) >> 9) + (move >> log2_of(kBins / 2 / kUnits));
    uint32_t exponent = bits & kExponent;
    if (wider) exponent += kLowestExponent, centre >>= 1;
    if (narrower) exponent -= kLowestExponent, centre <<= 1;
    return packed(exponent, centre);
  }

  // Returns the window to leave after a step that had none; the radius is rounded down.
  GVR_DEVICE static float around(float kth, float radius) {
    const uint32_t exponent = __float_as_uint(radius) & kExponent;
    const float centre = kth * __uint_as_float((260u << 23) - exponent);
    return packed(exponent, fabsf(centre) < kMostCentre ? __float2int_rn(centre) : kMostCentre);
  }

 private:
  // Packs a window. Extreme radii, and centres that do not fit, become kStateUnknown.
  GVR_DEVICE static float packed(uint32_t exponent, int centre) {
    constexpr uint32_t kLeast = 67u << 23, kMost = 187u << 23;
    const bool sound = exponent - kLeast <= kMost - kLeast && abs(centre) < kMostCentre;
    const uint32_t bits = kSign | exponent | (static_cast<uint32_t>(centre) & kMantissa);
    // No valid window may be equal to kStateUnknown. A centre one unit off makes no difference.
    const uint32_t no_state = __float_as_uint(kStateUnknown);
    return __uint_as_float(!sound ? no_state : bits == no_state ? bits + 1 : bits);
  }
};

// Counts values in the bins of a window, in the first set of the block's bins.
template <typename Bins>
struct ValueWindowCounter {
  using WindowType = ValueWindow<Bins::kBins>;

  WindowType value_window;
  uint32_t first;

  GVR_DEVICE ValueWindowCounter(const Bins& bins, float packed_window)
      : value_window(packed_window),
        first(ptx::shared_address(bins.set[0]) - sizeof(uint32_t) * WindowType::first_bin()) {
    ptx::keep(first);
  }

  // Returns the bin, plus WindowType::first_bin().
  GVR_DEVICE uint32_t count(float value) const {
    const uint32_t bin = value_window.bin(value);
    ptx::increment_shared(first + sizeof(uint32_t) * bin);
    return bin;
  }
};

// Stores a window for the next step if `next` is not null. A state is stored as a whole, because rows of any
// length may name its slot; in shared memory a window stands alone.
GVR_DEVICE void store_window(StepState* next, float packed_window) {
  store_state_if(next != nullptr, next, StepState{packed_window, 0.0f, 0.0f, 0});
}
GVR_DEVICE void store_window(float* next, float packed_window) {
  ptx::store_shared_if(next != nullptr, ptx::shared_address(next), packed_window);
}

// Partitions a row by the bins of the last step's window. All warps have counted their elements in these
// bins, and a block barrier has followed. Returns false if the k-th element lies outside the window, or
// shares its bin with too many elements. The thread whose `next` is not null stores the next window there.
// bin_of(i) is the bin of element i.
template <typename Context, typename Tile, typename Bins, typename Next, typename BinOf>
GVR_DEVICE bool partition_by_window(const Context& ctx, const Tile& tile, Bins& bins, float packed_window,
                                    Next* next, PartitionOf<Tile>& partition, BinOf bin_of) {
  using WindowType = ValueWindow<Bins::kBins>;
  const BinHit hit = locate(ctx, bins, bins.set[0], bins.set[1], false, ctx.k);
  if (hit.count > kRankDirectly || hit.bin - 1 > Bins::kBins - 3) return false;
  if (__any_sync(0xffffffffu, next != nullptr)) {  // All lanes of a warp compute, so that none comes apart.
    const uint32_t near = bins.group[hit.bin >> kLog2Group];
    store_window(next, WindowType::updated(packed_window, hit.bin, near));
  }
  partition.rank = ctx.k - hit.above;
  partition.boundary_count = hit.count;
  // The class of an element: 0 below the bin, 1 inside, 2 above.
  int offset = 1 - static_cast<int>(hit.bin + WindowType::first_bin());
  ptx::keep(offset);
  uint32_t classes[Tile::kWords] = {};
  tile.for_each_index([&](int i) {
    const uint32_t element_class = __viaddmin_s32_relu(static_cast<int>(bin_of(i)), offset, 2);
    classes[i / kValuesPerThread] += element_class << 2 * (i % kValuesPerThread);
  });
#pragma unroll
  for (int w = 0; w < Tile::kWords; ++w) {
    partition.above.word[w] = classes[w] >> 1 & kLowerBits;
    partition.inside.word[w] = classes[w] & kLowerBits;
  }
  return true;
}

// Counts a row in the bins of the last step's window, and partitions it by them (`partition_by_window`).
template <typename Context, typename Tile, typename Bins>
GVR_DEVICE bool try_predicted_window(const Context& ctx, const Tile& tile, Bins& bins, float packed_window,
                                     StepState* next, PartitionOf<Tile>& partition) {
  ValueWindowCounter<Bins> counter(bins, packed_window);
  // If registers are short, bins are computed again.
  constexpr bool kKeepsBins = Tile::kKeepsBins;
  uint32_t bin[kKeepsBins ? Tile::kSize : 1];
  tile.for_each_index([&](int i) {
    const uint32_t value_bin = counter.count(tile.value(i));
    if (kKeepsBins) bin[i] = value_bin;
  });
  __syncthreads();
  if (!kKeepsBins) ptx::keep(counter.value_window.scale);  // Otherwise the compiler would keep the bins.
  return partition_by_window(ctx, tile, bins, packed_window, next, partition, [&](int i) {
    return kKeepsBins ? bin[i] : counter.value_window.bin(tile.value(i));
  });
}

}  // namespace gvr_topk::small_row
