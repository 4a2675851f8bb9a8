// Defines the facts that hold for all rows of a launch, and the kernel specializations for common ones.
#pragma once

#include <cstdint>

#include "core/config.cuh"
#include "core/key.cuh"
#include "core/launch.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "ptx/warp.cuh"

namespace gvr_topk {

// The facts that a specialization of a kernel takes as constants. Run time is a matter of single instructions
// here, and many of them would test facts that hardly ever differ: calls that kCommonOneRow serves take 7 to
// 24 % longer by kCommon, where one CTA or the largest cluster holds the row (measured on an H100).
enum class Specialization {
  kGeneric,        // nothing
  kCommon,         // aligned rows in whole vectors, a hint allowed, state read and written
  kCommonOneRow,   // as kCommon, with one row per request, in the slot of the request's own number
  kCommonSlotted,  // as kCommon, with one row per request, in a slot that `row_slot` names, as engines pass
                   // it
  kNoState,        // aligned rows in whole vectors, one per request, and no state at all
  kAnyRow,         // rows of any width that start anywhere, one per request, with a state or without, and
                   // without statistics, counts and other options
};

// Whether rows are known to be aligned, in whole vectors.
GVR_TOPK_HOST_DEVICE constexpr bool has_whole_rows(Specialization which) {
  return which != Specialization::kGeneric && which != Specialization::kAnyRow;
}

// The host determines these facts once per launch. They are the first parameter of a kernel, and the kernel
// reads them before all else.
struct alignas(8) LaunchTraits {
  enum Flag : uint32_t {
    kUseHint = 1 << 0,        // the hint and the state may be used; without it a sample of the row is used
    kAligned = 1 << 1,        // no row has a lead, and all have room for kProbeElements
    kWholeVectors = 1 << 2,   // rows are aligned, and their buffers are whole 16-byte vectors
    kReadsState = 1 << 3,     // the state of the last step may be used
    kSlotIsRequest = 1 << 4,  // the state is read, and lies in the slot of the request's own number
    kDraftRows = 1 << 5,      // requests have several rows
    kRowSlots = 1 << 6,       // `row_slot` names the slots
    kStats = 1 << 7,          // statistics are written
    kWritesState = 1 << 8,    // state or positions are left for the next step
    kVectorStores = 1 << 9,   // results are not translated, and may be written 16 bytes at a time
    kRowLengths = 1 << 10,    // requests have several rows, and lengths are given by row
    kCounts = 1 << 11,        // the number of items of each row is written
    kStateByRow = 1 << 12,    // each row's next state goes to `next_state`, and slots stay as they are
    kRadixOnly = 1 << 13,     // no interval is guessed: radix rounds decide
    kCompressed = 1 << 14,    // several keys share a score
    kSharedSlots = 1 << 15,   // positions are kept, and several rows may name the same slot
    kDropMasked = 1 << 16,    // scores of -inf are not selected
    kClaimedSlots = 1 << 17,  // as kSharedSlots, and a launch before this one has claimed the slots
    kRowStarts = 1 << 18,     // rows start at columns of their own; only in kernels of blocks
    kStateFlags = kReadsState | kWritesState | kStats,  // those of launches that use a state
    kWholeRowFlags = kAligned | kWholeVectors,
    kAnyRowFlags = kWholeRowFlags | kUseHint | kReadsState | kWritesState | kSlotIsRequest | kRowSlots,
    kCommonFlags = kWholeRowFlags | kUseHint | kReadsState | kWritesState,
    kVaryingFlags = kSlotIsRequest | kDraftRows | kRowSlots | kRowLengths | kCounts | kStateByRow |
        kCompressed,
  };

  uint32_t sizes;  // log2_ctas in the lowest 8 bits, list_capacity from bit 16 on
  uint32_t flags;

  GVR_TOPK_HOST_DEVICE constexpr LaunchTraits(int log2_ctas, int list_capacity, uint32_t flags_)
      : sizes(log2_ctas | list_capacity << 16), flags(flags_) {}

  GVR_TOPK_HOST_DEVICE constexpr int log2_ctas() const { return sizes & 0xff; }
  GVR_TOPK_HOST_DEVICE constexpr int list_capacity() const { return sizes >> 16; }  // in keys
  // True if the flag is set or, of a combination, any of its flags.
  GVR_TOPK_HOST_DEVICE constexpr bool has(Flag flag) const { return (flags & flag) != 0; }

  // The traits of kCommonOneRow if a cluster of the largest size holds the row in registers.
  GVR_TOPK_HOST_DEVICE static constexpr LaunchTraits common_one_row() {
    return LaunchTraits(log2_of(kMaxClusterSize), kLongList, kCommonFlags | kSlotIsRequest);
  }

  GVR_TOPK_HOST_DEVICE constexpr bool has_common_sizes() const { return sizes == common_one_row().sizes; }

  GVR_TOPK_HOST_DEVICE constexpr Specialization specialization() const {
    const uint32_t tested = flags & ~uint32_t{kVectorStores};  // This flag concerns one kernel only.
    if (tested == common_one_row().flags) return Specialization::kCommonOneRow;
    if (tested == (kCommonFlags | kRowSlots)) return Specialization::kCommonSlotted;
    if ((tested & ~uint32_t{kUseHint}) == kWholeRowFlags) return Specialization::kNoState;
    if ((tested & ~uint32_t{kVaryingFlags}) == kCommonFlags) return Specialization::kCommon;
    return (tested & ~uint32_t{kAnyRowFlags}) == 0 ? Specialization::kAnyRow : Specialization::kGeneric;
  }

