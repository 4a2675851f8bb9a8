// Sizes of the kernel of blocks, and its shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cluster/smem_layout.cuh"
#include "small_row/partition.cuh"

namespace gvr_topk::blocks {

constexpr int kBlockScores = static_cast<int>(kBlockSize);
constexpr int kMaxChosen = static_cast<int>(kMaxChosenBlocks);
constexpr int kGivenPerThread = kMaxChosen / kThreads;
static_assert(kMaxChosen % kThreads == 0);

// 16-byte loads of one block.
template <typename T>
constexpr int kVecsOfBlock = kBlockScores / kPerVec<T>;

constexpr int kNoBlock = -1;

struct alignas(128) BlocksShared {
  Shared shared;
  small_row::RoundBins<kThreads> bins;
  int32_t candidates[kMaxChosen];  // blocks to select in; kNoBlock in place of one that the row does not have
  uint32_t given_count;            // given blocks that the row has
  uint32_t given_newest;           // how many of them are the row's newest block
  // The selected elements in ascending order: [block_k] blocks, and later [min(k, scores of all candidates)]
  // indices in the list of candidates' scores. Both fit 16 bits.
  alignas(8) uint16_t staged[kMaxChosen];
};

// `selected`: how many positions are staged at most.
inline size_t blocks_bytes(int64_t selected) {
  const int64_t more = selected > kMaxChosen ? selected - kMaxChosen : 0;
  return sizeof(BlocksShared) + sizeof(uint16_t) * more;
}
static_assert(sizeof(BlocksShared) + sizeof(uint16_t) * kMaxChosen * kBlockScores <=
              shared_bytes_of_block(120));

}  // namespace gvr_topk::blocks
