// The functions of sampling_arithmetic.h over arrays, for tests that compare them with NumPy.
#include "gvr_topk/sampling_arithmetic.h"

namespace s = gvr_topk::sampling;

extern "C" {

void distance_of(int64_t n, const float* x, const float* max, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::distance(x[i], max[i]);
}

void mass_of(int64_t n, const float* distance, float temperature, uint64_t* out) {
  const float scale = s::mass_scale(temperature);
  for (int64_t i = 0; i < n; ++i) out[i] = s::mass(distance[i], scale);
}

void top_p_mass_of(int64_t n, const float* top_p, const uint64_t* total, uint64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::top_p_mass(top_p[i], total[i]);
}

void min_p_mass_of(int64_t n, const float* min_p, uint64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::min_p_mass(min_p[i]);
}

void log_of(int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::log_of(x[i]);
}

void log_mass_of(int64_t n, const uint64_t* mass, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::log_mass(mass[i]);
}

void log_probability_of(int64_t n, const float* distance, float temperature, float log_total, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::log_probability(distance[i], temperature, log_total);
}

void hash_of(int64_t n, const int64_t* seed, const int64_t* position, const uint32_t* token, uint32_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::hash32(s::hash_prefix(seed[i], position[i]), token[i]);
}

void gumbel_of(int64_t n, const uint32_t* hash, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::gumbel(hash[i]);
}

void gumbel_score_of(int64_t n, const float* x, float temperature, const uint32_t* hash, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::gumbel_score(x[i], temperature, hash[i]);
}

void uniform64_of(int64_t n, const int64_t* seed, const int64_t* position, uint64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::uniform64(s::hash_prefix(seed[i], position[i]));
}

void draw_target_of(int64_t n, const uint64_t* uniform, const uint64_t* total, uint64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::draw_target(uniform[i], total[i]);
}

void is_greedy_of(int64_t n, const float* temperature, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = s::is_greedy(temperature[i]);
}
}
