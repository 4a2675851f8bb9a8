// A warp's part of a row that streams through shared memory, as often as needed: what is read of it, compared
// with an interval of keys, and written.
#pragma once

#include "core/key_range.cuh"
#include "core/lane_ranks.cuh"
#include "core/row_view.cuh"
#include "core/tile_ring.cuh"

namespace gvr_topk {

// Streams each warp's part of a row through the warp's ring. A part is whole tiles, and parts follow each
// other, so that (CTA, warp, tile, lane, index in the lane) is index order.
//
// The first part starts with the line of memory that the row starts in, whatever the row's own lead is.
template <typename T, int kBlockWarps, int kDepth, bool kEvictFirst = true>
struct PartStream {
  using Ring = TileRing<T, kDepth, kEvictFirst>;
  static constexpr int kStep = kBlockWarps * kTileElements;  // one tile of every warp

  // Elements of all parts of a row that one CTA reads, if every part is as long as the first.
  GVR_TOPK_HOST_DEVICE static constexpr int padded(int n) { return (n + kStep - 1) / kStep * kStep; }

  Ring ring;
  const T* from;  // where this lane fetches the part's first tile
  int lead;       // elements from there to the row
  int begin;      // first element of the part, counted from there
  int length;     // elements of the part, including those before the row
  int lane;
  uint32_t zero = ptx::unknown_zero();

  // 2^log2_ctas CTAs share the row; `rank` is the number of this one.
  GVR_DEVICE PartStream(const RowView<T>& row, const void* storage, int warp, int lane_, int rank = 0,
                        int log2_ctas = 0)
      : ring(storage, warp, lane_), lead(lead_of<T, kLineBytes>(row.data)), lane(lane_) {
    const int n = row.n + lead, tiles = (n + kTileElements - 1) / kTileElements;
    const int of_cta = (tiles + (1 << log2_ctas) - 1) >> log2_ctas, first = rank * of_cta;
    const int part = (of_cta + kBlockWarps - 1) / kBlockWarps, end = min((first + of_cta) * kTileElements, n);
    begin = min((first + warp * part) * kTileElements, end);
    length = min(part * kTileElements, end - begin);
    from = row.data - lead + begin + lane * kPerVec<T>;
  }

  // Position in the row of the part's first element; negative for one ahead of the row.
  GVR_DEVICE int first_position() const { return begin - lead; }

  // Starts the first copies of a pass over the part.
  GVR_DEVICE void start() const {
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
      request(from + step * kTileElements, length - step * kTileElements, step * Ring::kTileBytes);
    }
  }

  // Starts another pass. A part that the ring holds is still there, unless `emit_part` has written over it.
  GVR_DEVICE void restart() const {
    if (length > kDepth * kTileElements) start();
  }

  // Calls visit(step, slot, bits of this lane's elements that belong to the row) for every tile of a pass
  // that was started. Bits beyond a lane's elements may be set. No copy is under way afterwards.
  template <typename Visit>
  GVR_DEVICE void for_each_tile(Visit visit) const {
    const T* next = from + kDepth * kTileElements;
    int before = begin == 0 ? max(lead - lane * kValuesPerThread, 0) : 0;
    uint32_t slot = 0;
#pragma unroll 1
    for (int step = 0, left = length; left > 0; ++step) {
      ptx::wait_copies<kDepth - 1>();
      ptx::reconverge(zero);  // The tile's copies of all lanes have arrived.
      visit(step, slot, ptx::bit_range(before, max(left - lane * kValuesPerThread - before, 0)));
      ptx::reconverge(zero);  // All lanes have read the slot.
      request(next, left - kDepth * kTileElements, slot);
      next += kTileElements;
      left -= kTileElements;
      before = 0;
      slot = Ring::next(slot);
    }
  }

  // The same for two tiles at a time, the second of which may be none: visit(step, slot, bits of the first,
  // bits of the second).
  template <typename Visit>
  GVR_DEVICE void for_each_pair(Visit visit) const {
    static_assert(kDepth % 2 == 0);
    const T* next = from + kDepth * kTileElements;
    int before = begin == 0 ? max(lead - lane * kValuesPerThread, 0) : 0;
    uint32_t slot = 0;
#pragma unroll 1
    for (int step = 0, left = length; left > 0; step += 2) {
      ptx::wait_copies<kDepth - 2>();
      ptx::reconverge(zero);  // The copies of all lanes have arrived.
      const int own = left - lane * kValuesPerThread;
      visit(step, slot, ptx::bit_range(before, max(own - before, 0)),
            ptx::bit_range(0, max(own - kTileElements, 0)));
      ptx::reconverge(zero);  // All lanes have read both slots.
      before = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        request(next, left - kDepth * kTileElements, slot);
        next += kTileElements;
        left -= kTileElements;
        slot = Ring::next(slot);
      }
    }
  }

  // Calls visit(key) for each of this lane's elements of the row, in a pass that was started. Elements that
  // are not the row's are absent keys.
  template <typename Visit>
  GVR_DEVICE void for_each_key(Visit visit) const {
    for_each_tile([&](int, uint32_t slot, uint32_t valid) {
      ring.for_each_value(slot,
                          [&](int i, float x) { visit((valid >> i & 1) != 0 ? order_key(x) : kAbsentKey); });
    });
  }

 private:
  // Fetches a tile from where `left` elements of the part are left. An empty group is committed as well,
  // because a wait counts groups.
  GVR_DEVICE void request(const T* tile, int left, uint32_t slot) const {
    if (left > 0) ring.fetch(tile, left, slot);
    ptx::commit_copies();
  }
};

