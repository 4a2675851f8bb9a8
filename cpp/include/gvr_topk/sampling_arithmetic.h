// The numbers of the sampler: masses, logarithms, noise. Host and device compute the same bits, and so does
// gvr_topk/sampling/arithmetic.py, which has the same formulas and coefficients; docs/sampling.md states
// them. Host code that includes this file is compiled with -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gvr_topk/policy.h"

namespace gvr_topk::sampling {

constexpr int kMassBits = 43;
constexpr uint64_t kMaxMass = uint64_t{1} << kMassBits;  // of the row's largest value
// Longest row: a sum of masses stays below 2^63.
constexpr int64_t kMaxVocabulary = int64_t{1} << 20;
constexpr uint64_t kEverything = ~uint64_t{0};  // a prefix mass that no row reaches: nothing is cut
constexpr float kGreedyTemperature = 1e-5f;
// Token fields of the hashes that make the 64 uniform bits of an inverse-CDF draw.
constexpr uint32_t kLowBitsToken = 0xffffffffu;
constexpr uint32_t kHighBitsToken = 0xfffffffeu;

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e400p-1f;
constexpr float kLn2Low = 0x1.7f7d1cp-20f;

// Each of these rounds once, to nearest, and the compiler fuses none of them with another.
GVR_TOPK_HOST_DEVICE inline float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

GVR_TOPK_HOST_DEVICE inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

GVR_TOPK_HOST_DEVICE inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

GVR_TOPK_HOST_DEVICE inline float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

GVR_TOPK_HOST_DEVICE inline uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

GVR_TOPK_HOST_DEVICE inline float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

GVR_TOPK_HOST_DEVICE inline int leading_zeros(uint64_t x) {  // of a number above 0
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(x));
#else
  return __builtin_clzll(x);
#endif
}

// Whether rows with this top-k may be streamed: one CTA can sort what is kept, and that is a small part.
GVR_TOPK_HOST_DEVICE constexpr bool streams_top_k(int32_t top_k, int64_t vocabulary) {
  return top_k <= kMaxStreamedK || (top_k <= kMaxRankedTokens && top_k <= vocabulary / 64);
}

// Whether a temperature selects the largest value; NaN does.
GVR_TOPK_HOST_DEVICE inline bool is_greedy(float temperature) { return !(temperature >= kGreedyTemperature); }

// How far a value is above the row's largest, which is never positive. Equal values are at 0, also infinite
// ones.
GVR_TOPK_HOST_DEVICE inline float distance(float x, float max) { return x == max ? 0.0f : add_rn(x, -max); }

// The factor that turns a distance into an exponent of 2.
GVR_TOPK_HOST_DEVICE inline float mass_scale(float temperature) { return div_rn(kLog2E, temperature); }

// 2^f for f in [0, 1]. It rises with f from 1 to 2 exactly, because all coefficients are positive: each step
// of Horner's scheme rounds a rising function.
GVR_TOPK_HOST_DEVICE inline float exp2_fraction(float f) {
  float power = 0x1.c54180p-13f;
  power = fma_rn(power, f, 0x1.46d648p-10f);
  power = fma_rn(power, f, 0x1.3d0b92p-7f);
  power = fma_rn(power, f, 0x1.c68912p-5f);
  power = fma_rn(power, f, 0x1.ebfd58p-3f);
  power = fma_rn(power, f, 0x1.62e42cp-1f);
  return fma_rn(power, f, 0x1.000000p+0f);
}

// 1.5 * 2^23, where neighbouring numbers are 1 apart.
constexpr float kAligned = 0x1.8p23f;

// kAligned + floor(x), for x in [-2^22, 0].
GVR_TOPK_HOST_DEVICE inline float aligned_floor(float x) {
#if defined(__CUDA_ARCH__)
  return __fadd_rd(x, kAligned);
#else
  return std::floor(x) + kAligned;
#endif
}

