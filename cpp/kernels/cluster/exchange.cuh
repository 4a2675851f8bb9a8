// The exchange between the CTAs of a cluster. Every CTA sends its counts and its list of keys to all others,
// and each CTA can then finish alone.
#pragma once

#include "cluster/messages.cuh"
#include "cluster/row_context.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Sends this CTA's segment of the list and its header to the same offsets in the shared memory of every CTA
// of the cluster. One team of threads sends to each CTA. The receiver's transaction barrier counts one
// arrival per sender and the bytes that the sender announces.
template <typename T>
GVR_DEVICE void store_to_peers(const RowContext<T>& ctx, const KeyInterval& interval) {
  const Shared& smem = *ctx.shared;
  const uint32_t target = ctx.team_target(), index = ctx.team_index();
  const uint32_t barrier = ptx::map_to_rank(ptx::shared_address(&smem.counts_barrier), target);
  const uint32_t header = smem.header.address_in(target, ctx.rank);
  const auto mine = reinterpret_cast<const uint4*>(ctx.list.of(ctx.rank));
  const uint32_t list = ctx.list.own_address_in(target);
  const Counts counts = smem.counts;
  // A CTA's own copy is in place. A list that does not fit is not sent: the header says so, and no CTA reads
  // any list. The last vector may contain words past the listed keys, which nobody reads.
  const bool fits = counts.listed <= static_cast<uint32_t>(ctx.list.segment());
  const uint32_t listed = target == ctx.rank || !fits ? 0 : counts.listed;
  const uint32_t sent = (listed + kKeysPerVec - 1) / kKeysPerVec;
  ptx::barrier_expect_tx_if(index == 0, barrier, sizeof(uint4) * (kHeaderVecs + sent));
  const uint32_t length = static_cast<uint32_t>(ctx.row.n);
  const uint4 vec = index == 0 ? make_uint4(counts.above, counts.listed, counts.equal, length)
                               : make_uint4(interval.lo, interval.hi, 0, 0);
  ptx::store_async_if(index < kHeaderVecs, header + sizeof(uint4) * index, vec, barrier);
#pragma unroll 1
  for (uint32_t begin = 0; begin < sent; begin += ctx.team_size()) {  // All lanes make as many rounds.
    const uint32_t i = begin + index;
    const bool there = i < sent;
    ptx::store_async_if(there, list + sizeof(uint4) * i, there ? mine[i] : make_uint4(0, 0, 0, 0), barrier);
  }
}

// Sends this CTA's header and list, and waits for those of all other CTAs. A cluster of one only stores its
// header. Parities alternate between the exchanges of a launch. Every CTA of a cluster takes part in every
// exchange, whatever it has read, because a wait ends only when all CTAs have sent. No warp barrier follows
// the stores of a cluster, because its price shows in every launch.
template <typename T, typename Meanwhile>
GVR_DEVICE void send_and_wait(const RowContext<T>& ctx, const KeyInterval& interval, uint32_t parity,
                              Meanwhile meanwhile) {
  Shared& smem = *ctx.shared;
  if (ctx.ctas > 1) {
    store_to_peers(ctx, interval);
  } else {
    smem.header.put_alone(Header{smem.counts, ctx.row.n, interval.lo, interval.hi, {}});
  }
  meanwhile();
  if (ctx.ctas > 1) {
    ptx::barrier_wait(ptx::shared_address(&smem.counts_barrier), parity);
  } else {
    __syncthreads();
  }
}

// Sums up all headers.
template <typename T>
GVR_DEVICE CountResult read_headers(const RowContext<T>& ctx, const KeyInterval& interval) {
  const Shared& smem = *ctx.shared;
  const bool mine = ctx.lane < ctx.ctas;
  const Header& header = smem.header[mine ? ctx.lane : 0];
  const Counts counts = header.counts;
  // Counts of CTAs that used different lengths, states or samples are not added. No branch: sums follow.
  const bool same = (header.length == ctx.row.n) & (header.lo == interval.lo) & (header.hi == interval.hi);
  const bool fits = counts.listed <= static_cast<uint32_t>(ctx.list.segment());
  CountResult v;
  v.above = __reduce_add_sync(0xffffffffu, mine ? counts.above : 0);
  v.above_before = __reduce_add_sync(0xffffffffu, ctx.lane < ctx.rank ? counts.above : 0);
  v.inside = __reduce_add_sync(0xffffffffu, mine ? counts.listed : 0);
  v.equal = 0;
  if (interval.tie_key() != kAbsentKey) {
    v.equal = __reduce_add_sync(0xffffffffu, mine ? counts.equal : 0);
    v.inside += v.equal;
  }
  v.rank = static_cast<uint32_t>(ctx.k) - v.above;
  const bool there = v.rank - 1 < v.inside;  // Unsigned wrap: false for rank 0 and for negative ranks.
  v.complete = __all_sync(0xffffffffu, same && fits && there);
  v.agreed = v.complete || __all_sync(0xffffffffu, same);
  v.contains_k = v.agreed && there;
  return v;
}

// Exchanges the counts and lists of all CTAs. `meanwhile` runs while they are under way.
template <typename T, typename Meanwhile>
GVR_DEVICE CountResult exchange_lists(const RowContext<T>& ctx, const KeyInterval& interval, uint32_t parity,
                                      Meanwhile meanwhile) {
  __syncthreads();
  send_and_wait(ctx, interval, parity, meanwhile);
  return read_headers(ctx, interval);
}

}  // namespace gvr_topk
