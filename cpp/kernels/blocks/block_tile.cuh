// Sizes of the kernels of blocks and their shared memory, where a row begins, how its blocks are read, and
// what one thread holds in registers: keys of blocks, or of the scores of candidate blocks.
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

// 16-byte vectors of one block.
template <typename T>
constexpr int kVecsOfBlock = kBlockScores / kPerVec<T>;

constexpr int kNoBlock = -1;
constexpr int kPastRow = INT32_MAX / kBlockScores;  // a block that lies behind every row

// The launch flags that the kernels of blocks obey.
constexpr uint32_t kFlags = LaunchTraits::kAligned | LaunchTraits::kDraftRows | LaunchTraits::kRowLengths |
                            LaunchTraits::kCompressed | LaunchTraits::kDropMasked | LaunchTraits::kRowStarts;

// Whether half a tile holds the scores of so many blocks.
GVR_TOPK_HOST_DEVICE constexpr bool are_few(int blocks) {
  return blocks * kBlockScores <= kThreads * kValuesPerThread;
}

// Returns how many blocks a row of `n` scores has; the newest of them may be shorter than the others.
GVR_DEVICE int blocks_of(int n) { return (n + kBlockScores - 1) / kBlockScores; }

struct alignas(128) RowShared {
  Shared shared;
  int32_t start;  // column from which the row counts, if rows start at columns of their own
};

struct alignas(128) BlocksShared : RowShared {
  small_row::RoundBins<kThreads> bins;
  int32_t candidates[kMaxChosen];  // blocks to select in; kPastRow in place of one that the row does not have
  uint32_t given_count;            // given blocks that the row has
  uint32_t given_newest;           // how many of them are the row's newest block
  // The selected elements in ascending order: [block_k] blocks, and later [min(k, scores of all candidates)]
  // indices in the list of candidates' scores. Both fit 16 bits.
  alignas(8) uint16_t staged[kMaxChosen];

  // The keys of a row's blocks, behind this struct, if a CTA chooses from them. Only `send_keys` writes them,
  // its own and those of CTAs that choose, ahead of the wait for a barrier.
  GVR_DEVICE const uint32_t* keys() const { return reinterpret_cast<const uint32_t*>(this + 1); }
};
static_assert(sizeof(BlocksShared) <= kBlocksFixedBytes);

// Bytes where blocks are given. `selected`: how many positions are staged at most.
inline size_t given_blocks_bytes(int64_t selected) {
  const int64_t more = selected > kMaxChosen ? selected - kMaxChosen : 0;
  return sizeof(BlocksShared) + sizeof(uint16_t) * more;
}
static_assert(sizeof(BlocksShared) + sizeof(uint16_t) * kMaxChosen * kBlockScores <=
              shared_bytes_of_block(120));

// Bytes where blocks are chosen. Fewer positions than blocks are selected.
inline size_t chosen_blocks_bytes(int64_t width) { return sizeof(BlocksShared) + block_keys_bytes(width); }

// The row from its first column on, once that and its length are known.
template <typename T>
GVR_DEVICE RowView<T> started_row(const BlocksParams& p, const LaunchTraits& traits, int row,
                                  const RowShared& own) {
  RowView<T> view = row_buffer<T>(p.topk, traits.has(LaunchTraits::kAligned), row);
  view.n = own.shared.facts.length;
  view.lead %= kPerVec<T>;
  if (traits.has(LaunchTraits::kRowStarts)) {
    view.data += own.start;
    ptx::reconverge(ptx::unknown_zero());  // Single threads have read and prefetched.
    // All lanes have the same number; a reduction lets the compiler know.
    view.lead = __reduce_max_sync(0xffffffffu, lead_of<T, sizeof(uint4)>(view.data));
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
  ptx::store_shared_if(threadIdx.x == 0, ptx::shared_address(&own.start), start);
  TopkParams started = p.topk;
  started.width -= start;
  job.agree_on_length(started, traits);
  job.ctx.row.lead %= kPerVec<T>;
  if (traits.has(LaunchTraits::kRowStarts)) job.ctx.row = started_row<T>(p, traits, job.row, own);
}

// Returns the key of a block's largest score, or the key of NaN if one of the scores is NaN. The first
// vectors hold the scores, in any order.
template <typename T, int kVecs>
GVR_DEVICE uint32_t block_key(const uint4 (&vec)[kVecs]) {
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

// As `block_key`, for a block at any address. It is out of line because hardly any block needs it.
template <typename T>
__device__ __noinline__ uint32_t unaligned_block_key(const T* block) {
  float max = to_float(block[0]);
#pragma unroll
  for (int e = 1; e < kBlockScores; ++e) max = ptx::max_or_nan(max, to_float(block[e]));
  return order_key(max) >> kInvariantBits<T>;
}

// How the blocks of a row lie between 16-byte boundaries if the row does not start at one. Each block begins
// in the middle of a vector, and ends as far in the middle of a later one.
template <typename T>
struct Lead {
  uint32_t mask[4];  // bits of a block's first vector that belong to the block

  GVR_DEVICE explicit Lead(int elements) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int bits = 8 * (elements * static_cast<int>(sizeof(T)) - 4 * w);
      mask[w] = bits >= 32 ? 0 : 0xffffffffu << max(bits, 0);
    }
  }

  // Returns the scores of a block in its first and its last vector, as one vector.
  GVR_DEVICE uint4 joined(const uint4& first, const uint4& last) const {
    return make_uint4((first.x & mask[0]) | (last.x & ~mask[0]), (first.y & mask[1]) | (last.y & ~mask[1]),
                      (first.z & mask[2]) | (last.z & ~mask[2]), (first.w & mask[3]) | (last.w & ~mask[3]));
  }
};

