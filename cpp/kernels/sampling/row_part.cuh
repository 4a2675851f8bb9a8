// What the files of the sampler share: shapes, shared memory, the CTAs of a row, and the part of the row that
// a CTA holds in shared memory. Each warp has neighbouring vectors of it, so that ascending warps hold
// ascending tokens.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "core/row_view.cuh"
#include "gvr_topk/params.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::sampling {

constexpr int kThreads = kSampleThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = kThreads;  // one bin for each thread
constexpr int kLog2Bins = 8;
constexpr uint32_t kMaxCandidates = 1024;  // of a row that one CTA finishes alone
static_assert(1 << kLog2Bins == kBins);

// The parameters of a row. Another stream may be writing them, so each CTA reads them once, and all CTAs go
// on with what the first one has read.
struct alignas(16) RowParameters {
  union {
    int64_t seed;
    uint64_t uniform;  // behind complete(): random bits of a draw without noise
  };
  union {
    uint32_t position;  // 32 bits of it count
    uint32_t hash;      // behind complete(): that of seed and position
  };
  float scale;  // behind complete(): that of the masses at the temperature
  float temperature;
  float top_p;
  float min_p;
  // Behind complete(): so many octaves below the largest value all tokens together have less than the mass
  // that top-p leaves out.
  float octaves;
  int32_t top_k;       // 0 if it keeps everything
  int32_t counts_all;  // whether top-p counts the mass of all candidates
  int32_t allow_row;   // negative: every token is allowed
  int32_t skipped;     // whether the row is not sampled
};

// What a warp, or a CTA, tells the others. Each exchange has a meaning of its own for the words.
struct Record {
  uint64_t word[3];
};

// Records of the warps of a CTA, or of the CTAs of a row, word by word.
struct Records {
  static constexpr int kMost = 8;
  uint64_t word[3][kMost];
};
static_assert(kWarps <= Records::kMost && kMaxSampleCtas <= Records::kMost);

// The bin in which a prefix sum reaches its target.
struct FoundBin {
  uint64_t above;  // sum of the bins before it
  uint64_t at;     // what it holds
  uint32_t bin;    // kBins: none
};

constexpr int kCandidatesBarrier = 2;

// The shared memory of a CTA. Its part of the row follows.
//
// - `parameters`, `inbox` and `candidates` take transaction stores of any CTA. They are read behind the wait
//   for their transaction barrier. There are two inboxes, in turns: a CTA sends to one of them again when it
//   has got from all CTAs what they have sent to the other, behind the block barrier of that exchange, which
//   their warps come to after their reads of this one. The same holds for `warps`, of which each exchange has
//   one. expect_boundary() uses that of the next exchange before it, and a block barrier follows its reads.
//   The others are sent to once. What shares a place with `candidates` is in use before the exchange that
//   says that candidates are sent, or in rows that have none.
// - `word` is stored by another CTA ahead of a cluster barrier, and read behind it; or threads of this CTA
//   raise and read it at any time, so that each knows a part of what it was raised to.
// - `bins` are written by this CTA and read by all of them behind the next cluster barrier, in turns too. Or
//   listed elements lie in their place, once in a row: transaction stores of any CTA, sent behind an exchange
//   that follows the last reads of bins.
// - Everything else belongs to this CTA, with a block barrier between writes and reads.
struct alignas(16) SampleShared {
  uint64_t barriers[3];  // of the inboxes, and of candidates or listed elements
  RowParameters parameters, read;
  Records inbox[2], warps[2];
  uint64_t of_warp[kWarps];
  FoundBin found;
  uint32_t word;
  union {
    struct {
      uint64_t bins[2][kBins];
      uint32_t limbs[3][kBins];  // what a bin holds, in digits of kLimbBits bits
      alignas(16) uint32_t maxima[kThreads];
    };
    uint64_t candidates[kMaxCandidates];  // of a row that the first CTA finishes alone
  };
};
static_assert(sizeof(SampleShared) <= kSampleFixedBytes);
// A thread has a bit for each of its vectors.
static_assert((max_sample_bytes(90) / kMaxSampleCtas + 16 * kThreads - 1) / (16 * kThreads) < 64);

// A digit of a mass. A CTA's part of a row has less than 2^17 elements, so sums of digits fit 32 bits.
constexpr int kLimbBits = 15;
static_assert(3 * kLimbBits > 43);

