// The part of a row that a CTA holds in shared memory. Each warp has neighbouring vectors of it, so that
// ascending warps hold ascending tokens.
#pragma once

#include "core/row_view.cuh"
#include "sampling/config.cuh"

namespace gvr_topk::sampling {

template <typename T>
struct RowShare {
  uint32_t address;  // of this warp's first vector in shared memory
  int first;         // that vector's number in the row
  int vectors;       // of each warp

  GVR_DEVICE RowShare(const SampleParams& p, const Team& team) : vectors(p.vectors_per_warp) {
    const int before = team.warp * vectors;
    address = ptx::shared_address(storage) + kSampleFixedBytes + 16 * before;
    first = team.rank * kWarps * vectors + before;
  }

  GVR_DEVICE int token(int vector, int e) const { return (first + vector) * kPerVec<T> + e; }

  // Starts to copy the row here. Elements past its end become -inf. A thread may read what it has copied
  // behind its own wait, and the others behind a block barrier.
  GVR_DEVICE void fetch(const T* row, bool aligned, int vocabulary, int lane) const {
#pragma unroll 4
    for (int j = lane; j < vectors; j += 32) {
      const int begin = token(j, 0), left = vocabulary - begin;
      if (aligned && left >= kPerVec<T>) {
        ptx::copy_async(address + 16 * j, row + begin);
      } else {
        const uint4 vec =
            left > 0 ? load_elements(row + begin, min(left, kPerVec<T>)) : negative_infinity_vec<T>();
        ptx::store_shared(address + 16 * j, vec);
      }
    }
    ptx::commit_copies();
  }

  // A vector of this warp, or one of -inf behind its last.
  GVR_DEVICE uint4 load(int vector) const {
    return vector < vectors ? ptx::load_shared(address + 16 * vector) : negative_infinity_vec<T>();
  }

  // Calls visit(vector, its elements) for this thread's vectors, in ascending order. In each step a warp
  // takes 32 neighbouring ones.
  template <typename Visit>
  GVR_DEVICE void for_each_vector(int lane, Visit visit) const {
#pragma unroll 1
    for (int j = lane; j < vectors; j += 32) visit(j, ptx::load_shared(address + 16 * j));
  }

  // Calls visit(value, token) for this thread's elements, in ascending order.
  template <typename Visit>
  GVR_DEVICE void for_each(int lane, Visit visit) const {
    for_each_vector(lane, [&](int j, const uint4& vec) {
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) visit(element<T>(vec, e), token(j, e));
    });
  }
};

// The largest of a thread's elements, and whether one of them is no number.
struct ThreadBest {
  float value = -INFINITY;
  int vector = -1;  // -1: every element is -inf, NaN or not allowed
  bool nan = false;
};

// Makes elements that cannot be chosen -inf: NaN, and tokens whose bit in `allowed` is clear. Returns whether
// an allowed one is NaN.
template <typename T>
GVR_DEVICE bool mask_vector(uint4& vec, uint32_t allowed) {
  uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
  bool nan = false;
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    const bool is_nan = isnan(element<T>(vec, e)), is_allowed = (allowed >> e & 1) != 0;
    nan |= is_nan && is_allowed;
    if (!is_nan && is_allowed) continue;
    mask_element<T>(word, e);
  }
  vec = make_uint4(word[0], word[1], word[2], word[3]);
  return nan;
}

// Masks this thread's elements. `allow` has a bit for each token, or is null. Returns whether an allowed one
// is NaN.
template <typename T>
__device__ __noinline__ bool mask_row(RowShare<T> part, const uint32_t* allow, int vocabulary, int lane) {
  bool nan = false;
#pragma unroll 1
  for (int j = lane; j < part.vectors; j += 32) {
    uint4 vec = part.load(j);
    const int begin = part.token(j, 0);
    const uint32_t allowed = allow != nullptr && begin < vocabulary ? allow[begin / 32] >> (begin % 32) : ~0u;
    nan |= mask_vector<T>(vec, allowed);
    ptx::store_shared(part.address + 16 * j, vec);
  }
  return nan;
}

// Finds the largest of this thread's elements. They may hold NaN if `nan` becomes true: then some are NaN, or
// infinite with both signs.
template <typename T>
GVR_DEVICE ThreadBest best_of(const RowShare<T>& part, int lane) {
  ThreadBest best;
#pragma unroll 4
  for (int j = lane; j < part.vectors; j += 32) {
    const uint4 vec = ptx::load_shared(part.address + 16 * j);
    float most = element<T>(vec, 0), sum = most;
#pragma unroll
    for (int e = 1; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      most = fmaxf(most, x);
      sum += x;
    }
    best.nan |= isnan(sum);
    if (most > best.value) best.value = most, best.vector = j;
  }
  return best;
}

// Masks this thread's elements, which have arrived, and returns the largest.
template <typename T>
GVR_DEVICE ThreadBest take_row(const RowShare<T>& part, const uint32_t* allow, int vocabulary, int lane) {
  ThreadBest best = best_of(part, lane);
  if (allow != nullptr || best.nan) {
    const bool nan = mask_row(part, allow, vocabulary, lane);
    best = best_of(part, lane);
    best.nan = nan;
  }
  return best;
}

// The first token of a vector with this value.
template <typename T>
GVR_DEVICE int first_token(const RowShare<T>& part, int vector, float value) {
  const uint4 vec = ptx::load_shared(part.address + 16 * vector);
  int token = part.token(vector, kPerVec<T> - 1);
#pragma unroll
  for (int e = kPerVec<T> - 2; e >= 0; --e) {
    if (element<T>(vec, e) == value) token = part.token(vector, e);
  }
  return token;
}

}  // namespace gvr_topk::sampling