// Calls visit(block, key) for blocks `first`, `first + step` and so on of a row, below `blocks`, all of which
// are whole. The key is that of the block's largest score. `kAtOnce` blocks are loaded at once. Lanes may be
// apart afterwards.
template <bool kAligned, int kAtOnce, typename T, typename Visit>
GVR_DEVICE void visit_block_keys(const RowView<T>& row, int first, int step, int blocks, Visit visit) {
  constexpr int kVecs = kVecsOfBlock<T> + !kAligned;
  const Lead<T> lead(row.lead);
  const T* const data = kAligned ? row.data : row.boundary();
  // The last vector of a block may reach behind the row, and then is not read.
  const int in_vectors = kAligned ? blocks : min(blocks, (row.n + row.lead - kPerVec<T>) / kBlockScores);
#pragma unroll 1
  for (int begin = first; begin < blocks; begin += kAtOnce * step) {
    uint4 vec[kAtOnce][kVecs];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = begin + i * step;
      const T* const from = data + block * kBlockScores;
      ptx::load_before<0>(block, in_vectors, vec[i][0], from);
      if constexpr (kVecs > 1) ptx::load_before<16>(block, in_vectors, vec[i][1], from);
      if constexpr (kVecs > 2) ptx::load_before<32>(block, in_vectors, vec[i][2], from);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = begin + i * step;
      if (!kAligned) vec[i][0] = lead.joined(vec[i][0], vec[i][kVecs - 1]);
      uint32_t key = block_key<T>(vec[i]);
      if (!kAligned && in_vectors <= block && block < blocks) {
        key = unaligned_block_key(row.data + block * kBlockScores);
      }
      if (block < blocks) visit(block, key);
    }
  }
}

template <int kAtOnce, typename T, typename Visit>
GVR_DEVICE void for_each_block_key(const RowView<T>& row, int first, int step, int blocks, Visit visit) {
  if (row.lead == 0) {
    visit_block_keys<true, kAtOnce>(row, first, step, blocks, visit);
  } else {
    visit_block_keys<false, (kAtOnce + 1) / 2>(row, first, step, blocks, visit);
  }
}

// Divides `count` elements among all warps of a tile. Returns the vectors of each lane.
template <typename Tile>
GVR_DEVICE int divide(Tile& tile, int count, int warp) {
  constexpr int kRound = kThreads * Tile::kGroup / 32;
  const int vecs = static_cast<uint32_t>(count + kRound - 1) / kRound;
  tile.begin = warp * vecs * Tile::kGroup;
  return vecs;
}

// A tile of the keys of blocks, which are 32-bit words. Its positions are numbers of blocks.
struct BlockTile : small_row::CtaTile<float, kMaxValuesPerThread> {
  static constexpr int kStep = 2;  // Vectors are left out by twos, because a branch takes time as well.

  int vecs;  // vectors of a lane, in whole steps; elements of others are undefined

  // Calls visit(vector) for each of the vectors.
  template <typename Visit>
  GVR_DEVICE void for_each_vec(Visit visit) const {
#pragma unroll
    for (int j = 0; j < kVecs; j += kStep) {
      if (j >= vecs) break;
#pragma unroll
      for (int i = 0; i < kStep; ++i) visit(j + i);
    }
  }