extern __shared__ __align__(128) unsigned char storage[];

// The CTAs of a row, and this thread's place in them.
struct Team {
  int ctas;
  int rank;
  int thread, warp, lane;
  uint32_t zero;           // see ptx::unknown_zero
  uint32_t turn = 0;       // of the exchange; the same in all threads of the team
  uint32_t bins_turn = 0;  // of the bins, likewise

  // This thread's place in its cluster.
  GVR_DEVICE static Team here() {
    Team team{};
    team.zero = ptx::unknown_zero();
    team.ctas = static_cast<int>(ptx::cluster_size());
    team.rank = static_cast<int>(ptx::cluster_rank());
    team.thread = threadIdx.x, team.warp = threadIdx.x >> 5, team.lane = threadIdx.x & 31;
    return team;
  }

  // Not a pointer: functions that get the team would not know that it points to shared memory.
  GVR_DEVICE SampleShared& smem() const { return *reinterpret_cast<SampleShared*>(storage + zero); }

  // A barrier of all threads of all CTAs. Lanes may come to it apart.
  GVR_DEVICE void sync() const {
    ptx::reconverge(zero);
    if (ctas == 1) {
      __syncthreads();
    } else {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  // Initializes the transaction barriers, or ends their use. It is called by one thread, ahead of a barrier
  // of all CTAs, or behind one.
  GVR_DEVICE void init_barriers() const {
    for (uint64_t& barrier : smem().barriers) ptx::barrier_init(ptx::shared_address(&barrier), 1);
  }
  GVR_DEVICE void invalidate_barriers() const {
    for (uint64_t& barrier : smem().barriers) ptx::barrier_invalidate(ptx::shared_address(&barrier));
  }

  // The address of a barrier of this CTA, to which others complete their stores.
  GVR_DEVICE uint32_t address_of(const uint64_t& barrier, uint32_t at) const {
    return ptx::map_to_rank(ptx::shared_address(&barrier), at);
  }

  // Puts each warp's record together with those of the CTA's other warps, and exchanges what comes of them
  // with all CTAs. `own` is valid in the first lane, and `kWords` of its words are in use. `combine` makes of
  // the warps' records word number lane / 8 of the CTA's; the first warp calls it. `more` sends what else
  // belongs to the exchange, `more_bytes` to each CTA. Lanes may come to it apart.
  template <int kWords, typename Combine, typename More>
  GVR_DEVICE const Records& exchange(const Record& own, Combine combine, uint32_t more_bytes, More more) {
    const uint32_t parity = turn >> 1 & 1;
    Records& inbox = smem().inbox[turn & 1];
    Records& warps = smem().warps[turn & 1];
    const uint64_t& barrier = smem().barriers[turn++ & 1];
    ptx::reconverge(zero);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) warps.word[i][warp] = own.word[i];
    }
    ptx::reconverge(zero);
    __syncthreads();
    if (warp == 0) {
      const uint64_t word = combine(warps);
      const int number = lane / Records::kMost, to = lane % Records::kMost;
      if (ctas > 1 && lane == 0) {
        constexpr uint32_t kBytes = kWords * sizeof(uint64_t);
        ptx::barrier_expect_tx(address_of(barrier, rank), ctas * kBytes + more_bytes);
      }
      if (number < kWords && to < ctas) {
        uint64_t& place = inbox.word[number][rank];
        if (ctas > 1) {
          ptx::store_async(ptx::map_to_rank(ptx::shared_address(&place), to), word, address_of(barrier, to));
          if (number == 0) more(to, address_of(barrier, to));
        } else {
          place = word;
        }
      }
    }
    ptx::reconverge(zero);
    if (ctas > 1) {
      ptx::barrier_wait(ptx::shared_address(&barrier), parity);
    } else {
      __syncthreads();
    }
    ptx::reconverge(zero);
    return inbox;
  }
  template <int kWords, typename Combine>
  GVR_DEVICE const Records& exchange(const Record& own, Combine combine) {
    return exchange<kWords>(own, combine, 0, [](int, uint32_t) {});
  }
};

// The greater elements of two words, or NaN where one of them is.
template <typename T>
GVR_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(ptx::max_or_nan(__uint_as_float(a), __uint_as_float(b)));
  } else {
    return std::is_same_v<T, __half> ? ptx::max_or_nan_f16x2(a, b) : ptx::max_or_nan_bf16x2(a, b);
  }
}
template <typename T>
GVR_DEVICE uint32_t larger(const uint4& vec) {
  return larger<T>(larger<T>(vec.x, vec.y), larger<T>(vec.z, vec.w));
}

