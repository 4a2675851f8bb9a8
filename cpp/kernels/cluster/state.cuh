// Shared memory of one CTA of the cluster kernel, and the task it works on.
#pragma once

#include <cstddef>

#include "cluster/regions.cuh"
#include "common/histogram.cuh"
#include "common/row.cuh"
#include "gvr_topk/params.h"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk::cluster {

constexpr int kThreads = kClusterThreads;
constexpr int kLog2Threads = log2_of(kThreads);
constexpr int kWarps = kThreads / 32;
static_assert(Histogram::kGroups == kWarps && Histogram::kBins == 2 * kThreads);
constexpr int kMaxSteps = kMaxElementsPerCta / kStepElements;
constexpr int kMaxPoolChunks = 256;  // a chunk's number is a byte
constexpr int kRankDirectly = 32;    // few enough items for one warp to rank by comparison
constexpr int kKeysPerVec = 4;       // sent at a time
constexpr int kLog2RadixBins = 9;    // of a radix round, whose histograms CTAs send each other as lists
constexpr int kRadixBins = 1 << kLog2RadixBins;
constexpr int kGreatestOfSample = 8 * kWarps;

enum GuessSource : uint32_t {
  kGuessNone = 0,
  kGuessHint = 1,
  kGuessRowSample = 2,
  kGuessPlace = 3,
  kGuessValue = 4,
};

// An inclusive range of keys. The k-th key is believed (or known) to lie in it.
struct Bracket {
  uint32_t lo;
  uint32_t hi;
  uint32_t source;

  __device__ __forceinline__ static Bracket everything() { return Bracket{kMinKey, kMaxKey, kGuessNone}; }
  __device__ __forceinline__ static Bracket only(uint32_t key) { return Bracket{key, key, kGuessNone}; }

  // The ends as values, for comparing scores themselves. Just below zero's key is that of minus zero, which
  // no score has: as a value it would be zero, and take zeros into a bracket that ends below them.
  __device__ __forceinline__ float low() const { return key_to_float(lo); }
  __device__ __forceinline__ float high() const { return key_to_float(hi == kZeroKey - 1 ? hi - 1 : hi); }

  // The one key inside the bracket that is counted instead of listed, because a plateau of it is
  // expected: the only key there is, or zero, which ReLU indexers give to most of a row.
  __device__ __forceinline__ uint32_t plateau() const {
    if (lo == hi) return lo;
    return lo <= kZeroKey && kZeroKey <= hi ? kZeroKey : kAbsentKey;
  }
};

// What one CTA has counted in its part of the row.
struct Counts {
  uint32_t above;   // elements above the bracket
  uint32_t listed;  // elements inside, the plateau's apart; may exceed the list's capacity
  uint32_t equal;   // elements equal to the plateau
};

// What a CTA tells all others. Each CTA reads the row's length and guesses the bracket for itself, from
// memory that another stream may be writing, so both travel: counts belong together only where they agree.
struct alignas(16) Header {
  Counts counts;
  int32_t length;
  uint32_t lo;  // of the bracket
  uint32_t hi;
  uint32_t unused[2];
};
constexpr int kHeaderVecs = sizeof(Header) / sizeof(uint4);
static_assert(kHeaderVecs == 2);

// What the headers of a cluster say together.
struct Verdict {
  bool counted;        // all CTAs went by the same length and bracket
  bool contains;       // and the k-th key is in it
  bool holds;          // and everything needed was listed
  uint32_t above;      // elements above the bracket,
  uint32_t before;     // and those of earlier CTAs
  uint32_t rank;       // its rank, from the top, among the elements inside
  uint32_t inside;     // elements inside
  uint32_t equal;      // of these, elements equal to the plateau
  uint32_t collected;  // candidates of this CTA; above the capacity they were not collected
};

// What is known of a row whose guess has missed, by all CTAs of its cluster: where the rest of the work
// starts.
struct Missed {
  Bracket bracket;        // that missed last
  Verdict verdict;        // counts that belong together
  int passes;             // so far, each with one exchange
  int length;             // of the row
  int elements;           // by which a row in registers was laid out
  float mean, deviation;  // of the row's sample
  uint32_t source;        // of the first guess
};

// What one step leaves for the next. What the numbers mean predictor.cuh says; the first also tells of what
// kind they are.
struct alignas(16) Feedback {
  float place;
  float value;
  float limit;
  uint32_t spreads;
};
static_assert(sizeof(Feedback) == sizeof(float4) && sizeof(Feedback) == kStateFloats * sizeof(float));

