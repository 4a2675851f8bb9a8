// The candidates that one CTA keeps of a row that streams by: those of each warp in the order they came, in
// chunks of one common store.
#pragma once

#include "core/config.cuh"
#include "ptx/warp_scan.cuh"

namespace gvr_topk::streaming {

// Large scores cluster, and warps own consecutive parts of a row. So half of the store is given to warps at
// the start, in equal shares, and the other half, chunk by chunk, to those that need it.
struct CandidateBuffer {
  BufferedValue* store;
  uint8_t* chunks;  // [kMaxBufferChunks] numbers of this warp's chunks
  int capacity;     // chunks in the store
  int room;         // candidates that this warp's chunks hold
  int shift;        // The i-th candidate lies at shift + i, if it lies in the chunks taken last.
  int count = 0;
  int rotation = 0;  // The candidate that is first in index order: warps start mid-part, so earlier ones
                     // follow the last.
  bool full = false;

  __device__ __forceinline__ static int initial_chunks(int capacity) { return capacity / (2 * kWarps); }

  __device__ __forceinline__ CandidateBuffer(BufferedValue* storage, uint8_t* table, int size, int warp)
      : store(storage),
        chunks(table),
        capacity(size),
        room(kChunk * initial_chunks(size)),
        shift(warp * room) {}

  // Takes this warp's initial share, before anything is appended. `chunks_used` already counts it.
  __device__ __forceinline__ void claim_share(int lane) const {
    if (lane < initial_chunks(capacity)) chunks[lane] = static_cast<uint8_t>((shift >> kLog2Chunk) + lane);
  }

  __device__ __forceinline__ const BufferedValue& at(int i) const {
    return store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))];
  }

  // Takes consecutive chunks for `added` more candidates. All lanes take part. Returns false when the store
  // is full.
  __device__ __forceinline__ bool claim_chunks(uint32_t* used, int added, int lane) {
    const int owned = room >> kLog2Chunk;
    const int more = (count + added - room + kChunk - 1) >>
                     kLog2Chunk;  // At most those of one tile, which are fewer than lanes.
    int first = 0;
    if (lane == 0) first = static_cast<int>(atomicAdd(used, static_cast<uint32_t>(more)));
    first = __shfl_sync(0xffffffffu, first, 0);
    full |= first + more > capacity;
    if (full) return false;
    if (lane < more) chunks[owned + lane] = static_cast<uint8_t>(first + lane);
    shift = kChunk * first - room;
    room += kChunk * more;
    return true;
  }

  // Appends the selected elements of a warp, lane by lane: make(index) returns the element. All lanes take
  // part. When the store is full, nothing is appended.
  template <typename Make>
  __device__ __forceinline__ void append(uint32_t* used, uint32_t selected, int lane, Make make) {
    const uint32_t lanes = __ballot_sync(0xffffffffu, selected != 0);
    if (lanes == 0) return;
    int before = __popc(lanes & ((1u << lane) - 1)), added = __popc(lanes);
    if (__ballot_sync(0xffffffffu, (selected & (selected - 1)) != 0) != 0) {
      const int mine = __popc(selected);
      before = static_cast<int>(ptx::inclusive_scan(mine));
      added = __shfl_sync(0xffffffffu, before, 31);
      before -= mine;
    }
    const int old_shift = shift, old_room = room;
    if (count + added > room && !claim_chunks(used, added, lane)) return;
    int next = count + before;
    count += added;
#pragma unroll 1
    for (; selected != 0; selected &= selected - 1) {
      store[(next < old_room ? old_shift : shift) + next] = make(__ffs(selected) - 1);
      ++next;
    }
  }

  // Whether `x` was buffered: padding is -inf, and -inf never is.
  __device__ __forceinline__ static bool is_buffered(const BufferedValue& x) {
    return x.value != -__int_as_float(0x7f800000);
  }

  // Turns every NaN into infinity and everything else into -inf, because NaN itself does not compare. All
  // lanes take part.
  __device__ __forceinline__ void keep_only_nan(int lane) const {
    const float infinity = __int_as_float(0x7f800000);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      BufferedValue& x = store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))];
      x.value = x.value != x.value ? infinity : -infinity;
    }
    __syncwarp();
  }

  // Calls visit(candidate) for this lane's part of them, 32 of the warp at a time, in index order. All lanes
  // take part; some see -inf.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int lane, Visit visit) const {
    constexpr int kAtOnce = 4;  // Several, so that their loads overlap.
#pragma unroll 1
    for (int first = lane; first < count + lane; first += 32 * kAtOnce) {
      BufferedValue some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + 32 * j;
        some[j] = i < count ? at(i + rotation < count ? i + rotation : i + rotation - count)
                            : BufferedValue{0, -__int_as_float(0x7f800000)};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first - lane + 32 * j < count) visit(some[j]);
      }
    }
  }
};

}  // namespace gvr_topk::streaming
