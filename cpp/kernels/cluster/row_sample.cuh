// A sample of the row itself: per thread, the greatest of a few scattered elements.
//
// Of single elements so few belong to the top k of a long row that their order statistics say little; of the
// greatest of m, a share of 1 - (1 - k/n)^m do. The CTAs of a cluster need the same sample: each reads its
// part of it and sends that to the others.
#pragma once

#include "cluster/bracket.cuh"

namespace gvr_topk::cluster {

struct RowSampling {
  int log2_total;  // elements per thread, of all CTAs together
  int first, own;  // and of this one; may be none

  template <typename T>
  __device__ __forceinline__ RowSampling(const Task<T>& task, bool divided) {
    const int n = task.row.n;
    // As few as leave a handful of the top k in each warp: lines of the cache are what a sample costs.
    log2_total = n < 1 << 14 ? 0 : n < 3 << 14 ? 1 : n < 1 << 17 ? 2 : n < 1 << 18 ? 3 : n < 1 << 19 ? 4 : 5;
    if (n > 1 << 20) log2_total = 6;
    // Many CTAs read at once what few would need long for.
    if (divided) log2_total = max(log2_total, task.log2_ctas + (n >= 1 << 18 && task.ctas >= 8 ? 1 : 0));
    // Of more, nearly all would lie in the top k.
    while (log2_total > 0 && task.k << log2_total > 2 * n) --log2_total;
    own = 1 << log2_total;
    if (divided) own = max(own >> task.log2_ctas, task.rank < own ? 1 : 0);
    first = divided ? task.rank * own : 0;
  }

  template <typename T>
  __device__ __forceinline__ uint32_t greatest(const Task<T>& task) const {
    uint32_t greatest = kAbsentKey;
#pragma unroll 8  // so that the loads overlap
    for (int i = 0; i < own; ++i) {
      // One position in each stratum, neighbouring strata in different warps, whose statistics shall not
      // depend on where in the row they look; the multiplicative hash keeps periodic rows from hiding.
      const uint32_t stratum = (first + i) * kThreads + task.lane * kWarps + task.warp;
      const uint64_t begin = static_cast<uint64_t>(stratum) * static_cast<uint32_t>(task.row.n);
      const uint32_t jitter = __umulhi(stratum * 2654435761u, task.row.n);
      greatest =
          max(greatest, task.row.key(static_cast<int>((begin + jitter) >> (kLog2Threads + log2_total))));
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

// What a CTA says of its part of the sample.
enum Contribution : uint32_t { kByHint, kNoneOfMany, kSamples };

// Tells the CTA of this thread's team what this CTA has for it, and returns its mailbox.
template <typename T>
__device__ __forceinline__ uint32_t announce_sample(const Task<T>& task, Contribution what) {
  const Shared& sm = *task.shared;
  const uint32_t target = task.team_target();
  const uint32_t mailbox = ptx::map_to_rank(ptx::shared_address(&sm.sample_mailbox), target);
  if (task.team_place() == 0) {
    const uint32_t sampled = ptx::map_to_rank(ptx::shared_address(&sm.sampled[task.rank]), target);
    ptx::mailbox_announce(mailbox, sizeof(uint32_t) * (what == kSamples ? kThreads + 1 : 1));
    ptx::mailbox_store(sampled, what, mailbox);
  }
  return mailbox;
}

// For a CTA that goes by the hint: others of its cluster may have read another state of it, and wait.
template <typename T>
__device__ __forceinline__ void send_no_sample(const Task<T>& task) {
  announce_sample(task, kByHint);
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

// Whether all CTAs of the cluster go by the hint, or none does. Equal brackets of different origin are not
// enough: the samples of one may lie where another keeps its candidates.
template <typename T>
__device__ __forceinline__ bool same_origin(const Task<T>& task) {
  const Shared& sm = *task.shared;
  const bool by_hint = sm.sampled[task.lane < task.ctas ? task.lane : 0] == kByHint;
  return __all_sync(0xffffffffu, by_hint == (sm.sampled[task.rank] == kByHint));
}

// Greatest, per thread, of what the CTAs of the cluster have, this one if `any`. `samples`: [ctas][kThreads],
// used for nothing else before a block barrier.
template <typename T>
__device__ __forceinline__ uint32_t greatest_of_cluster(const Task<T>& task, uint32_t mine, bool any,
                                                        uint32_t* samples) {
  Shared& sm = *task.shared;
  reinterpret_cast<uint32_t*>(sm.sample)[threadIdx.x] = mine;
  __syncthreads();
  ptx::cluster_wait();
  const uint32_t mailbox = announce_sample(task, any ? kSamples : kNoneOfMany);
  const uint32_t there =
      ptx::map_to_rank(ptx::shared_address(samples + task.rank * kThreads), task.team_target());
#pragma unroll 1
  for (int i = task.team_place(); any && i < kThreads / 4; i += task.team_size()) {
    ptx::mailbox_store(there + sizeof(uint4) * i, sm.sample[i], mailbox);
  }
  receive_samples(task);
  uint32_t greatest = mine;
#pragma unroll 4
  for (int i = 0; i < task.ctas; ++i) {
    const uint32_t other = samples[i * kThreads + threadIdx.x];
    greatest = max(greatest, sm.sampled[i] == kSamples ? other : kAbsentKey);
  }
  __syncthreads();  // all have read the samples, and sent their own
  return greatest;
}

}  // namespace gvr_topk::cluster