// What one thread reads for its whole block, because two threads could find different values. The others
// take it behind the block barrier that comes next.
struct RowFacts {
  Feedback feedback;  // what the last step left
  int32_t length;     // of the row
  int32_t slot;       // negative: none; of kernels whose barriers depend on it
};

// An element that may be selected: at or above the bracket's lower end.
struct alignas(8) Candidate {
  int32_t position;
  uint32_t key;
};

// Shared memory of a CTA, each region with those who write it, those who read it, and what orders the two.
// Nothing of one kind overlays anything of another, and only `Inbox` and `KeyList` (regions.cuh) are written
// from outside:
//
// - Own regions are written by threads of this CTA, and read by them behind a block barrier, or by the same
//   warp behind __syncwarp. Regions of a union are named with the phase that uses them, and a block barrier
//   lies between two phases.
// - The landing zones take asynchronous copies of this CTA's own threads; a thread reads what it copied
//   itself, behind its own wait for the copies.
// - Inboxes take transaction stores of any CTA of the cluster, sent behind the cluster barrier that says that
//   all CTAs run. They are read behind the wait for their transaction barrier, and sent to again only behind
//   another cluster barrier (`start_again`), so that nobody still reads what is overwritten.
//
// What comes behind the struct starts where 128 bytes do: copies into a ring take longer across such bounds.
struct alignas(128) Shared {
  union {
    uint4 landing[kThreads];    // guess: landing zone of each thread's look at the row
    uint32_t hist[kRadixBins];  // radix rounds
  };
  Histogram keys;  // of the listed keys, or cluster-wide sums of one radix round
  // From the sums of that on, all is cleared at once, up to `over_range`.
  Counts counts;
  uint32_t segment_above[kMaxClusterSize];  // listed keys above the k-th, per CTA
  uint32_t segment_equal[kMaxClusterSize];  // listed keys equal to it
  uint32_t at_or_above;                     // hinted values at or above the k-th
  uint32_t hinted;                          // hinted values that lie in the row
  uint32_t small_count;
  uint32_t over_range;  // elements above the range of a radix round
  RowFacts facts;
  Missed missed;
  Inbox<Header, kMaxClusterSize> header;
  Inbox<uint32_t, kThreads> received;  // the sample of the cluster, as its CTAs have sent it
  uint64_t mailbox;                    // transaction barrier of `header` and of the key list
  uint64_t sample_mailbox;             // and of `received`
  uint32_t warp_value[3][kWarps];
  // Packed counts (place.cuh) of what is selected: of earlier CTAs' listed keys, as each warp finds them, and
  // of each warp's own elements.
  uint32_t selected[2][kWarps];
  union {
    struct {
      uint32_t sent[kThreads];                 // guess: what this CTA has for the sample of the cluster,
      alignas(16) uint4 sample[kThreads / 4];  // and the sample, one key per thread
    };
    alignas(8) uint16_t word_candidates[kMaxSteps * kWarps];  // collect: per word; then, of all words before
    uint8_t pool_chunks[kWarps][kMaxPoolChunks];  // collect: which chunks of the store a warp has taken
  };
  alignas(16) uint32_t greatest[kGreatestOfSample];  // guess: of a sample of which few lie above the k-th
  alignas(16) uint32_t edge[2][kWarps];  // every warp's idea of the bracket: its top, and its inverted bottom
  alignas(16) float moment[2 * kWarps];  // of every warp's sample: sums, then sums of squares
  alignas(8) uint32_t small[kRankDirectly];
  uint32_t pool_used;  // chunks taken by all warps
};

// What a kernel is compiled for, of the flags of a launch. Time is instructions here, and many ask for what
// hardly ever differs.
enum class Known {
  kNothing,
  kUsual,    // of most, that they are as usual,
  kPlain,    // and of all others, that requests have one row each, and their own slots,
  kSlotted,  // or one row each, in slots that are named, as engines pass them;
  kBare,     // or else that there is nothing but rows, one to a request
};

// What is the same for all rows of a launch, and looked at before anything else: of layout, buffers and
// parameters. The host finds it out.
struct alignas(8) Shape {
  enum Flag : uint32_t {
    kRing = 1 << 0,
    kUseHint = 1 << 1,  // or guess from a sample of the row, whatever the hint
    kAligned = 1 << 2,  // all rows
    kWhole = 1 << 3,    // and nothing is left of a buffer that is read 16 bytes at a time
    kFed = 1 << 4,      // what the last step has left may be used,
    kPrompt = 1 << 5,   // and is found without a look at the row's slot
    kSeveral = 1 << 6,  // rows to a request
    kSlotted = 1 << 7,  // rows have slots of their own
    kAudited = 1 << 8,  // statistics are wanted
    kLeaving = 1 << 9,  // something is left for the next step
    kQuads = 1 << 10,   // results may be written 16 bytes at a time, as they are
    kBare = kAligned | kWhole,
    kUsual = kBare | kUseHint | kFed | kLeaving,
    kOthers = kPrompt | kSeveral | kSlotted,
  };

