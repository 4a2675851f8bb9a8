// Gives values and indices of the items that the decode op has selected, and sorts them by value. Items come
// by ascending position, so a stable sort leaves equal values in the order of their positions.
//
// Grid: a CTA for each row (`sort_items`), a warp for each row of few items (`sort_few`), or a thread for
// each item that stays where it is (`list_items`). Of rows of more items than a CTA sorts, a thread for each
// item makes a number (`number_items`), CUB sorts the numbers of many rows at once, and `list_items` follows.
// Ahead of the selection a thread for each row writes its length, or where the smallest are selected, CTAs
// for each row make numbers to select by, too (`prepare_selection`).
#pragma once

#include <cub/block/block_radix_sort.cuh>

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::topk_items {

constexpr int kFew = 32, kFewThreads = 128, kListThreads = 256, kPrepareChunk = 16 * kListThreads;
constexpr int kRadixBits = 4;
constexpr int kMostSorted = 8192;        // by one CTA, in registers
constexpr uint32_t kLast = 0xffffffffu;  // ranks behind every number

// The items of one row, by their places. A position outside of the row is an item of index -1 and value NaN
// that ranks last, and like NaN among the smallest.
struct RowItems {
  const TopkItemsParams& p;
  int64_t row;

  GVR_DEVICE int32_t position(int place) const { return checked(p.positions[row * p.k + place]); }
  GVR_DEVICE int32_t checked(int32_t at) const {
    return static_cast<uint32_t>(at) < static_cast<uint32_t>(p.width) ? at : -1;
  }

  GVR_DEVICE uint32_t bits(int32_t position) const {
    const int64_t at = row * p.scores_stride + position;
    if (p.dtype == Dtype::kFloat32) return static_cast<const uint32_t*>(p.scores)[at];
    return static_cast<const uint16_t*>(p.scores)[at];
  }

  // A number that ascends from the best item to the worst.
  GVR_DEVICE uint32_t rank_key(int32_t position) const {
    if (position < 0) return kLast;
    const uint32_t key = order_key(p.dtype, bits(position));
    return p.reversed == nullptr ? ~key : key;
  }

  GVR_DEVICE void write(int place, int32_t position) const {
    const int64_t at = row * p.k + place;
    if (p.values != nullptr) {
      const uint32_t value = position < 0 ? kLast : bits(position);
      if (p.dtype == Dtype::kFloat32) {
        static_cast<uint32_t*>(p.values)[at] = value;
      } else {
        static_cast<uint16_t*>(p.values)[at] = static_cast<uint16_t>(value);
      }
    }
    const bool is_named = p.candidates != nullptr && position >= 0;
    p.indices[at] = is_named ? p.candidates[row * p.width + position] : position;
  }
};

// A number that ranks opposite to a score, and below all others for NaN. Negation alone would leave NaN on
// top. So every number moves up to the next one, which frees -inf for NaN: the largest finite number becomes
// +inf, and +inf becomes NaN.
GVR_DEVICE float reversed(uint32_t key) {
  const float negated = -key_to_float(key);
  if (isnan(negated)) return -INFINITY;
  return negated == INFINITY ? NAN : nextafterf(negated, INFINITY);
}

// Each row has `chunks` CTAs, or if that is 0 a thread that writes its length.
static __global__ void __launch_bounds__(kListThreads)
    prepare_selection(const __grid_constant__ TopkItemsParams p, int chunks) {
  ptx::grid_take_over();
  const int thread = static_cast<int>(threadIdx.x);
  if (chunks == 0) {
    const int64_t row = int64_t{blockIdx.x} * kListThreads + thread;
    if (row < p.rows) p.lengths[row] = p.width;
    return;
  }
  const RowItems items{p, blockIdx.x / chunks};
  float* const to = p.reversed + items.row * p.reversed_stride;
  const int first = static_cast<int>(blockIdx.x % chunks) * kPrepareChunk;
  const int end = min(first + kPrepareChunk, p.width);
  if (first == 0 && thread == 0) p.lengths[items.row] = p.width;
#pragma unroll 4
  for (int i = first + thread; i < end; i += kListThreads) {
    to[i] = reversed(order_key(p.dtype, items.bits(i)));
  }
}

static __global__ void __launch_bounds__(kFewThreads) sort_few(const __grid_constant__ TopkItemsParams p) {
  ptx::grid_take_over();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const RowItems items{p, int64_t{blockIdx.x} * (kFewThreads / 32) + threadIdx.x / 32};
  if (items.row >= p.rows) return;
  const int32_t position = lane < p.k ? items.position(lane) : -1;
  const uint32_t key = lane < p.k ? items.rank_key(position) : kLast;
  ptx::reconverge(ptx::unknown_zero());
  int place = 0;
  for (int i = 0; i < p.k; ++i) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, i);
    place += other < key || (other == key && i < lane);
  }
  if (lane < p.k) items.write(place, position);
}

