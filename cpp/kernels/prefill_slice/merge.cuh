// Merges a row's carry with the elements of a slice: finds the k-th key of both together, and puts what is
// selected into the carry or, at the end of the row, into the output. All pairs of the carry come before the
// slice in position order.
#pragma once

#include "prefill/radix_rounds.cuh"
#include "prefill_slice/config.cuh"

namespace gvr_topk::prefill_slice {

using prefill::EarlierItems;
using prefill::KthKey;

// Pairs of a carry, as many as a block's registers hold. Each warp has consecutive ones, 32 at a time. Absent
// pairs have a key below every score's.
struct CarriedPairs {
  static constexpr int kOfThread = 8, kOfBlock = kOfThread * kBlockThreads;
  static_assert(kOfBlock >= kPrefillMaxK);

  uint32_t pair[kOfThread][2];  // position and key

  GVR_DEVICE CarriedPairs(const uint64_t* pairs, int count, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      const int i = 32 * (kOfThread * warp + j) + lane;
      pair[j][1] = kAbsentKey;
      ptx::load_if(i < count, pair[j], pairs + i);
    }
  }

  // Calls visit(key, position) for this lane's pairs.
  template <typename Visit>
  GVR_DEVICE void for_each(Visit visit) const {
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) visit(pair[j][1], static_cast<int>(pair[j][0]));
  }
};

// What a warp has listed, with the first of its elements in registers.
struct ListedItems {
  static constexpr int kOfLane = 4;

  SliceStore store;
  int lane;
  uint32_t kept[kOfLane][2] = {};  // position and key

  GVR_DEVICE ListedItems(const SliceStore& of, int count, int lane_) : store(of), lane(lane_) {
    store.count = count;
    if (count > 0) load(0, kept);
  }

  // Calls visit(key, position) for 32 consecutive elements at once; the key of an absent one is kAbsentKey.
  template <typename Visit>
  GVR_DEVICE void for_each(Visit visit) const {
    uint32_t some[kOfLane][2];
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) some[j][0] = kept[j][0], some[j][1] = kept[j][1];
#pragma unroll 1
    for (int begin = 0; begin < store.count;) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        if (begin + 32 * j < store.count) visit(some[j][1], static_cast<int>(some[j][0]));
      }
      begin += 32 * kOfLane;
      if (begin < store.count) load(begin, some);
    }
  }

 private:
  GVR_DEVICE void load(int begin, uint32_t (&items)[kOfLane][2]) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int i = begin + 32 * j + lane;
      const BufferedValue x = store.at(min(i, store.count - 1));
      items[j][0] = x.position;
      items[j][1] = i < store.count ? order_key(x.value) : kAbsentKey;
    }
    ptx::reconverge(ptx::unknown_zero());  // ptxas may make a branch of the choice.
  }
};

// A row of the carry: a word that says how it begins, and pairs of a key and a position. Any content is safe:
// control flow follows from what all threads read in shared memory, and addresses are checked.
struct CarryRow {
  uint64_t* word;
  int count;

  GVR_DEVICE CarryRow(const SliceParams& p, const Slice& slice)
      : word(p.carry + slice.window.row * (int64_t{p.prefill.k} + 1)), count(slice.carried) {}

  // Calls visit(pairs) for all pairs.
  template <typename Visit>
  GVR_DEVICE void for_each_part(int warp, int lane, Visit visit) const {
#pragma unroll 1
    for (int begin = 0; begin < count; begin += CarriedPairs::kOfBlock) {
      visit(CarriedPairs(word + 1 + begin, count - begin, warp, lane));
    }
  }
};

// Puts a selected item into the output. It is out of line because few slices end rows.
static __device__ __noinline__ void put_output(const SliceParams& p, int turn, uint32_t item, int position) {
  const Slice& slice = shared_memory().slices[turn];
  PrefillOutput(p.prefill, slice.window).put(static_cast<int>(item), position);
}

// Puts a selected item into the carry, or into the output if the slice ends the rows. Like the output's
// writer it writes only the row's own k items.
GVR_DEVICE void put(const SliceParams& p, int turn, uint32_t item, uint32_t key, int position) {
  if (p.ends) return put_output(p, turn, item, position);
  if (item >= static_cast<uint32_t>(p.prefill.k)) return;
  const CarryRow carry(p, shared_memory().slices[turn]);
  carry.word[1 + item] = uint64_t{key} << 32 | static_cast<uint32_t>(position);
}

// Where items go that are selected from a list: to the carry, or, if the slice ends the rows, to the memory
// of the bins, from where they are written as the output.
struct ListSink {
  uint64_t* carry;
  uint32_t staged;
  uint32_t k;
  bool ends;

