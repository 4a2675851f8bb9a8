// Exchanges records between the CTAs of several GPUs, in memory that all of them write into.
//
// Each cell of 8 bytes carries 4 of a record, and the number of the exchange. They are stored and loaded at
// once, so whoever finds the number has the 4 bytes, and neither a fence nor a flag is needed. Two places for
// each rank take turns: a rank writes into a place again when it has had the next record of all others, which
// have read the one before. Numbers begin again after 2^32 exchanges. So that no cell has a number already
// that is waited for, the first records of each lap clear all cells of their place.
#pragma once

#include "core/config.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::sharded {

// What stands for a number of an exchange: while a launch is under way, and once an exchange has failed.
constexpr uint32_t kPeerBusy = 0xfffffffeu, kPeerBroken = 0xffffffffu;
constexpr uint32_t kLastNumber = kPeerBusy - 2;
static_assert(kLastNumber % 2 == 0);  // the first one, 1, takes the other place

// Returns n / divisor, which are at most 2^21, by the divisor's reciprocal.
GVR_DEVICE int quotient(int n, float reciprocal) {
  return static_cast<int>((static_cast<float>(n) + 0.5f) * reciprocal);
}

struct Exchange {
  static constexpr int kPolled = kPeerMaxK / kThreads + 1;  // cells that a thread waits for at once
  static constexpr int kPollsPerLook = 64;

  struct Smem {
    uint32_t received[kPeerCells];  // records of all ranks, this one included, one behind the other
    int32_t late;                   // 1 + a rank that was not heard of
    uint32_t number;
  };

  const ShardedParams& p;
  Smem& smem;
  int cta;
  int capacity;     // cells of a record
  uint32_t number;  // of the last exchange; kPeerBroken once one has failed, and then for good

  GVR_DEVICE Exchange(const ShardedParams& p, Smem& smem, int cta)
      : p(p), smem(smem), cta(cta), capacity(kPeerCells / p.world), number(0) {}

  // What all threads go by is read by one of them, and becomes known in `begin`. Records of two launches at
  // once would mix: the second one breaks the exchange.
  GVR_DEVICE void open(int thread) {
    if (thread > 0) return;
    smem.late = 0;
    number = atomicMax(&p.progress[cta], kPeerBusy);
    if (number != kPeerBusy) return;
    tell_late(1 + p.rank);
    atomicMax(&p.progress[cta], number = kPeerBroken);
  }

  GVR_DEVICE void close(int thread) const {
    if (thread == 0) atomicCAS(&p.progress[cta], kPeerBusy, number);
  }

  // Begins an exchange, behind a barrier. Returns whether there can be one.
  GVR_DEVICE bool begin(int thread) {
    if (thread == 0) {
      if (number != kPeerBroken) number = number == kLastNumber ? 1 : number + 1;
      smem.number = number;
    }
    __syncthreads();
    number = smem.number;
    if (number == kPeerBroken) return false;
    // 1 and 2 clear what the lap before has left, and 3 and 4 what 1 and 2 leave for the next lap. A place is
    // cleared a whole exchange before any of its numbers is waited for again.
    if (number > 4) return true;
    for (int at = thread; at < capacity; at += kThreads) {
      for_others([&](uint64_t* record) { ptx::store_system(record + at, 0); });
    }
    __threadfence_system();
    __syncthreads();
    return true;
  }

