// A window in the registers of a CTA. Windows arrive in shared memory first, so that the next window can be
// fetched meanwhile.
#pragma once

#include "core/prefill_rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "small_row/cta_tile.cuh"

namespace gvr_topk::prefill_short {

// A bulk copy brings a window from a multiple of 16 bytes on.
template <typename T>
using BulkWindow = AlignedWindow<T, sizeof(uint4)>;

// One warp's part of a window: whole words, each of which is a run of 16 elements of every lane. The words of
// a window are spread over the warps as evenly as possible.
template <typename T, int kBlockThreads>
struct PrefillPart {
  static constexpr int kBlockWarps = kBlockThreads / 32;
  static constexpr int kWordElements = 32 * kValuesPerThread;  // elements of one word over the warp

  int begin;  // first element, from `BulkWindow::data` on
  int words;

  GVR_DEVICE PrefillPart(int length, int warp) {
    const int all = (length + kWordElements - 1) / kWordElements;
    const int first = warp * all / kBlockWarps;
    words = (warp + 1) * all / kBlockWarps - first;
    begin = first * kWordElements;
  }

  // Elements of the window from the first one of this lane's run of a word on; may be negative.
  GVR_DEVICE int left(int length, int word, int lane) const {
    return length - begin - word * kWordElements - lane * kValuesPerThread;
  }
};

// The buffers in shared memory where windows arrive, in turn. One bulk copy brings the whole vectors of a
// window. The elements after the last whole vector are copied by the lane that takes them, so that nothing
// after the window is read.
template <typename T, int kBlockThreads>
struct Arrivals {
  static constexpr uint32_t kBytes = short_prefill_row_bytes(kBlockThreads, sizeof(T));
  static constexpr int kBuffers = short_prefill_buffers(sizeof(T));
  static constexpr size_t kAllBytes = kBuffers * size_t{kBytes};
  using Part = PrefillPart<T, kBlockThreads>;

  uint32_t buffers, barriers;
  uint32_t taken = 0;  // number of windows taken so far

  // One thread initializes the mbarriers. A block barrier must follow.
  GVR_DEVICE Arrivals(uint32_t buffers_, uint64_t* barriers_)
      : buffers(buffers_), barriers(ptx::shared_address(barriers_)) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kBuffers; ++i) ptx::barrier_init(barriers + i * sizeof(uint64_t), 1);
  }

  GVR_DEVICE uint32_t buffer(uint32_t number) const {
    return buffers + (kBuffers == 2 ? number & 1 : 0) * kBytes;
  }
  GVR_DEVICE uint32_t barrier(uint32_t number) const {
    return barriers + (kBuffers == 2 ? number & 1 : 0) * sizeof(uint64_t);
  }

  // Starts to fetch window `number`. Since its buffer was last read, every thread has passed a fence before
  // bulk copies and then a block barrier.
  GVR_DEVICE void fetch(const BulkWindow<T>& window, uint32_t number, int warp, int lane) const {
    const int rest = window.length % kPerVec<T>, whole = window.length - rest;
    if (threadIdx.x == 0) {
      ptx::barrier_expect_tx(barrier(number), whole * sizeof(T));
      if (whole > 0) ptx::copy_bulk(buffer(number), window.data, whole * sizeof(T), barrier(number));
    }
    if (rest == 0) return;
    const Part part(window.length, warp);
    const int offset = whole - part.begin;  // where the last, partial vector starts in this warp's part
    const bool owner =
        static_cast<uint32_t>(offset) < static_cast<uint32_t>(part.words * Part::kWordElements) &&
        offset / kValuesPerThread % 32 == lane;
    const int bytes = owner ? rest * static_cast<int>(sizeof(T)) : 0;
    ptx::copy_part_async(bytes, buffer(number) + whole * sizeof(T), window.data + whole);
  }

  // Waits for the window that is taken next. One group of copies has been committed for each window so far
  // and, with two buffers, for the window after it as well.
  GVR_DEVICE void wait() const {
    ptx::wait_copies<kBuffers - 1>();
    ptx::barrier_wait(barrier(taken), (kBuffers == 2 ? taken >> 1 : taken) & 1);
  }
};

// The tile of a window in registers. A lane has a run of 16 consecutive elements in each word, so index order
// is (warp, word, lane, element of the run). Positions count from the window's first element, so elements
// before it in the first vector have negative positions.
//
// Lanes load the vectors of a run in rotated order, so that lanes that load together use different banks:
// vector v of a run lies in the registers of vector (v - rotation) of the word.
template <typename T, int kBlockThreads>
struct PrefillTile : small_row::WordTile {
  using Part = PrefillPart<T, kBlockThreads>;
  static constexpr int kWordVecs = kVecsOfTile<T>;
  static_assert((kWordVecs & (kWordVecs - 1)) == 0);
  // If every lane has at most this many selected elements in a run, finding these takes less time than
  // looking at all elements.
  static constexpr uint32_t kFewOfRun = 5;

  // The vector of its run that a lane loads first.
  GVR_DEVICE static int rotation(int lane) { return lane / (8 / kWordVecs) % kWordVecs; }