// Mass of a value at a distance: 2^43 * 2^(distance * scale), 0 below exponent -43 and for NaN.
GVR_TOPK_HOST_DEVICE inline uint64_t mass(float distance, float scale) {
  // Nothing branches, so that a GPU computes several masses at once. The shift leaves nothing of exponents
  // from -63 up to -43, and the maximum is -63 of a NaN.
  const float exponent = fmaxf(mul_rn(distance, scale), -63.0f);
  const float aligned = aligned_floor(exponent), whole = add_rn(aligned, -kAligned);
  // The difference rounds to 1 for exponents just below 0; 2^1 of this octave is 2^0 of the next one.
  const float power = exp2_fraction(add_rn(exponent, -whole));
  // The bits of a number in [1, 2] count its steps of 2^-23.
  const uint64_t mantissa = bits_of(power) - 0x3f000000u;
  return (mantissa << (kMassBits - 23)) >> (bits_of(kAligned) - bits_of(aligned));
}

// The least integer that is not below share * total, for a share in (0, 1) and a total in [1, 2^63].
GVR_TOPK_HOST_DEVICE inline uint64_t scaled_mass(float share, uint64_t total) {
  // share = mantissa * 2^-shift, exactly.
  const uint32_t bits = bits_of(share);
  const int biased = static_cast<int>(bits >> 23);
  const uint64_t mantissa = biased == 0 ? bits : (bits & 0x7fffffu) | 0x800000u;
  const int shift = 150 - (biased == 0 ? 1 : biased);
  if (shift >= 88) return 1;  // the product is positive and below 2^88
  const auto product = static_cast<unsigned __int128>(mantissa) * total;
  const auto round_up = (static_cast<unsigned __int128>(1) << shift) - 1;
  return static_cast<uint64_t>((product + round_up) >> shift);
}

// The prefix mass at which top-p cuts: a candidate stays while the mass of those before it is below.
GVR_TOPK_HOST_DEVICE inline uint64_t top_p_mass(float top_p, uint64_t total) {
  if (!(top_p < 1.0f)) return kEverything;
  return top_p <= 0.0f ? 1 : scaled_mass(top_p, total);
}

// The least mass that min-p keeps.
GVR_TOPK_HOST_DEVICE inline uint64_t min_p_mass(float min_p) {
  if (!(min_p > 0.0f)) return 0;
  return min_p >= 1.0f ? kMaxMass : scaled_mass(min_p, kMaxMass);
}

// Logarithm of (1 + fraction) * 2^exponent, for a fraction in [sqrt(1/2) - 1, sqrt(2) - 1].
GVR_TOPK_HOST_DEVICE inline float log_of_split(float fraction, float exponent) {
  float series = -0x1.38b3e6p-4f;
  series = fma_rn(series, fraction, 0x1.055b10p-3f);
  series = fma_rn(series, fraction, -0x1.0d8568p-3f);
  series = fma_rn(series, fraction, 0x1.22da2ep-3f);
  series = fma_rn(series, fraction, -0x1.547242p-3f);
  series = fma_rn(series, fraction, 0x1.99a008p-3f);
  series = fma_rn(series, fraction, -0x1.000228p-2f);
  series = fma_rn(series, fraction, 0x1.555554p-2f);
  float rest = mul_rn(mul_rn(series, fraction), mul_rn(fraction, fraction));
  rest = fma_rn(exponent, kLn2Low, rest);
  rest = fma_rn(mul_rn(-0.5f, fraction), fraction, rest);
  return fma_rn(exponent, kLn2High, add_rn(fraction, rest));
}

// Natural logarithm of a positive normal number.
GVR_TOPK_HOST_DEVICE inline float log_of(float x) {
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const int32_t bits = static_cast<int32_t>(bits_of(x)) - kSqrtHalf;
  const float mantissa = float_of(static_cast<uint32_t>((bits & 0x7fffff) + kSqrtHalf));
  return log_of_split(add_rn(mantissa, -1.0f), static_cast<float>(bits >> 23));
}

