// Tests the key map: unsigned comparison of keys is the contract's comparison of scores, and shortened keys
// lose nothing.
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "core/key.cuh"

using namespace gvr_topk;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Keys rise strictly with the value, from -inf to NaN.
void test_order() {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> rising = {-kInfinity, -most, -1.0f,           -tiny, 0.0f,
                                     tiny,       1.0f,  1.0f + 0x1p-23f, most,  kInfinity};
  for (size_t i = 1; i < rising.size(); ++i) CHECK(order_key(rising[i - 1]) < order_key(rising[i]));
  CHECK(order_key(-0.0f) == order_key(0.0f));
  for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu}) {
    CHECK(order_key(__uint_as_float(nan)) == kMaxKey);
  }
  CHECK(kMaxKey > order_key(kInfinity));
}

// The named keys are those of the values they are named after.
void test_named_keys() {
  CHECK(order_key(0.0f) == kZeroKey);
  CHECK(order_key(-kInfinity) == kNegInfKey);
  CHECK(order_key(kInfinity) == kPosInfKey);
  CHECK(order_key(std::numeric_limits<float>::lowest()) == kLeastFiniteKey);
  CHECK(order_key(std::numeric_limits<float>::max()) == kMostFiniteKey);
  CHECK(kAbsentKey < kMinKey && kMinKey < kNegInfKey);
}

// A key converts back to its value, except for the sign of zero.
void test_round_trip() {
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 4093) {
    const float x = __uint_as_float(static_cast<uint32_t>(bits));
    if (std::isnan(x)) continue;
    CHECK(key_to_float(order_key(x)) == x);
    CHECK(order_key(Dtype::kFloat32, static_cast<uint32_t>(bits)) == order_key(x));
  }
}

// The upper bits of a key alone tell every score of a 16-bit type from the others. A key does not depend on
// whether the type is known as the code is compiled.
template <typename T>
void test_short_keys(Dtype dtype) {
  CHECK(invariant_bits(dtype) == kInvariantBits<T>);
  for (uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    T x;
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(&x, &half, sizeof half);
    const uint32_t key = order_key(to_float(x));
    CHECK(order_key(dtype, bits) == key);
    CHECK(whole_key<T>(key >> kInvariantBits<T>) == key);
  }
}

// `element` unpacks a 16-byte load in memory order.
template <typename T>
void test_elements(const std::vector<uint16_t>& stored) {
  uint4 vec;
  std::memcpy(&vec, stored.data(), sizeof vec);
  CHECK(kPerVec<T> == 8);
  for (int e = 0; e < kPerVec<T>; ++e) {
    T x;
    std::memcpy(&x, &stored[e], sizeof stored[e]);
    CHECK(element<T>(vec, e) == to_float(x));
  }
}

// The filler after a row's end is -inf in every type.
void test_absent() {
  for (int e = 0; e < 8; ++e) {
    CHECK(element<__nv_bfloat16>(negative_infinity_vec<__nv_bfloat16>(), e) == -kInfinity);
    CHECK(element<__half>(negative_infinity_vec<__half>(), e) == -kInfinity);
    CHECK(element<float>(negative_infinity_vec<float>(), e % 4) == -kInfinity);
  }
}

int main() {
  test_order();
  test_named_keys();
  test_round_trip();
  test_short_keys<__nv_bfloat16>(Dtype::kBfloat16);
  test_short_keys<__half>(Dtype::kFloat16);
  test_elements<__nv_bfloat16>({0x3f80, 0xbf80, 0x0001, 0x7f80, 0xff80, 0x0000, 0x4049, 0xc2f7});
  test_elements<__half>({0x3c00, 0xbc00, 0x0001, 0x7c00, 0xfc00, 0x0000, 0x4248, 0xd7b8});
  test_absent();
  return report("key");
}