  // Takes the window that has arrived, with -inf where the window has no elements, and calls visit(i) for
  // each of the lane's elements as soon as it is there.
  template <typename Visit>
  GVR_DEVICE void take(const BulkWindow<T>& window, uint32_t buffer, int warp, int lane, Visit visit) {
    const Part part(window.length, warp);
    begin = part.begin - window.lead;
    words = part.words;
    const uint32_t run = buffer + (part.begin + lane * kValuesPerThread) * sizeof(T);
    pad(run, part, window.length, lane);
    uint32_t vecs[kWordVecs];
#pragma unroll
    for (int v = 0; v < kWordVecs; ++v) {
      vecs[v] = run + (v + rotation(lane)) % kWordVecs * sizeof(uint4);
    }
    // A vector is loaded while the elements of the vector before are visited. The vector behind the last one
    // lies in the block's memory, too.
    constexpr int kVecs = kWords * kWordVecs;
    uint4 next = ptx::load_shared(vecs[0]);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j / kWordVecs >= words) break;
      const uint4 vec = next;
      if (j + 1 < kVecs) {
        constexpr uint32_t kWordBytes = Part::kWordElements * sizeof(T);
        next = ptx::load_shared(vecs[(j + 1) % kWordVecs] + (j + 1) / kWordVecs * kWordBytes);
      }
      const int first = j * kPerVec<T>;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) bits[first + e] = __float_as_uint(element<T>(vec, e));
      if (j == 0) mask_lead(lane, __float_as_uint(-INFINITY));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) visit(first + e);
    }
  }

  // Makes the keys. Elements before the window get a key below all others.
  GVR_DEVICE void make_keys(int lane) {
    for_each_index([&](int i) { bits[i] = order_key(value(i)) >> kInvariantBits<T>; });
    mask_lead(lane, kAbsentKey);
  }

  GVR_DEVICE float value(int index) const { return __uint_as_float(bits[index]); }

  // The position in the row of the element with this index.
  GVR_DEVICE uint32_t position(int lane, uint32_t index) const {
    const uint32_t of_run = (index + rotation(lane) * kPerVec<T>) % kValuesPerThread;
    return begin + index / kValuesPerThread * Part::kWordElements + lane * kValuesPerThread + of_run;
  }

  // A word of a set in the order of the run.
  GVR_DEVICE static uint32_t in_order(uint32_t word, int lane) {
    const int turned = 2 * kPerVec<T> * rotation(lane);
    return __funnelshift_l(word, word, turned);
  }

  // Counts, for each word, the elements of a set that the whole warp has up to the end of this lane's run.
  // All lanes take part.
  GVR_DEVICE static void count_upto(const LaneMask<kWords>& set, uint32_t (&upto)[kWords]) {
    uint32_t before = 0;
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {  // Two counts share a register.
      const uint32_t pair = ptx::inclusive_scan(__popc(set.word[w]) | __popc(set.word[w + 1]) << 16);
      const uint32_t all = __shfl_sync(0xffffffffu, pair, 31);
      upto[w] = before + (pair & 0xffff);
      upto[w + 1] = before + (all & 0xffff) + (pair >> 16);
      before += (all & 0xffff) + (all >> 16);
    }
  }

  // Calls visit(there, word, bit, rank) for the lane's elements of a set, all of which are `there`: which
  // element of which word, and how many elements of the whole warp come earlier. All lanes take part.
  template <typename Visit>
  GVR_DEVICE static void for_each_in_order_of(const LaneMask<kWords>& set, int lane, Visit visit) {
    uint32_t upto[kWords];
    count_upto(set, upto);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t rank = upto[w] - __popc(set.word[w]);
#pragma unroll 1
      for (uint32_t left = in_order(set.word[w], lane); left != 0; left &= left - 1) {
        const uint32_t of_run = (__ffs(left) - 1) / 2;
        visit(true, w, (of_run - rotation(lane) * kPerVec<T>) % kValuesPerThread, rank++);
      }
    }
  }

  // Stages the positions of selected elements in ascending order; earlier warps have selected `before`. A
  // block barrier comes next.
  GVR_DEVICE void stage(const LaneMask<kWords>& selected, int lane, uint32_t before, uint32_t staged) const {
    uint32_t upto[kWords], most[kWords];
    count_upto(selected, upto);
#pragma unroll
    for (int w = 0; w < kWords; ++w) most[w] = __reduce_max_sync(0xffffffffu, __popc(selected.word[w]));
    uint32_t first = begin + lane * kValuesPerThread;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t slot = staged + sizeof(uint16_t) * (before + upto[w]);
      uint32_t left = in_order(selected.word[w], lane);
      if (most[w] <= kFewOfRun) {
        // Elements are taken from the last to the first, because the highest bit is found sooner than the
        // lowest.
#pragma unroll
        for (uint32_t i = 0; i < kFewOfRun; ++i) {
          if (i >= most[w]) break;
          const uint32_t bit = 31 - __clz(left);
          ptx::prepend_if(left, slot, static_cast<uint16_t>(first + bit / 2));
          left &= ~(1u << bit % 32);  // This changes nothing if no element is left.
        }
      } else {
        slot -= sizeof(uint16_t) * __popc(left);
#pragma unroll
        for (int i = 0; i < kValuesPerThread; ++i) {
          ptx::append_if(left & 1u << 2 * i, slot, static_cast<uint16_t>(first + i));
        }
      }
      first += Part::kWordElements;
    }
  }

 private:
  // Puts -inf behind the end of the window, as far as its last word goes, into the buffer where it has
  // arrived. Only one warp has that word.
  GVR_DEVICE void pad(uint32_t run, const Part& part, int length, int lane) {
    const int left = part.left(length, words - 1, lane);
    if (words == 0 || left >= kValuesPerThread) return;
    run += (words - 1) * Part::kWordElements * sizeof(T);
#pragma unroll 1
    for (int i = max(left, 0); i < kValuesPerThread; ++i) {
      ptx::store_shared(run + i * static_cast<uint32_t>(sizeof(T)), static_cast<T>(-INFINITY));
    }
  }

  GVR_DEVICE void mask_lead(int lane, uint32_t masked) {
    if (begin >= 0 || lane != 0) return;
#pragma unroll
    for (int e = 0; e < kPerVec<T> - 1; ++e) {
      if (e < -begin) bits[e] = masked;
    }
  }
};

}  // namespace gvr_topk::prefill_short
