// Chooses the k largest scores of rows whose parts lie on several GPUs, each of which has selected the k best
// of its part.
//
// Grid: CTAs that take the rows in turn, as many on every rank. Grid dependencies let few of them start while
// the selection of the parts ends.
//
// The word of a score orders it among all scores of the row: its key, and below it a number that falls as
// positions ascend. No two words are equal, so the choice is the k largest ones, ties included, and the ranks
// look for the k-th. They exchange records (sharded/exchange.cuh). The first one has all keys, if those of
// all ranks fit: then only the last of equal keys may be left to find. Otherwise it is a histogram of the
// rank's own keys. Each further record is a histogram of the interval in which the k-th word lies, and the
// last one has the words of a bin of few. All ranks compute the same from the same records, and so exchange
// equally often, whatever is in their memory.
//
// Keys are counted while others are on their way.
#pragma once

#include "core/histogram.cuh"
#include "core/key.cuh"
#include "ptx/barrier.cuh"
#include "sharded/exchange.cuh"

namespace gvr_topk::sharded {

constexpr int kLog2Bins = 10, kBins = 1 << kLog2Bins, kEachBins = kBins / kThreads;
// Bins of a record: two to a number, of which no rank has 2^16.
constexpr int kLog2SentBins = 9, kBinCells = (1 << kLog2SentBins) / 2;
constexpr int kListed = kBinCells / 2;
constexpr int kEach = kPeerMaxK / kThreads;  // most items of a thread
constexpr int kPositionBits = 31;
constexpr uint64_t kPositionMask = (uint64_t{1} << kPositionBits) - 1;
constexpr uint64_t kLastPosition = kPositionMask - 1;
constexpr uint64_t kLeastWord = 1;

// What a first record has: a header, the length of the part, and keys; or how many keys there are, the least
// and the largest one, and bins.
constexpr int kHeaderCells = 2 * kHeaderWords, kLength = kHeaderCells, kFirst = 8;
constexpr int kCount = kFirst, kLeast = kFirst + 1, kMost = kFirst + 2, kFirstBins = kFirst + 4;
static_assert((kFirstBins + kBinCells) * kPeerRanks <= kPeerCells);

struct Smem {
  Exchange::Smem exchange;
  alignas(16) uint32_t bins[kBins];  // zeros between two searches
  uint32_t warp_sums[kWarps];
  alignas(16) BinHit hit;
  uint32_t least[kWarps], most[kWarps];
  uint32_t keys[kRankDirectly];
  uint32_t listed_keys;
  uint64_t list[kListed];
  uint32_t listed;  // words in `list` or in a record
  int32_t differs;  // whether a rank means another call
  int32_t length;
  int64_t step;
  uint64_t kth;
};

// The k best items of this rank's part, consecutive ones in a thread. All of a row are read before its
// results are written, because these may take their place.
struct Items {
  int32_t position[kEach];
  uint64_t word[kEach] = {};  // 0: none
  int each;

  GVR_DEVICE Items(const ShardedParams& p, int64_t row, int each, int thread) : each(each) {
    const int32_t* const best = p.best + row * p.best_stride + each * thread;
    const int count = min(each, p.k - each * thread);
    // Scores are loaded without a branch around what uses them, and so all at once.
    const auto load = [&](const auto* scores, uint32_t (&bits)[kEach]) {
      scores += row * p.logits_stride;
      for_each([&](int i) {
        if (position[i] >= 0 && position[i] < p.width) bits[i] = scores[position[i]];
      });
    };
    uint32_t bits[kEach];
    for_each([&](int i) {
      position[i] = i < count ? best[i] : -1;
      ptx::keep(position[i]);
    });
    if (p.dtype == Dtype::kFloat32) {
      load(static_cast<const uint32_t*>(p.logits), bits);
    } else {
      load(static_cast<const uint16_t*>(p.logits), bits);
    }
    // The order of a position is its place in the row; if parts lie one behind the other, it stands for that.
    const float turns = p.interleave > 0 ? 1.0f / static_cast<float>(p.interleave) : 0;
    const int others = (p.world - 1) * p.interleave;
    const int before = p.rank * (p.interleave > 0 ? p.interleave : static_cast<int>(kMaxWidth));
    for_each([&](int i) {
      if (position[i] < 0 || position[i] >= p.width) return;
      const uint32_t order = position[i] + quotient(position[i], turns) * others + before;
      word[i] = uint64_t{order_key(p.dtype, bits[i])} << kPositionBits | (kLastPosition - order);
    });
  }