// Natural logarithm of mass / 2^43, for a mass above 0. It is precise for masses near 2^43 too.
GVR_TOPK_HOST_DEVICE inline float log_mass(uint64_t mass) {
  const int zeros = leading_zeros(mass);
  const uint64_t aligned = mass << zeros;
  const bool above = aligned > 0xb504f333f9de6484u;  // sqrt(2) * 2^63
  const uint64_t one = above ? 0 : uint64_t{1} << 63;
  const float difference = static_cast<float>(static_cast<int64_t>(aligned - one));
  const float fraction = mul_rn(difference, above ? 0x1p-64f : 0x1p-63f);
  return log_of_split(fraction, static_cast<float>(63 - zeros + (above ? 1 : 0) - kMassBits));
}

// Log-probability of a value at a distance, of a total mass with logarithm `log_total`. At an infinite
// temperature the quotient of an infinite distance would be NaN.
GVR_TOPK_HOST_DEVICE inline float log_probability(float distance, float temperature, float log_total) {
  const bool infinite = distance == -INFINITY;
  return infinite ? distance : add_rn(div_rn(distance, temperature), -log_total);
}

GVR_TOPK_HOST_DEVICE inline uint32_t rotated(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

GVR_TOPK_HOST_DEVICE inline uint32_t murmur3_mix(uint32_t h, uint32_t word) {
  h ^= rotated(word * 0xcc9e2d51u, 15) * 0x1b873593u;
  return rotated(h, 13) * 5 + 0xe6546b64u;
}

// What all tokens of a row have in common in their hashes.
GVR_TOPK_HOST_DEVICE inline uint32_t hash_prefix(int64_t seed, int64_t position) {
  uint32_t h = murmur3_mix(0, static_cast<uint32_t>(seed));
  h = murmur3_mix(h, static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  return murmur3_mix(h, static_cast<uint32_t>(position));
}

// Murmur3 of a seed, a position and a token.
GVR_TOPK_HOST_DEVICE inline uint32_t hash32(uint32_t prefix, uint32_t token) {
  uint32_t h = murmur3_mix(prefix, token) ^ 16;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

// Gumbel noise -log(-log(1 - u)) of the uniform number u = (hash + 1/2) / 2^32, which rounds to fp32. A small
// hash makes large noise, so the noise that decides a draw has all 32 bits. It never rises with the hash,
// which was checked for all 2^32.
GVR_TOPK_HOST_DEVICE inline float gumbel(uint32_t hash) {
  const float high = mul_rn(static_cast<float>(hash >> 16), 0x1p-16f);
  const float u = add_rn(high, mul_rn(add_rn(static_cast<float>(hash & 0xffffu), 0.5f), 0x1p-32f));
  float exponential;
  if (u < 0.25f) {
    float series = 1.0f / 8.0f;
    series = fma_rn(series, u, 1.0f / 7.0f);
    series = fma_rn(series, u, 1.0f / 6.0f);
    series = fma_rn(series, u, 1.0f / 5.0f);
    series = fma_rn(series, u, 1.0f / 4.0f);
    series = fma_rn(series, u, 1.0f / 3.0f);
    series = fma_rn(series, u, 1.0f / 2.0f);
    series = fma_rn(series, u, 1.0f);
    exponential = mul_rn(u, series);
  } else {
    const float rest = add_rn(1.0f, -u);
    exponential = -log_of(rest > 0x1p-24f ? rest : 0x1p-24f);
  }
  return -log_of(exponential);
}

// Score of a kept token of a Gumbel-max draw; the largest one wins, and among equal ones the smallest token.
// `x` is 0 for the tokens of a row whose largest value is +inf.
GVR_TOPK_HOST_DEVICE inline float gumbel_score(float x, float temperature, uint32_t hash) {
  return add_rn(div_rn(x, temperature), gumbel(hash));
}

// The uniform bits of an inverse-CDF draw.
GVR_TOPK_HOST_DEVICE inline uint64_t uniform64(uint32_t prefix) {
  return (static_cast<uint64_t>(hash32(prefix, kHighBitsToken)) << 32) | hash32(prefix, kLowBitsToken);
}

// The drawn mass, below `total`: the token is the first one, by ascending id among the kept ones, at which
// the sum of masses, its own included, exceeds this.
GVR_TOPK_HOST_DEVICE inline uint64_t draw_target(uint64_t uniform, uint64_t total) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(uniform) * total) >> 64);
}

}  // namespace gvr_topk::sampling