  uint32_t sizes;  // log2_ctas, list_capacity
  uint32_t flags;

  GVR_TOPK_HOST_DEVICE constexpr Shape(int log2_ctas, int list_capacity, uint32_t flags_)
      : sizes(log2_ctas | list_capacity << 16), flags(flags_) {}

  GVR_TOPK_HOST_DEVICE constexpr int log2_ctas() const { return sizes & 0xff; }
  GVR_TOPK_HOST_DEVICE constexpr int list_capacity() const { return sizes >> 16; }  // keys
  // The flag, or any of several.
  GVR_TOPK_HOST_DEVICE constexpr bool has(Flag flag) const { return (flags & flag) != 0; }

  // Of one row or few, in registers.
  GVR_TOPK_HOST_DEVICE static constexpr Shape plain() {
    return Shape(log2_of(kMaxClusterSize), kLongList, kUsual | kPrompt);
  }

  GVR_TOPK_HOST_DEVICE constexpr bool has_usual_sizes() const { return sizes == plain().sizes; }

  GVR_TOPK_HOST_DEVICE constexpr Known known() const {
    const uint32_t looked_at = flags & ~uint32_t{kRing | kQuads};  // which only some kernels look at
    if (looked_at == plain().flags) return Known::kPlain;
    if (looked_at == (kUsual | kSlotted)) return Known::kSlotted;
    if ((looked_at & ~uint32_t{kUseHint}) == kBare) return Known::kBare;
    return (looked_at & ~uint32_t{kOthers}) == kUsual ? Known::kUsual : Known::kNothing;
  }

  // Those that are known as what they are known to be.
  template <Known kKnown>
  __device__ __forceinline__ uint32_t known_flags() const {
    if (kKnown == Known::kUsual) return (flags & (kRing | kOthers)) | kUsual;
    if (kKnown == Known::kPlain) return (flags & kRing) | plain().flags;
    if (kKnown == Known::kSlotted) return (flags & kRing) | kUsual | kSlotted;
    if (kKnown == Known::kBare) return (flags & (kRing | kUseHint)) | kBare;
    return flags;
  }

  // Where rows have one CTA; where anything is known, results are written in quads.
  template <Known kKnown>
  __device__ __forceinline__ Shape alone() const {
    return Shape(0, 0, known_flags<kKnown>() | (kKnown == Known::kNothing ? 0 : kQuads));
  }

  // In registers, where it stays, but for what is known.
  template <Known kKnown, bool kUsualSizes>
  __device__ __forceinline__ Shape kept() const {
    Shape shape = *this;
    ptx::keep(shape.sizes);
    ptx::keep(shape.flags);
    if (kUsualSizes) shape.sizes = plain().sizes;
    shape.flags = shape.known_flags<kKnown>();
    return shape;
  }
};
static_assert(sizeof(Shape) == 8);
static_assert(Shape::plain().has_usual_sizes() && Shape::plain().known() == Known::kPlain);

// The same for what comes later: room in shared memory.
struct Room {
  int candidate_capacity;
  int masks;        // selection masks of one CTA; 0 when rows fit in registers
  int pool_chunks;  // room for candidates of the stream kernel, in its chunks
};

template <typename T>
struct Task {
  Row<T> row;
  int k;
  int rank;  // of this CTA in the cluster
  int ctas;  // in the cluster
  int log2_ctas;
  // A CTA owns consecutive elements. Of one word per warp, which stays in registers, warps own equal
  // parts; of several, the CTA walks through its part 16 words at a time, a warp taking one: DRAM likes
  // that better than 16 streams. Either way (CTA, step, warp, place in the word) is index order.
  int begin;  // of this warp's first word
  int end;    // of this warp's part, or of the CTA's when there are several words
  int steps;  // words per warp
  int thread;
  int lane;
  int warp;
  uint32_t zero;  // `unknown_zero()`
  Shared* shared;
  Candidate* candidates;  // [candidate_capacity] this CTA's, in index order
  int candidate_capacity;
  KeyList list;
  uint16_t* masks;  // [steps][kThreads] selection bits; rows of several words only
  uint4* ring;      // [kRingDepth][vectors][kThreads] words under way, or null: words are loaded when needed