  template <typename Use>
  GVR_DEVICE void for_each(Use use) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i >= each) break;
      use(i);
    }
  }

  GVR_DEVICE uint32_t key(int i) const { return static_cast<uint32_t>(word[i] >> kPositionBits); }

  // The place of an item in the row, behind `first` positions of other ranks if parts lie one behind the
  // other.
  GVR_DEVICE int32_t place(const ShardedParams& p, int i, int32_t first) const {
    return p.interleave > 0 ? static_cast<int32_t>(kLastPosition - (word[i] & kPositionMask))
                            : position[i] + first;
  }
};

// Values, keys or words, between which the k-th lies, both included.
struct SearchRange {
  uint64_t low, high;
  uint32_t chosen;           // of those up to `high`
  uint32_t count = 1 << 30;  // how many there are, at most

  GVR_DEVICE bool has(uint64_t value) const { return low <= value && value <= high; }
  GVR_DEVICE bool is_decided() const { return low >= high || count <= chosen; }

  // The least shift by which its values have that many bins. Bins begin at multiples of their width, so that
  // those of a smaller shift lie within one of a greater shift.
  GVR_DEVICE int shift(int log2_bins) const {
    const int bits = max(0, 64 - __clzll(static_cast<int64_t>(high - low)) - log2_bins);
    return bits + static_cast<int>(((high >> bits) - (low >> bits)) >> log2_bins);
  }
  GVR_DEVICE uint64_t bin_of(uint64_t value, int shift) const { return (value >> shift) - (low >> shift); }
  GVR_DEVICE void narrow(const BinHit& hit, int shift) {
    const uint64_t first = ((low >> shift) + hit.bin) << shift;
    low = max(low, first);
    high = min(high, first + (uint64_t{1} << shift) - 1);
    chosen -= hit.above;
    count = hit.count;
  }
};

// The chooser of one row.
struct Chooser {
  const ShardedParams& p;
  Smem& smem;
  Exchange& exchange;
  int64_t row;
  int thread, lane, warp;
  uint32_t zero;
  int each, threads;  // items of a thread, and how many threads have some

  // Whether the keys of all ranks fit into first records.
  GVR_DEVICE bool sends_keys() const { return kFirst + each * threads <= exchange.capacity; }

  GVR_DEVICE uint32_t header(int at) const {
    const int64_t word = at / 2 == kHeaderWords - 1 ? smem.step : p.header[at / 2];
    return static_cast<uint32_t>(word >> 32 * (at & 1));
  }
  GVR_DEVICE uint64_t received_word(int rank, int at) const {
    return exchange.received(rank, at) | uint64_t{exchange.received(rank, at + 1)} << 32;
  }

  GVR_DEVICE void count(uint64_t bin) const { ptx::add_shared(smem.bins[bin], 1, zero); }

  // Sends the bins, behind a barrier, from number `first` of the record on, and clears them.
  GVR_DEVICE void send_bins(int first) const {
    __syncthreads();
    for (int at = thread; at < kBinCells; at += kThreads) {
      uint32_t* const two = &smem.bins[2 * at];
      exchange.send(first + at, {two[0] | two[1] << 16});
      two[0] = two[1] = 0;
    }
  }
  GVR_DEVICE uint32_t received_bin(int rank, int first, int bin) const {
    return exchange.received(rank, first + bin / 2) >> (16 * (bin & 1)) & 0xffff;
  }

  // Finds the bin of the last chosen value, after a barrier, and clears the bins.
  GVR_DEVICE BinHit find_bin(uint32_t chosen) const {
    ptx::reconverge(zero);
    return locate_in_block<kEachBins>(smem.bins, smem.warp_sums, smem.hit, chosen, warp, lane, [&] {
#pragma unroll
      for (int i = 0; i < kEachBins; ++i) smem.bins[kEachBins * thread + i] = 0;
      if (thread == 0) smem.hit.count = 0;
      ptx::reconverge(zero);
    });
  }

