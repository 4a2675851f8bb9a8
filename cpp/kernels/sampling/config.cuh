// What the files of the sampler share: shapes, shared memory, and the indices of a thread.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::sampling {

constexpr int kThreads = kSampleThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = kThreads;  // one bin for each thread
constexpr int kLog2Bins = 8;
constexpr uint32_t kMaxCandidates = 1024;  // of a row that one CTA finishes alone
static_assert(1 << kLog2Bins == kBins);

// The parameters of a row. Another stream may be writing them, so each CTA reads them once, and all CTAs go
// on with what the first one has read.
struct alignas(16) RowParameters {
  int64_t seed;
  int64_t position;
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  int32_t allow_row;  // negative: every token is allowed
  int32_t skipped;    // whether the row is not sampled
};

// What a CTA tells the others. Each exchange has a meaning of its own for the words.
struct alignas(16) Record {
  uint64_t word[4];
};

// The bin in which a prefix sum reaches its target.
struct FoundBin {
  uint64_t above;  // sum of the bins before it
  uint64_t at;     // what it holds
  uint32_t bin;    // kBins: none
};

// The shared memory of a CTA. Its part of the row follows.
//
// - `parameters`, `inbox` and `candidates` take transaction stores of any CTA. They are read behind the wait
//   for their transaction barrier. There are two inboxes, in turns: a CTA sends to one of them again when it
//   has got from all CTAs what they have sent to the other, behind a block barrier after their reads of this
//   one. The others are sent to once. What shares a place with `candidates` is in use before the exchange
//   that says that candidates are sent, or in rows that have none.
// - `word` is stored by another CTA ahead of a cluster barrier, and read behind it.
// - `bins` are written by this CTA and read by all of them behind the next cluster barrier, in turns too.
// - Everything else belongs to this CTA, with a block barrier between writes and reads.
struct alignas(16) SampleShared {
  uint64_t barriers[2];  // of the inboxes
  uint64_t candidates_barrier;
  RowParameters parameters, read;
  Record inbox[2][kMaxSampleCtas];
  Record warp_record[kWarps];
  FoundBin found;
  uint32_t word;
  union {
    struct {
      uint64_t bins[2][kBins];
      uint32_t limbs[3][kBins];  // what a bin holds, in digits of kLimbBits bits
      alignas(16) uint32_t maxima[kThreads];
    };
    uint64_t candidates[kMaxCandidates];  // of a row that the first CTA finishes alone
  };
};
static_assert(sizeof(SampleShared) <= kSampleFixedBytes);

// A digit of a mass. A CTA's part of a row has less than 2^17 elements, so sums of digits fit 32 bits.
constexpr int kLimbBits = 15;
static_assert(3 * kLimbBits > 43);

extern __shared__ __align__(128) unsigned char storage[];

// The CTAs of a row, and this thread's place in them.
struct Team {
  SampleShared* smem;
  int ctas;
  int rank;
  int thread, warp, lane;
  uint32_t zero;      // see ptx::unknown_zero
  uint32_t turn = 0;  // of the exchange; the same in all threads of the team

  // A barrier of all threads of all CTAs. Lanes may come to it apart.
  GVR_DEVICE void sync() const {
    ptx::reconverge(zero);
    if (ctas == 1) {
      __syncthreads();
    } else {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }

  // Initializes the transaction barriers. It is called by one thread, ahead of a barrier of all CTAs.
  GVR_DEVICE void init_barriers() const {
    for (uint64_t& barrier : smem->barriers) ptx::barrier_init(ptx::shared_address(&barrier), 1);
    ptx::barrier_init(ptx::shared_address(&smem->candidates_barrier), 1);
  }

  // The address of a barrier of this CTA, to which others complete their stores.
  GVR_DEVICE uint32_t address_of(const uint64_t& barrier, uint32_t at) const {
    return ptx::map_to_rank(ptx::shared_address(&barrier), at);
  }

  // Sends this CTA's record to all CTAs, and returns theirs. `mine` is valid in the threads below `ctas`,
  // which send it. A block barrier precedes the call, after all reads of what the last call but one has
  // returned. `more` sends what else belongs to the exchange, `more_bytes` to each CTA.
  template <typename More>
  GVR_DEVICE const Record* exchange(const Record& mine, uint32_t more_bytes, More more) {
    const uint32_t parity = turn >> 1 & 1;
    Record* const inbox = smem->inbox[turn & 1];
    const uint64_t& barrier = smem->barriers[turn++ & 1];
    if (ctas == 1) {
      if (thread == 0) inbox[0] = mine;
      __syncthreads();
      return inbox;
    }
    if (thread == 0) {
      ptx::barrier_expect_tx(address_of(barrier, rank), ctas * sizeof(Record) + more_bytes);
    }
    if (thread < ctas) {
      const uint32_t address = ptx::map_to_rank(ptx::shared_address(&inbox[rank]), thread);
      const uint32_t completes = address_of(barrier, thread);
      ptx::store_async(address, mine.word[0], mine.word[1], completes);
      ptx::store_async(address + 16, mine.word[2], mine.word[3], completes);
      more(thread, completes);
    }
    ptx::reconverge(zero);
    ptx::barrier_wait(ptx::shared_address(&barrier), parity);
    ptx::reconverge(zero);
    __syncthreads();
    return inbox;
  }
  GVR_DEVICE const Record* exchange(const Record& mine) {
    return exchange(mine, 0, [](int, uint32_t) {});
  }
};

}  // namespace gvr_topk::sampling
