// A short row in the registers of one CTA, and the way what is chosen of it gets out in ascending order.
#pragma once

#include <type_traits>

#include "cluster/job.cuh"
#include "common/order_scan.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::single {

using namespace cluster;  // a cluster of one

// A warp owns consecutive elements, and a lane of it vectors in coalesced order: index order is (warp,
// vector, lane, element). The row is treated as if it went on with -inf up to what the block holds: its top
// k are the same, since ties go to the smallest positions.
//
// Of few elements all that the buffer has are fetched before the row's length is there: what lies behind it
// costs less than waiting.
template <typename T, int kValues>
struct Held {
  static constexpr int kVecs = kValues / kPerVec<T>;
  static constexpr int kGroup = 32 * kPerVec<T>;
  static constexpr bool kAhead = kValues <= kValuesPerThread;
  static constexpr int kWords = kValues > kValuesPerThread ? kValues / kValuesPerThread : 1;
  using Bits = std::conditional_t<(kValues > 32), uint64_t, uint32_t>;

  int vecs;   // of a lane
  int begin;  // position of the warp's first element
  uint4 raw[kVecs];
  uint32_t key[kValues];  // without its idle bits

  // Starts the loads: of all that the buffer of the row has, or of what is there of it.
  __device__ __forceinline__ void load(const Row<T>& row) {
    constexpr int kBlock = kThreads * kPerVec<T>;
    const int there = row.n;
    vecs = (there + kBlock - 1) / kBlock;
    begin = (threadIdx.x >> 5) * vecs * kGroup;
    const int first = begin + (threadIdx.x & 31) * kPerVec<T>;
    const T* data = row.data + first;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      raw[j] = absent_vec<T>();
      if (row.aligned && j < vecs && first + j * kGroup + kPerVec<T> <= there) {
        raw[j] = ptx::load_streaming(data + j * kGroup);
      }
    }
    if (row.aligned && there % kPerVec<T> == 0) return;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int left = there - first - j * kGroup;
      if (j < vecs && left > 0 && (!row.aligned || left < kPerVec<T>)) {
        raw[j] = load_elements(data + j * kGroup, left);
      }
    }
  }

  // Waits for them.
  __device__ __forceinline__ void take(int n, int lane) {
    for_each_place(
        [&](int i) { key[i] = order_key(element<T>(raw[i / kPerVec<T>], i % kPerVec<T>)) >> kIdleBits<T>; });
    if (!kAhead || begin + vecs * kGroup <= n) return;
    const int left = n - begin - lane * kPerVec<T>;
    for_each_place([&](int i) {
      if (i / kPerVec<T> * kGroup + i % kPerVec<T> >= left) key[i] = kNegInfKey >> kIdleBits<T>;
    });
  }

  // Calls visit(place) for every element of the lane.
  template <typename Visit>
  __device__ __forceinline__ void for_each_place(Visit visit) const {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) visit(j * kPerVec<T> + e);
    }
  }

  // Bits of the keys that mark(marks, key, bit) marks.
  template <typename Mark>
  __device__ __forceinline__ Bits bits(Mark mark) const {
    ptx::Marks marks[kWords];
    for_each_place([&](int i) {
      mark(marks[i / kValuesPerThread].of[i / kPerVec<T> % 2], key[i], 1u << i % kValuesPerThread);
    });
    Bits found = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) found |= Bits{marks[w].bits()} << (kValuesPerThread * w);
    return found;
  }

  // The key at a place known only at run time: a tree of selections, because registers have no addresses.
  template <int kFirst = 0, int kCount = kValues>
  __device__ __forceinline__ uint32_t key_at(int place) const {
    if constexpr (kCount == 1) {
      return key[kFirst];
    } else {
      constexpr int kHalf = kCount / 2;
      const uint32_t lower = key_at<kFirst, kHalf>(place);
      const uint32_t upper = key_at<kFirst + kHalf, kHalf>(place);
      return (place & kHalf) != 0 ? upper : lower;
    }
  }

  // Those of 16 elements.
  __device__ __forceinline__ static uint32_t word(Bits bits, int w) {
    return static_cast<uint32_t>(bits >> (kValuesPerThread * w)) & 0xffffu;
  }
};

__device__ __forceinline__ uint32_t count_bits(uint32_t bits) { return __popc(bits); }
__device__ __forceinline__ uint32_t count_bits(uint64_t bits) { return __popcll(bits); }
__device__ __forceinline__ int first_bit(uint32_t bits) { return __ffs(bits) - 1; }
__device__ __forceinline__ int first_bit(uint64_t bits) { return __ffsll(bits) - 1; }

// Brings the chosen elements in order; `before` were chosen in earlier warps. A block barrier comes next.
template <typename T, int kValues>
__device__ __forceinline__ void stage(const Task<T>& task, const Held<T, kValues>& held,
                                      typename Held<T, kValues>::Bits chosen, uint32_t before,
                                      uint16_t* staged) {
  constexpr uint32_t kFieldMask = (1u << kFieldBits<T>)-1;
  constexpr int kWordVecs = kVecsOfWord<T>;
  const uint32_t storage = ptx::shared_address(staged);
  uint32_t position = held.begin + task.lane * kPerVec<T>;
#pragma unroll
  for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
    const uint32_t word = Held<T, kValues>::word(chosen, w);
    const uint32_t counts = packed_counts<T>(word);
    uint32_t upto = inclusive_scan(counts);
    uint32_t total = __shfl_sync(0xffffffffu, upto, 31);
    upto -= counts;
#pragma unroll
    for (int j = 0; j < kWordVecs; ++j) {
      if (w * kWordVecs + j >= min(held.vecs, Held<T, kValues>::kVecs)) break;
      uint32_t slot = storage + 2 * (before + (upto & kFieldMask));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        ptx::push_if(word & (1u << (j * kPerVec<T> + e)), slot, static_cast<uint16_t>(position + e));
      }
      before += total & kFieldMask;
      upto >>= kFieldBits<T>;
      total >>= kFieldBits<T>;
      position += Held<T, kValues>::kGroup;
    }
  }
}

// Looks at the whole hint, which is still the old one, when somebody wants to know.
template <typename T>
__device__ __forceinline__ void audit(const TopkParams& p, const Shape& shape, const Job<T>& job,
                                      uint32_t kth) {
  if (!shape.has(Shape::kAudited) || job.slot(p, shape) < 0) return;
  audit_hint(job.task, job.hint(p, shape), kth);
  __syncthreads();
}

// Writes what all warps have staged.
template <typename T>
__device__ __forceinline__ void write_out(const Task<T>& task, const uint16_t* staged, const Sink& sink) {
  const auto outputs = reinterpret_cast<uintptr_t>(sink.indices) | reinterpret_cast<uintptr_t>(sink.prior);
  if (sink.pages == nullptr && (outputs & 15) == 0 && (task.k & 3) == 0) {
#pragma unroll 1
    for (int i = 4 * task.thread; i < task.k; i += 4 * kThreads) {
      const ushort4 four = *reinterpret_cast<const ushort4*>(staged + i);
      const int4 positions = make_int4(four.x, four.y, four.z, four.w);
      *reinterpret_cast<int4*>(sink.indices + i) = positions;
      if (sink.prior != nullptr) *reinterpret_cast<int4*>(sink.prior + i) = positions;
    }
    return;
  }
#pragma unroll 1
  for (int i = task.thread; i < task.k; i += kThreads) sink.put(i, staged[i]);
}

}  // namespace gvr_topk::single
