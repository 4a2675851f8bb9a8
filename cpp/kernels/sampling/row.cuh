// The row that a team samples: its parameters, what its filters keep, what is drawn, and the end of a row
// whose candidates have come to one CTA.
#pragma once

#include "core/ids.cuh"
#include "sampling/candidates.cuh"

namespace gvr_topk::sampling {

constexpr uint64_t kAllEqual = ~uint64_t{0};

// A prefix of the tokens in descending order of values: those with keys above `key`, and the first `equal` of
// those with this key.
struct Prefix {
  uint32_t key;
  uint64_t equal;
};

GVR_DEVICE Prefix shorter(const Prefix& a, const Prefix& b) {
  const bool first = a.key > b.key || (a.key == b.key && a.equal < b.equal);
  return first ? a : b;
}

template <typename T>
GVR_DEVICE T parameter_of(const RowParameter<T>& parameter, int64_t at) {
  return parameter.each != nullptr ? parameter.each[at] : parameter.all;
}

GVR_DEVICE RowParameters read_parameters(const SampleParams& p, int row) {
  int64_t slot = p.row_slot.data != nullptr ? read_id(p.row_slot, row) : row;
  ptx::keep(slot);  // what is checked is what is used
  RowParameters own{};
  own.skipped = p.row_slot.data != nullptr && (slot < 0 || slot >= p.num_slots);
  if (own.skipped) return own;
  own.seed = parameter_of(p.seed, slot);
  own.position = static_cast<uint32_t>(parameter_of(p.position, row));
  own.temperature = parameter_of(p.temperature, slot);
  own.top_p = parameter_of(p.top_p, slot);
  own.min_p = parameter_of(p.min_p, slot);
  own.top_k = parameter_of(p.top_k, slot);
  if (own.top_k < 0 || (own.top_k > 1 && own.top_k >= p.vocabulary)) own.top_k = 0;
  own.counts_all =
      own.top_p < 1.0f && (p.order == FilterOrder::kJoint ||
                           (own.top_k == 0 && (p.order != FilterOrder::kVllm || !(own.min_p > 0.0f))));
  own.allow_row = p.allow == nullptr ? -1 : p.allow_row != nullptr ? p.allow_row[row] : row;
  ptx::keep(own.allow_row);
  if (own.allow_row >= p.allow_rows) own.allow_row = -1;
  return own;
}

// Computes what follows from the parameters that have been read. Greedy rows do not need it.
GVR_DEVICE void complete(RowParameters& own, int vocabulary) {
  if (is_greedy(own.temperature)) return;
  own.hash = hash_prefix(own.seed, own.position);
  own.uniform = uniform64(own.hash);
  own.scale = mass_scale(own.temperature);
  own.octaves = log2f(static_cast<float>(vocabulary)) - log2f(1.0f - fmaxf(own.top_p, 0.0f));
}

// Starts to send what the first CTA has read as the row's parameters to one CTA. A thread of each CTA calls
// it.
GVR_DEVICE void send_parameters(const Team& team, int rank, uint32_t completes) {
  if (team.rank > 0) return;
  const auto* const words = reinterpret_cast<const uint64_t*>(&team.smem().read);
  const uint32_t address = ptx::map_to_rank(ptx::shared_address(&team.smem().parameters), rank);
  static_assert(sizeof(RowParameters) % 16 == 0);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(RowParameters)) / 16; ++i) {
    ptx::store_async(address + 16 * i, words[2 * i], words[2 * i + 1], completes);
  }
}

// The parameters that the first CTA has sent, behind their exchange.
GVR_DEVICE const RowParameters& parameters_of(const Team& team) {
  return team.ctas == 1 ? team.smem().read : team.smem().parameters;
}

// The largest of a number over the lanes, which are converged.
GVR_DEVICE uint64_t warp_max(uint64_t value) {
  const uint32_t high = static_cast<uint32_t>(value >> 32), most = __reduce_max_sync(0xffffffffu, high);
  const uint32_t low = __reduce_max_sync(0xffffffffu, high == most ? static_cast<uint32_t>(value) : 0);
  return static_cast<uint64_t>(most) << 32 | low;
}

// The largest of `count` numbers. The warp is converged, and stays so without a branch.
GVR_DEVICE uint64_t max_of(const uint64_t* numbers, int count, int lane) {
  return warp_max(numbers[min(lane, count - 1)]);
}

