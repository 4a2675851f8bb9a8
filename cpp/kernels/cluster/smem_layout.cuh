// Defines the shared memory of one CTA: its regions, who writes them, and how many bytes a plan takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cluster/messages.cuh"
#include "cluster/step_state.cuh"
#include "core/config.cuh"
#include "core/histogram.cuh"
#include "core/launch_traits.cuh"
#include "gvr_topk/policy.h"

namespace gvr_topk {

static_assert(Histogram::kGroups == kWarps && Histogram::kBins == 2 * kThreads);

// Shared memory of a CTA. There are three kinds of regions. Regions of different kinds do not overlay each
// other, except for `landing` and `hist`. Other CTAs write only `Inbox` and `KeyList` (cluster/messages.cuh):
//
// - Own regions are written by threads of this CTA. They are read behind a block barrier, or by the same warp
//   behind __syncwarp. The comments on the regions of a union name the phase that uses each region, and a
//   block barrier lies between two phases.
// - Landing zones take asynchronous copies of this CTA's own threads. A thread reads what it has copied
//   itself behind its own wait for the copies; in rings, what its warp has copied, behind the warp's barrier.
// - Inboxes take transaction stores of any CTA of the cluster. The stores are issued behind the cluster
//   barrier that says that all CTAs run. An inbox is read behind the wait for its transaction barrier. New
//   stores are issued only behind another cluster barrier (`restart_counts`), so that nobody still reads what
//   they overwrite.
//
// The memory behind the struct starts at a multiple of 128 bytes, because copies into a ring take longer if
// they cross a 128-byte boundary.
struct alignas(128) Shared {
  union {
    uint4 landing[kThreads];    // guess: landing zone of each thread's probe
    uint32_t hist[kRadixBins];  // radix rounds: this CTA's histogram
  };
  Histogram keys;  // histogram of the listed keys, or the cluster-wide sums of one radix round
  // `prepare_exchange` clears the memory from `keys.coarse` up to, but not including, `over_range`.
  Counts counts;
  uint32_t segment_above[kMaxClusterSize];  // listed keys above the k-th, of each CTA
  uint32_t segment_equal[kMaxClusterSize];  // listed keys equal to the k-th, of each CTA
  uint32_t hint_hits;                       // hinted values at or above the k-th
  uint32_t few_count;                       // keys added to `few_keys`
  uint32_t over_range;                      // elements above the range of a radix round
  RowFacts facts;
  MissedGuess missed;
  Inbox<Header, kMaxClusterSize> header;
  alignas(16) Inbox<uint32_t, kThreads> received;  // the cluster's sample; see `send_sample`
  uint64_t counts_barrier;                         // transaction barrier of `header` and of the key list
  uint64_t sample_barrier;                         // transaction barrier of `received`
  uint32_t warp_value[3][kWarps];
  // Packed counts (cluster/select.cuh) of selected elements: first of the keys that earlier CTAs have
  // listed, as each warp counts them, then of each warp's own elements.
  uint32_t selected[2][kWarps];
  union {
    struct {
      uint32_t sent[kThreads];                 // guess: this CTA's part of the cluster's sample
      alignas(16) uint4 sample[kThreads / 4];  // guess: a sample that this CTA takes alone
    };
    uint8_t buffer_chunks[kWarps][kMaxBufferChunks];  // collect: numbers of the chunks of each warp
  };
  alignas(16) uint32_t warp_top8[kGreatestOfSample];  // guess: the greatest 8 keys of each warp's sample
  alignas(16) uint32_t interval_ends[2][kWarps];      // guess: the upper and lower ends that warps name
  alignas(16) float sample_sums[2 * kWarps];    // guess: sums of each warp's sample, then sums of squares
  alignas(8) uint32_t few_keys[kRankDirectly];  // keys that are ranked by comparison
  uint32_t chunks_used;                         // chunks of the buffer that all warps together have taken
};

// The dynamic shared memory of every kernel but that of prefill, which has a layout of its own. The kernels
// share one symbol, so that the compiler takes its address for a constant in functions that several of them
// call out of line.
extern __shared__ __align__(128) unsigned char storage[];

constexpr size_t kLaneTileBytes = 4 * kValuesPerThread;  // for the widest dtype

// Bytes of `Shared`, the key list and a ring of `depth` tiles for every thread.
GVR_TOPK_HOST_DEVICE constexpr size_t fixed_bytes(int list_capacity, int depth) {
  return sizeof(Shared) + sizeof(uint32_t) * list_capacity + depth * kThreads * kLaneTileBytes;
}

// Bytes of everything that the fallback needs with rings of `depth` tiles. Behind the rings lies one byte for
// each key that the CTA can list.
inline constexpr size_t fallback_bytes(const LaunchTraits& traits, int depth) {
  return fixed_bytes(traits.list_capacity(), depth) + (traits.list_capacity() >> traits.log2_ctas());
}

// Bytes of everything that the streaming kernel needs: its candidate buffer follows the rings.
inline constexpr size_t streaming_bytes(const LaunchTraits& traits) {
  return fixed_bytes(traits.list_capacity(), kRingDepth) + kMaxBufferChunks * kChunkBytes;
}

// The most elements that one CTA selects from, in registers or in its candidate buffer.
constexpr int kMaxCounted = kThreads * kWideValuesPerThread;
static_assert(kMaxBufferChunks * kChunk <= kMaxCounted);

// Whether rows of `width` can be planned for `ctas` CTAs:
// - shared memory has room for everything;
// - rings start at a multiple of 128 bytes;
// - each CTA's segment of the list has room for a histogram, and is sent in whole vectors;
// - counts fit in 16 bits (cluster/select.cuh);
// - the candidate buffer has room for a sample that is taken again (cluster/predictor.cuh). Later it has room
//   for what may be selected and for a wide interval, even if the last chunk of every warp is all but empty.
//   Where shares are uneven, it may be full.
inline constexpr bool fits(int arch, int64_t width, int ctas, int64_t k) {
  const Plan plan = make_plan(PlanInput{1, width, k, Dtype::kFloat32, Path::kAuto, 132, arch, ctas});
  const LaunchTraits traits = make_traits(plan);
  const bool streams = plan.family == Family::kStreaming;
  return (streams ? streaming_bytes(traits) : fallback_bytes(traits, plan.ring_depth)) <=
             static_cast<size_t>(shared_bytes_of_block(arch)) &&
         fixed_bytes(traits.list_capacity(), 0) % alignof(Shared) == 0 &&
         (traits.list_capacity() >> traits.log2_ctas()) % kKeysPerVec == 0 &&
         traits.list_capacity() >> traits.log2_ctas() >= kRadixBins &&
         traits.list_capacity() + kMaxCounted < 1 << 16;
}
static_assert(kMaxBufferChunks * kChunkBytes >= kThreads * sizeof(uint4) &&
              kMaxBufferChunks >= (kStreamingMaxShare + kWideInterval) / kChunk + kWarps);
static_assert(fits(90, kMaxWidth, 1, kStreamingMaxShare) && fits(90, kMaxWidth, 1, kMaxWidth) &&
              fits(90, kMaxWidth / 4, 1, kStreamingMaxShare));
static_assert(fits(90, kMaxWidth / 8, 4, kStreamingMaxK) && fits(90, kMaxWidth, 16, kStreamingMaxK));
static_assert(fits(90, kMaxWidth / 8, 16, kStreamingMaxK));  // in registers
static_assert(fits(120, kMaxElementsPerSmallCta, 1, kStreamingMaxK) && fits(120, kMaxWidth, 8, kMaxWidth));

}  // namespace gvr_topk