template <int kSortThreads, int kEach>
struct SortShared {
  using Sort = cub::BlockRadixSort<uint32_t, kSortThreads, kEach, int32_t, kRadixBits>;
  static constexpr int kSortWarps = kSortThreads / 32;

  typename Sort::TempStorage sort;
  uint32_t set[kSortWarps], unset[kSortWarps];  // bits of the keys of each warp

  // Which bits differ among all keys, from those that are set, and unset, in any key of this thread.
  GVR_DEVICE uint32_t differing_bits(uint32_t is_set, uint32_t is_unset, int thread) {
    ptx::reconverge(ptx::unknown_zero());
    is_set = __reduce_or_sync(0xffffffffu, is_set);
    is_unset = __reduce_or_sync(0xffffffffu, is_unset);
    if (thread % 32 == 0) {
      set[thread / 32] = is_set;
      unset[thread / 32] = is_unset;
    }
    __syncthreads();
    for (int i = 0; i < kSortWarps; ++i) {
      is_set |= set[i];
      is_unset |= unset[i];
    }
    return is_set & is_unset;
  }
};

template <int kSortThreads, int kEach>
__global__ void __launch_bounds__(kSortThreads) sort_items(const __grid_constant__ TopkItemsParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& smem = *reinterpret_cast<SortShared<kSortThreads, kEach>*>(shared);
  ptx::grid_take_over();
  const int thread = static_cast<int>(threadIdx.x);
  const RowItems items{p, blockIdx.x};
  int32_t position[kEach];
  uint32_t key[kEach], is_set = 0, is_unset = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int place = kEach * thread + i;
    position[i] = place < p.k ? items.position(place) : -1;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    key[i] = items.rank_key(position[i]);
    if (kEach * thread + i >= p.k) continue;
    is_set |= key[i];
    is_unset |= ~key[i];
  }
  // Only the bits that differ are sorted by, without those that say nothing in 16-bit numbers.
  const uint32_t differing = smem.differing_bits(is_set, is_unset, thread);
  const int begin = max(__ffs(static_cast<int>(differing)) - 1, invariant_bits(p.dtype));
  const int end = max(32 - __clz(static_cast<int>(differing)), begin + 1);
  typename SortShared<kSortThreads, kEach>::Sort(smem.sort).SortBlockedToStriped(key, position, begin, end);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int place = kSortThreads * i + thread;
    if (place < p.k) items.write(place, position[i]);
  }
}

// The number of an item: its row, its `rank_key`, and its position. Numbers ascend in the order of the
// output, and a stable sort need not look at positions.
constexpr int kPositionBits = 22, kRowShift = kPositionBits + 32, kMostRows = 1 << (64 - kRowShift);
constexpr uint32_t kPositionMask = (1u << kPositionBits) - 1;
static_assert(kMaxWidth <= kPositionMask, "-1 is the number of no position");

// Numbers `count` items of rows from `first` on.
static __global__ void __launch_bounds__(kListThreads)
    number_items(const __grid_constant__ TopkItemsParams p, int first, int64_t count, uint64_t* numbers) {
  ptx::grid_take_over();
  const int64_t at = int64_t{blockIdx.x} * kListThreads + threadIdx.x, row = at / p.k;
  if (at >= count) return;
  const RowItems items{p, first + row};
  const int32_t position = items.position(static_cast<int>(at - row * p.k));
  numbers[at] = static_cast<uint64_t>(row) << kRowShift |
                static_cast<uint64_t>(items.rank_key(position)) << kPositionBits |
                (static_cast<uint32_t>(position) & kPositionMask);
}

// Writes them in the order of their sorted numbers, or if these are null by ascending positions.
static __global__ void __launch_bounds__(kListThreads)
    list_items(const __grid_constant__ TopkItemsParams p, int first, int64_t count, const uint64_t* numbers) {
  ptx::grid_take_over();
  const int64_t at = int64_t{blockIdx.x} * kListThreads + threadIdx.x, row = at / p.k;
  if (at >= count) return;
  const RowItems items{p, first + row};
  const int place = static_cast<int>(at - row * p.k);
  items.write(place, numbers == nullptr ? items.position(place)
                                        : items.checked(static_cast<int32_t>(numbers[at] & kPositionMask)));
}

}  // namespace gvr_topk::topk_items