// The largest of a number over all CTAs. Lanes may come to it apart.
GVR_DEVICE uint64_t team_max(Team& team, uint64_t value) {
  ptx::reconverge(team.zero);
  const Records& ctas = team.exchange<1>(Record{{warp_max(value)}}, [&](const Records& warps) {
    return max_of(warps.word[0], kWarps, team.lane);
  });
  return max_of(ctas.word[0], team.ctas, team.lane);
}

// Fills the places behind the kept tokens.
GVR_DEVICE void clear_kept(const Team& team, const SampleParams& p, int row, int count) {
  for (int64_t i = count + team.rank * kThreads + team.thread; i < p.kept_columns;
       i += team.ctas * kThreads) {
    p.kept[row * p.kept_stride + i] = -1;
    if (p.kept_logprobs != nullptr) p.kept_logprobs[row * p.kept_logprobs_stride + i] = -INFINITY;
  }
}

// Tells by their hashes which tokens have less than a score with noise: noise is at most -log(u), for a hash
// (and a uniform number u) of any size. A quarter of a bit is left for the roundings of both sides.
struct NoiseBound {
  float scale, offset;  // of the logarithm of the greatest hash that may reach the score

  GVR_DEVICE NoiseBound(float score, float scale_) : scale(scale_), offset(32.25f - kLog2E * score) {
    // Of scores without bound, or with large roundings, nothing is known; nothing is greater than NaN.
    if (!(fabsf(offset) < 0x1p16f)) offset = NAN;
  }
  // A token at +inf is never excluded.
  GVR_DEVICE bool excludes(float x, uint32_t hash) const {
    return static_cast<float>(hash) > ptx::power_of_2(fmaf(x, scale, offset));
  }
};

// The row that a team samples.
struct Row {
  const SampleParams& p;
  RowParameters own;
  int number;
  float max;
  int flags;
  bool writer;  // whether this is the thread that writes what there is once for each row

  GVR_DEVICE bool wants_raw() const {
    return p.raw_logprobs && p.logprobs != nullptr && (flags & kFlagNoCandidate) == 0;
  }
  GVR_DEVICE Masses masses() const { return Masses{max, own.scale}; }
  GVR_DEVICE Masses raw_masses() const { return Masses{max, mass_scale(1.0f)}; }
  // The score of a token with noise, as a number by which the best is the largest.
  GVR_DEVICE uint64_t noisy(float x, int token) const {
    const float score = gumbel_score(isinf(x) ? 0.0f : x, own.temperature, hash32(own.hash, token));
    return ranked(order_key(score), token);
  }
  GVR_DEVICE NoiseBound noise_bound(float best) const { return NoiseBound(best, own.scale); }
  GVR_DEVICE void write_kept(uint64_t at, int token, float x, float temperature, float log_total) const {
    if (at >= static_cast<uint64_t>(p.kept_columns)) return;
    p.kept[number * p.kept_stride + at] = token;
    if (p.kept_logprobs == nullptr) return;
    p.kept_logprobs[number * p.kept_logprobs_stride + at] =
        log_probability(distance(x, max), temperature, log_total);
  }
};

// Searches for the best token with noise, in each thread as far as no other thread of the CTA has a better
// one. Hardly any score is computed, because most hashes are too large: mostly the least one of a vector
// would be so for its largest element.
struct NoisySearch {
  const Row& row;
  uint32_t* shared_best;
  uint64_t best = 0;
  uint32_t so_far = 0;
  NoiseBound bound;

  // Block barriers stand within.
  GVR_DEVICE NoisySearch(const Team& team, const Row& row_)
      : row(row_), shared_best(&team.smem().word), bound(row_.noise_bound(key_to_float(0))) {
    __syncthreads();  // All have read what was there.
    if (team.thread == 0) *shared_best = 0;
    __syncthreads();
  }