  // The launch flags, with those that the specialization fixes replaced by constants.
  template <Specialization kSpecialization>
  GVR_DEVICE uint32_t specialized_flags() const {
    if (kSpecialization == Specialization::kCommon) return (flags & kVaryingFlags) | kCommonFlags;
    if (kSpecialization == Specialization::kCommonOneRow) return common_one_row().flags;
    if (kSpecialization == Specialization::kCommonSlotted) return kCommonFlags | kRowSlots;
    if (kSpecialization == Specialization::kNoState) return (flags & kUseHint) | kWholeRowFlags;
    if (kSpecialization == Specialization::kAnyRow) return flags & kAnyRowFlags;
    return flags;
  }

  // The traits for an out-of-line function. With `kOptions` these are the traits of kGeneric, unchanged.
  // Without it, flags that no specialization but kGeneric can have are zeros that the compiler knows. With
  // `kWholeRows` the flags of aligned rows in whole vectors, which kAnyRow may lack, are ones that it knows.
  template <bool kOptions, bool kWholeRows>
  GVR_DEVICE LaunchTraits out_of_line() const {
    LaunchTraits traits = *this;
    if (!kOptions) traits.flags &= kVaryingFlags | kAnyRowFlags | kVectorStores;
    if (kWholeRows) traits.flags |= kWholeRowFlags;
    return traits;
  }

  // The traits for a kernel of one CTA per row. Every specialization of such a kernel but kGeneric writes
  // whole vectors.
  template <Specialization kSpecialization>
  GVR_DEVICE LaunchTraits for_one_cta() const {
    const uint32_t vector_stores = kSpecialization == Specialization::kGeneric ? 0 : kVectorStores;
    return LaunchTraits(0, 0, specialized_flags<kSpecialization>() | vector_stores);
  }

  // Returns a copy that stays in registers, in which the flags that the specialization fixes are constants.
  template <Specialization kSpecialization, bool kCommonSizes>
  GVR_DEVICE LaunchTraits in_registers() const {
    LaunchTraits traits = *this;
    ptx::keep(traits.sizes);
    ptx::keep(traits.flags);
    if (kCommonSizes) traits.sizes = common_one_row().sizes;
    traits.flags = traits.specialized_flags<kSpecialization>();
    return traits;
  }
};
static_assert(sizeof(LaunchTraits) == 8);
static_assert(LaunchTraits::common_one_row().has_common_sizes());
static_assert(LaunchTraits::common_one_row().specialization() == Specialization::kCommonOneRow);

// The traits that the plan alone decides, without those that depend on the call's parameters and buffers.
inline constexpr LaunchTraits make_traits(const Plan& plan) {
  uint32_t flags = 0;
  if (plan.path == Path::kAuto || plan.path == Path::kPaperGvr) flags |= LaunchTraits::kUseHint;
  if (plan.path == Path::kRadixRounds) flags |= LaunchTraits::kRadixOnly;
  return LaunchTraits(log2_of(plan.ctas_per_row), plan.list_capacity, flags);
}

template <typename T>
LaunchTraits describe_launch(const TopkParams& p, const Plan& plan) {
  const LaunchTraits traits = make_traits(plan);
  uint32_t flags = traits.flags;
  const auto set = [&](LaunchTraits::Flag flag, bool condition) {
    if (condition) flags |= flag;
    return condition;
  };
  // Rows that have a lead are read in whole lines. Where rows stream, that is worth more than a constant.
  const int64_t alignment = plan.family == Family::kStreaming ? kLineBytes : sizeof(uint4);
  const bool starts = are_aligned(p.logits, p.rows, p.logits_stride * int64_t{sizeof(T)}, alignment);
  const bool aligned = set(LaunchTraits::kAligned, starts && p.width >= kProbeElements);
  set(LaunchTraits::kWholeVectors, aligned && p.width % kPerVec<T> == 0);
  set(LaunchTraits::kDraftRows, p.next_n > 1);
  const bool slotted = set(LaunchTraits::kRowSlots, p.row_slot != nullptr);
  set(LaunchTraits::kRowLengths, p.row_lengths);
  set(LaunchTraits::kCompressed, p.compress_ratio > 1);
  set(LaunchTraits::kCounts, p.counts != nullptr);
  set(LaunchTraits::kStateByRow, p.next_state != nullptr);
  set(LaunchTraits::kWritesState, p.state != nullptr || p.next_state != nullptr);
  const bool reads_state =
      set(LaunchTraits::kReadsState, traits.has(LaunchTraits::kUseHint) && p.state != nullptr);
  set(LaunchTraits::kSlotIsRequest, reads_state && !slotted && p.rows <= int64_t{p.num_slots} * p.next_n);
  if (!set(LaunchTraits::kClaimedSlots, claims_slots(p))) {
    set(LaunchTraits::kSharedSlots, may_share_slots(p));
  }
  set(LaunchTraits::kDropMasked, p.drop_masked);
  set(LaunchTraits::kStats, p.stats != nullptr);
  const auto in_vectors = [](const int32_t* results, int64_t stride) {
    return reinterpret_cast<uintptr_t>(results) % sizeof(int4) == 0 && stride % 4 == 0;
  };
  set(LaunchTraits::kVectorStores, p.page_table == nullptr && p.k % 4 == 0 &&
                                       in_vectors(p.indices, p.indices_stride) &&
                                       in_vectors(p.state_indices, p.state_indices_stride));
  return LaunchTraits(traits.log2_ctas(), traits.list_capacity(), flags);
}

}  // namespace gvr_topk
