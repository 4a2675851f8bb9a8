// The part of a short row that one thread holds in registers, and the staging of its selected positions in
// ascending order.
#pragma once

#include "cluster/row_context.cuh"
#include "core/lane_ranks.cuh"
#include "core/output_writer.cuh"
#include "core/row_view.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::small_row {

// The register of an index known only at run time: a tree of selections, because registers have no addresses.
template <int kFirst, int kCount, int kValues>
GVR_DEVICE uint32_t register_at(const uint32_t (&registers)[kValues], uint32_t index) {
  if constexpr (kCount == 1) {
    return registers[kFirst];
  } else {
    constexpr int kLower = kCount / 2;
    const uint32_t lower = register_at<kFirst, kLower>(registers, index);
    const uint32_t upper = register_at<kFirst + kLower, kLower>(registers, index);
    return (index & kLower) != 0 ? upper : lower;
  }
}

// Returns the mask of a tile's keys for which set_bit(sum, key, bit) adds its bit to the sum.
template <typename Tile, typename SetBit>
GVR_DEVICE LaneMask<Tile::kWords> mask_of_keys(const Tile& tile, SetBit set_bit) {
  constexpr int kWords = Tile::kWords, kHalf = kValuesPerThread / 2;
  ptx::BitAccumulator accumulators[kWords];
  tile.for_each_index([&](int i) {
    set_bit(accumulators[i / kValuesPerThread].sums[i / kHalf % 2], tile.bits[i], 1u << 2 * (i % kHalf));
  });
  LaneMask<kWords> mask;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    mask.word[w] = ptx::integer_of_sum(accumulators[w].sums[0]) | ptx::integer_of_sum(accumulators[w].sums[1])
                                                                      << 2 * kHalf;
  }
  return mask;
}

// A warp owns consecutive elements, and its lanes own vectors in coalesced order. Index order is (warp,
// vector, lane, element). The first vector starts at the boundary ahead of the row. Elements behind the row's
// end are -inf. The top k are the same, since ties go to the smallest positions. Elements ahead of the row
// are -inf as well, and where keys are compared they are absent.
//
// A small tile loads the whole buffer of the row before the row's length is known, because loading elements
// behind the end costs less than waiting.
template <typename T, int kValues>
struct CtaTile {
  using Element = T;

  // Whether there are registers for the bin of each element (small_row/value_window.cuh).
  static constexpr bool kKeepsBins = kValues <= kWideValuesPerThread;
  static constexpr int kVecs = kValues / kPerVec<T>;
  static constexpr int vecs = kVecs;  // vectors in use; a derived tile may use fewer
  static constexpr int kGroup = 32 * kPerVec<T>;
  static constexpr int kSize = kValues;
  static constexpr bool kLoadsEarly = kValues <= kValuesPerThread;
  static constexpr int kWords = kValues > kValuesPerThread ? kValues / kValuesPerThread : 1;

  int begin;  // position of the warp's first element; negative ahead of the row
  int last;   // which of the vectors arrives in shared memory, or -1
  uint4 raw[kVecs];
  uint32_t bits[kValues];  // bits of the values; later the keys, without their invariant low bits

