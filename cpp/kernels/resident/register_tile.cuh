// The part of a row that a CTA holds in its registers.
#pragma once

#include "core/config.cuh"
#include "core/key.cuh"
#include "core/row_context.cuh"
#include "ptx/compare.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk::resident {

// The consecutive elements of one lane: index order is (CTA, warp, lane, place), and a rank takes a single
// scan over the lanes. They are fetched in coalesced order, and change hands in shared memory. The row's
// groups of 32 vectors are spread evenly over the warps: some have one more than others.
template <typename T, int kValues>
struct RegisterTile {
  static constexpr int kVecs = kValues / kPerVec<T>;
  static constexpr int kGroup = 32 * kPerVec<T>;

  int vecs;                 // a lane holds
  int begin;                // position of the first element
  int length;               // elements in the row from there on; may be none, or more than it holds
  uint32_t stage_selected;  // shared address of what the warp holds
  float value[kValues];     // -inf behind the row's end

  // The stage lies behind the list, and holds as many bytes as the CTA holds of the row.
  __device__ __forceinline__ RegisterTile(const RowContext<T>& ctx, const LaunchTraits& traits)
      : stage_selected(ptx::shared_address(static_cast<uint4*>(ctx.list.end(traits.list_capacity())) +
                                           ctx.warp * 32 * kVecs)) {
    ptx::keep(stage_selected);
  }

  __device__ __forceinline__ static int groups_of(int elements) {
    return (elements + kGroup - 1) >> log2_of(kGroup);
  }

  // Says where this lane's elements lie of a row of so many; returns where those of its warp begin.
  __device__ __forceinline__ int lay_out(const RowContext<T>& ctx, int elements) {
    const int groups = groups_of(elements), log2_warps = log2_of(kWarps) + ctx.log2_ctas;
    const int before = (ctx.rank * kWarps + ctx.warp) * groups + (1 << log2_warps) - 1;
    const int first = before >> log2_warps;  // the last warp, which does most else, has no more than others
    vecs = ((before + groups) >> log2_warps) - first;
    begin = first * kGroup + ctx.lane * vecs * kPerVec<T>;
    return first * kGroup;
  }

  // Starts the loads of a row of so many elements, in a buffer of `width`: of whole vectors where it has
  // them, for what lies behind the row's end costs less than leaving it out.
  __device__ __forceinline__ void fetch(const RowContext<T>& ctx, const LaunchTraits& traits, int elements,
                                        int width) {
    const int warp_begin = lay_out(ctx, elements);
    const int at_lane = warp_begin + ctx.lane * kPerVec<T>;
    const T* data = ctx.row.data + at_lane;
    const int left = elements - at_lane;
    int whole = min(min(left, width - at_lane - kPerVec<T> + 1), vecs * kGroup);
    ptx::keep(whole);
    if (ctx.row.aligned) {
      // Of `address`, 32 vectors on, only one bit of what is swapped changes.
      const uint32_t even = address(ctx.lane), odd = address(32 + ctx.lane) - 32 * sizeof(uint4);
      copy_before(whole, even, odd, data);
    }
    ptx::commit_copies();
    if (traits.has(LaunchTraits::kWholeVectors)) return;
#pragma unroll 1
    for (int j = 0; j < vecs; ++j) {
      const int at = j * kGroup;
      if (at < left && (!ctx.row.aligned || at >= whole)) {
        ptx::store_shared(address(32 * j + ctx.lane), load_elements(data + at, left - at));
      }
    }
  }

  template <int kVec = 0>
  __device__ __forceinline__ static void copy_before(int whole, uint32_t even, uint32_t odd, const T* data) {
    if constexpr (kVec < kVecs) {
      constexpr int kGroupBytes = kGroup * sizeof(T);
      ptx::copy_async_before<kVec * kGroupBytes>(kVec * kGroup, whole, kVec % 2 == 0 ? even : odd, data);
      copy_before<kVec + 1>(whole, even, odd, data);
    }
  }

  // Neighbouring lanes read vectors that lie `vecs` apart, out of different banks: odd numbers see to that
  // themselves.
  __device__ __forceinline__ uint32_t address(uint32_t vec) const {
    return stage_selected + sizeof(uint4) * (vec ^ (vec >> 3 & (vecs % 2 - 1) & 7));
  }

  // Waits for the loads of the whole warp.
  __device__ __forceinline__ void load(int lane, int n) {
    length = n - begin;
    ptx::wait_copies<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
      const uint4 vec = ptx::load_shared(address(lane * vecs + j));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) value[j * kPerVec<T> + e] = element<T>(vec, e);
    }
    if (length >= vecs * kPerVec<T>) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i >= length) value[i] = -INFINITY;
    }
  }

  // Key of one element of a lane, by a place known only at run time.
  __device__ __forceinline__ uint32_t key(int lane, uint32_t place) const {
    const uint32_t vec = address(lane * vecs + place / kPerVec<T>);
    return order_key(to_float(ptx::load_shared_element<T>(vec + sizeof(T) * (place % kPerVec<T>))));
  }

  // Bits of the elements that mark(marks, value, bit) marks; it does not mark -inf.
  template <typename Mark>
  __device__ __forceinline__ uint32_t bits(Mark set_bit) const {
    ptx::BitAccumulator accumulators[kValues / kValuesPerThread];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const int i = j * kPerVec<T> + e;
        set_bit(accumulators[i / kValuesPerThread].sums[j % 2], value[i], 1u << i % kValuesPerThread);
      }
    }
    uint32_t found = 0;
#pragma unroll
    for (int w = 0; w < kValues / kValuesPerThread; ++w)
      found |= accumulators[w].bits() << (kValuesPerThread * w);
    return found;
  }

  __device__ __forceinline__ uint32_t not_below(float bound) const {
    return bits([&](float& sum, float x, float bit) { ptx::set_bit_unless_less(sum, x, bound, bit); });
  }

  __device__ __forceinline__ uint32_t equal(float level) const {
    return bits([&](float& sum, float x, float bit) { ptx::set_bit_if_equal(sum, x, level, bit); });
  }
};

}  // namespace gvr_topk::resident
