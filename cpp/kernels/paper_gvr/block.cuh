// Shared memory, block-wide reductions and the row stream of the paper's kernel.
//
// Each counting pass reads the row once, and also leaves one bit per element. So collecting reads nothing of
// the row but the candidates.
#pragma once

#include "cluster/row_context.cuh"
#include "core/histogram.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp_scan.cuh"

namespace gvr_topk::paper_gvr {

constexpr int kCapacity =
    6144;  // most candidates of the refinement: three times the largest k (paper, section 5.3)
constexpr int kBins = 2048;
constexpr int kLog2Bins = log2_of(kBins);
constexpr int kHintPerThread = 2048 / kThreads;
constexpr int kPerThread = kCapacity / kThreads;
constexpr int kSnapLimit = 32;  // most members of a bin that snap steps walk through
constexpr int kSecantPasses = 4;
constexpr int kFloatPasses = 8;
// One bit per element. A row may start up to seven elements after a 16-byte boundary.
constexpr int kBitmapWords = kWarps * warp_span(static_cast<int32_t>(kPaperMaxWidth) + 7, 0, 2) / 32;

// A histogram, and the members of one of its bins when they are few.
struct alignas(16) SearchBins {
  uint32_t fine[kBins + 4];  // fine[kBins] counts items in no bin, which is cheaper than a branch.
  uint32_t warp_sums[kWarps];
  BinHit hit;
  uint32_t member[kSnapLimit];
  uint32_t members;  // may exceed kSnapLimit
};

// The candidates. They overlay the ring once the last tile of the row has been counted.
struct Candidates {
  uint32_t key[kCapacity];
  int32_t position[kCapacity];  // ascending
};

struct alignas(128) PaperShared {
  uint32_t bitmap[kBitmapWords];  // elements that reach the threshold of the last pass
  SearchBins guess;
  SearchBins snap;
  uint32_t warp_value[2][4][kWarps];
  double warp_sum[kWarps];
};

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float positive_infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

enum class Reduce { kAdd, kMin, kMax };

template <Reduce kOp>
__device__ __forceinline__ uint32_t warp_reduce(uint32_t x) {
  ptx::reconverge(ptx::unknown_zero());
  if constexpr (kOp == Reduce::kAdd) return __reduce_add_sync(0xffffffffu, x);
  if constexpr (kOp == Reduce::kMin) return __reduce_min_sync(0xffffffffu, x);
  return __reduce_max_sync(0xffffffffu, x);
}

// Reductions of one value per thread over the block. Successive reductions alternate between two sets of
// slots, so each takes one block barrier: a thread that stores into a set has passed a barrier since the set
// was read.
struct Block {
  PaperShared& smem;
  int lane;
  int warp;
  int set = 0;

  __device__ __forceinline__ explicit Block(PaperShared& shared)
      : smem(shared), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

  // `slot` distinguishes reductions that share a block barrier.
  template <Reduce kOp>
  __device__ __forceinline__ void store_partial(int slot, uint32_t x) {
    x = warp_reduce<kOp>(x);
    if (lane == 0) smem.warp_value[set][slot][warp] = x;
  }

  __device__ __forceinline__ void sync() {
    __syncthreads();
    set ^= 1;
  }

  template <Reduce kOp>
  __device__ __forceinline__ uint32_t reduce(int slot) const {
    constexpr uint32_t kNeutral = kOp == Reduce::kMin ? 0xffffffffu : 0;
    return warp_reduce<kOp>(lane < kWarps ? smem.warp_value[set ^ 1][slot][lane] : kNeutral);
  }

  // Sum over the earlier warps.
  __device__ __forceinline__ uint32_t reduce_earlier(int slot) const {
    return warp_reduce<Reduce::kAdd>(lane < warp ? smem.warp_value[set ^ 1][slot][lane] : 0);
  }