  // Exchanges first records, and narrows an interval of keys by them. Returns whether all ranks mean the same
  // call; the host is told if not.
  GVR_DEVICE bool introduce(const Items& items, SearchRange& in) const {
    uint32_t least = kMaxKey, most = 0, count_of_keys = 0, keys[kEach];
    items.for_each([&](int i) {
      keys[i] = items.key(i);
      if (keys[i] == kAbsentKey) return;
      least = min(least, keys[i]);
      most = max(most, keys[i]);
      ++count_of_keys;
    });
    ptx::reconverge(zero);
    reduce(least, most, count_of_keys);
    if (lane == 0) {
      smem.least[warp] = least;
      smem.most[warp] = most;
      smem.warp_sums[warp] = count_of_keys;
    }
    if (thread == 0) smem.listed_keys = 0;
    if (!exchange.begin(thread)) return false;
    if (thread < kFirst) {
      const uint32_t length = min(max(smem.length, 0), p.width);
      exchange.send(thread, {thread < kHeaderCells ? header(thread) : length});
    }
    if (sends_keys() && thread < threads) exchange.send(kFirst + thread, keys, threads, each);
    least = smem.least[lane % kWarps];
    most = smem.most[lane % kWarps];
    count_of_keys = lane < kWarps ? smem.warp_sums[lane] : 0;
    ptx::reconverge(zero);
    reduce(least, most, count_of_keys);
    in = {least, most, static_cast<uint32_t>(p.k)};
    if (least > most) in = {kMinKey, kMaxKey, static_cast<uint32_t>(p.k)};
    const int shift = in.shift(sends_keys() ? kLog2Bins : kLog2SentBins);
    // Keys of others may lie outside of those of this rank.
    const auto count_key = [&](uint32_t key) {
      const uint32_t low = static_cast<uint32_t>(in.low), high = static_cast<uint32_t>(in.high);
      if (key != kAbsentKey) count((min(max(key, low), high) >> shift) - (low >> shift));
    };
    items.for_each([&](int i) { count_key(keys[i]); });
    if (!sends_keys()) {
      if (thread < kFirstBins - kFirst) {
        exchange.send(kFirst + thread, {thread == 0 ? count_of_keys : thread == 1 ? least : most});
      }
      send_bins(kFirstBins);
    }
    // A rank with another k sends another number of keys.
    const auto is_in_vain = [&] {
      return exchange.differs(kHeaderCells, [&](int at) { return header(at); });
    };
    const auto use = [&](int at, uint32_t value) {
      if (at >= kFirst && sends_keys()) count_key(value);
      if (at < kHeaderCells && value != header(at)) atomicMax(&smem.differs, 1);
    };
    const int numbers = sends_keys() ? kFirst + each * threads : kFirstBins + kBinCells;
    if (!exchange.receive(numbers, thread, is_in_vain, use)) return false;
    if (smem.differs == 0) {
      sends_keys() ? narrow_by_keys(in, shift) : narrow_by_bins(in);
      return true;
    }
    const int rank = thread / kHeaderWords;
    if (rank < p.world)
      p.told[thread] = static_cast<int64_t>(received_word(rank, 2 * (thread % kHeaderWords)));
    return false;
  }

  GVR_DEVICE static void reduce(uint32_t& least, uint32_t& most, uint32_t& count) {
    least = __reduce_min_sync(0xffffffffu, least);
    most = __reduce_max_sync(0xffffffffu, most);
    count = __reduce_add_sync(0xffffffffu, count);
  }

  template <typename Use>
  GVR_DEVICE void each_key(const SearchRange& in, Use use) const {
    const uint32_t low = static_cast<uint32_t>(in.low), high = static_cast<uint32_t>(in.high);
#pragma unroll 1
    for (int rank = 0; rank < p.world; ++rank) {
      for (int at = thread; at < each * threads; at += kThreads) {
        const uint32_t key = exchange.received(rank, kFirst + at);
        if (low <= key && key <= high) use(key);
      }
    }
  }

  // Narrows an interval of keys until one is left or all of them are chosen. The keys of all ranks are
  // counted, those outside of the interval in its outermost bins.
  GVR_DEVICE void narrow_by_keys(SearchRange& in, int shift) const {
    const uint64_t last = in.bin_of(in.high, shift);
    BinHit hit = find_bin(in.chosen);
    in.narrow(hit, shift);
    if (hit.bin == 0) in.low = kMinKey;
    if (hit.bin == last) in.high = kMaxKey;
    while (!in.is_decided() && in.count > kRankDirectly) {
      shift = in.shift(kLog2Bins);
      each_key(in, [&](uint32_t key) { count(in.bin_of(key, shift)); });
      __syncthreads();
      in.narrow(find_bin(in.chosen), shift);
    }
    if (!in.is_decided()) rank_keys(in);
  }