// The largest element of a word or of a vector, or NaN if one of them is.
template <typename T>
GVR_DEVICE float largest(uint32_t word) {
  const uint4 vec{word, 0, 0, 0};
  return sizeof(T) == 4 ? element<T>(vec, 0) : ptx::max_or_nan(element<T>(vec, 0), element<T>(vec, 1));
}
template <typename T>
GVR_DEVICE float largest(const uint4& vec) {
  return largest<T>(larger<T>(vec));
}

template <typename T>
struct RowShare {
  uint32_t address;  // of this warp's first vector in shared memory
  int first;         // that vector's number in the row
  int vectors;       // of each warp

  GVR_DEVICE RowShare(const SampleParams& p, const Team& team) : vectors(p.vectors_per_warp) {
    const int before = team.warp * vectors;
    address = ptx::shared_address(storage) + kSampleFixedBytes + 16 * before;
    first = team.rank * kWarps * vectors + before;
  }

  GVR_DEVICE int token(int vector, int e) const { return (first + vector) * kPerVec<T> + e; }

  // Starts to copy the row here. Elements past its end become -inf. A thread may read what it has copied
  // behind its own wait, and the others behind a block barrier.
  GVR_DEVICE void fetch(const T* row, bool aligned, int vocabulary, int lane) const {
    const int whole = aligned ? max(min(vocabulary / kPerVec<T> - first, vectors), 0) : 0;
#pragma unroll 1
    for (int j = lane; j < whole; j += 128) {
      const T* const from = row + token(j, 0);
      ptx::copy_async_before<0>(j, whole, address + 16 * j, from);
      ptx::copy_async_before<512>(j, whole - 32, address + 16 * j, from);
      ptx::copy_async_before<1024>(j, whole - 64, address + 16 * j, from);
      ptx::copy_async_before<1536>(j, whole - 96, address + 16 * j, from);
    }
#pragma unroll 1
    for (int j = whole / 32 * 32 + lane; j < vectors; j += 32) {
      if (j < whole) continue;
      const int begin = token(j, 0), left = vocabulary - begin;
      const uint4 vec =
          left > 0 ? load_elements(row + begin, min(left, kPerVec<T>)) : negative_infinity_vec<T>();
      ptx::store_shared(address + 16 * j, vec);
    }
    ptx::commit_copies();
  }

  // A vector of this warp, or one of -inf behind its last.
  GVR_DEVICE uint4 load(int vector) const {
    return vector < vectors ? ptx::load_shared(address + 16 * vector) : negative_infinity_vec<T>();
  }

  GVR_DEVICE float value(int vector, int e) const {
    const uint32_t at = address + 16 * vector + static_cast<int>(sizeof(T)) * e;
    return to_float(ptx::load_shared_element<T>(at));
  }

  // A bit for each step at which this thread has a vector. In each step a warp takes 32 neighbouring ones.
  GVR_DEVICE uint64_t every_step(int lane) const {
    const int count = max(0, (vectors - lane + 31) / 32);
    return (uint64_t{1} << count) - 1;
  }

  // The steps at which this thread has elements from `least` on.
  GVR_DEVICE uint64_t steps_from(float least, int lane) const {
    uint64_t steps = 0;
#pragma unroll 4
    for (int j = lane; j < vectors; j += 32) {
      const uint4 vec = ptx::load_shared(address + 16 * j);
      steps |= static_cast<uint64_t>(largest<T>(vec) >= least) << (j / 32);
    }
    return steps;
  }

  // Calls visit(vector, its elements) for this thread's vectors of some steps, in ascending order.
  template <typename Visit>
  GVR_DEVICE void for_each_vector(uint64_t steps, int lane, Visit visit) const {
#pragma unroll 1
    for (; steps != 0; steps &= steps - 1) {
      const int j = (__ffsll(static_cast<long long>(steps)) - 1) * 32 + lane;
      visit(j, ptx::load_shared(address + 16 * j));
    }
  }

