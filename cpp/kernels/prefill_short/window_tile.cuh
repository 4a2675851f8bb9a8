// A window in the registers of a CTA. Windows arrive in shared memory first, so that the next window can be
// fetched meanwhile.
#pragma once

#include "prefill/window.cuh"
#include "ptx/cluster.cuh"
#include "small_row/register_tile.cuh"

namespace gvr_topk::prefill_short {

using prefill::AlignedWindow;

// One warp's part of a window: each lane has as few words, of 16 elements each, as hold the window.
template <typename T, int kBlockThreads>
struct WindowPart {
  static constexpr int kBlockWarps = kBlockThreads / 32;
  static constexpr int kWords = kMaxValuesPerThread / kValuesPerThread;
  static constexpr int kWordElements = 32 * kValuesPerThread;  // elements of one word over the warp

  int begin;  // first element, from `AlignedWindow::data` on
  int words;  // words of each lane that hold elements of the window

  __device__ __forceinline__ WindowPart(int length, int warp) {
    constexpr int kBlockElements = kBlockWarps * kWordElements;
    const int share = min((length + kBlockElements - 1) / kBlockElements, kWords);
    begin = warp * share * kWordElements;
    words = min(share, max(length - begin + kWordElements - 1, 0) / kWordElements);
  }
};

// The places in shared memory where windows arrive, in turn. One bulk copy brings the whole vectors of a
// window. The elements after the last whole vector are copied by the lane that takes them, so that nothing
// after the window is read.
template <typename T, int kBlockThreads>
struct Arrivals {
  static constexpr uint32_t kBytes = short_prefill_row_bytes(kBlockThreads, sizeof(T));
  static constexpr int kPlaces = short_prefill_places(sizeof(T));
  static constexpr size_t kAllBytes = kPlaces * size_t{kBytes};
  using Part = WindowPart<T, kBlockThreads>;

  uint32_t places, barriers;
  uint32_t taken = 0;  // number of windows taken so far

  // One thread initializes the mbarriers. A block barrier must follow.
  __device__ __forceinline__ Arrivals(uint32_t places_, uint64_t* barriers_)
      : places(places_), barriers(ptx::shared_address(barriers_)) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kPlaces; ++i) ptx::barrier_init(barriers + i * sizeof(uint64_t), 1);
  }

  __device__ __forceinline__ uint32_t place(uint32_t number) const {
    return places + (kPlaces == 2 ? number & 1 : 0) * kBytes;
  }
  __device__ __forceinline__ uint32_t barrier(uint32_t number) const {
    return barriers + (kPlaces == 2 ? number & 1 : 0) * sizeof(uint64_t);
  }

  // Starts to fetch window `number`. Block barriers have passed since its place was last read.
  __device__ __forceinline__ void fetch(const AlignedWindow<T>& window, uint32_t number, int warp,
                                        int lane) const {
    const int rest = window.length % kPerVec<T>, whole = window.length - rest;
    if (threadIdx.x == 0) {
      ptx::barrier_expect_tx(barrier(number), whole * sizeof(T));
      if (whole > 0) ptx::copy_bulk(place(number), window.data, whole * sizeof(T), barrier(number));
    }
    const Part part(window.length, warp);
    const int ahead = whole - part.begin;  // where the last, partial vector starts in this warp's part
    const bool owner =
        static_cast<uint32_t>(ahead) < static_cast<uint32_t>(part.words * Part::kWordElements) &&
        ahead / kPerVec<T> % 32 == lane;
    if (rest != 0 && owner) {
      ptx::copy_async(place(number) + whole * sizeof(T), window.data + whole, ptx::evict_first_policy(),
                      rest * sizeof(T));
    }
  }

  // Waits for the window that is taken next. One group of copies has been committed for each window so far
  // and, with two places, for the window after it as well.
  __device__ __forceinline__ void wait() const {
    ptx::wait_copies<kPlaces - 1>();
    ptx::barrier_wait(barrier(taken), (kPlaces == 2 ? taken >> 1 : taken) & 1);
  }
};

// The tile of a window in registers. Positions count from the window's first element, so elements before it
// in the first vector have negative positions.
template <typename T, int kBlockThreads>
struct WindowTile : small_row::RegisterTile<T, kMaxValuesPerThread, true> {
  using Base = small_row::RegisterTile<T, kMaxValuesPerThread, true>;
  using Base::begin, Base::bits, Base::kGroup, Base::kVecs, Base::words;
  using Part = WindowPart<T, kBlockThreads>;

  // Takes the window that has arrived, with -inf where the window has no elements.
  __device__ __forceinline__ void take(const AlignedWindow<T>& window, uint32_t place, int warp, int lane) {
    const Part part(window.length, warp);
    begin = part.begin - window.lead;
    words = part.words;
    const uint32_t first = place + part.begin * sizeof(T) + lane * sizeof(uint4);
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j * kPerVec<T> / kValuesPerThread >= words) break;
      const uint4 vec = ptx::load_shared(first + j * 32 * sizeof(uint4));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) bits[j * kPerVec<T> + e] = __float_as_uint(element<T>(vec, e));
    }
    mask_lead(lane, __float_as_uint(-INFINITY));
    if (part.begin + words * Part::kWordElements <= window.length) return;
    const int left = window.length - part.begin - lane * kPerVec<T>;
    Base::for_each_index([&](int i) {
      if (i / kPerVec<T> * kGroup + i % kPerVec<T> >= left) bits[i] = __float_as_uint(-INFINITY);
    });
  }

  // Makes the keys. Elements before the window get a key below all others.
  __device__ __forceinline__ void make_keys(int lane) {
    Base::make_keys();
    mask_lead(lane, kAbsentKey);
  }

 private:
  __device__ __forceinline__ void mask_lead(int lane, uint32_t masked) {
    if (begin >= 0 || lane != 0) return;
#pragma unroll
    for (int e = 0; e < kPerVec<T> - 1; ++e) {
      if (e < -begin) bits[e] = masked;
    }
  }
};

}  // namespace gvr_topk::prefill_short