  // Starts the loads of a row's first elements. If they end within a vector, that one arrives at `last_vec`
  // in shared memory, because loads of single elements would be waited for. Null: they do not.
  GVR_DEVICE void load(const RowView<T>& row, int elements, uint4* last_vec) {
    const int there = row.lead + elements, of_warp = (threadIdx.x >> 5) * kVecs * kGroup;
    begin = of_warp - row.lead;
    const int first = of_warp + (threadIdx.x & 31) * kPerVec<T>;
    const T* data = row.boundary() + first;
    if constexpr (kLoadsEarly) {
      ptx::keep(data);
      load_before(there - kPerVec<T> + 1 - first, data);  // Whole vectors start before this element.
    } else {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        raw[j] = negative_infinity_vec<T>();
        if (first + j * kGroup + kPerVec<T> <= there) raw[j] = ptx::load_streaming(data + j * kGroup);
      }
    }
    last = -1;
    if (last_vec == nullptr) return;
    const int left = there - first, rest = left & (kGroup - 1);
    if (0 < left && left < kVecs * kGroup && 0 < rest && rest < kPerVec<T>) last = left >> log2_of(kGroup);
    ptx::copy_part_async(last < 0 ? 0 : rest * static_cast<int>(sizeof(T)), ptx::shared_address(last_vec),
                         data + (left - rest));
    ptx::commit_copies();
  }

  template <int kVec = 0>
  GVR_DEVICE void load_before(int end, const T* data) {
    if constexpr (kVec < kVecs) {
      constexpr int kIndex = kVec * kGroup;
      ptx::load_streaming_before<kIndex * sizeof(T)>(kIndex, end, raw[kVec], data);
      load_before<kVec + 1>(end, data);
    }
  }

  // Takes the row from shared memory, as far as it is staged there.
  GVR_DEVICE void load(const StagedRow& staged, int lead) {
    const int first = (threadIdx.x >> 5) * kVecs;
    begin = first * kGroup - lead;
    last = -1;
    int warp = first / staged.vecs, vec = first - warp * staged.vecs;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      raw[j] = negative_infinity_vec<T>();
      if (warp < kWarps) raw[j] = ptx::load_shared(staged.address(warp, 32 * vec + (threadIdx.x & 31)));
      if (++vec == staged.vecs) vec = 0, ++warp;
    }
  }

  // Waits for the loads, and puts -inf ahead of the row and behind its end. `may_pass_end`: whether elements
  // behind that end were loaded.
  GVR_DEVICE void wait(const RowView<T>& row, int lane, const uint4* last_vec,
                       bool may_pass_end = kLoadsEarly) {
    if (last_vec != nullptr && __any_sync(0xffffffffu, last >= 0)) {
      ptx::wait_copies<0>();
      __syncwarp();  // All lanes read the vector that one of them has copied; only that one uses it.
      const uint4 vec = ptx::load_shared(ptx::shared_address(last_vec));
      uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
      const int there = (row.n - begin - lane * kPerVec<T>)&(kGroup - 1);
#pragma unroll
      for (int e = 1; e < kPerVec<T>; ++e) {
        if (!may_pass_end && e >= there) mask_element<T>(word, e);
      }
#pragma unroll
      for (int j = 0; j < kVecs; ++j) ptx::set_if(j == last, raw[j], word);
    }
    for_each_index(
        [&](int i) { bits[i] = __float_as_uint(element<T>(raw[i / kPerVec<T>], i % kPerVec<T>)); });
    set_ahead(row.lead, lane, __float_as_uint(-INFINITY));
    if (!may_pass_end || begin + kVecs * kGroup <= row.n) return;
    const int left = row.n - begin - lane * kPerVec<T>;
    for_each_index([&](int i) {
      if (i / kPerVec<T> * kGroup + i % kPerVec<T> >= left) bits[i] = __float_as_uint(-INFINITY);
    });
  }

  GVR_DEVICE void make_keys(int lead, int lane) {
    for_each_index([&](int i) { bits[i] = order_key(value(i)) >> kInvariantBits<T>; });
    set_ahead(lead, lane, kAbsentKey);
  }

  // Sets the elements ahead of the row.
  GVR_DEVICE void set_ahead(int lead, int lane, uint32_t absent) {
    if (lead == 0) return;
#pragma unroll
    for (int i = 0; i < kPerVec<T>; ++i) {
      bits[i] = begin + lane * kPerVec<T> + i < 0 ? absent : bits[i];
    }
  }

  GVR_DEVICE float value(int index) const { return __uint_as_float(bits[index]); }

  // Calls visit(index) for every element of the lane.
  template <typename Visit>
  GVR_DEVICE void for_each_index(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) visit(i);
  }

  // Returns `mask_of_keys` over all elements of the lane.
  template <typename SetBit>
  GVR_DEVICE LaneMask<kWords> mask_of(SetBit set_bit) const {
    return mask_of_keys(*this, set_bit);
  }

  // Returns the bits of the element at an index known only at run time.
  GVR_DEVICE uint32_t bits_at(uint32_t index) const { return register_at<0, kValues>(bits, index); }

  // Returns the row position of the element at an index.
  GVR_DEVICE uint32_t position(int lane, uint32_t index) const {
    return begin + index / kPerVec<T> * kGroup + lane * kPerVec<T> + index % kPerVec<T>;
  }

  // Calls visit(there, word, bit, rank) for the lane's elements of a set: which element of which word, and
  // how many elements of the whole warp come earlier. All lanes take part, and visit elements that are not
  // `there` with the others, so that none comes apart.
  template <typename Visit>
  GVR_DEVICE static void for_each_in_order_of(const LaneMask<kWords>& set, int, Visit visit) {
    constexpr uint32_t kFieldMask = (1u << kFieldBits<T>)-1;
    uint32_t passed = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t bits = set.word[w];
      const uint32_t counts = packed_counts<T>(bits);
      uint32_t upto = ptx::inclusive_scan(counts) - counts, total = __reduce_add_sync(0xffffffffu, counts);
#pragma unroll 1  // Few vectors have elements of the set.
      for (int first = 0; total != 0; first += kPerVec<T>) {
        uint32_t rank = passed + (upto & kFieldMask);
#pragma unroll
        for (int e = 0; e < kPerVec<T>; ++e) {
          const bool there = bits >> 2 * e & 1;
          visit(there, w, first + e, rank);
          rank += there;
        }
        passed += total & kFieldMask;
        bits >>= 2 * kPerVec<T>;
        upto >>= kFieldBits<T>;
        total >>= kFieldBits<T>;
      }
    }
  }
};

