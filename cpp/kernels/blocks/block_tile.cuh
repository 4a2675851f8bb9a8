// Sizes of the kernels of blocks and their shared memory, where a row begins, and what one thread holds in
// registers: the largest scores of blocks, and the scores of candidate blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cluster/row_context.cuh"
#include "cluster/row_job.cuh"
#include "cluster/smem_layout.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "small_row/cta_tile.cuh"
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

// The launch flags that the kernels of blocks obey.
constexpr uint32_t kFlags = LaunchTraits::kAligned | LaunchTraits::kDraftRows | LaunchTraits::kRowLengths |
                            LaunchTraits::kCompressed | LaunchTraits::kDropMasked | LaunchTraits::kRowStarts;

// Returns how many blocks a row of `n` scores has; the newest of them may be shorter than the others.
GVR_DEVICE int blocks_of(int n) { return (n + kBlockScores - 1) / kBlockScores; }

struct alignas(128) RowShared {
  Shared shared;
  int32_t start;  // column from which the row counts, if rows start at columns of their own
};

struct alignas(128) BlocksShared : RowShared {
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

// The row from its first column on, once that and its length are known.
template <typename T>
GVR_DEVICE RowView<T> started_row(const BlocksParams& p, const LaunchTraits& traits, int row,
                                  const RowShared& own) {
  RowView<T> view = row_buffer<T>(p.topk, traits.has(LaunchTraits::kAligned), row);
  view.n = own.shared.facts.length;
  if (traits.has(LaunchTraits::kRowStarts)) {
    view.data += own.start;
    // All lanes have the same number; a vote lets the compiler know.
    view.aligned = __all_sync(0xffffffffu, view.aligned && own.start % kPerVec<T> == 0);
  }
  return view;
}

// Waits for the row's first column and length, which one thread has read. This contains one block barrier.
template <typename T>
GVR_DEVICE void agree_on_row(RowJob<T, false>& job, const LaunchTraits& traits, const BlocksParams& p,
                             RowShared& own) {
  int start = 0;
  ptx::load_if(traits.has(LaunchTraits::kRowStarts) && threadIdx.x == 0, start, p.row_starts + job.row);
  start = min(max(start, 0), p.topk.width);
  ptx::store_shared_if(threadIdx.x == 0, own.start, start);
  TopkParams started = p.topk;
  started.width -= start;
  job.agree_on_length(started, traits);
  if (traits.has(LaunchTraits::kRowStarts)) job.ctx.row = started_row<T>(p, traits, job.row, own);
}

// Returns the key of a block's largest score, or the key of NaN if one of the scores is NaN.
template <typename T>
GVR_DEVICE uint32_t block_key(const uint4 (&vec)[kVecsOfBlock<T>]) {
  float max;
  if constexpr (sizeof(T) == 4) {
    const auto max_of = [](const uint4& four) {
      return ptx::max_or_nan(ptx::max_or_nan(__uint_as_float(four.x), __uint_as_float(four.y)),
                             ptx::max_or_nan(__uint_as_float(four.z), __uint_as_float(four.w)));
    };
    max = ptx::max_or_nan(max_of(vec[0]), max_of(vec[1]));
  } else {
    const auto max_of = [](uint32_t a, uint32_t b) {
      return std::is_same_v<T, __half> ? ptx::max_or_nan_f16x2(a, b) : ptx::max_or_nan_bf16x2(a, b);
    };
    const uint4 pair = make_uint4(max_of(max_of(vec[0].x, vec[0].y), max_of(vec[0].z, vec[0].w)), 0, 0, 0);
    max = ptx::max_or_nan(element<T>(pair, 0), element<T>(pair, 1));
  }
  return order_key(max) >> kInvariantBits<T>;
}

// As `block_key`, for a block at any address. It is out of line because only rows that are not aligned need
// it.
template <typename T>
__device__ __noinline__ uint32_t unaligned_block_key(const T* block) {
  float max = to_float(block[0]);
#pragma unroll
  for (int e = 1; e < kBlockScores; ++e) max = ptx::max_or_nan(max, to_float(block[e]));
  return order_key(max) >> kInvariantBits<T>;
}

// A warp owns consecutive blocks, and a lane owns every 32nd of these. The row's length decides how many
// these are, so that all warps load, however short the row is in its buffer. Index order is (warp, index,
// lane). The tile's elements are keys of blocks. Absent blocks have key 0, which is below every score's.
template <typename T>
struct BlockTile : small_row::WordTile {
  static constexpr int kAhead = 4;  // Blocks that a lane loads at once; more would be spilled.
  static_assert(kSize % kAhead == 0, "a lane's part is a multiple of kAhead");

  // Loads the first `blocks` blocks of a row, all of which are whole.
  GVR_DEVICE void load(const RowView<T>& row, int blocks) {
    constexpr int kStep = kThreads * kAhead;
    const int part = (blocks + kStep - 1) / kStep * kAhead;
    const int lane = threadIdx.x & 31;
    words = (part + kValuesPerThread - 1) / kValuesPerThread;
    begin = (threadIdx.x >> 5) * 32 * part;
    // The lane's block i is in the row if 32 * i < end.
    const int end = min(blocks - begin, 32 * part) - lane;
    const T* const data = row.data + (begin + lane) * kBlockScores;
    if (row.aligned) {
      Ahead ahead;
      start(ahead, end, data);
      finish(ahead, end, data);
    } else {
      for_each_index(
          [&](int i) { bits[i] = 32 * i < end ? unaligned_block_key(data + 32 * i * kBlockScores) : 0; });
    }
  }

