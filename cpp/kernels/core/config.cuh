// Constants that several kernels share. This file holds no device code, so host code may include it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gvr_topk/policy.h"

namespace gvr_topk {

// The architecture that device code is being compiled for, in the form of `PlanInput::arch`. In host code it
// is kMinArch, for which no kernel is left out.
#ifdef __CUDA_ARCH__
constexpr int32_t kArch = __CUDA_ARCH__ / 10;
#else
constexpr int32_t kArch = kMinArch;
#endif

constexpr int kThreads = kClusterThreads;
constexpr int kLog2Threads = log2_of(kThreads);
constexpr int kWarps = kThreads / 32;

constexpr int kRankDirectly = 32;  // Up to this many keys are ranked by comparison within one warp.
constexpr int kKeysPerVec = 4;     // keys per 16-byte transaction store

// A radix round looks at 9 bits of the key. CTAs send each other its histogram like a list of keys.
constexpr int kLog2RadixBins = 9;
constexpr int kRadixBins = 1 << kLog2RadixBins;

// A probe is one read of the row by one thread for a sample: `kSampleVec` neighbouring elements.
constexpr int kSampleVec = 4;
// If all CTAs probe the same positions, groups of 8 lanes read neighbouring probes, because every requested
// line of memory takes time. On real traces the moments of such a sample are as stable as those of scattered
// probes.
constexpr int kProbeLanes = 8;
constexpr int kProbeElements = kProbeLanes * kSampleVec;
constexpr int kGreatestOfSample = 8 * kWarps;

// A candidate that the streaming and prefill kernels keep. It holds the value instead of the key, because
// most candidates are only compared.
struct alignas(8) BufferedValue {
  int32_t position;
  float value;
};
// A `ChunkedStore` is handed out to warps in chunks of this many candidates.
constexpr int kLog2Chunk = 5;
constexpr int kChunk = 1 << kLog2Chunk;
constexpr size_t kChunkBytes = kChunk * sizeof(BufferedValue);
constexpr int kMaxBufferChunks = 256;  // The number of a chunk is one byte.

}  // namespace gvr_topk
