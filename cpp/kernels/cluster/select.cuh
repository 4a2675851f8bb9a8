// Phase 4, refine: finds the exact k-th key among the listed keys. Every CTA finds it for itself, in its own
// copy of the list. From that follow the offsets of selected elements in the output: the number of elements
// that are selected before each one, in index order.
#pragma once

#include "cluster/messages.cuh"
#include "cluster/row_context.cuh"
#include "core/config.cuh"
#include "core/histogram.cuh"
#include "core/key_range.cuh"
#include "core/lane_ranks.cuh"

namespace gvr_topk {

// This thread's part of the keys that the cluster has listed. The block's threads are divided evenly over the
// segments. The thread's first few keys stay in registers.
struct ListedKeys {
  static constexpr int kInRegisters = 4;  // `for_each` visits each of them by name
  uint32_t first[kInRegisters];
  const uint32_t* keys;  // from this thread's first key on
  int count;             // keys from the warp's first one to the segment's end
  int lane;
  int stride;
  int cta;  // the CTA that has listed them; the same for a warp, because there are at most as many as warps

  template <typename T>
  GVR_DEVICE explicit ListedKeys(const RowContext<T>& ctx) : lane(ctx.lane), stride(ctx.team_size()) {
    const int log2_warps = log2_of(kWarps) - ctx.log2_ctas;  // of a segment
    const int begin = 32 * (ctx.warp & ((1 << log2_warps) - 1));
    cta = ctx.warp >> log2_warps;
    keys = ctx.list.of(cta) + begin + lane;
    const uint32_t listed = ctx.shared->header[cta].counts.listed;
    count = static_cast<int>(min(listed, static_cast<uint32_t>(ctx.list.segment()))) - begin;
#pragma unroll
    for (int j = 0; j < kInRegisters; ++j) first[j] = at(j * stride);
  }

  GVR_DEVICE uint32_t at(int i) const { return i + lane < count ? keys[i] : kAbsentKey; }

  // Calls visit(key) for each of this thread's keys, and as often in all lanes of a warp. Some of these keys
  // may be absent.
  template <typename Visit>
  GVR_DEVICE void for_each(Visit visit) const {
    visit(first[0]);  // The first two are hardly ever absent, so there is no test.
    visit(first[1]);
    if (2 * stride >= count) return;
    visit(first[2]);
    visit(first[3]);
#pragma unroll 4
    for (int i = kInRegisters * stride; i < count; i += stride) visit(at(i));
  }
};

// The end of the selection. Every key above `key` is selected, and the first `tie_quota` of the `tie_count`
// elements equal to it.
struct Threshold {
  uint32_t key;
  uint32_t tie_quota;
  uint32_t tie_count;

