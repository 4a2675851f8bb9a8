// Sizes of the paper's kernel, its shared memory, and what its phases know of a row.
#pragma once

#include "cluster/candidates.cuh"
#include "small_row/partition.cuh"

namespace gvr_topk::paper_gvr {

constexpr int kCapacity = 6144;  // most candidates: three times the largest k (paper, section 5.3)
constexpr int kMaxItems = kCapacity / 3;
constexpr int kHintPerThread = kMaxItems / kThreads;
constexpr int kSecantPasses = 4, kFloatPasses = 8;

// The ring is as many bytes deep for every dtype. The row is read again, so it is not evicted first.
template <typename T>
using PaperStream = PartStream<T, kWarps, static_cast<int>(kRingDepth * sizeof(float) / sizeof(T)), false>;

// Shared memory of a block. A region is read by the warp that wrote it (`ring`, behind its wait for the
// copies), or behind a block barrier since then. A block barrier lies between the uses of a union. Where the
// search gives up, radix rounds take all memory behind `shared`, behind a barrier.
struct alignas(128) PaperShared {
  Shared shared;
  union {
    unsigned char ring[kWarps * PaperStream<float>::Ring::kBytes];  // guess, verify: tiles under way
    CandidateList<kCapacity, kMaxItems> list;                       // collect, refine
  };
  small_row::RoundBins<kThreads> bins;  // guess, refine: of its two sets only the first
  uint32_t sums[3][kWarps];             // verify: of passes in turn, and of `repeats`; refine, statistics
  double value_sum[kWarps];             // guess
  uint32_t bitmap[PaperStream<float>::padded(kPaperMaxWidth + kMaxLineLead) / 32];  // ends with the buffer
};
static_assert(sizeof(PaperShared) <= shared_bytes_of_block(kMinArch));

template <typename T>
struct PaperContext : RowContext<T> {
  PaperShared& own;
  PaperStream<T> stream;
};

GVR_DEVICE bool is_finite_key(uint32_t key) { return kLeastFiniteKey <= key && key <= kMostFiniteKey; }

}  // namespace gvr_topk::paper_gvr
