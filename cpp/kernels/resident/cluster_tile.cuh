// The part of a row that one thread of a cluster holds in registers.
#pragma once

#include "cluster/row_context.cuh"
#include "core/config.cuh"
#include "core/key.cuh"
#include "core/row_view.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::resident {

// Consecutive elements of one lane. Index order is (CTA, warp, lane, index in the tile), so one scan over the
// lanes ranks them. They are fetched in coalesced order, and change lanes in shared memory. The row is spread
// over warps in groups of 32 vectors, evenly: some warps have one group more than others. The first vector
// starts at the boundary ahead of the row.
template <typename T, int kValues>
struct ClusterTile {
  static constexpr int kVecs = kValues / kPerVec<T>;
  static constexpr int kGroup = 32 * kPerVec<T>;

  static constexpr uint32_t kStagingBytes = sizeof(T) * kThreads * kValues;
  static constexpr uint32_t kSecondStagingBytes = kStagingBytes / 2;

  int vecs;          // vectors that a lane holds
  int begin;         // position of the first element; negative ahead of the row
  int length;        // elements from `begin` to the row's end; may be negative, or more than the tile holds
  uint32_t staging;  // shared address of the warp's elements
  float value[kValues];  // -inf outside of the row

  // The staging area lies behind the list. It holds as many bytes of the row as the CTA does.
  GVR_DEVICE ClusterTile(const RowContext<T>& ctx, const LaunchTraits& traits)
      : staging(ptx::shared_address(static_cast<uint4*>(ctx.list.end(traits.list_capacity())) +
                                    ctx.warp * 32 * kVecs)) {
    ptx::keep(staging);
  }

  // Stages in a second area from now on, so that copies under way need not be waited for. The area has room
  // for a row of at most half the buffer's width.
  GVR_DEVICE void stage_in_second_area(const RowContext<T>& ctx, const LaunchTraits& traits) {
    static_assert(kVecs % 2 == 0);
    uint4* const area =
        static_cast<uint4*>(ctx.list.end(traits.list_capacity())) + kStagingBytes / sizeof(uint4);
    staging = ptx::shared_address(area + ctx.warp * 32 * (kVecs / 2));
    ptx::keep(staging);
  }

  // The memory behind both areas.
  GVR_DEVICE static uint4* behind(const RowContext<T>& ctx, const LaunchTraits& traits) {
    return static_cast<uint4*>(ctx.list.end(traits.list_capacity())) +
           (kStagingBytes + kSecondStagingBytes) / sizeof(uint4);
  }

  GVR_DEVICE static int groups_of(const RowContext<T>& ctx, int elements) {
    return (ctx.row.lead + elements + kGroup - 1) >> log2_of(kGroup);
  }

  // Computes where this lane's elements lie in a row of `elements`. Returns how far its warp's first element
  // is from the boundary.
  GVR_DEVICE int lay_out(const RowContext<T>& ctx, int elements) {
    const int groups = groups_of(ctx, elements), log2_warps = log2_of(kWarps) + ctx.log2_ctas;
    const int before = (ctx.rank * kWarps + ctx.warp) * groups + (1 << log2_warps) - 1;
    // The last warp also writes the next state, so it never has a group more.
    const int first = before >> log2_warps;
    vecs = ((before + groups) >> log2_warps) - first;
    begin = first * kGroup + ctx.lane * vecs * kPerVec<T> - ctx.row.lead;
    return first * kGroup;
  }

  // Starts the loads of a row of `elements` in a buffer of `width`. Whole vectors are loaded where the buffer
  // has them, because loading elements behind the row's end costs less than leaving them out.
  GVR_DEVICE void fetch(const RowContext<T>& ctx, const LaunchTraits& traits, int elements, int width) {
    const int at_lane = lay_out(ctx, elements) + ctx.lane * kPerVec<T>;
    const T* data = ctx.row.boundary() + at_lane;
    const int before = at_lane - ctx.row.lead, left = elements - before;
    int whole = min(min(left, width - before - kPerVec<T> + 1), vecs * kGroup);
    ptx::keep(whole);
    // `address` of a vector 32 further on differs in one swizzled bit only, so two base addresses serve all
    // vectors.
    const uint32_t even = address(ctx.lane), odd = address(32 + ctx.lane) - 32 * sizeof(uint4);
    copy_before(whole, even, odd, data);
    if (!traits.has(LaunchTraits::kWholeVectors)) {
      // The buffer may end within a vector, which is the last one of its lane.
      const int vec = (max(whole, 0) + kGroup - 1) >> log2_of(kGroup), at = vec * kGroup;
      const int there = vec < vecs ? left - at : 0;
      ptx::copy_part_async(there * static_cast<int>(sizeof(T)), address(32 * vec + ctx.lane), data + at);
    }
    ptx::commit_copies();
  }