  // Leaves the k-th key of an interval that has no more than kRankDirectly.
  GVR_DEVICE void rank_keys(SearchRange& in) const {
    each_key(in, [&](uint32_t key) {
      const uint32_t at = atomicAdd(&smem.listed_keys, 1);
      if (at < kRankDirectly) smem.keys[at] = key;
    });
    __syncthreads();
    const int listed = min(smem.listed_keys, kRankDirectly);
    const uint32_t own = lane < listed ? smem.keys[lane] : kAbsentKey;
    uint32_t greater = 0, equal = 0;
    for (int i = 0; i < listed; ++i) {
      greater += smem.keys[i] > own;
      equal += smem.keys[i] == own;
    }
    ptx::reconverge(zero);
    const bool is_kth = greater < in.chosen && in.chosen <= greater + equal;
    const int from = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, is_kth))) - 1;
    in.low = in.high = __shfl_sync(0xffffffffu, own, from);
    in.chosen -= __shfl_sync(0xffffffffu, greater, from);
    in.count = __shfl_sync(0xffffffffu, equal, from);
  }

  // Narrows an interval of keys by bins that each rank has counted in the interval of its own keys. A rank
  // that has k keys has none below the k-th.
  GVR_DEVICE void narrow_by_bins(SearchRange& in) const {
    const auto keys_of = [&](int rank) {
      return SearchRange{exchange.received(rank, kLeast), exchange.received(rank, kMost)};
    };
    uint64_t full = 0, least = kMaxKey, most = 0;
    int shift = 0;
#pragma unroll 1
    for (int rank = 0; rank < p.world; ++rank) {
      const SearchRange own = keys_of(rank);
      const uint32_t count = exchange.received(rank, kCount);
      if (count >= p.k) full = max(full, own.low);
      if (count > 0) shift = max(shift, own.shift(kLog2SentBins));
      least = min(least, own.low);
      most = max(most, own.high);
    }
    in.low = full != 0 ? full : least;
    in.high = most;
    if (in.is_decided()) return;
    shift = max(shift, in.shift(kLog2SentBins));
#pragma unroll 1
    for (int rank = 0; rank < p.world; ++rank) {
      const int own = keys_of(rank).shift(kLog2SentBins);
      for (int i = thread; i < 2 * kBinCells; i += kThreads) {
        const uint64_t bin = in.bin_of(((keys_of(rank).low >> own) + i) << own, shift);
        if (bin < kBins) ptx::add_shared(smem.bins[bin], received_bin(rank, kFirstBins, i), zero);
      }
    }
    __syncthreads();
    in.narrow(find_bin(in.chosen), shift);
  }

  // Sum of the lengths of the parts ahead.
  GVR_DEVICE int32_t first_position() const {
    int32_t sum = 0;
#pragma unroll 1
    for (int rank = 0; rank < p.rank; ++rank) sum += static_cast<int32_t>(exchange.received(rank, kLength));
    return sum;
  }

  // Exchanges the words of an interval that has no more than kListed, and finds the k-th.
  GVR_DEVICE bool list_words(const Items& items, const SearchRange& in) const {
    if (thread == 0) smem.listed = 0;
    if (!exchange.begin(thread)) return false;
    const auto list = [&](uint64_t word) {
      const uint32_t at = atomicAdd(&smem.listed, 1);
      if (at < kListed) smem.list[at] = word;
    };
    items.for_each([&](int i) {
      if (in.has(items.word[i])) list(items.word[i]);
    });
    __syncthreads();
    if (thread < in.count) {
      const uint64_t word = thread < smem.listed ? smem.list[thread] : 0;
      exchange.send(2 * thread, {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)});
    }
    if (!exchange.receive(2 * in.count, thread)) return false;
    if (thread == 0) {
      smem.listed = 0;
      smem.kth = in.low;
    }
    __syncthreads();
    for (int i = thread; i < p.world * kListed; i += kThreads) {
      const int at = i % kListed;
      if (at >= in.count) continue;
      const uint64_t word = received_word(i / kListed, 2 * at);
      if (word != 0) list(word);
    }
    __syncthreads();
    const int listed = min(smem.listed, kListed);
    if (thread < listed) {
      uint32_t greater = 0;
#pragma unroll 1
      for (int i = 0; i < listed; ++i) greater += smem.list[i] > smem.list[thread];
      if (greater == in.chosen - 1) smem.kth = smem.list[thread];
    }
    __syncthreads();
    return true;
  }

  // Finds the k-th largest word of all ranks; kLeastWord if there are fewer. Returns whether no rank was
  // late.
  GVR_DEVICE bool find(const Items& items, SearchRange in, uint64_t& kth) const {
    while (in.count > 0 && !in.is_decided()) {
      if (in.count <= kListed) {
        const bool is_listed = list_words(items, in);
        kth = smem.kth;
        return is_listed;
      }
      const int shift = in.shift(kLog2SentBins);
      items.for_each([&](int i) {
        if (in.has(items.word[i])) count(in.bin_of(items.word[i], shift));
      });
      if (!exchange.begin(thread)) return false;
      send_bins(0);
      if (!exchange.receive(kBinCells, thread)) return false;
      for (int i = thread; i < 2 * kBinCells; i += kThreads) {
#pragma unroll 1
        for (int rank = 0; rank < p.world; ++rank) smem.bins[i] += received_bin(rank, 0, i);
      }
      __syncthreads();
      in.narrow(find_bin(in.chosen), shift);
    }
    kth = in.count > 0 && in.low <= in.high ? in.low : kLeastWord;
    return true;
  }

  // Writes the items of this rank from the k-th word on.
  GVR_DEVICE void write(const Items& items, uint64_t kth, int32_t first) const {
    uint32_t in_lanes_before = 0, in_warp = 0;
    ptx::reconverge(zero);
    items.for_each([&](int i) {
      const uint32_t chosen = __ballot_sync(0xffffffffu, items.word[i] >= kth);
      in_lanes_before += __popc(chosen & ptx::bit_range(0, lane));
      in_warp += __popc(chosen);
    });
    if (lane == 0) smem.warp_sums[warp] = in_warp;
    __syncthreads();
    const uint32_t sum = lane < kWarps ? smem.warp_sums[lane] : 0;
    ptx::reconverge(zero);
    uint32_t at = __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0) + in_lanes_before;
    const uint32_t count = min(__reduce_add_sync(0xffffffffu, sum), p.k);
    int32_t* const out = p.out + row * p.out_stride;
    int32_t* const local = p.local + row * p.local_stride;
    items.for_each([&](int i) {
      if (items.word[i] < kth || at >= p.k) return;
      local[at] = items.position[i];
      out[at++] = items.place(p, i, first);
    });
    for (int i = static_cast<int>(count) + thread; i < p.k; i += kThreads) out[i] = local[i] = -1;
    if (thread == 0) p.counts[row] = static_cast<int32_t>(count);
  }

  // Returns whether further rows can be chosen from: ranks that mean different calls exchange nothing more.
  GVR_DEVICE bool run(bool can_exchange) const {
    // One thread reads what all go by.
    const int32_t length = thread == 0 ? p.lengths[row] : 0;
    const int64_t step = thread == 0 && p.step != nullptr ? *p.step : p.header[kHeaderWords - 1];
    const Items items(p, row, each, thread);
    if (thread == 0) {
      smem.length = length;
      smem.step = step;
    }
    uint64_t kth = ~uint64_t{0};  // above all: nothing is chosen of a row that the ranks do not agree on
    int32_t first = 0;
    SearchRange in{};
    can_exchange = can_exchange && introduce(items, in);
    if (can_exchange) {
      first = first_position();
      in.low <<= kPositionBits;
      in.high = in.high << kPositionBits | kPositionMask;
      uint64_t found = kth;
      can_exchange = find(items, in, found);
      if (can_exchange) kth = found;
    }
    write(items, kth, first);
    __syncthreads();
    return can_exchange;
  }
};

static __global__ void __launch_bounds__(kThreads, 1) choose(const __grid_constant__ ShardedParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kEachBins; ++i) smem.bins[kEachBins * thread + i] = 0;
  if (thread == 0) smem.differs = 0;
  const int each = (p.k + kThreads - 1) / kThreads, threads = (p.k + each - 1) / each;
  Exchange exchange(p, smem.exchange, static_cast<int>(blockIdx.x));
  ptx::grid_take_over();
  exchange.open(thread);
  bool can_exchange = true;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Chooser chooser{p,    smem,   exchange, row, thread, thread & 31, thread >> 5, ptx::unknown_zero(),
                          each, threads};
    can_exchange = chooser.run(can_exchange);
  }
  exchange.close(thread);
}

}  // namespace gvr_topk::sharded