// Stages the positions of selected elements in ascending order; earlier warps have selected `before`. A block
// barrier comes next.
template <typename Context, typename Tile>
GVR_DEVICE void stage_selected(const Context& ctx, const Tile& tile, const LaneMask<Tile::kWords>& selected,
                               uint32_t before, uint16_t* staged) {
  using T = typename Tile::Element;
  constexpr uint32_t kFieldMask = (1u << kFieldBits<T>)-1;
  constexpr int kWordVecs = kVecsOfTile<T>;
  const uint32_t storage = ptx::shared_address(staged);
  uint32_t position = tile.begin + ctx.lane * kPerVec<T>;
#pragma unroll
  for (int w = 0; w < Tile::kWords; ++w) {
    if (w * kWordVecs >= tile.vecs) break;
    const uint32_t word = selected.word[w];
    const uint32_t counts = packed_counts<T>(word);
    uint32_t upto = ptx::inclusive_scan(counts);
    uint32_t total = __shfl_sync(0xffffffffu, upto, 31);
    upto -= counts;
#pragma unroll
    for (int j = 0; j < kWordVecs; ++j) {
      if (w * kWordVecs + j >= tile.vecs) break;
      uint32_t slot = storage + 2 * (before + (upto & kFieldMask));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        ptx::append_if(word & (1u << 2 * (j * kPerVec<T> + e)), slot, static_cast<uint16_t>(position + e));
      }
      before += total & kFieldMask;
      upto >>= kFieldBits<T>;
      total >>= kFieldBits<T>;
      position += Tile::kGroup;
    }
  }
}

// Takes masked elements, those of -inf, out of a selection. The tile holds keys. `before` becomes the number
// that earlier warps have selected, and the result is that of all warps. It takes one block barrier.
template <typename T, typename Tile>
GVR_DEVICE int drop_masked(const RowContext<T>& ctx, const Tile& tile, LaneMask<Tile::kWords>& selected,
                           uint32_t& before) {
  constexpr uint32_t kMasked = kNegInfKey >> kInvariantBits<T>;
  uint32_t* const in_warp = ctx.shared->warp_value[2];
  const LaneMask<Tile::kWords> unmasked =
      tile.mask_of([&](float& sum, uint32_t x, float bit) { ptx::set_bit_if_greater(sum, x, kMasked, bit); });
#pragma unroll
  for (int w = 0; w < Tile::kWords; ++w) selected.word[w] &= unmasked.word[w];
  const uint32_t here = __reduce_add_sync(0xffffffffu, selected.count());
  if (ctx.lane == 0) in_warp[ctx.warp] = here;
  __syncthreads();
  before = earlier_warps(ctx, 2);
  return static_cast<int>(__reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? in_warp[ctx.lane] : 0));
}

// Writes the positions that all warps have staged.
template <typename T>
GVR_DEVICE void write_staged(const RowContext<T>& ctx, const LaunchTraits& traits, const uint16_t* staged,
                             const OutputWriter& output) {
  if (traits.has(LaunchTraits::kVectorStores)) {
#pragma unroll 1
    for (int i = 4 * ctx.thread; i < ctx.k; i += 4 * kThreads) {
      const ushort4 four = *reinterpret_cast<const ushort4*>(staged + i);
      const int4 positions = make_int4(four.x, four.y, four.z, four.w);
      *reinterpret_cast<int4*>(output.indices + i) = positions;
      if (output.state_indices != nullptr) *reinterpret_cast<int4*>(output.state_indices + i) = positions;
    }
    return;
  }
#pragma unroll 1
  for (int i = ctx.thread; i < ctx.k; i += kThreads) output.put(i, staged[i]);
}

// The elements of one lane in registers, in words of 16. Derived tiles define which positions these elements
// have.
struct WordTile {
  static constexpr int kSize = kMaxValuesPerThread;
  static constexpr int kWords = kSize / kValuesPerThread;

  int begin;             // position of the warp's first element
  int words;             // words that the row needs; elements of other words are undefined
  uint32_t bits[kSize];  // bits of the values, or the keys without their invariant low bits

  // Calls visit(index) for every element of the lane.
  template <typename Visit>
  GVR_DEVICE void for_each_index(Visit visit) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w >= words) break;
#pragma unroll
      for (int i = 0; i < kValuesPerThread; ++i) visit(w * kValuesPerThread + i);
    }
  }

  // Returns `mask_of_keys` over all elements of the lane.
  template <typename SetBit>
  GVR_DEVICE LaneMask<kWords> mask_of(SetBit set_bit) const {
    return mask_of_keys(*this, set_bit);
  }

  // Returns the bits of the element at an index known only at run time.
  GVR_DEVICE uint32_t bits_at(uint32_t index) const { return register_at<0, kSize>(bits, index); }
};

}  // namespace gvr_topk::small_row