// An interval of keys as a test of elements. Finite ends are compared as values, which needs no conversion;
// NaN is above them.
struct IntervalTest {
  KeyInterval interval;
  bool finite;
  float lo, hi;

  GVR_DEVICE explicit IntervalTest(const KeyInterval& of)
      : interval(of), finite(kNegInfKey < of.lo && of.hi < kPosInfKey), lo(of.low()), hi(of.high()) {}

  // Returns the bits of this lane's elements in the tile at `slot` that are not below the interval, of those
  // in `valid`; `above` receives the bits of those above it.
  template <typename Ring>
  GVR_DEVICE uint32_t not_below(const Ring& ring, uint32_t slot, uint32_t valid, uint32_t& above) const {
    uint32_t bits;
    if (finite) {
      bits = ring.not_below(lo, hi, slot, above);
    } else {
      above = ring.matching(slot, [&](uint32_t key) { return key > interval.hi; });
      bits = ring.matching(slot, [&](uint32_t key) { return key >= interval.lo; });
    }
    above &= valid;
    return bits & valid;
  }
};

// The output item of the next selected element, and how many more ties of the k-th key may be taken.
struct OutputCursor {
  uint32_t first;
  uint32_t ties_left;

  // Moves past some elements. `above` of them are above the k-th key, and `ties` of them equal it.
  GVR_DEVICE void advance(uint32_t above, uint32_t ties) {
    const uint32_t taken = min(ties, ties_left);
    first += above + taken;
    ties_left -= taken;
  }

  // Calls put(item) for the selected ones of 32 consecutive elements, one of each lane. All lanes take part.
  template <typename Put>
  GVR_DEVICE void put_lanes(bool is_above, bool is_tie, int lane, Put put) {
    const uint32_t earlier = (1u << lane) - 1;
    const uint32_t above = __ballot_sync(0xffffffffu, is_above), ties = __ballot_sync(0xffffffffu, is_tie);
    const uint32_t ties_before = __popc(ties & earlier);
    if (is_above || (is_tie && ties_before < ties_left)) {
      put(first + __popc(above & earlier) + min(ties_before, ties_left));
    }
    ptx::reconverge(ptx::unknown_zero());
    advance(__popc(above), __popc(ties));
  }

  // Returns those of a lane's ties that may be taken, where each lane has consecutive elements. All lanes
  // take part.
  GVR_DEVICE uint32_t take_ties(uint32_t ties) {
    const uint32_t count = __popc(ties), upto = ptx::inclusive_scan(count);
    const uint32_t earlier = min(upto - count, ties_left);
#pragma unroll 1
    for (uint32_t left = count; left > ties_left - earlier; --left) ties ^= 0x80000000u >> __clz(ties);
    ptx::reconverge(ptx::unknown_zero());  // Lanes have dropped different numbers of ties.
    ties_left -= min(__shfl_sync(0xffffffffu, upto, 31), ties_left);
    return ties;
  }
};

// Calls put(item, position) for the selected elements of a warp's part, in index order. A pass over the part
// has been started. `kth` is the least selected key. `takes_all`: all elements equal to it are selected;
// otherwise the cursor says how many.
template <typename Stream, typename Put>
GVR_DEVICE void emit_part(const Stream& stream, uint32_t kth, bool takes_all, OutputCursor cursor, Put put) {
  const IntervalTest test(KeyInterval::only(kth));
  const uint32_t ring = stream.ring.read_address - stream.ring.own_offset(stream.lane);
  const int first_tile = stream.first_position(), first_of_lane = kValuesPerThread * stream.lane;
  stream.for_each_tile([&](int step, uint32_t slot, uint32_t valid) {
    uint32_t selected;
    if (takes_all) {
      uint32_t unused;  // The compiler removes these bits.
      selected = test.not_below(stream.ring, slot, valid, unused);
    } else {
      uint32_t ties = test.not_below(stream.ring, slot, valid, selected);
      ties = cursor.ties_left > 0 ? ties & ~selected : 0;
      if (__ballot_sync(0xffffffffu, ties != 0) != 0) selected |= cursor.take_ties(ties);
    }
    const LaneRank rank = rank_lanes(selected, stream.lane);
    if (rank.all == 0) return;
    // Positions are staged where the tile was, so that lanes write consecutive items.
    ptx::reconverge(stream.zero);  // All lanes have read the tile.
    const uint32_t staged = ring + slot;
    uint32_t to = staged + sizeof(uint16_t) * rank.before;
#pragma unroll 1
    for (; selected != 0; selected &= selected - 1) {
      ptx::store_shared(to, static_cast<uint16_t>(first_of_lane + __ffs(selected) - 1));
      to += sizeof(uint16_t);
    }
    ptx::reconverge(stream.zero);
    const int first = first_tile + step * kTileElements;
#pragma unroll 1
    for (int i = stream.lane; i < rank.all; i += 32) {
      put(cursor.first + i, first + ptx::load_shared_element<uint16_t>(staged + sizeof(uint16_t) * i));
    }
    cursor.first += rank.all;
  });
}

}  // namespace gvr_topk
