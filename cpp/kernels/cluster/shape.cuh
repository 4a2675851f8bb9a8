// How much shared memory a plan takes, and what is told to its kernel beside the parameters.
#pragma once

#include "cluster/moments.cuh"
#include "cluster/pool.cuh"
#include "cluster/row_sample.cuh"
#include "cluster/state.cuh"

namespace gvr_topk::cluster {

constexpr size_t kWordBytes = 4 * kValuesPerThread;  // of the widest dtype

constexpr size_t kSharedLimit = 227 * 1024;
constexpr size_t kSharedLimitSmall = 99 * 1024;

// Lists, and a ring of so many words for every thread.
inline constexpr size_t fixed_bytes(int list_capacity, int depth) {
  return sizeof(Shared) + sizeof(uint32_t) * list_capacity + depth * kThreads * kWordBytes;
}

// Behind lists and ring, masks and candidates.
inline constexpr size_t shared_bytes(const Shape& shape, const Room& room) {
  return fixed_bytes(shape.list_capacity(), shape.has(Shape::kRing) ? kRingDepth : 0) +
         sizeof(Candidate) * room.candidate_capacity + sizeof(uint16_t) * room.masks;
}

// Without what depends on buffers.
inline constexpr Shape make_shape(const Plan& plan) {
  uint32_t flags = plan.ring_depth > 0 ? Shape::kRing : 0;
  if (plan.path == Path::kCluster) flags |= Shape::kUseHint;
  return Shape(log2_of(plan.ctas_per_row), plan.list_capacity, flags);
}

inline constexpr Room make_room(const Plan& plan) {
  Room room{plan.candidate_capacity, plan.masks, 0};
  if (plan.family == Family::kStream) {
    const size_t left = (kSharedLimit - fixed_bytes(plan.list_capacity, kRingDepth)) / kChunkBytes;
    room.pool_chunks = left < kMaxPoolChunks ? static_cast<int>(left) : kMaxPoolChunks;
  }
  return room;
}

// Elements one CTA selects from, in registers or in its pool.
constexpr int kMostCounted = kThreads * kWideValuesPerThread;
static_assert(kMaxPoolChunks * kChunk <= kMostCounted);

// Whether rows of `width` can be planned for `ctas` CTAs: shared memory takes everything, rings start where
// shared memory's lines do, lists have room for a histogram and are sent in whole vectors, their counts fit
// in halves of a word (place.cuh), and a pool takes a second look at the row (moments.cuh), and then what may
// be selected and a wide bracket, though every warp's last chunk is all but empty.
inline constexpr bool fits(int arch, int64_t width, int ctas, int64_t k) {
  const Plan plan = make_plan(PlanInput{1, width, k, Dtype::kFloat32, Path::kCluster, 132, arch, ctas});
  const Shape shape = make_shape(plan);
  const Room room = make_room(plan);
  return shared_bytes(shape, room) <= (is_small_arch(arch) ? kSharedLimitSmall : kSharedLimit) &&
         fixed_bytes(shape.list_capacity(), 0) % alignof(Shared) == 0 &&
         (shape.list_capacity() >> shape.log2_ctas()) % kKeysPerVec == 0 &&
         shape.list_capacity() >> shape.log2_ctas() >= kRadixBins &&
         shape.list_capacity() + kMostCounted < 1 << 16 &&
         (plan.family != Family::kStream ||
          (room.pool_chunks * kChunkBytes >= (kMostLooks - 1) * kThreads * sizeof(uint4) &&
           room.pool_chunks >= (kStreamMaxK + kWideBracket) / kChunk + kWarps));
}
static_assert(fits(90, kMaxElementsPerCta, 1, kStreamMaxK) && fits(90, kMaxElementsPerCta, 1, kMaxWidth));
static_assert(fits(90, kMaxElementsPerCta / 2, 1, kMaxWidth) && fits(90, kMaxWidth / 4, 1, kStreamMaxK));
static_assert(fits(90, kMaxWidth / 8, 4, kStreamMaxK) && fits(90, kMaxWidth, 16, kStreamMaxK));
static_assert(fits(90, kMaxWidth / 8, 16, kStreamMaxK));  // in registers
static_assert(fits(120, kMaxElementsPerSmallCta, 1, kStreamMaxK) && fits(120, kMaxWidth, 8, kMaxWidth));

// What kernels need not find out for every row.
template <typename T>
Shape describe(const TopkParams& p, const Plan& plan) {
  const Shape shape = make_shape(plan);
  uint32_t flags = shape.flags;
  const auto set = [&](Shape::Flag flag, bool condition) {
    if (condition) flags |= flag;
    return condition;
  };
  const bool based = reinterpret_cast<uintptr_t>(p.logits) % sizeof(uint4) == 0;
  const bool strides = p.rows == 1 || p.logits_stride % kPerVec<T> == 0;
  const bool aligned = set(Shape::kAligned, based && strides && p.width >= kLook);
  set(Shape::kWhole, aligned && p.width % kPerVec<T> == 0);
  set(Shape::kSeveral, p.next_n > 1);
  const bool slotted = set(Shape::kSlotted, p.row_slot != nullptr);
  set(Shape::kLeaving, p.prior != nullptr || p.guess_state != nullptr);
  const bool fed = set(Shape::kFed, shape.has(Shape::kUseHint) && aligned && p.guess_state != nullptr);
  set(Shape::kPrompt, fed && !slotted && p.rows <= p.num_slots * p.next_n);
  set(Shape::kAudited, p.stats != nullptr);
  const auto in_quads = [](const int32_t* results, int64_t stride) {
    return reinterpret_cast<uintptr_t>(results) % sizeof(int4) == 0 && stride % 4 == 0;
  };
  set(Shape::kQuads, p.page_table == nullptr && p.k % 4 == 0 && in_quads(p.indices, p.indices_stride) &&
                         in_quads(p.prior, p.prior_stride));
  return Shape(shape.log2_ctas(), shape.list_capacity(), flags);
}

}  // namespace gvr_topk::cluster