  // Sends the first `count` of these numbers, `stride` apart in the record, to all ranks, this one included.
  template <int kCount>
  GVR_DEVICE void send(int at, const uint32_t (&values)[kCount], int stride = 1, int count = kCount) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= count) break;
      smem.received[p.rank * capacity + at + i * stride] = values[i];
    }
    for_others([&](uint64_t* record) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i >= count) break;
        ptx::store_system(record + at + i * stride, uint64_t{number} << 32 | values[i]);
      }
    });
  }

  GVR_DEVICE uint32_t received(int from, int at) const { return smem.received[from * capacity + at]; }

  // Receives the first `count` numbers of all records, and passes those of other ranks to `use(at, value)`.
  // Once `is_in_vain()`, what is not here will not come. Returns whether no rank was late. All threads take
  // part.
  template <typename IsInVain, typename Use>
  GVR_DEVICE bool receive(int count, int thread, IsInVain is_in_vain, Use use) {
    int64_t start = 0;
#pragma unroll 1
    for (int first = 0; first < (p.world - 1) * count; first += kPolled * kThreads) {
      poll(count, first, thread, start, is_in_vain, use);
    }
    __syncthreads();
    if (smem.late == 0) return true;
    if (thread == 0) tell_late(smem.late);
    number = kPeerBroken;
    return false;
  }
  GVR_DEVICE bool receive(int count, int thread) {
    return receive(count, thread, [] { return false; }, [](int, uint32_t) {});
  }

  // Whether all ranks have sent these numbers, of which some are others.
  template <typename Number>
  GVR_DEVICE bool differs(int count, Number number_at) const {
    bool differs = false;
#pragma unroll 1
    for (int i = 0; i < p.world * count; ++i) {
      const int from = i / count, at = i % count;
      if (from == p.rank) continue;
      const uint64_t cell = ptx::load_system(records(p.rank) + from * capacity + at);
      if (static_cast<uint32_t>(cell >> 32) != number) return false;
      differs |= static_cast<uint32_t>(cell) != number_at(at);
    }
    return differs;
  }

 private:
  // Tells the host of a rank that was not heard of, or of this one if two of its launches met, unless the
  // host has been told of a rank before.
  GVR_DEVICE void tell_late(int one_plus_rank) const {
    volatile int64_t& told = p.told[p.world * kHeaderWords];
    if (told == 0) told = one_plus_rank;
  }

  // Where rank `to` finds the records of this exchange.
  GVR_DEVICE uint64_t* records(int to) const {
    return p.inboxes[to] + (static_cast<int>(number & 1) * kPeerCtas + cta) * kPeerCells;
  }

  // Passes where this rank's record of this exchange lies in the memory of each other rank.
  template <typename Use>
  GVR_DEVICE void for_others(Use use) const {
#pragma unroll 1
    for (int to = 0; to < p.world; ++to) {
      if (to != p.rank) use(records(to) + p.rank * capacity);
    }
  }

  // Receives this thread's numbers from the one with number `first` on, counted over the records of all
  // others.
  template <typename IsInVain, typename Use>
  GVR_DEVICE void poll(int count, int first, int thread, int64_t& start, IsInVain is_in_vain, Use use) {
    const uint64_t* const cells = records(p.rank);
    const float reciprocal = 1.0f / static_cast<float>(count);
    const int used = ((p.world - 1) * count - first + kThreads - 1) / kThreads;  // cells of a thread
    int awaited[kPolled];                                                        // their places; -1: none
    int at[kPolled];
    uint64_t cell[kPolled];
    const auto for_each = [&](auto use_cell) {
#pragma unroll
      for (int i = 0; i < kPolled; ++i) {
        if (i >= used) break;
        use_cell(i);
      }
    };
    for_each([&](int i) {
      const int number_of_cell = first + i * kThreads + thread;
      const int other = quotient(number_of_cell, reciprocal), from = other + (other >= p.rank);
      at[i] = number_of_cell - other * count;
      awaited[i] = from < p.world ? from * capacity + at[i] : -1;
    });
    bool gives_up = false;
    for (uint32_t polls = 1;; ++polls) {
      for_each([&](int i) {
        if (awaited[i] >= 0) cell[i] = ptx::load_system(cells + awaited[i]);
      });
      int missing = -1;
      for_each([&](int i) {
        if (awaited[i] >= 0 && static_cast<uint32_t>(cell[i] >> 32) != number) missing = awaited[i];
      });
      if (missing < 0 || gives_up) break;
      if (polls % kPollsPerLook != 0) continue;
      const int64_t now = ptx::clock_ns();
      if (start == 0) start = now;
      const bool is_late = now - start > p.timeout_ns;
      if (is_late) atomicMax(&smem.late, 1 + missing / capacity);
      gives_up = is_late || is_in_vain();
    }
    for_each([&](int i) {
      if (awaited[i] < 0) return;
      smem.received[awaited[i]] = static_cast<uint32_t>(cell[i]);
      use(at[i], static_cast<uint32_t>(cell[i]));
    });
  }
};

}  // namespace gvr_topk::sharded