  // Calls visit(index) for every element of the vectors.
  template <typename Visit>
  GVR_DEVICE void for_each_index(Visit visit) const {
    for_each_vec([&](int j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(4 * j + e);
    });
  }

  template <typename SetBit>
  GVR_DEVICE LaneMask<kWords> mask_of(SetBit set_bit) const {
    return small_row::mask_of_keys(*this, set_bit);
  }
};

// Fills the tile with the keys of a row's first `count` blocks. Absent blocks have key 0, which is below
// every score's. `kClamps`: CTAs that have read another length may have sent fewer keys than this one takes,
// so whatever lies there is taken for a score's key.
template <bool kClamps, typename T>
GVR_DEVICE void take_keys(const RowContext<T>& ctx, const uint32_t* keys, int count, BlockTile& tile) {
  constexpr uint32_t kLeast = kNegInfKey >> kInvariantBits<T>, kMost = kMaxKey >> kInvariantBits<T>;
  const int vecs = divide(tile, count, ctx.warp), first = tile.begin + 4 * ctx.lane;
  tile.vecs = (vecs + BlockTile::kStep - 1) / BlockTile::kStep * BlockTile::kStep;
  tile.for_each_vec([&](int j) {
    const int left = j < vecs ? count - first - j * BlockTile::kGroup : 0;
    uint4 four = make_uint4(0, 0, 0, 0);
    if (left > 0) four = reinterpret_cast<const uint4*>(keys + first)[32 * j];
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      tile.bits[4 * j + e] = e >= left ? 0 : kClamps ? min(max(key[e], kLeast), kMost) : key[e];
    }
  });
  ptx::reconverge(ctx.zero);
}

// Returns the position in the row of the score at an index in the list.
GVR_DEVICE int position_of_listed(const int32_t* candidates, int index) {
  return candidates[index / kBlockScores] * kBlockScores + index % kBlockScores;
}

// Fills the tile with the keys of `count` candidates, behind which there are absent ones. Elements that are
// no scores of the row have key 0, which is below every score's.
template <typename T, int kValues>
GVR_DEVICE void gather(const RowContext<T>& ctx, const int32_t* candidates, int count,
                       small_row::CtaTile<T, kValues>& tile) {
  using Tile = small_row::CtaTile<T, kValues>;
  static_assert(kBlockScores % kPerVec<T> == 0 && Tile::kGroup % kBlockScores == 0,
                "a vector lies in one block");
  const int vecs = divide(tile, count * kBlockScores, ctx.warp);
  const uint32_t first = tile.begin + ctx.lane * kPerVec<T>;
  int left[Tile::kVecs];  // scores of the row from the vector's first one on
#pragma unroll
  for (int j = 0; j < Tile::kVecs; ++j) {
    int candidate = kPastRow;
    if (j < vecs) candidate = candidates[first / kBlockScores + j * (Tile::kGroup / kBlockScores)];
    left[j] = ctx.row.n - (candidate * kBlockScores + static_cast<int>(first % kBlockScores));
  }
  const auto data = [&](int j) { return ctx.row.data + (ctx.row.n - left[j]); };
  if (ctx.row.lead == 0) {
#pragma unroll
    for (int j = 0; j < Tile::kVecs; ++j) ptx::load_before<0>(kPerVec<T> - 1, left[j], tile.raw[j], data(j));
#pragma unroll
    for (int j = 0; j < Tile::kVecs; ++j) {
      if (0 < left[j] && left[j] < kPerVec<T>) tile.raw[j] = load_elements(data(j), left[j]);
    }
    ptx::reconverge(ctx.zero);
    tile.for_each_index(
        [&](int i) { tile.bits[i] = __float_as_uint(element<T>(tile.raw[i / kPerVec<T>], i % kPerVec<T>)); });
  } else {
    tile.for_each_index([&](int i) {
      T score{};
      if (i % kPerVec<T> < left[i / kPerVec<T>]) score = data(i / kPerVec<T>)[i % kPerVec<T>];
      tile.bits[i] = __float_as_uint(to_float(score));
    });
  }
  ptx::reconverge(ctx.zero);
  tile.for_each_index([&](int i) {
    const uint32_t key = order_key(tile.value(i)) >> kInvariantBits<T>;
    tile.bits[i] = i % kPerVec<T> < left[i / kPerVec<T>] ? key : 0;
  });
}

}  // namespace gvr_topk::blocks