  // Takes the elements of a vector for which has(value, token); the first one's token is `first`. value_at(e)
  // loads one of them again.
  template <typename T, typename Has, typename ValueAt>
  GVR_DEVICE void visit(const uint4& vec, int first, Has has, ValueAt value_at) {
    const uint32_t now = ptx::load_shared_element<uint32_t>(ptx::shared_address(shared_best));
    if (now != so_far) so_far = now, bound = row.noise_bound(key_to_float(so_far));
    uint32_t hash[kPerVec<T>], least = ~0u;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      hash[e] = hash32(row.own.hash, first + e);
      least = min(least, hash[e]);
    }
    if (bound.excludes(largest<T>(vec), least)) return;
    uint32_t left = 0;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      left |= (has(x, first + e) & !bound.excludes(x, hash[e])) << e;
    }
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int e = __ffs(static_cast<int>(left)) - 1;
      best = max(best, row.noisy(value_at(e), first + e));
    }
    if (key_of(best) > so_far) atomicMax(shared_best, key_of(best));
  }
};

// The prefixes that the filters of a row keep. `Part` is what a CTA holds of it.
template <typename T, typename Part = RowShare<T>>
struct Filters {
  Team& team;
  const Part& part;
  const Row& row;
  uint32_t top, guess;

  GVR_DEVICE const RowParameters& own() const { return row.own; }
  GVR_DEVICE FilterOrder order() const { return row.p.order; }
  GVR_DEVICE Masses masses() const {
    return order() == FilterOrder::kTemperatureLast ? row.raw_masses() : row.masses();
  }

  // All candidates: the finite values, or those of +inf if there are any.
  GVR_DEVICE Prefix everything() const {
    return Prefix{top == kPosInfKey ? kPosInfKey : kLeastFiniteKey, kAllEqual};
  }

  // A key below which the filters are expected, or known, to keep nothing.
  GVR_DEVICE uint32_t least_expected() const {
    const bool guessed = has_top_k() || own().counts_all;
    return ::max(everything().key, guessed ? guess : by_min_p().key);
  }

  // Whether the tokens below the guess are expected to have more mass than top-p leaves out. Of 128,256
  // Gaussian logits with a deviation up to 4 they had a 2^9th or more of what all would have at the guess.
  GVR_DEVICE bool expects_many() const {
    const float distance = (row.max - key_to_float(guess)) * masses().scale;
    return own().counts_all && !has_top_k() && distance < own().octaves - 10.0f;
  }

  // Whether they keep nothing below the candidates of a survey from the key `least` on, and those are few
  // enough for one CTA.
  GVR_DEVICE bool hold(const Survey& survey, uint32_t least) const {
    if (survey.count > kMaxCandidates) return false;
    if (least == everything().key) return true;
    if (has_top_k()) return survey.count >= static_cast<uint64_t>(own().top_k);
    return !own().counts_all || top_p_mass(own().top_p, survey.all) <= survey.listed;
  }

  GVR_DEVICE bool any() const { return has_top_k() || own().top_p < 1.0f || own().min_p > 0.0f; }

  GVR_DEVICE bool has_top_k() const { return own().top_k > 0; }

  GVR_DEVICE Prefix by_min_p() const {
    const uint64_t least = min_p_mass(own().min_p);
    if (least == 0) return everything();
    const Masses measure = masses();
    return Prefix{least_key(top, team, [&](float x) { return measure(x) >= least; }), kAllEqual};
  }

  // Top-k, or with it all tokens behind that make `enough` at most, if they are found on the way.
  GVR_DEVICE Prefix by_top_k(Border& border, uint64_t enough = 0) const {
    if (!has_top_k()) return everything();
    const uint64_t k = own().top_k;
    uint64_t target;
    const uint32_t floor = everything().key;
    const Cut cut = find_cut<T>(
        team, part, floor, Span{guess, top}, top, 0, Ones{}, [&](uint64_t) { return k; }, target, border,
        enough);
    if (cut.key < floor) return everything();  // There are fewer candidates.
    const uint64_t equal = k - cut.above;
    return Prefix{cut.key, equal == cut.at || cut.above + cut.at <= enough ? kAllEqual : equal};
  }

  // The keys between which top-p is expected to cut.
  GVR_DEVICE Span expected(const Masses& measure) const {
    if (!own().counts_all || has_top_k())
      return Span{order_key(row.max - own().octaves / measure.scale), top};
    return expect_boundary(team, part, measure, own().octaves, key_to_float(least_expected()), own().top_p);
  }