  template <int kVec = 0>
  GVR_DEVICE static void copy_before(int whole, uint32_t even, uint32_t odd, const T* data) {
    if constexpr (kVec < kVecs) {
      constexpr int kGroupBytes = kGroup * sizeof(T);
      ptx::copy_async_before<kVec * kGroupBytes>(kVec * kGroup, whole, kVec % 2 == 0 ? even : odd, data);
      copy_before<kVec + 1>(whole, even, odd, data);
    }
  }

  GVR_DEVICE uint32_t address(uint32_t vec) const {
    return staging + sizeof(uint4) * staged_index(vec, vecs);
  }

  // Returns the first `length` elements of a row that was fetched by its buffer's `width`, if they lie in
  // this CTA and each of its warps has as many vectors.
  GVR_DEVICE StagedRow staged_row(const RowContext<T>& ctx, int length, int width) const {
    const uint32_t stride = 32 * kVecs * sizeof(uint4);
    const bool even = groups_of(ctx, width) % (kWarps << ctx.log2_ctas) == 0;
    const bool is_here = ctx.rank == 0 && even && ctx.row.lead + length <= kWarps * vecs * kGroup;
    return StagedRow{staging - ctx.warp * stride, stride, is_here ? vecs : 0};
  }

  // Waits for the loads of the whole warp, and takes this lane's elements into registers.
  GVR_DEVICE void load(const RowContext<T>& ctx) {
    const int lane = ctx.lane;
    length = ctx.row.n - begin;
    ptx::wait_copies<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
      const uint4 vec = ptx::load_shared(address(lane * vecs + j));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) value[j * kPerVec<T> + e] = element<T>(vec, e);
    }
    if (ctx.row.lead != 0 && begin < lane * vecs * kPerVec<T>) {  // in the row's first warp
#pragma unroll
      for (int i = 0; i < kValues; ++i) value[i] = i < -begin ? -INFINITY : value[i];
    }
    // The condition is the same in all lanes: the warp's elements do not reach behind the row's end.
    if (length >= (32 - lane) * vecs * kPerVec<T>) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i >= length) value[i] = -INFINITY;
    }
  }

  // Number of this lane's elements that lie ahead of the row.
  GVR_DEVICE int ahead(const RowContext<T>& ctx) const {
    return ctx.row.lead == 0 ? 0 : min(max(-begin, 0), vecs * kPerVec<T>);
  }

  // Returns the key of one element of a lane, whose index is known only at run time.
  GVR_DEVICE uint32_t key(int lane, uint32_t index) const {
    const uint32_t vec = address(lane * vecs + index / kPerVec<T>);
    return order_key(to_float(ptx::load_shared_element<T>(vec + sizeof(T) * (index % kPerVec<T>))));
  }

  // Returns the bits of the elements for which set_bit(sum, element, bit) adds its bit to the sum. `elements`
  // are the tile's values, or something computed from each of them. set_bit must not add a bit for an element
  // outside of the row.
  template <typename Element, typename SetBit>
  GVR_DEVICE uint32_t bits_of(const Element (&elements)[kValues], SetBit set_bit) const {
    ptx::BitAccumulator accumulators[kValues / kValuesPerThread];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const int i = j * kPerVec<T> + e;
        set_bit(accumulators[i / kValuesPerThread].sums[j % 2], elements[i], 1u << i % kValuesPerThread);
      }
    }
    uint32_t found = 0;
#pragma unroll
    for (int w = 0; w < kValues / kValuesPerThread; ++w)
      found |= accumulators[w].bits() << (kValuesPerThread * w);
    return found;
  }

  template <typename SetBit>
  GVR_DEVICE uint32_t bits(SetBit set_bit) const {
    return bits_of(value, set_bit);
  }

  GVR_DEVICE uint32_t not_below(float bound) const {
    return bits([&](float& sum, float x, float bit) { ptx::set_bit_unless_less(sum, x, bound, bit); });
  }

  GVR_DEVICE uint32_t equal(float level) const {
    return bits([&](float& sum, float x, float bit) { ptx::set_bit_if_equal(sum, x, level, bit); });
  }
};

}  // namespace gvr_topk::resident