  template <Reduce kOp>
  __device__ __forceinline__ uint32_t reduce_all(uint32_t x) {
    store_partial<kOp>(0, x);
    sync();
    return reduce<kOp>(0);
  }
};

// Clears the bins. They are empty after the next block barrier.
__device__ __forceinline__ void clear(SearchBins& bins) {
  static_assert(kBins == 4 * kThreads);
  reinterpret_cast<uint4*>(bins.fine)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Finds the bin that holds the rank-th largest item. There are at least `rank` items.
__device__ __forceinline__ BinHit locate(SearchBins& bins, uint32_t rank) {
  ptx::reconverge(ptx::unknown_zero());  // Lanes have counted different items.
  const BinHit hit = locate_in_block<kBins / kThreads>(bins.fine, bins.warp_sums, bins.hit, rank,
                                                       threadIdx.x >> 5, threadIdx.x & 31, [] {});
  ptx::reconverge(ptx::unknown_zero());  // One thread has written the bin.
  return hit;
}

__device__ __forceinline__ void add_member(SearchBins& bins, uint32_t key) {
  const uint32_t slot = atomicAdd(&bins.members, 1u);
  if (slot < kSnapLimit) bins.member[slot] = key;
}

// A warp's contiguous part of the row, in tiles of 64 consecutive bytes per lane, so that (warp, tile, lane,
// index in the tile) is index order. Tiles are fetched 16 bytes at a time in coalesced order, and the vectors
// of a lane are rotated so that neighbouring lanes read from different banks. The first part starts at the
// 16-byte boundary before the row. The elements between that boundary and the row belong to the same
// allocation, and are fetched but never counted.
template <typename T>
struct PaperStream {
  static constexpr int kVecs = kLaneTileBytes / sizeof(uint4);
  static constexpr int kLaneElements = kVecs * kPerVec<T>;
  static constexpr int kElements = 32 * kLaneElements;  // elements of a tile
  static constexpr int kSlotBytes = kElements * static_cast<int>(sizeof(T));
  static_assert(kVecs == 4, "the rotation is of four vectors");

  int shift;   // elements between the row's 16-byte boundary and the row
  int begin;   // first element of the part, counted from that boundary
  int length;  // elements of the part, including those before the row
  int lane;
  const T* data;           // the first vector of the part that this lane fetches
  const uint4* read_vecs;  // this lane's own vectors in the ring's first slot
  uint32_t write_address;  // shared address that this lane fetches to

  __device__ __forceinline__ PaperStream(const RowView<T>& row, int warp, int lane_id, uint4* rings)
      : lane(lane_id) {
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.data) % sizeof(uint4) / sizeof(T));
    const int n = row.n + shift;
    const int span = warp_span(n, 0, sizeof(T));
    begin = min(warp * span, n);
    length = min(span, n - begin);
    data = row.data - shift + begin + lane * kPerVec<T>;
    read_vecs = rings + (warp * kRingDepth * 32 + lane) * kVecs;
    write_address =
        ptx::shared_address(read_vecs - lane * kVecs + ((lane & ~3) + ((lane & 3) ^ (lane >> 3 & 3))));
  }

  __device__ __forceinline__ int steps() const { return (length + kElements - 1) / kElements; }

  // Starts to fetch a tile. `from` is this lane's first vector of the tile. Nothing after the end of the part
  // is fetched.
  __device__ __forceinline__ void request(int step, int slot, const T* from) const {
    const uint32_t to = write_address + slot * kSlotBytes;
    if (step < length / kElements) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) ptx::copy_async(to + 512 * j, from + 32 * j * kPerVec<T>);
    } else if (step < steps()) {
      request_last(from, to, length - step * kElements - lane * kPerVec<T>);
    }
    ptx::commit_copies();  // Empty groups are committed as well, because a wait counts groups.
  }

  // Fetches only the first `left` elements, because memory after them must not be read. This is out of line
  // because only the last tile of a warp needs it.
  __device__ __noinline__ static void request_last(const T* from, uint32_t to, int left) {
#pragma unroll 1
    for (int j = 0; j < kVecs; ++j) {
      if (kPerVec<T> <= left) {
        ptx::copy_async(to, from);
      } else {
        T* const slot = static_cast<T*>(__cvta_shared_to_generic(to));
#pragma unroll 1
        for (int e = 0; e < left; ++e) slot[e] = from[e];
      }
      from += 32 * kPerVec<T>;
      to += 512;
      left -= 32 * kPerVec<T>;
    }
  }

  // Starts the first copies of a pass.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (int slot = 0; slot < kRingDepth; ++slot) request(slot, slot, data + slot * kElements);
  }

  // Calls visit(step, vectors of this lane, bits of those elements that belong to the row) for every tile.
  // Bits beyond a lane's elements may be set.
  template <typename Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) const {
    const uint4* vecs[kVecs];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) vecs[j] = read_vecs + (j ^ (lane >> 1 & 3));
    const T* next = data + kRingDepth * kElements;
    // Only the first elements of warp 0's part may lie before the row.
    int before = begin == 0 && lane == 0 ? shift : 0;
    int left = length - lane * kLaneElements;
    const int steps = this->steps();
#pragma unroll 1
    for (int first = 0; first < steps; first += kRingDepth) {
#pragma unroll
      for (int slot = 0; slot < kRingDepth; ++slot) {
        const int step = first + slot;
        if (step >= steps) break;
        ptx::wait_copies<kRingDepth - 1>();
        __syncwarp();
        uint4 vec[kVecs];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) vec[j] = vecs[j][slot * (kSlotBytes / sizeof(uint4))];
        __syncwarp();  // All lanes have read the slot.
        request(step + kRingDepth, slot, next);
        next += kElements;
        visit(step, vec, ptx::bit_range(before, max(left - before, 0)));
        before = 0;
        left -= kElements;
      }
    }
  }
};

}  // namespace gvr_topk::paper_gvr
