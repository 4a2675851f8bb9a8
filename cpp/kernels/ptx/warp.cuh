// Arithmetic in registers and over the lanes of a warp.
//
// Approximate functions are less exact than the usual ones but faster. Sums over lanes are in assembly
// because a shuffle itself says whether its source lane exists: a step is one predicated addition.
// Comparisons are in assembly because the compiler would take an instruction more for each; their results are
// added up in floating point, because comparisons and integer additions share a pipe that takes two cycles
// for each, and additions of floats use another.
#pragma once

#include <cstdint>

#include "ptx/macros.cuh"

namespace gvr_topk::ptx {

// Hides the origin of a value, so that the compiler does not compute or load it again each time it is used.
GVR_DEVICE void keep(int& value) { asm("" : "+r"(value)); }
GVR_DEVICE void keep(uint32_t& value) { asm("" : "+r"(value)); }
GVR_DEVICE void keep(int64_t& value) { asm("" : "+l"(value)); }
GVR_DEVICE void keep(float& value) { asm("" : "+f"(value)); }
template <typename T>
GVR_DEVICE void keep(T*& pointer) {
  asm("" : "+l"(pointer));
}

// Returns the same shared-memory address through a register; the compiler would otherwise compute it again
// behind every barrier.
GVR_DEVICE unsigned char* opaque_shared(unsigned char* p) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  keep(address);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Returns zero: blocks have one dimension. The compiler knows neither that, nor that the value is the same in
// all lanes.
GVR_DEVICE uint32_t unknown_zero() {
  uint32_t zero;
  asm volatile("mov.u32 %0, %%tid.z;" : "=r"(zero));
  return zero;
}

// Brings the lanes of a warp together behind a branch that some of them have taken, ahead of whatever the
// warp computes in common. The compiler takes lanes for converged there and leaves a plain __syncwarp() out,
// but its BSYNC has been seen not to bring them together (docs/algorithm.md, "Lanes of a warp"). Behind a
// condition that it does not know, on `unknown_zero`, the barrier stays, and what follows is guarded as well,
// up to the next block barrier.
GVR_DEVICE void reconverge(uint32_t zero) {
  if (zero == 0) __syncwarp();
}

// Defines a function of a float that is one instruction.
#define GVR_FUNCTION(name, instruction)             \
  GVR_DEVICE float name(float x) {                  \
    float y;                                        \
    asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                       \
  }
GVR_FUNCTION(reciprocal_root, "rsqrt.approx.ftz.f32")  // 1 / sqrt(x); x must not be denormal
GVR_FUNCTION(reciprocal, "rcp.approx.ftz.f32")         // 1 / x; x must not be denormal
GVR_FUNCTION(log2, "lg2.approx.ftz.f32")
GVR_FUNCTION(power_of_2, "ex2.approx.ftz.f32")  // 2^x

// Returns x to the power of `exponent`; x must be positive.
GVR_DEVICE float power(float x, float exponent) { return power_of_2(log2(x) * exponent); }

// Returns a mask of `count` bits from bit `first` on; positions past bit 31 are dropped.
GVR_DEVICE uint32_t bit_range(int first, int count) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}

// Defines a sum of `value` over this lane and others: from a source lane that exists, each step adds.
#define GVR_SCAN(name, direction, last_lane)                                     \
  GVR_DEVICE uint32_t name(uint32_t value) {                                     \
    _Pragma("unroll") for (int d = 1; d < 32; d *= 2) {                          \
      asm volatile("{\n .reg .pred p;\n .reg .u32 other;\n shfl.sync." direction \
                   ".b32 other|p, %0, %1, " last_lane                            \
                   ", 0xffffffff;\n"                                             \
                   " @p add.u32 %0, %0, other;\n}"                               \
                   : "+r"(value)                                                 \
                   : "r"(d));                                                    \
    }                                                                            \
    return value;                                                                \
  }
GVR_SCAN(inclusive_scan, "up", "0")  // and the lower lanes
GVR_SCAN(suffix_sum, "down", "31")   // and the higher lanes

// 2^23: a sum of this number and small integers holds the integers in its lowest bits.
constexpr float kIntegerBase = 8388608.0f;

GVR_DEVICE uint32_t integer_of_sum(float sum) { return __float_as_uint(sum) - __float_as_uint(kIntegerBase); }

// Adds 1 to `count` if a > b.
GVR_DEVICE void count_if_greater(uint32_t& count, uint32_t a, uint32_t b) {
  asm(GVR_PREDICATED("gt.u32", "%1, %2", "add.u32 %0, %0, 1") : "+r"(count) : "r"(a), "r"(b));
}

GVR_DEVICE void count_if_greater(float& count, uint32_t a, uint32_t b) {
  asm(GVR_PREDICATED("gt.u32", "%1, %2", "add.f32 %0, %0, 0f3F800000") : "+f"(count) : "r"(a), "r"(b));
}

GVR_DEVICE void count_if_greater(float& count, uint64_t a, uint64_t b) {
  asm(GVR_PREDICATED("gt.u64", "%1, %2", "add.f32 %0, %0, 0f3F800000") : "+f"(count) : "l"(a), "l"(b));
}

// Defines how `bit`, a power of two, is added to `sum`. The comparison gives 1.0 or 0.0, because predicates
// are few and each predicated addition would wait for its comparison.
#define GVR_SET_BIT(name, comparison)                                                  \
  GVR_DEVICE void name(float& sum, float x, float bound, float bit) {                  \
    float is_set;                                                                      \
    asm("set." comparison ".f32.f32 %0, %1, %2;" : "=f"(is_set) : "f"(x), "f"(bound)); \
    sum = fmaf(is_set, bit, sum);                                                      \
  }
GVR_SET_BIT(set_bit_unless_less, "geu")     // unless x < bound; for NaN it is added
GVR_SET_BIT(set_bit_unless_at_most, "gtu")  // unless x <= bound; for NaN it is added
GVR_SET_BIT(set_bit_if_equal, "eq")

// Adds `bit` if x > bound, as unsigned integers.
GVR_DEVICE void set_bit_if_greater(float& sum, uint32_t x, uint32_t bound, float bit) {
  asm(GVR_PREDICATED("gt.u32", "%1, %2", "add.f32 %0, %0, %3") : "+f"(sum) : "r"(x), "r"(bound), "f"(bit));
}

GVR_DEVICE void set_bit_if_at_most(float& sum, uint32_t x, uint32_t bound, float bit) {
  asm(GVR_PREDICATED("le.u32", "%1, %2", "add.f32 %0, %0, %3") : "+f"(sum) : "r"(x), "r"(bound), "f"(bit));
}

// Returns the greater of two floats, or NaN if either is NaN.
GVR_DEVICE float max_or_nan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

// Return the greater number in each half of two bf16 or fp16 pairs, or NaN if either is NaN.
GVR_DEVICE uint32_t max_or_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}

GVR_DEVICE uint32_t max_or_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}

// Accumulates bits in two float sums, at most 16 bits in all. Two sums halve the chain of dependent
// additions.
struct BitAccumulator {
  float sums[2] = {kIntegerBase, kIntegerBase};

  GVR_DEVICE uint32_t bits() const {
    return __float_as_uint(sums[0]) + __float_as_uint(sums[1]) - 2 * __float_as_uint(kIntegerBase);
  }
};

}  // namespace gvr_topk::ptx
