// Mean and deviation of a sample of the row, which predictions start from. The sample is of the same places
// of the buffer in every step, so that what it has of chance stays; its loads need neither hint nor length,
// and no CTA needs another.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/row_sample.cuh"

namespace gvr_topk::cluster {

constexpr int kMostLooks = 2;

// This thread's looks at the row, before its length is known: `row.n` is that of the buffer. All CTAs look at
// the same places if `alike`, else each at its own part of a larger sample, and once. What they see lands in
// memory that no other CTA stores to: a copy may come late, and a peer's store early.
template <typename T, int kLooks>
struct Ahead {
  static_assert(kLooks <= kMostLooks);
  bool alike;
  int span;
  int at[kLooks];
  uint4* zone[kLooks];  // where this thread's looks land

  // Starts to fetch it: to shared memory, or what waits for the length would wait for it too. The second look
  // lands in `store`, kThreads vectors that this CTA alone uses, and for something else only later.
  __device__ __forceinline__ Ahead(const Task<T>& task, const Shape& shape, uint4* store = nullptr)
      : alike(shape.has(Shape::kFed)) {
    zone[0] = task.shared->landing + task.thread;
    if constexpr (kLooks > 1) zone[1] = store + task.thread;
    fetch(task, shape);
  }

  // Out of what is known to be in the row.
  __device__ __forceinline__ void fetch(const Task<T>& task, const Shape& shape) {
    span = task.row.n;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      if (i > 0 && !alike) break;
      if (alike) {
        const int line =
            RowSampling::place((i * kThreads + task.thread) / kLookLanes, span & -kLook) & -kLook;
        at[i] = line + kNeighbours * (task.thread % kLookLanes);
      } else {
        at[i] = RowSampling::place((task.thread << task.log2_ctas) + task.rank, span);
      }
      if (!shape.has(Shape::kAligned)) continue;
      const uint32_t target = ptx::shared_address(zone[i]);
      if constexpr (sizeof(T) == 4) {
        ptx::copy_async(target, task.row.data + at[i]);
      } else {
        ptx::copy_half_async(target, task.row.data + at[i]);
      }
    }
    ptx::commit_copies();
  }

  // When it has come.
  __device__ __forceinline__ Neighbours<T> seen(int look = 0) const {
    Neighbours<T> neighbours;
    neighbours.load(zone[look]);
    return neighbours;
  }

  // Whether it is as good as a look at a row of known length: when hardly any of it lies behind the end.
  __device__ __forceinline__ bool serves(const Shape& shape, int n) const {
    return shape.has(Shape::kAligned) && !alike && n > span - span / 16;
  }
};

// A sample says too little when less of it counts than this share: looks count where all they see is finite.
// Of a row that is masked nearly everywhere none does.
constexpr float kLeastCounted = 0.125f;
constexpr float kTooFew = -1.0f, kNone = -2.0f;

struct Moments {
  float mean = 0.0f, deviation = 0.0f;  // the deviation is kTooFew or kNone where too little counts

  Moments() = default;
  __device__ __forceinline__ explicit Moments(const Missed& missed)
      : mean(missed.mean), deviation(missed.deviation) {}

  // Of a sample that all CTAs have alike. One block barrier.
  template <typename T, int kLooks>
  __device__ __forceinline__ Moments(const Task<T>& task, const Ahead<T, kLooks>& ahead) {
    Shared& sm = *task.shared;
    float sum = 0.0f, squares = 0.0f;
    bool counts = true;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const Neighbours<T> seen = ahead.seen(i);
      counts &= ahead.at[i] + kNeighbours <= task.row.n;
#pragma unroll
      for (int e = 0; e < kNeighbours; ++e) {
        sum += seen.value(e);
        squares = fmaf(seen.value(e), seen.value(e), squares);
      }
    }
    counts &= squares < __int_as_float(0x7f800000);
    // One half of the warp adds up the one, the other the other.
    const bool upper = (task.lane & 16) != 0;
    float mine = counts ? (upper ? squares : sum) : 0.0f;
    const float theirs = counts ? (upper ? sum : squares) : 0.0f;
    mine += __shfl_xor_sync(0xffffffffu, theirs, 16);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if ((task.lane & 15) == 0) sm.moment[task.lane + task.warp] = mine;
    const float count = static_cast<float>(kLooks * kNeighbours * __syncthreads_count(counts));
    // A lane takes four warps' sums, and one four lanes away what goes with them.
    static_assert(kWarps == 16);
    const float4 four = reinterpret_cast<const float4*>(sm.moment)[task.lane & 7];
    float all = (four.x + four.y) + (four.z + four.w);
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    const float other = __shfl_xor_sync(0xffffffffu, all, 4);
    const bool squared = (task.lane & 4) != 0;
    const float share = ptx::reciprocal(count);
    mean = (squared ? other : all) * share;
    deviation = cluster::deviation((squared ? all : other) * share - mean * mean);
    if (count < kLeastCounted * kLooks * kNeighbours * kThreads) deviation = count > 0 ? kTooFew : kNone;
  }

  __device__ __forceinline__ bool are_known() const { return deviation >= 0.0f; }
  __device__ __forceinline__ bool found_none() const { return deviation == kNone; }
};

}  // namespace gvr_topk::cluster