  GVR_DEVICE ListSink(const SliceParams& p, const Slice& slice)
      : carry(CarryRow(p, slice).word + 1),
        staged(ptx::shared_address(shared_memory().key_bins)),
        k(p.prefill.k),
        ends(p.ends) {}

  // No branch, so that lanes stay together.
  GVR_DEVICE void operator()(bool condition, uint32_t item, uint32_t key, int position) const {
    condition &= item < k;
    ptx::store_shared_if(condition & ends, staged + sizeof(position) * item, position);
    ptx::store_global_if(condition & !ends, carry + item,
                         uint64_t{key} << 32 | static_cast<uint32_t>(position));
  }
};
static_assert(sizeof(int32_t) * kPrefillMaxK <= sizeof(SliceShared::key_bins));

static_assert(CarriedPairs::kOfBlock <= 0xffff && kMaxSliceChunks * kChunk <= 0xffff);

// Counts a warp's items above the k-th key, and its ties in the upper half of the word. for_each(visit) calls
// visit(key, position) for 32 consecutive items of a warp at once, and warps follow each other; absent items
// have a key below every score's.
template <typename ForEach>
GVR_DEVICE uint32_t count_selected(const KthKey& kth, ForEach for_each) {
  uint32_t counts = 0;
  for_each([&](uint32_t key, int) {
    counts += key > kth.key ? 1 : 0;
    counts += key == kth.key && key != kAbsentKey ? 0x10000 : 0;
  });
  ptx::reconverge(ptx::unknown_zero());
  return __reduce_add_sync(0xffffffffu, counts);
}

// Puts the selected ones of items that `count_selected` has counted: `counts` are those of all warps, which
// stand behind a block barrier, and `before` is what comes before the items. put_if(whether, item, key,
// position) puts one. Returns what comes before, and all items.
template <typename ForEach, typename PutIf>
GVR_DEVICE EarlierItems put_selected(const KthKey& kth, const EarlierItems& before, const uint32_t* counts,
                                     int warp, int lane, ForEach for_each, PutIf put_if) {
  const uint32_t own = lane < kBlockWarps ? counts[lane] : 0, earlier = (1u << lane) - 1;
  const uint32_t of_earlier = __reduce_add_sync(0xffffffffu, lane < warp ? own : 0);
  const uint32_t all = __reduce_add_sync(0xffffffffu, own);
  OutputCursor cursor{0, kth.quota};
  cursor.advance(before.above + (of_earlier & 0xffff), before.ties + (of_earlier >> 16));
  for_each([&](uint32_t key, int position) {
    const uint32_t ties = __ballot_sync(0xffffffffu, key == kth.key);
    const bool takes = key > kth.key || (key == kth.key && __popc(ties & earlier) < cursor.ties_left);
    const uint32_t taken = __ballot_sync(0xffffffffu, takes);
    put_if(takes, cursor.first + __popc(taken & earlier), key, position);
    cursor.first += __popc(taken);
    cursor.ties_left -= min(static_cast<uint32_t>(__popc(ties)), cursor.ties_left);
  });
  return EarlierItems{before.above + (all & 0xffff), before.ties + (all >> 16)};
}

// Puts the selected pairs of the carry, in their order. Pairs move towards the front: those of a part are in
// registers before one is written, and later parts stay where they are. Returns what all pairs are.
static __device__ __noinline__ EarlierItems put_carried(const SliceParams& p, int turn, KthKey kth) {
  SliceShared& smem = shared_memory();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  EarlierItems before{0, 0};
  CarryRow(p, smem.slices[turn]).for_each_part(warp, lane, [&](const CarriedPairs& pairs) {
    const auto for_each = [&](auto visit) { pairs.for_each(visit); };
    const uint32_t counts = count_selected(kth, for_each);
    if (lane == 0) smem.warp_sums[0][warp] = counts;
    __syncthreads();
    before = put_selected(kth, before, smem.warp_sums[0], warp, lane, for_each,
                          [&](bool takes, uint32_t item, uint32_t key, int position) {
                            if (takes) put(p, turn, item, key, position);
                            ptx::reconverge(ptx::unknown_zero());
                          });
    __syncthreads();  // All warps have read the counts.
  });
  return before;
}

// Ends the merge of a row that has `count` items now.
GVR_DEVICE void finish(const SliceParams& p, const Slice& slice, int count, uint32_t kth_key) {
  if (threadIdx.x != 0) return;
  if (p.prefill.counts != nullptr) p.prefill.counts[slice.window.row] = count;
  const uint32_t key = count == p.prefill.k ? kth_key : kAbsentKey;
  CarryRow(p, slice).word[0] = p.ends ? 0 : uint64_t{key} << 32 | static_cast<uint32_t>(count);
}