  GVR_DEVICE bool takes_all() const { return tie_quota == tie_count; }
};

// The threshold at the rank-th largest of the first `count` keys in `few_keys`.
GVR_DEVICE Threshold threshold_of_few(const Shared& smem, uint32_t rank, int count, int lane) {
  const uint32_t mine = lane < count ? smem.few_keys[lane] : kAbsentKey;
  const uint32_t key = rank_directly(mine, count, rank, lane);
  const uint32_t above = __popc(__ballot_sync(0xffffffffu, mine > key));
  return Threshold{key, rank - above, static_cast<uint32_t>(__popc(__ballot_sync(0xffffffffu, mine == key)))};
}

// The threshold at the k-th key, which is the `result.rank`-th largest inside the interval. Histograms of
// 1024 bins narrow the key range by 10 bits per round. The rounds end when all keys of a bin are selected
// (then the bin's lower edge serves as the k-th key, because no element lies between), or when few enough
// keys are left to be ranked directly.
template <typename T>
GVR_DEVICE Threshold select_kth(const RowContext<T>& ctx, const KeyInterval& interval,
                                const ListedKeys& listed, const CountResult& result, int& rounds) {
  Shared& smem = *ctx.shared;
  constexpr int kInvariant = kInvariantBits<T>;
  const uint32_t tie_key = interval.tie_key();
  // The range consists of keys without their invariant low bits. It lies above the absent key, whose distance
  // from the base wraps, so that the absent key is never inside.
  KeyRange range{interval.lo >> kInvariant, 0};
  if (whole_key<T>(range.base) < interval.lo) ++range.base;  // The range holds no key below the interval.
  range.length = (interval.hi >> kInvariant) - range.base;
  // Elements of the tie key are counted, not listed.
  const auto has_tie_key = [&] { return tie_key != kAbsentKey && range.contains(tie_key >> kInvariant); };
  uint32_t rank = result.rank;
  uint32_t inside = result.inside;
  bool cleared = true;  // The histogram and `few_count` were cleared before the lists were made.
#pragma unroll 1
  while (range.length != 0 && rank != inside) {
    if (inside <= kRankDirectly) {
      listed.for_each([&](uint32_t x) {
        if (range.contains(x >> kInvariant)) add_small(smem, x);
      });
      if (ctx.thread == 0 && has_tie_key()) {
        for (uint32_t i = 0; i < min(result.equal, uint32_t{kRankDirectly}); ++i) {
          add_small(smem, tie_key);
        }
      }
      __syncthreads();
      return threshold_of_few(smem, rank, static_cast<int>(inside), ctx.lane);
    }
    const int shift = range.shift<Histogram::kLog2Bins>();
    if (!cleared) {
      __syncthreads();  // All threads have finished the last `locate`.
      smem.keys.template clear<kThreads>();
      __syncthreads();
    }
    cleared = false;
    listed.for_each([&](uint32_t x) {
      const uint32_t key = x >> kInvariant;
      smem.keys.add(range.contains(key) ? range.bin(key, shift) : Histogram::kBins);
    });
    if (has_tie_key()) {
      if (ctx.thread == 0) smem.keys.add(range.bin(tie_key >> kInvariant, shift), result.equal);
      ptx::reconverge(ctx.zero);
    }
    __syncthreads();
    ++rounds;
    const BinHit hit = smem.keys.locate(rank, ctx.thread);
    rank -= hit.above;
    inside = hit.count;
    range.narrow(hit.bin, shift);
    // Keys of values around zero lie far apart. Without this, rounds would go on although only ties of the
    // tie key are left.
    if (inside == result.equal && has_tie_key()) range = KeyRange{tie_key >> kInvariant, 0};
  }
  return Threshold{whole_key<T>(range.base), rank, inside};
}

// Counts are packed in pairs. The lower half counts elements above the threshold, or all selected elements if
// no tie is left out. The upper half counts ties. Neither half overflows, because the keys that a cluster
// lists and the elements that one CTA holds are together fewer than 2^16 (`fits`). Masked rows have more ties
// than that, and do not pack those of earlier CTAs (resident/resolve_miss.cuh).
GVR_DEVICE uint32_t packed_count(uint32_t key, const Threshold& threshold) {
  if (key < threshold.key) return 0;
  return key > threshold.key || threshold.takes_all() ? 1 : 1 << 16;
}

// Returns the packed count of an element of the row. `level` is the threshold's key as a value.
GVR_DEVICE uint32_t packed_count(float value, float level, const Threshold& threshold) {
  if (value < level) return 0;
  return threshold.takes_all() || value != level ? 1 : 1 << 16;
}

// Counts the selected keys among those that earlier CTAs have listed. The counts are read behind a block
// barrier.
template <typename T>
GVR_DEVICE void count_listed(const RowContext<T>& ctx, const ListedKeys& listed, const Threshold& threshold) {
  uint32_t counts = 0;
  if (listed.cta < ctx.rank) {
    listed.for_each([&](uint32_t x) { counts += packed_count(x, threshold); });
  }
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (ctx.lane == 0) ctx.shared->selected[0][ctx.warp] = counts;
}

// The output index of a lane's next selected element, and the ties that may still be selected.
struct OutputOffset {
  int next;
  uint32_t ties_left;  // ties that may still be selected, from this lane's first element on

  // `above`: elements above the interval in earlier CTAs. `in_warp`: packed count of the earlier lanes. All
  // other counts of earlier CTAs and warps are in `selected`. Ties go to the smallest indices.
  template <typename T>
  GVR_DEVICE OutputOffset(const RowContext<T>& ctx, const KeyInterval& interval, const Threshold& threshold,
                          uint32_t above, uint32_t in_warp) {
    const Shared& smem = *ctx.shared;
    // One half of the warp adds up the counts of earlier CTAs, the other half those of earlier warps.
    static_assert(kWarps == 16);
    const uint32_t* selected = smem.selected[0];
    const uint32_t packed =
        __reduce_add_sync(0xffffffffu, ctx.lane < kWarps + ctx.warp ? selected[ctx.lane] : 0) + in_warp;
    above += packed & 0xffffu;
    uint32_t ties = packed >> 16;
    const uint32_t tie_key = interval.tie_key();
    if (tie_key != kAbsentKey) {  // Elements of the tie key are not listed.
      const uint32_t equal =
          __reduce_add_sync(0xffffffffu, ctx.lane < ctx.rank ? smem.header[ctx.lane].counts.equal : 0);
      const uint32_t at_tie_key = packed_count(tie_key, threshold);
      above += at_tie_key == 1 ? equal : 0;
      ties += at_tie_key > 1 ? equal : 0;
    }
    ties = min(ties, threshold.tie_quota);
    ties_left = threshold.tie_quota - ties;
    next = static_cast<int>(threshold.takes_all() ? above : above + ties);
  }

  // Whether the next element is selected: a tie is selected only while the quota lasts.
  GVR_DEVICE bool accept(bool tie) {
    if (!tie) return true;
    if (ties_left == 0) return false;
    --ties_left;
    return true;
  }
};

}  // namespace gvr_topk