  // Calls visit(value, token) for the elements of a vector that have a bit.
  template <typename Visit>
  GVR_DEVICE void for_each_bit(uint32_t bits, int vector, Visit visit) const {
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) {
      const int e = __ffs(static_cast<int>(bits)) - 1;
      visit(value(vector, e), token(vector, e));
    }
  }

  // Calls visit(value, token) for the elements of these vectors for which holds(value, token), in ascending
  // order. They are few: each of them is loaded again.
  template <typename Holds, typename Visit>
  GVR_DEVICE void for_each(uint64_t steps, int lane, Holds holds, Visit visit) const {
    for_each_vector(steps, lane, [&](int j, const uint4& vec) {
      uint32_t left = 0;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) left |= holds(element<T>(vec, e), token(j, e)) << e;
      for_each_bit(left, j, visit);
    });
  }

  // Calls visit(value, token) for all elements of these vectors, in ascending order.
  template <typename Visit>
  GVR_DEVICE void for_each(uint64_t steps, int lane, Visit visit) const {
    for_each_vector(steps, lane, [&](int j, const uint4& vec) {
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) visit(element<T>(vec, e), token(j, e));
    });
  }
};

// The largest of a thread's elements, and whether one of them is no number.
struct ThreadBest {
  float value = -INFINITY;
  int vector = -1;  // -1: it is not known, or every element is -inf, NaN or not allowed
  bool nan = false;
};

// Makes elements that cannot be chosen -inf: NaN, and tokens whose bit in `allowed` is clear. Returns whether
// an allowed one is NaN.
template <typename T>
GVR_DEVICE bool mask_vector(uint4& vec, uint32_t allowed) {
  uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
  bool nan = false;
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    const bool is_nan = isnan(element<T>(vec, e)), is_allowed = (allowed >> e & 1) != 0;
    nan |= is_nan && is_allowed;
    if (!is_nan && is_allowed) continue;
    mask_element<T>(word, e);
  }
  vec = make_uint4(word[0], word[1], word[2], word[3]);
  return nan;
}

// Masks this thread's elements. `allow` has a bit for each token, or is null. Returns whether an allowed one
// is NaN.
template <typename T>
__device__ __noinline__ bool mask_row(RowShare<T> part, const uint32_t* allow, int vocabulary, int lane) {
  bool nan = false;
#pragma unroll 1
  for (int j = lane; j < part.vectors; j += 32) {
    uint4 vec = part.load(j);
    const int begin = part.token(j, 0);
    const uint32_t allowed = allow != nullptr && begin < vocabulary ? allow[begin / 32] >> (begin % 32) : ~0u;
    nan |= mask_vector<T>(vec, allowed);
    ptx::store_shared(part.address + 16 * j, vec);
  }
  return nan;
}

// Finds the largest of this thread's elements, which has no meaning if one of them is NaN. Where it lies is
// found only if `kWhere`, which takes longer.
template <bool kWhere, typename T>
GVR_DEVICE ThreadBest best_of(const RowShare<T>& part, int lane) {
  ThreadBest best;
  uint32_t word = negative_infinity_vec<T>().x;
#pragma unroll 4
  for (int j = lane; j < part.vectors; j += 32) {
    const uint4 vec = ptx::load_shared(part.address + 16 * j);
    if constexpr (kWhere) {
      const float most = largest<T>(vec);
      best.nan |= isnan(most);
      if (most > best.value) best.value = most, best.vector = j;
    } else {
      word = larger<T>(word, larger<T>(vec));
    }
  }
  if constexpr (!kWhere) best.value = largest<T>(word), best.nan = isnan(best.value);
  return best;
}

// Masks this thread's elements, which have arrived, and returns the largest.
template <bool kWhere, typename T>
GVR_DEVICE ThreadBest take_row(const RowShare<T>& part, const uint32_t* allow, int vocabulary, int lane) {
  ThreadBest best = best_of<kWhere>(part, lane);
  if (allow != nullptr || best.nan) {
    const bool nan = mask_row(part, allow, vocabulary, lane);
    best = best_of<kWhere>(part, lane);
    best.nan = nan;
  }
  return best;
}

// The first token of a vector with this value.
template <typename T>
GVR_DEVICE int first_token(const RowShare<T>& part, int vector, float value) {
  const uint4 vec = ptx::load_shared(part.address + 16 * vector);
  int token = part.token(vector, kPerVec<T> - 1);
#pragma unroll
  for (int e = kPerVec<T> - 2; e >= 0; --e) {
    if (element<T>(vec, e) == value) token = part.token(vector, e);
  }
  return token;
}

}  // namespace gvr_topk::sampling