// The same for items that `put` has placed, behind which the output has -1.
static __device__ __noinline__ void finish_put(const SliceParams& p, int turn, int count, uint32_t kth_key) {
  const Slice& slice = shared_memory().slices[turn];
  if (p.ends) {
    const PrefillOutput output(p.prefill, slice.window);
#pragma unroll 1
    for (int i = count + static_cast<int>(threadIdx.x); i < p.prefill.k; i += kBlockThreads)
      output.put(i, -1);
  }
  finish(p, slice, count, kth_key);
}

// All keys but for the absent one.
template <typename T>
constexpr KeyRange kEveryKey{1, (kMaxKey >> kInvariantBits<T>)-1};

// Where the k-th key is expected: close above `least`, the k-th of a full carry or a sample's. Two rounds end
// there.
template <typename T>
GVR_DEVICE KeyRange range_above(uint32_t least) {
  const uint32_t base = max(least >> kInvariantBits<T>, 1u), longest = (kMaxKey >> kInvariantBits<T>)-base;
  if (least == kAbsentKey || longest == 0) return kEveryKey<T>;
  return KeyRange{base, min(longest, (1u << 2 * kLog2KeyBins) - 1)};
}

// Finds the k-th key of at least k keys. If it does not lie where it is expected, rounds among all keys
// follow.
template <typename T, typename ForEach>
GVR_DEVICE KthKey find_kth(SliceShared& smem, int k, uint32_t least, ForEach for_each) {
  KeyRange range = range_above<T>(least);
  int rounds = 0;
#pragma unroll 1
  while (true) {
    const KthKey kth = prefill::find_kth<T>(smem, k, range, rounds, for_each);
    if (range.base == kEveryKey<T>.base || smem.hits[0].count > 0) return kth;
    range = kEveryKey<T>;
  }
}

// The same, faster if few keys lie in the bin that holds the k-th one: they are ranked by comparison. All
// bins are empty, and `few_count` is 0.
template <typename T, typename ForEach>
GVR_DEVICE KthKey find_kth_listed(SliceShared& smem, int k, uint32_t least, int lane, ForEach for_each) {
  KeyRange range = range_above<T>(least);
  const int shift = range.shift<kLog2KeyBins>();
  const uint32_t rank = static_cast<uint32_t>(k);
  RadixBins bins{smem.key_bins, range, shift};
  for_each([&](uint32_t key) { bins.add(key >> kInvariantBits<T>); });
  prefill::locate_ranks(smem, bins.above, prefill::RankPair{rank, rank});
  const BinHit hit = smem.hits[0];
  if (hit.count == 0) return find_kth<T>(smem, k, kAbsentKey, for_each);
  range.narrow(hit.bin, shift);
  if (range.length == 0) return KthKey{whole_key<T>(range.base), rank - hit.above};
  int rounds = 0;
  if (hit.count > kRankDirectly) return prefill::find_kth<T>(smem, k, range, rounds, for_each);
  for_each([&](uint32_t key) {
    if (range.contains(key >> kInvariantBits<T>)) add_small(smem, key);
  });
  ptx::reconverge(ptx::unknown_zero());
  __syncthreads();
  const uint32_t key = smem.few_keys[lane], count = hit.count;
  const uint32_t kth = rank_directly(key, static_cast<int>(count), rank - hit.above, lane);
  const uint32_t above = __ballot_sync(0xffffffffu, lane < count && key > kth);
  return KthKey{kth, rank - hit.above - __popc(above)};
}

// Merges with all elements of the slice by radix rounds, for any content and any k.
template <typename T>
__device__ __noinline__ void merge_by_rounds(const SliceParams& p, int turn) {
  SliceShared& smem = shared_memory();
  const Slice& slice = smem.slices[turn];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, k = p.prefill.k;
  const RowView<T> row = AlignedWindow<T>(p.prefill, slice.window).view();
  const RowStream<T> stream(row, smem.ring, warp, lane);
  const CarryRow carry(p, slice);
  const int64_t total = int64_t{carry.count} + slice.window.n;
  KthKey kth = KthKey::none();
  if (total >= k) {
    kth = find_kth<T>(smem, k, slice.kth_key, [&](auto visit) {
      carry.for_each_part(warp, lane, [&](const CarriedPairs& pairs) {
        pairs.for_each([&](uint32_t key, int) { visit(key); });
      });
      stream.start();
      stream.for_each_key(visit);
    });
  }
  const EarlierItems carried = put_carried(p, turn, kth);
  prefill::verify_key<T>(smem, stream, kth.key, k, warp);
  prefill::emit_by_key<T>(smem, stream, kth.key, k, carried, warp, [&](uint32_t item, int position) {
    put(p, turn, item, row.key(position), slice.shift + position);
  });
  ptx::reconverge(ptx::unknown_zero());
  finish_put(p, turn, static_cast<int>(min(total, int64_t{k})), kth.key);
}

}  // namespace gvr_topk::prefill_slice
