// Exchanges records between the CTAs of several GPUs, in memory that all of them write into.
//
// Each 8 bytes carry 4 of a record, and the number of the exchange. They are stored and loaded at once, so
// whoever finds the number has the 4 bytes, and neither a fence nor a flag is needed. Two places for each
// rank take turns: a rank writes into a place again when it has had the next record of all others, which have
// read the one before.
#pragma once

#include "core/config.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::sharded {

constexpr uint32_t kPeerBroken = 0xffffffffu;

struct Exchange {
  struct Smem {
    uint32_t sent[kPeerWords];
    uint32_t received[kPeerRanks][kPeerWords];
    int32_t late;  // 1 + a rank that was not heard of
    uint32_t number;
  };

  const ShardedParams& p;
  Smem& smem;
  int cta;
  uint32_t number;  // of the last exchange; kPeerBroken once a rank was late, and then for good

  // It takes a barrier: what all threads go by is read by one of them.
  GVR_DEVICE Exchange(const ShardedParams& p, Smem& smem, int cta) : p(p), smem(smem), cta(cta) {
    if (threadIdx.x == 0) {
      smem.late = 0;
      smem.number = p.progress[cta];
    }
    __syncthreads();
    number = smem.number;
  }

  // Where rank `to` finds the record of rank `from`.
  GVR_DEVICE uint64_t* place(int to, int from) const {
    const int64_t record = (static_cast<int64_t>(number & 1) * p.world + from) * kPeerCtas + cta;
    return p.inboxes[to] + record * kPeerWords;
  }

  // Sends `kWords` words to all ranks, this one included, and receives theirs. Returns whether all came. All
  // threads take part, and what they have put into `sent` needs no barrier.
  template <int kWords>
  GVR_DEVICE bool run(int thread) {
    static_assert(kWords <= kPeerWords && kThreads % kWords == 0);
    __syncthreads();
    if (number == kPeerBroken) return false;
    number = number == kPeerBroken - 1 ? 1 : number + 1;
    const int at = thread % kWords;
    for (int rank = thread / kWords; rank < p.world; rank += kThreads / kWords) {
      ptx::store_system(place(rank, p.rank) + at, uint64_t{number} << 32 | smem.sent[at]);
    }
    for (int rank = thread / kWords; rank < p.world; rank += kThreads / kWords) {
      smem.received[rank][at] = receive(place(p.rank, rank) + at, rank);
    }
    __syncthreads();
    if (smem.late == 0) return true;
    if (thread == 0) p.told[p.world * kHeaderWords] = smem.late;
    number = kPeerBroken;
    return false;
  }

 private:
  GVR_DEVICE uint32_t receive(const uint64_t* from, int rank) {
    const uint64_t start = ptx::clock_ns();
    uint64_t word = ptx::load_system(from);
    while (static_cast<uint32_t>(word >> 32) != number) {
      if (ptx::clock_ns() - start > static_cast<uint64_t>(p.timeout_ns)) smem.late = 1 + rank;
      if (*static_cast<volatile int32_t*>(&smem.late) != 0) break;  // another thread has waited long enough
      word = ptx::load_system(from);
    }
    return static_cast<uint32_t>(word);
  }
};

}  // namespace gvr_topk::sharded