  // Takes the row's length, and with it the parts of its warps.
  __device__ __forceinline__ void measure(int length) {
    row.n = length;
    const int n = max(length, 0);
    const int span = warp_span(n, log2_ctas, sizeof(T));
    steps = steps_of(span);
    if (steps == 1) {
      begin = min(n, (rank * kWarps + warp) * span);
      end = min(n, begin + span);
    } else {
      const int share = steps * kStepElements;
      begin = min(n, rank * share + warp * kWordElements);
      end = min(n, (rank + 1) * share);
    }
  }

  __device__ __forceinline__ int word_begin(int step) const { return min(end, begin + step * kStepElements); }

  // Bits of one word's elements for which `test(key)` holds; slower than a test of values.
  template <typename Test>
  __device__ __forceinline__ uint32_t match_keys(const Word<T>& word, int at, Test test) const {
    return valid_bits<T>(at, end, lane) &
           match_word(word, at, end, [&](float x) { return test(order_key(x)); });
  }

  // Vectors of one word that hold elements of this warp's span.
  __device__ __forceinline__ int word_vecs(int step) const {
    constexpr int kGroup = 32 * kPerVec<T>;
    return min(Word<T>::kVecs, (end - word_begin(step) + kGroup - 1) / kGroup);
  }

  __device__ __forceinline__ uint16_t& mask(int step) const { return masks[step * kThreads + thread]; }

  // The block split evenly over the CTAs of the cluster: this thread's CTA, and its place in the team.
  __device__ __forceinline__ int team_size() const { return kThreads >> log2_ctas; }
  __device__ __forceinline__ int team_target() const { return thread >> (kLog2Threads - log2_ctas); }
  __device__ __forceinline__ int team_place() const { return thread & (team_size() - 1); }

  // Calls visit(step, begin of the word) with the word loaded. One word is never read again: it is
  // still in its registers.
  template <typename Visit>
  __device__ __forceinline__ void for_each_word(Word<T>& word, Visit visit) const {
    if (steps == 1) {
      visit(0, begin);
      return;
    }
    if (ring == nullptr) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        load_word(row, word_begin(step), end, lane, word);
        visit(step, word_begin(step));
      }
      return;
    }
    for (int step = 0; step < kRingDepth; ++step) request_word(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::wait_copies<kRingDepth - 1>();
      const uint4* slot = ring_slot(step);
      if (is_whole(step)) {
#pragma unroll
        for (int j = 0; j < Word<T>::kVecs; ++j) word.vec[j] = slot[j * kThreads];
      } else {
        load_word(row, word_begin(step), end, lane, word,
                  [&](int j, const T*) { return slot[j * kThreads]; });
      }
      visit(step, word_begin(step));
      request_word(step + kRingDepth);
    }
  }

  // Whether all of a word is there and can be loaded 16 bytes at a time; all but the last ones are.
  __device__ __forceinline__ bool is_whole(int step) const {
    return row.aligned && begin + step * kStepElements + kWordElements <= end;
  }

  // A thread reads back only what it requested, so the ring needs no barrier.
  __device__ __forceinline__ uint4* ring_slot(int step) const {
    return ring + (step % kRingDepth) * Word<T>::kVecs * kThreads + thread;
  }

  __device__ __forceinline__ void request_word(int step) const {
    if (step < steps && row.aligned) {
      const int left = end - word_begin(step) - lane * kPerVec<T>;
      const T* first = row.data + word_begin(step) + lane * kPerVec<T>;
      const uint32_t slot = ptx::shared_address(ring_slot(step));
      const bool whole = is_whole(step);
#pragma unroll
      for (int j = 0; j < Word<T>::kVecs; ++j) {
        if (whole || j * Word<T>::kGroup + kPerVec<T> <= left) {
          ptx::copy_async(slot + j * kThreads * sizeof(uint4), first + j * Word<T>::kGroup);
        }
      }
    }
    ptx::commit_copies();  // empty groups too: waiting counts groups
  }

  // Calls visit(i, i < count) for this thread's candidates: warps own contiguous runs of them, and all
  // lanes of a warp take part in every call.
  template <typename Visit>
  __device__ __forceinline__ void for_each_candidate(uint32_t count, Visit visit) const {
    const int rounds = static_cast<int>(count + kThreads - 1) >> kLog2Threads;
    const int first = warp * rounds * 32 + lane;
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) visit(first + 32 * r, first + 32 * r < static_cast<int>(count));
  }
};

__device__ __forceinline__ void cluster_sync(int ctas) {
  if (ctas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

// Sum over the warps before this one of what each left in `warp_value[which]`.
template <typename T>
__device__ __forceinline__ uint32_t earlier_warps(const Task<T>& task, int which) {
  return __reduce_add_sync(0xffffffffu,
                           task.lane < task.warp ? task.shared->warp_value[which][task.lane] : 0);
}

}  // namespace gvr_topk::cluster