  // Top-p of the tokens that `of` keeps.
  GVR_DEVICE Prefix by_top_p(const Prefix& of, Border& border) const {
    if (!(own().top_p < 1.0f)) return of;
    const Masses measure = masses();
    const float least = key_to_float(of.key);
    const bool some = of.equal != kAllEqual;
    const uint64_t extra = some ? of.equal * measure(least) : 0;
    const auto target_of = [&](uint64_t total) { return top_p_mass(own().top_p, total); };
    uint64_t target;
    Cut cut{of.key, 0, 0, false};
    if (some && of.key == top) {
      target = target_of(extra);
    } else {
      cut = find_cut<T>(team, part, of.key + some, expected(measure), top, extra, measure, target_of, target,
                        border);
      if (cut.ends_with_one) return Prefix{cut.key, kAllEqual};
    }
    if (cut.key < of.key) cut.key = of.key;
    const uint64_t weight = measure(key_to_float(cut.key));
    if (target == kEverything || weight == 0) return of;
    const uint64_t equal = (target - cut.above + weight - 1) / weight;
    return Prefix{cut.key, equal * weight == cut.at ? kAllEqual : equal};
  }

  // What all filters keep. Top-p keeps a part of what it is given, so what it is given may cut again.
  GVR_DEVICE Prefix kept(Border& border) const {
    const Prefix best = by_top_k(border), near = by_min_p();
    const Prefix given = order() == FilterOrder::kJoint  ? everything()
                         : order() == FilterOrder::kVllm ? shorter(best, near)
                                                         : best;
    return shorter(shorter(by_top_p(given, border), best), near);
  }
};

// What is drawn from a row.
struct Outcome {
  Found found;    // the token, in one thread of the row
  int count = 1;  // kept tokens
  float temperature = 1.0f;
  uint64_t mass = kMaxMass;  // of the kept tokens
  uint64_t raw = 0;          // of all tokens, at temperature 1
  uint64_t last = 0;         // the `ranked` last kept token

  GVR_DEVICE void write(const Row& row) const {
    const SampleParams& p = row.p;
    if (found.here) {
      write_id(p.out, row.number, found.token);
      if (p.logprobs != nullptr) {
        const float of = distance(found.value, row.max);
        p.logprobs[row.number] = row.wants_raw() ? log_probability(of, 1.0f, log_mass(raw))
                                                 : log_probability(of, temperature, log_mass(mass));
      }
    }
    if (!row.writer) return;
    if (p.counts != nullptr) p.counts[row.number] = count;
    const bool overflow = count > p.kept_columns;
    if (p.flags != nullptr) p.flags[row.number] = row.flags | (overflow ? kFlagKeptOverflow : 0);
    if (p.limits != nullptr) {
      p.limits[row.number] = SampleLimits{
          key_of(last), token_of(last), __fadd_rn(row.max, 0.0f), temperature, count, row.flags, mass};
    }
  }
};

// Reports a row of which one token is kept. `raw`: the mass of all tokens, if it is asked for.
// write_rank(token) writes its rank.
template <typename WriteRank>
GVR_DEVICE void report_one(const Team& team, const Row& row, int token, uint64_t raw, WriteRank write_rank) {
  Outcome outcome{Found{row.writer, row.max, token}};
  outcome.raw = raw;
  outcome.last = ranked(order_key(row.max), token);
  outcome.write(row);
  if (row.p.ranks != nullptr) write_rank(outcome.found);
  if (row.p.kept == nullptr) return;
  if (row.writer) row.write_kept(0, token, row.max, 1.0f, 0.0f);
  clear_kept(team, row.p, row.number, 1);
}

