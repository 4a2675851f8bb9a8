// What one CTA keeps of a row that streams by, each warp's in the order it came, in chunks of one store.
#pragma once

#include "core/config.cuh"
#include "ptx/warp_scan.cuh"

namespace gvr_topk::streaming {

// Warps own consecutive parts of a row, and scores bunch: so half of the store is given out at the start, in
// equal shares, and the other half, a chunk at a time, to who needs it.
struct CandidateBuffer {
  BufferedValue* store;
  uint8_t* chunks;  // [kMaxPoolChunks] of this warp
  int capacity;     // chunks in the store
  int room;         // so much this warp has chunks for
  int shift;        // what came i-th lies at shift + i, as far as the last chunks taken go
  int count = 0;
  int rotation = 0;  // the first in index order: what came before it belongs behind the last
  bool full = false;

  __device__ __forceinline__ static int initial_chunks(int capacity) { return capacity / (2 * kWarps); }

  __device__ __forceinline__ CandidateBuffer(BufferedValue* storage, uint8_t* table, int size, int warp)
      : store(storage),
        chunks(table),
        capacity(size),
        room(kChunk * initial_chunks(size)),
        shift(warp * room) {}

  // Takes this warp's share of the store, before anything is appended. The number of chunks taken by all
  // warps has been set to those given out.
  __device__ __forceinline__ void claim_share(int lane) const {
    if (lane < initial_chunks(capacity)) chunks[lane] = static_cast<uint8_t>((shift >> kLog2Chunk) + lane);
  }

  __device__ __forceinline__ const BufferedValue& at(int i) const {
    return store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))];
  }

  // Makes room for `added` more, in consecutive chunks; all lanes take part. False when there is none.
  __device__ __forceinline__ bool claim_chunks(uint32_t* used, int added, int lane) {
    const int owned = room >> kLog2Chunk;
    const int more = (count + added - room + kChunk - 1) >> kLog2Chunk;  // at most a word's: fewer than lanes
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

  // Appends what is marked in the lanes of a warp, lane by lane: make(place) brings it. All lanes take part.
  // When the store is full, it is left out.
  template <typename Make>
  __device__ __forceinline__ void append(uint32_t* used, uint32_t marked, int lane, Make make) {
    const uint32_t lanes = __ballot_sync(0xffffffffu, marked != 0);
    if (lanes == 0) return;
    int before = __popc(lanes & ((1u << lane) - 1)), added = __popc(lanes);
    if (__ballot_sync(0xffffffffu, (marked & (marked - 1)) != 0) != 0) {
      const int mine = __popc(marked);
      before = static_cast<int>(ptx::inclusive_scan(mine));
      added = __shfl_sync(0xffffffffu, before, 31);
      before -= mine;
    }
    const int old_shift = shift, old_room = room;
    if (count + added > room && !claim_chunks(used, added, lane)) return;
    int next = count + before;
    count += added;
#pragma unroll 1
    for (; marked != 0; marked &= marked - 1) {
      store[(next < old_room ? old_shift : shift) + next] = make(__ffs(marked) - 1);
      ++next;
    }
  }

  // Whether it is something that was kept, which -inf never is.
  __device__ __forceinline__ static bool is_buffered(const BufferedValue& x) {
    return x.value != -__int_as_float(0x7f800000);
  }

  // Leaves nothing but NaN, as infinity: NaN itself does not compare. All lanes take part.
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

  // Calls visit(kept) for this lane's part of it, 32 of the warp at a time, in index order; all lanes take
  // part, some with -inf.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int lane, Visit visit) const {
    constexpr int kAtOnce = 4;  // so that their loads overlap
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