  // The number of the block with this index.
  GVR_DEVICE uint32_t position(int lane, uint32_t index) const { return begin + 32 * index + lane; }

  // Calls visit(word, bit, rank) for the lane's blocks of a set: which block of which word, and how many
  // blocks of the whole warp come earlier. All lanes take part.
  template <typename Visit>
  GVR_DEVICE void for_each_in_order_of(const LaneMask<kWords>& set, int lane, Visit visit) const {
    const uint32_t lower = (1u << lane) - 1;
    uint32_t passed = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w >= words) break;
#pragma unroll
      for (int i = 0; i < kValuesPerThread; ++i) {
        const bool mine = (set.word[w] & (1u << 2 * i)) != 0;
        const uint32_t lanes = __ballot_sync(0xffffffffu, mine);
        if (mine) visit(w, i, passed + __popc(lanes & lower));
        passed += __popc(lanes);
      }
    }
  }

 private:
  using Ahead = uint4[kAhead][kVecsOfBlock<T>];

  // Starts to load the block of an index.
  template <int kIndex>
  GVR_DEVICE static void fetch(Ahead& ahead, int end, const T* data) {
    if constexpr (kIndex < kSize) {
      constexpr int kOffset = 32 * kIndex * kBlockScores * sizeof(T);
      uint4(&vec)[kVecsOfBlock<T>] = ahead[kIndex % kAhead];
      ptx::load_before<kOffset>(32 * kIndex, end, vec[0], data);
      if constexpr (kVecsOfBlock<T> > 1) {
        ptx::load_before<kOffset + sizeof(uint4)>(32 * kIndex, end, vec[1], data);
      }
    }
  }

  template <int kIndex = 0>
  GVR_DEVICE static void start(Ahead& ahead, int end, const T* data) {
    if constexpr (kIndex < kAhead) {
      fetch<kIndex>(ahead, end, data);
      start<kIndex + 1>(ahead, end, data);
    }
  }

  // Waits for one block after the other, and starts to load the one that lies `kAhead` further on.
  template <int kIndex = 0>
  GVR_DEVICE void finish(Ahead& ahead, int end, const T* data) {
    if constexpr (kIndex < kSize) {
      if (kIndex % kValuesPerThread == 0 && kIndex / kValuesPerThread >= words) return;
      const uint32_t key = block_key<T>(ahead[kIndex % kAhead]);  // without a branch
      bits[kIndex] = 32 * kIndex < end ? key : 0;
      fetch<kIndex + kAhead>(ahead, end, data);
      finish<kIndex + 1>(ahead, end, data);
    }
  }
};

// Stages the numbers of selected blocks in ascending order; earlier warps have selected `before`. A block
// barrier comes next.
template <typename T>
GVR_DEVICE void stage_selected(const RowContext<T>& ctx, const BlockTile<T>& tile,
                               const LaneMask<BlockTile<T>::kWords>& selected, uint32_t before,
                               uint16_t* staged) {
  tile.for_each_in_order_of(selected, ctx.lane, [&](int word, int bit, uint32_t rank) {
    const uint32_t block = tile.position(ctx.lane, word * kValuesPerThread + bit);
    staged[before + rank] = static_cast<uint16_t>(block);
  });
}

// A tile of the scores of all candidates, one candidate behind the other. Its positions are indices in that
// list: index i is the score i % kBlockScores of candidate i / kBlockScores.
template <typename T>
using CandidateTile = small_row::CtaTile<T, kWideValuesPerThread>;

// Returns the position in the row of the score at an index in the list.
GVR_DEVICE int position_of_listed(const int32_t* candidates, int index) {
  return candidates[index / kBlockScores] * kBlockScores + index % kBlockScores;
}

// Fills the tile with the keys of `count` candidates. Each is a block that the row has, or kNoBlock. Elements
// that are no scores of the row have key 0, which is below every score's.
template <typename T>
GVR_DEVICE void gather(const RowContext<T>& ctx, const int32_t* candidates, int count,
                       CandidateTile<T>& tile) {
  using Tile = CandidateTile<T>;
  static_assert(kBlockScores % kPerVec<T> == 0, "a vector lies in one block");
  tile.begin = ctx.warp * Tile::kVecs * Tile::kGroup;
  int left[Tile::kVecs];  // scores of the row from the vector's first one on
  const T* data[Tile::kVecs];
#pragma unroll
  for (int j = 0; j < Tile::kVecs; ++j) {
    const int index = tile.begin + j * Tile::kGroup + ctx.lane * kPerVec<T>;
    const bool listed = index / kBlockScores < count;
    const int position = listed ? position_of_listed(candidates, index) : kNoBlock;
    left[j] = position < 0 ? 0 : ctx.row.n - position;
    data[j] = ctx.row.data + position;
    ptx::load_before<0>(kPerVec<T> - 1, ctx.row.aligned ? left[j] : 0, tile.raw[j], data[j]);
  }
#pragma unroll
  for (int j = 0; j < Tile::kVecs; ++j) {
    if (left[j] > 0 && (!ctx.row.aligned || left[j] < kPerVec<T>)) {
      tile.raw[j] = load_elements(data[j], left[j]);
    }
  }
  ptx::reconverge(ctx.zero);
  tile.for_each_index([&](int i) {
    const uint32_t key = order_key(element<T>(tile.raw[i / kPerVec<T>], i % kPerVec<T>)) >> kInvariantBits<T>;
    tile.bits[i] = i % kPerVec<T> < left[i / kPerVec<T>] ? key : 0;
  });
}

}  // namespace gvr_topk::blocks
