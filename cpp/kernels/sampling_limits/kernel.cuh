// Applies what the sampler has left of each row (SampleLimits) to the row's logits: as a mask, in place, or
// as probabilities.
//
// Grid: CTAs of 256 threads, each for kVectors * 256 neighbouring vectors of one row. Vectors lie at
// multiples of 16 bytes whatever the row's address, so the first and the last one of a row may be partial.
// Each thread decides for its own elements, so limits that change meanwhile do nothing but change the
// results.
#pragma once

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/sampling_arithmetic.h"
#include "ptx/warp.cuh"

namespace gvr_topk::sampling_limits {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of each thread

// A 16-byte vector of a row of logits, which may begin before the row or end behind it.
template <typename T>
struct Piece {
  int begin;  // token of the first element
  int width;  // of the row

  GVR_DEVICE bool is_whole() const { return begin >= 0 && begin + kPerVec<T> <= width; }
  GVR_DEVICE bool has(int e) const { return begin + e >= 0 && begin + e < width; }

  GVR_DEVICE uint4 load(const T* row) const {
    if (is_whole()) return __ldcs(reinterpret_cast<const uint4*>(row + begin));
    uint4 vec = negative_infinity_vec<T>();
    T* const elements = reinterpret_cast<T*>(&vec);
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (has(e)) elements[e] = row[begin + e];
    }
    return vec;
  }

  // Bits of the elements that a mask with a bit for each token allows.
  GVR_DEVICE uint32_t allowed(const uint32_t* allow) const {
    if (allow == nullptr) return ~0u;
    const int first = max(begin, 0), last = min(begin + kPerVec<T>, width) - 1;
    return __funnelshift_r(allow[first / 32], allow[last / 32], first % 32) << (first - begin);
  }
};

// What the limits of a row say of an element.
struct Decision {
  SampleLimits limits;

  GVR_DEVICE bool keeps(float x, bool is_allowed, int token) const {
    if ((limits.flags & kFlagNoCandidate) != 0) return token == limits.token;
    const uint32_t key = is_allowed && !isnan(x) ? order_key(x) : kNegInfKey;
    return key > limits.key ||
           (key == limits.key && static_cast<uint32_t>(token) <= static_cast<uint32_t>(limits.token));
  }
};

// Stores the elements of a vector that are kept, and -inf for the others.
template <typename T>
GVR_DEVICE void store_masked(const Decision& decision, const Piece<T>& piece, uint4 vec, uint32_t allowed,
                             T* row) {
  const uint4 absent = negative_infinity_vec<T>();
  uint32_t dropped = 0;
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    const bool is_kept = decision.keeps(element<T>(vec, e), (allowed >> e & 1) != 0, piece.begin + e);
    dropped |= static_cast<uint32_t>(!is_kept) << e;
  }
  if (!piece.is_whole()) {
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (piece.has(e) && (dropped >> e & 1) != 0) {
        row[piece.begin + e] = *reinterpret_cast<const T*>(&absent.x);
      }
    }
    return;
  }
  if (dropped == 0) return;
  uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    if ((dropped >> e & 1) != 0) mask_element<T>(word, e);
  }
  __stcs(reinterpret_cast<uint4*>(row + piece.begin), make_uint4(word[0], word[1], word[2], word[3]));
}

// Stores the probabilities of a vector's elements.
template <typename T>
GVR_DEVICE void store_probabilities(const Decision& decision, const Piece<T>& piece, const uint4& vec,
                                    uint32_t allowed, float* row) {
  const SampleLimits& limits = decision.limits;
  const double total = __ull2double_rn(limits.mass);
  const float scale = sampling::mass_scale(limits.temperature);
  alignas(16) float shares[kPerVec<T>];
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    const bool is_allowed = (allowed >> e & 1) != 0;
    const float logit = element<T>(vec, e), x = is_allowed && !isnan(logit) ? logit : -INFINITY;
    shares[e] = 0.0f;
    if (limits.count == 0 || !decision.keeps(logit, is_allowed, piece.begin + e)) continue;
    const uint64_t mass = sampling::mass(sampling::distance(x, limits.max), scale);
    shares[e] = __double2float_rn(__ddiv_rn(__ull2double_rn(mass), total));
  }
  float* const at = row + piece.begin;
  if (piece.is_whole() && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
#pragma unroll
    for (int e = 0; e < kPerVec<T>; e += 4) {
      __stcs(reinterpret_cast<float4*>(at + e), *reinterpret_cast<const float4*>(&shares[e]));
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    if (piece.has(e)) at[e] = shares[e];
  }
}

template <typename T, bool kProbabilities>
__global__ void __launch_bounds__(kThreads) apply_limits(const __grid_constant__ LimitsParams p) {
  const int chunks = static_cast<int>(gridDim.x / static_cast<uint32_t>(p.rows));
  const int row = static_cast<int>(blockIdx.x) / chunks, chunk = static_cast<int>(blockIdx.x) % chunks;
  // The number of the mask may change meanwhile, and is read once so that it stays what has been checked.
  int mask = p.allow == nullptr ? -1 : p.allow_row != nullptr ? p.allow_row[row] : row;
  ptx::keep(mask);
  const bool has_mask = mask >= 0 && mask < p.allow_rows;
  const uint32_t* const allow = has_mask ? p.allow + mask * p.allow_stride : nullptr;
  const Decision decision{p.limits[row]};
  if (!kProbabilities && decision.limits.count == 0) return;

  T* const logits = static_cast<T*>(p.logits) + row * p.logits_stride;
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(logits) % 16 / sizeof(T));
  Piece<T> pieces[kVectors];
  uint4 vec[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int vector = (chunk * kVectors + j) * kThreads + static_cast<int>(threadIdx.x);
    pieces[j] = Piece<T>{vector * kPerVec<T> - before, p.vocabulary};
    if (pieces[j].begin < p.vocabulary) vec[j] = pieces[j].load(logits);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (pieces[j].begin >= p.vocabulary) break;
    const uint32_t allowed = pieces[j].allowed(allow);
    if constexpr (kProbabilities) {
      store_probabilities(decision, pieces[j], vec[j], allowed, p.out + row * p.out_stride);
    } else {
      store_masked(decision, pieces[j], vec[j], allowed, logits);
    }
  }
}

}  // namespace gvr_topk::sampling_limits
