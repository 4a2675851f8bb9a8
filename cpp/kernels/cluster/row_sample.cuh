// A sample of the row itself: per thread, the greatest of a few scattered elements.
//
// Of single elements so few belong to the top k of a long row that their order statistics say little; of the
// greatest of m, a share of 1 - (1 - k/n)^m do. The CTAs of a cluster need the same samples: each reads its
// part of the elements, and sends the others what it made of them.
#pragma once

#include "cluster/bracket.cuh"

namespace gvr_topk::cluster {

struct RowSampling {
  int log2_total;  // elements a sample is the greatest of:
  int log2_own;    // of those that a thread reads,
  int log2_lanes;  // and then of lanes of a warp
  int log2_parts;  // CTAs that divide a sample among them,
  int part;        // and which of them this one is

  template <typename T>
  __device__ __forceinline__ RowSampling(const Task<T>& task, bool divided) {
    const int n = task.row.n;
    log2_parts = divided ? task.log2_ctas : 0;
    part = divided ? task.rank : 0;
    // As few as leave a handful of the top k in each warp: lines of the cache are what a sample costs.
    log2_total = n < 1 << 14 ? 0 : n < 3 << 14 ? 1 : n < 1 << 17 ? 2 : n < 1 << 18 ? 3 : n < 1 << 19 ? 4 : 5;
    if (n > 1 << 20) log2_total = 6;
    // Many CTAs read at once what few would need long for.
    if (divided) log2_total = max(log2_total, log2_parts + (n >= 1 << 18 && task.ctas >= 8 ? 1 : 0));
    // Of more, nearly all would lie in the top k.
    while (log2_total > 0 && task.k << log2_total > 2 * n) --log2_total;
    log2_lanes = min(log2_parts, log2_total);
    log2_own = log2_total - log2_lanes;
  }

  // Of what this thread reads, then of its group of lanes.
  template <typename T>
  __device__ __forceinline__ uint32_t greatest(const Task<T>& task) const {
    uint32_t greatest = kAbsentKey;
#pragma unroll 8  // so that the loads overlap
    for (int i = 0; i < 1 << log2_own; ++i) {
      // One position in each stratum. Neighbouring strata belong to different CTAs and warps, whose
      // statistics shall not depend on where in the row they look; what is put together comes from all over
      // it. The multiplicative hash keeps periodic rows from hiding.
      const uint32_t in_cta = i * kThreads + task.lane * kWarps + task.warp;
      const uint32_t stratum = (in_cta << log2_parts) + part;
      const uint64_t begin = static_cast<uint64_t>(stratum) * static_cast<uint32_t>(task.row.n);
      const uint32_t jitter = __umulhi(stratum * 2654435761u, task.row.n);
      const uint64_t at = (begin + jitter) >> (kLog2Threads + log2_own + log2_parts);
      greatest = max(greatest, task.row.key(static_cast<int>(at)));
    }
#pragma unroll 1
    for (int i = 0; i < log2_lanes; ++i) {
      greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, 16 >> i));
    }
    return greatest;
  }

  // Of such greatest ones, which lie in the top k.
  template <typename T>
  __device__ __forceinline__ float share(const Task<T>& task) const {
    float rest = 1.0f - __fdividef(static_cast<float>(task.k), static_cast<float>(task.row.n));
    for (int i = 0; i < log2_total; ++i) rest *= rest;
    return 1.0f - rest;
  }
};

// Sends one sample to the CTA of this thread's team.
template <typename T>
__device__ __forceinline__ void send_sample(const Task<T>& task, uint32_t key) {
  const Shared& sm = *task.shared;
  const uint32_t target = task.team_target(), place = task.team_place();
  const uint32_t mailbox = ptx::map_to_rank(ptx::shared_address(&sm.sample_mailbox), target);
  if (place == 0) ptx::mailbox_announce(mailbox, sizeof(uint32_t) * task.team_size());
  const uint32_t* there = &sm.received[task.rank * task.team_size() + place];
  ptx::mailbox_store(ptx::map_to_rank(ptx::shared_address(there), target), key, mailbox);
}

template <typename T>
__device__ __forceinline__ void receive_samples(const Task<T>& task) {
  ptx::mailbox_wait(ptx::shared_address(&task.shared->sample_mailbox), 0);
}

// Before the end of a CTA that went by the hint: what others send it must have a place to go to.
template <typename T>
__device__ __forceinline__ void outlast_samples(const Task<T>& task) {
  if (task.ctas > 1 && task.contested) receive_samples(task);
}

// One sample per thread, the same in all CTAs of the cluster: of each CTA, as many as there are threads for
// it. `greatest`: of this thread's group of lanes.
template <typename T>
__device__ __forceinline__ uint32_t sample_of_cluster(const Task<T>& task, uint32_t greatest) {
  Shared& sm = *task.shared;
  const int groups = 32 >> task.log2_ctas;
  if (task.lane < groups) sm.sent[task.warp * groups + task.lane] = greatest;
  __syncthreads();
  ptx::cluster_wait();
  send_sample(task, sm.sent[task.team_place()]);
  receive_samples(task);
  return sm.received[task.thread];
}

}  // namespace gvr_topk::cluster