// Draws from the first `kept` of a row's candidates, in one CTA.
template <int kEach>
GVR_DEVICE void draw_from_candidates(Team& team, const Row& row, const Candidates<kEach>& list, int kept,
                                     uint64_t raw) {
  const SampleParams& p = row.p;
  const Masses measure = row.masses();
  uint64_t mass[kEach], sum = 0, best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    mass[i] = list.rank[i] < kept ? measure(value_of(list.own[i])) : 0;
    sum += mass[i];
    if (p.gumbel && list.rank[i] < kept) {
      best = max(best, row.noisy(value_of(list.own[i]), token_of(list.own[i])));
    }
  }
  Outcome outcome{Found{}, kept, row.own.temperature};
  outcome.raw = raw;
  uint64_t before = block_prefix(team, sum, outcome.mass);
  const uint64_t target = draw_target(row.own.uniform, outcome.mass);
  if (p.gumbel) best = team_max(team, best);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool here = list.rank[i] < kept && (p.gumbel ? token_of(list.own[i]) == token_of(best)
                                                       : before <= target && target - before < mass[i]);
    if (here) outcome.found = Found{true, value_of(list.own[i]), token_of(list.own[i])};
    before += mass[i];
  }
  outcome.last = list.by_rank[kept - 1];
  outcome.write(row);
  if (p.ranks != nullptr) {
    if (outcome.found.here) team.smem().word = order_key(outcome.found.value);
    __syncthreads();
    const uint32_t key = team.smem().word;
    const int above = block_count<kEach>([&](int i) { return key_of(list.sorted[i]) >= key; });
    if (row.writer) p.ranks[row.number] = above;
  }
  if (p.kept == nullptr) return;
  const float log_total = log_mass(outcome.mass);
  uint64_t count = 0, total;
#pragma unroll
  for (int i = 0; i < kEach; ++i) count += list.rank[i] < kept;
  ptx::reconverge(team.zero);
  uint64_t at = block_prefix(team, count, total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (list.rank[i] >= kept) continue;
    row.write_kept(at++, token_of(list.own[i]), value_of(list.own[i]), row.own.temperature, log_total);
  }
  clear_kept(team, p, row.number, kept);
}

// Samples a row from its candidates, in one CTA.
template <int kEach>
GVR_DEVICE void sample_candidates(Team& team, const Row& row, uint32_t least, int by_k, bool counts_all,
                                  const Masses& masses, const Survey& survey) {
  const Candidates<kEach> list(team, least, order_key(row.max), static_cast<int>(survey.count));
  const int kept =
      list.kept(masses, min(by_k, list.count), min_p_mass(row.own.min_p), row.p.order == FilterOrder::kVllm,
                counts_all, survey.all - survey.listed, row.own.top_p);
  draw_from_candidates(team, row, list, kept, survey.raw);
}

static __device__ __noinline__ void sample_many_candidates(Team team, Row row, uint32_t least, int by_k,
                                                           bool counts_all, Masses masses, Survey survey) {
  sample_candidates<kMaxCandidates / kThreads>(team, row, least, by_k, counts_all, masses, survey);
}

// How many candidates there are, and a key that they reach.
struct ShortList {
  uint32_t least;
  int count;
};

// Leaves of `count` candidates those that surely hold the first k, in their order: fewer take less time to
// sort.
static __device__ __noinline__ ShortList keep_first_k(Team team, int k, int count) {
  constexpr int kEach = kMaxCandidates / kThreads;
  uint64_t* const listed = team.smem().candidates;
  uint64_t own[kEach], most = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int place = team.thread * kEach + i, other = i * kThreads + team.thread;
    own[i] = place < count ? listed[place] : 0;
    most = max(most, other < count ? listed[other] : 0);
  }
  ptx::reconverge(team.zero);
  __syncthreads();  // All have been read: `maxima` lie where they were.
  const uint32_t least = reached_by(team, key_of(most), false, k);
  uint64_t kept = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; ++i) kept += own[i] != 0 && key_of(own[i]) >= least;
  uint64_t at = block_prefix(team, kept, all);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (own[i] != 0 && key_of(own[i]) >= least) listed[at++] = own[i];
  }
  ptx::reconverge(team.zero);
  return ShortList{least, static_cast<int>(all)};
}

// Samples a row from its candidates, which have arrived in this CTA and are known to hold what the filters
// keep.
template <typename T>
GVR_DEVICE void sample_alone(Team& team, const Row& row, const Filters<T>& filters, uint32_t least,
                             Survey survey) {
  team.ctas = 1;
  const int by_k = filters.has_top_k() ? row.own.top_k : INT_MAX;
  if (survey.count > kThreads && by_k < kThreads && !filters.own().counts_all) {
    const ShortList list = keep_first_k(team, by_k, static_cast<int>(survey.count));
    least = max(least, list.least), survey.count = list.count;
  }
  if (survey.count <= kThreads) {
    sample_candidates<1>(team, row, least, by_k, filters.own().counts_all, filters.masses(), survey);
  } else {
    sample_many_candidates(team, row, least, by_k, filters.own().counts_all, filters.masses(), survey);
  }
}

}  // namespace gvr_topk::sampling
