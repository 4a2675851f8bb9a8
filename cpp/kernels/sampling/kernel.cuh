// Samples one token of each row: temperature, min-p, top-k and top-p, and the draw.
//
// Grid: one cluster of up to 8 CTAs for each row, of 256 threads each. Each CTA holds its part of the row in
// shared memory, so the row is read once.
//
// Phases:
// - take: the row is copied, NaN and forbidden tokens become -inf, and the largest value is found. With its
//   own, the first CTA sends the parameters that it has read to all CTAs. A greedy row ends here;
// - cut: every filter keeps a prefix of the tokens in descending order of values. If few tokens surely hold
//   all of it, the first CTA sorts them and finishes the row alone (sampling/candidates.cuh). Otherwise all
//   CTAs find where it ends by sums over bins of keys (sampling/select.cuh), the first of which lie above a
//   guess: for top-k a value that enough threads have reached, for top-p a value behind which no mass is
//   expected;
// - draw: the kept masses are added up, and the token is found at which their sum exceeds a random share of
//   the whole; or the largest kept score with noise wins (sampling/draw.cuh);
// - report: the token, and what else is asked for.
//
// Every decision of a row follows from numbers that all its CTAs have got from one of them, so no value that
// changes meanwhile makes them disagree.
#pragma once

#include "ptx/barrier.cuh"
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
GVR_DEVICE T parameter_of(const RowParameter<T>& parameter, int at) {
  return parameter.each != nullptr ? parameter.each[at] : parameter.all;
}

GVR_DEVICE RowParameters read_parameters(const SampleParams& p, int row) {
  int slot = p.row_slot != nullptr ? p.row_slot[row] : row;
  ptx::keep(slot);  // what is checked is what is used
  RowParameters own{};
  own.skipped = p.row_slot != nullptr && (slot < 0 || slot >= p.num_slots);
  if (own.skipped) return own;
  own.seed = parameter_of(p.seed, slot);
  own.position = parameter_of(p.position, row);
  own.temperature = parameter_of(p.temperature, slot);
  own.top_p = parameter_of(p.top_p, slot);
  own.min_p = parameter_of(p.min_p, slot);
  own.top_k = parameter_of(p.top_k, slot);
  own.allow_row = p.allow == nullptr ? -1 : p.allow_row != nullptr ? p.allow_row[row] : row;
  ptx::keep(own.allow_row);
  if (own.allow_row >= p.allow_rows) own.allow_row = -1;
  return own;
}

GVR_DEVICE uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, d));
  return value;
}

// The largest of a number over this CTA. It takes one block barrier. Lanes may come to it apart.
GVR_DEVICE uint64_t block_max(const Team& team, uint64_t value) {
  ptx::reconverge(team.zero);
  value = warp_max(value);
  if (team.lane == 0) team.smem->warp_record[team.warp].word[3] = value;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) value = max(value, team.smem->warp_record[w].word[3]);
  return value;
}

// The largest of a number over all CTAs.
GVR_DEVICE uint64_t team_max(Team& team, uint64_t value) {
  Record mine{};
  mine.word[0] = block_max(team, value);
  const Record* const theirs = team.exchange(mine);
  for (int rank = 0; rank < team.ctas; ++rank) value = max(value, theirs[rank].word[0]);
  return value;
}

// What is known of a row when all of it has been read.
struct RowTop {
  uint64_t best;   // `ranked` largest value; its key is 0 if no value is finite or +inf
  uint32_t guess;  // a key that about k tokens reach, or 0
  bool nan;
};

// How many threads of each CTA are to reach the guess. Without top-k as many as one CTA takes well.
GVR_DEVICE int share_of(const RowParameters& own, int ctas) {
  constexpr int kUsual = 160;
  const int wanted = own.top_k > 0 && own.top_k <= ctas * kThreads ? own.top_k : kUsual;
  return min((wanted + ctas - 1) / ctas, kThreads);
}

// Finds the largest value of the row, and hands out what the first CTA has read as its parameters. If `share`
// is not 0, the guess is a key that so many threads, or groups of four, of each CTA reach.
GVR_DEVICE RowTop top_of(Team& team, uint64_t best, bool nan, int share) {
  SampleShared& smem = *team.smem;
  constexpr int kGroup = 4, kMostOfGroups = kThreads / kGroup / 3;
  const bool by_group = share <= kMostOfGroups;
  uint32_t own = key_of(best);
  if (by_group) {
    own = max(own, __shfl_xor_sync(0xffffffffu, own, 1));
    own = max(own, __shfl_xor_sync(0xffffffffu, own, 2));
  }
  if (!by_group || team.thread % kGroup == 0)
    smem.maxima[by_group ? team.thread / kGroup : team.thread] = own;
  ptx::reconverge(team.zero);
  best = warp_max(best);
  if (team.lane == 0) smem.warp_record[team.warp].word[3] = best;
  const bool any_nan = __syncthreads_or(nan);
  find_reached(team, by_group ? kThreads / kGroup : kThreads, own, share);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) best = max(best, smem.warp_record[w].word[3]);
  __syncthreads();
  Record mine{};
  mine.word[0] = best;
  mine.word[1] = static_cast<uint64_t>(any_nan) << 32 | (share > 0 ? smem.word : 0);
  // Every CTA expects the parameters, and the first one sends them.
  const auto send_parameters = [&](int rank, uint32_t completes) {
    if (team.rank > 0) return;
    const auto* const words = reinterpret_cast<const uint64_t*>(&smem.read);
    const uint32_t address = ptx::map_to_rank(ptx::shared_address(&smem.parameters), rank);
    static_assert(sizeof(RowParameters) % 16 == 0);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(RowParameters)) / 16; ++i) {
      ptx::store_async(address + 16 * i, words[2 * i], words[2 * i + 1], completes);
    }
  };
  const Record* const theirs = team.exchange(mine, sizeof(RowParameters), send_parameters);
  RowTop top{0, kMaxKey, false};
#pragma unroll
  for (int rank = 0; rank < kMaxSampleCtas; ++rank) {
    if (rank >= team.ctas) break;
    top.best = max(top.best, theirs[rank].word[0]);
    top.guess = min(top.guess, static_cast<uint32_t>(theirs[rank].word[1]));
    top.nan |= theirs[rank].word[1] >> 32 != 0;
  }
  return top;
}

// The first token that is not NaN and allowed, of a row in which no value is above -inf; 0 if there is none.
// It reads the row again.
template <typename T>
__device__ __noinline__ int first_number(Team& team, const RowShare<T>& part, const T* row,
                                         const uint32_t* allow, int vocabulary) {
  uint64_t first = 0;
  part.for_each(team.lane, [&](float, int token) {
    if (token >= vocabulary || isnan(to_float(row[token]))) return;
    if (allow == nullptr || (allow[token / 32] >> (token % 32) & 1) != 0)
      first = max(first, ranked(1, token));
  });
  first = team_max(team, first);
  return first == 0 ? 0 : token_of(first);
}

// Fills the places behind the kept tokens.
GVR_DEVICE void clear_kept(const Team& team, const SampleParams& p, int row, int count) {
  for (int64_t i = count + team.rank * kThreads + team.thread; i < p.kept_columns;
       i += team.ctas * kThreads) {
    p.kept[row * p.kept_stride + i] = -1;
    if (p.kept_logprobs != nullptr) p.kept_logprobs[row * p.kept_logprobs_stride + i] = -INFINITY;
  }
}

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
  GVR_DEVICE Masses masses(float temperature) const { return Masses{max, mass_scale(temperature)}; }
  // The score of a token with noise, as a number by which the best is the largest.
  GVR_DEVICE uint64_t noisy(uint32_t hash, float x, int token) const {
    const float score = gumbel_score(isinf(x) ? 0.0f : x, own.temperature, hash32(hash, token));
    return ranked(order_key(score), token);
  }
  GVR_DEVICE void write_kept(uint64_t at, int token, float x, float temperature, float log_total) const {
    if (at >= static_cast<uint64_t>(p.kept_columns)) return;
    p.kept[number * p.kept_stride + at] = token;
    if (p.kept_logprobs == nullptr) return;
    p.kept_logprobs[number * p.kept_logprobs_stride + at] =
        log_probability(distance(x, max), temperature, log_total);
  }
};

// The prefixes that the filters of a row keep.
template <typename T>
struct Filters {
  Team& team;
  const RowShare<T>& part;
  const Row& row;
  uint32_t top, guess;
  uint64_t all;  // mass of all candidates, known where `counts_all`

  GVR_DEVICE const RowParameters& own() const { return row.own; }
  GVR_DEVICE FilterOrder order() const { return row.p.order; }
  GVR_DEVICE Masses masses() const {
    return row.masses(order() == FilterOrder::kTemperatureLast ? 1.0f : own().temperature);
  }

  // All candidates: the finite values, or those of +inf if there are any.
  GVR_DEVICE Prefix everything() const {
    return Prefix{top == kPosInfKey ? kPosInfKey : kLeastFiniteKey, kAllEqual};
  }

  // Whether top-p counts the mass of all candidates.
  GVR_DEVICE bool counts_all() const {
    if (!(own().top_p < 1.0f)) return false;
    return order() == FilterOrder::kJoint ||
           (!has_top_k() && (order() != FilterOrder::kVllm || !(own().min_p > 0.0f)));
  }

  // A key below which the filters are expected, or known, to keep nothing.
  GVR_DEVICE uint32_t least_expected() const {
    const bool guessed = has_top_k() || counts_all();
    return ::max(everything().key, guessed ? guess : by_min_p().key);
  }

  // Whether they keep nothing below the candidates of a survey from the key `least` on, and those are few
  // enough for one CTA.
  GVR_DEVICE bool hold(const Survey& survey, uint32_t least) const {
    if (survey.count > kMaxCandidates) return false;
    if (least == everything().key) return true;
    if (has_top_k()) return survey.count >= static_cast<uint64_t>(own().top_k);
    return !counts_all() || top_p_mass(own().top_p, survey.all) <= survey.listed;
  }

  GVR_DEVICE bool any() const { return has_top_k() || own().top_p < 1.0f || own().min_p > 0.0f; }

  GVR_DEVICE bool has_top_k() const { return own().top_k > 0 && own().top_k < row.p.vocabulary; }

  GVR_DEVICE Prefix by_min_p() const {
    const uint64_t least = min_p_mass(own().min_p);
    if (least == 0) return everything();
    const Masses measure = masses();
    return Prefix{least_key(top, team, [&](float x) { return measure(x) >= least; }), kAllEqual};
  }

  GVR_DEVICE Prefix by_top_k() const {
    if (!has_top_k()) return everything();
    const uint64_t k = own().top_k;
    uint64_t target;
    const uint32_t floor = everything().key;
    const Cut cut =
        find_cut(team, part, floor, guess, top, 0, Ones{}, [&](uint64_t) { return k; }, false, target);
    if (cut.key < floor) return everything();  // There are fewer candidates.
    const uint64_t equal = k - cut.above;
    return Prefix{cut.key, equal == cut.at ? kAllEqual : equal};
  }

  // Top-p of the tokens that `of` keeps.
  GVR_DEVICE Prefix by_top_p(const Prefix& of) const {
    if (!(own().top_p < 1.0f)) return of;
    const Masses measure = masses();
    const float least = key_to_float(of.key);
    const bool some = of.equal != kAllEqual;
    const uint64_t extra = some ? of.equal * measure(least) : 0;
    const auto target_of = [&](uint64_t total) {
      return top_p_mass(own().top_p, counts_all() ? all : total);
    };
    uint64_t target;
    Cut cut{of.key, 0, 0};
    if (some && of.key == top) {
      target = target_of(extra);
    } else {
      // Behind this distance all tokens together have less than the mass that top-p leaves out.
      const float reach =
          (log2f(static_cast<float>(row.p.vocabulary)) - log2f(1.0f - own().top_p)) / measure.scale;
      const uint32_t expected = order_key(row.max - reach);
      cut = find_cut(team, part, of.key + some, expected, top, extra, measure, target_of, !counts_all(),
                     target);
    }
    if (cut.key < of.key) cut.key = of.key;
    const uint64_t weight = measure(key_to_float(cut.key));
    if (target == kEverything || weight == 0) return of;
    const uint64_t equal = (target - cut.above + weight - 1) / weight;
    return Prefix{cut.key, equal * weight == cut.at ? kAllEqual : equal};
  }

  // What all filters keep. Top-p keeps a part of what it is given, so what it is given may cut again.
  GVR_DEVICE Prefix kept() const {
    const Prefix best = by_top_k(), near = by_min_p();
    const Prefix given = order() == FilterOrder::kJoint  ? everything()
                         : order() == FilterOrder::kVllm ? shorter(best, near)
                                                         : best;
    return shorter(shorter(by_top_p(given), best), near);
  }
};

// The set that a prefix keeps.
template <typename T>
GVR_DEVICE KeptSet set_of(Team& team, const RowShare<T>& part, const Prefix& prefix) {
  const float least = key_to_float(prefix.key);
  if (prefix.equal == kAllEqual) return KeptSet{least, 0xffffffffu};
  return set_through(team, part, least, [&](uint64_t all) { return min(prefix.equal, all) - 1; });
}

GVR_DEVICE void write_token(const SampleParams& p, int row, int token) {
  if (p.wide_out) {
    static_cast<int64_t*>(p.out)[row] = token;
  } else {
    static_cast<int32_t*>(p.out)[row] = token;
  }
}

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
      write_token(p, row.number, found.token);
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

// Counts the values at or above that of the token.
template <typename T>
GVR_DEVICE void write_rank(Team& team, const RowShare<T>& part, const Row& row, const Found& found) {
  if (found.here) send_word(team, __float_as_uint(found.value));
  team.sync();
  const float value = __uint_as_float(team.smem->word);
  const WarpSums above =
      count_elements(team, part, [&](float x, int token) { return x >= value && token < row.p.vocabulary; });
  if (row.writer) row.p.ranks[row.number] = static_cast<int64_t>(above.all.word[0]);
}

// Reports a row of which one token is kept.
template <typename T>
__device__ __noinline__ void take_one(Team team, RowShare<T> part, Row row, int token) {
  Outcome outcome{Found{row.writer, row.max, token}};
  if (row.wants_raw()) {
    Record own{};
    own.word[0] = add_masses(part, row.masses(1.0f), 0.0f, team.lane).all;
    outcome.raw = sum_threads<1>(team, own).all.word[0];
  }
  outcome.last = ranked(order_key(row.max), token);
  outcome.write(row);
  if (row.p.ranks != nullptr) write_rank(team, part, row, outcome.found);
  if (row.p.kept == nullptr) return;
  if (row.writer) row.write_kept(0, token, row.max, 1.0f, 0.0f);
  clear_kept(team, row.p, row.number, 1);
}

// Draws from the tokens of a set that all CTAs hold.
template <typename T>
GVR_DEVICE void draw_from_row(Team& team, const RowShare<T>& part, const Row& row, const KeptSet& set,
                              bool filtered) {
  const SampleParams& p = row.p;
  const Masses masses = row.masses(row.own.temperature);
  const auto kept_mass = [&](float x, int token) { return masses(set.has(x, token) ? x : -INFINITY); };
  Record own{};
  uint32_t count = 0;
  part.for_each(team.lane, [&](float x, int token) {
    own.word[0] += kept_mass(x, token);
    count += set.has(x, token);
  });
  own.word[1] = count;
  if (row.wants_raw()) own.word[2] = add_masses(part, row.masses(1.0f), 0.0f, team.lane).all;
  const WarpSums sums = sum_threads<3>(team, own);
  Outcome outcome{Found{}, static_cast<int>(sums.all.word[1]), row.own.temperature, sums.all.word[0],
                  sums.all.word[2]};
  const uint32_t hash = hash_prefix(row.own.seed, row.own.position);
  Found& found = outcome.found;
  if (p.gumbel) {
    uint64_t best = 0;
    part.for_each(team.lane, [&](float x, int token) {
      if (set.has(x, token)) best = max(best, row.noisy(hash, x, token));
    });
    best = team_max(team, best);
    const int in_cta = token_of(best) / kPerVec<T> - team.rank * kWarps * part.vectors;
    found.here = team.thread == 0 && in_cta >= 0 && in_cta < kWarps * part.vectors;
    found.token = token_of(best);
    if (found.here) {  // This thread's warp is the first, so its vectors are the first ones.
      found.value = element<T>(ptx::load_shared(part.address + 16 * in_cta), found.token % kPerVec<T>);
    }
    ptx::reconverge(team.zero);
  } else {
    const uint64_t target = draw_target(uniform64(hash), outcome.mass);
    found = find_token(team, part, sums, target, kept_mass);
  }
  outcome.last = ranked(order_key(set.least), p.vocabulary - 1);
  if (p.limits != nullptr && filtered) {
    uint64_t last = 0;
    part.for_each(team.lane, [&](float x, int token) {
      if (set.has(x, token)) last = max(last, ~ranked(order_key(x), token));
    });
    outcome.last = ~team_max(team, last);
  }
  outcome.write(row);
  ptx::reconverge(team.zero);
  if (p.ranks != nullptr) write_rank(team, part, row, found);
  if (p.kept == nullptr) return;
  const float log_total = log_mass(outcome.mass);
  visit_kept(team, part, set, sums.before.word[1], [&](uint64_t at, int token, float x) {
    row.write_kept(at, token, x, row.own.temperature, log_total);
  });
  clear_kept(team, p, row.number, outcome.count);
}

// Draws from the first `kept` of a row's candidates, in one CTA.
template <int kEach>
GVR_DEVICE void draw_from_candidates(Team& team, const Row& row, const Candidates<kEach>& list, int kept,
                                     uint64_t raw) {
  const SampleParams& p = row.p;
  const Masses measure = row.masses(row.own.temperature);
  const uint32_t hash = hash_prefix(row.own.seed, row.own.position);
  uint64_t mass[kEach], sum = 0, best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    mass[i] = list.rank[i] < kept ? measure(value_of(list.own[i])) : 0;
    sum += mass[i];
    if (p.gumbel && list.rank[i] < kept) {
      best = max(best, row.noisy(hash, value_of(list.own[i]), token_of(list.own[i])));
    }
  }
  Outcome outcome{Found{}, kept, row.own.temperature};
  outcome.raw = raw;
  uint64_t before = block_prefix(team, sum, outcome.mass);
  const uint64_t target = draw_target(uniform64(hash), outcome.mass);
  if (p.gumbel) best = block_max(team, best);
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
    if (outcome.found.here) team.smem->word = order_key(outcome.found.value);
    __syncthreads();
    const uint32_t key = team.smem->word;
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

// Writes what a row gets that is not sampled.
GVR_DEVICE void skip_row(const Team& team, const SampleParams& p, int row) {
  if (p.kept != nullptr) clear_kept(team, p, row, 0);
  if (team.rank != 0 || team.thread != 0) return;
  write_token(p, row, -1);
  if (p.logprobs != nullptr) p.logprobs[row] = 0.0f;
  if (p.ranks != nullptr) p.ranks[row] = 0;
  if (p.counts != nullptr) p.counts[row] = 0;
  if (p.flags != nullptr) p.flags[row] = 0;
  if (p.limits != nullptr) p.limits[row] = SampleLimits{};
}

// Samples a row whose kept tokens may be many, which all CTAs do together.
template <typename T>
__device__ __noinline__ void sample_from_row(Team team, RowShare<T> part, Row row, uint32_t top,
                                             uint32_t guess, uint64_t all) {
  const Filters<T> filters{team, part, row, top, guess, all};
  const KeptSet set = set_of(team, part, filters.any() ? filters.kept() : filters.everything());
  draw_from_row(team, part, row, set, filters.any());
  // CTAs have read sums in each other's memory, so none of them ends before the others.
  if (filters.any()) team.sync();
}

// The key of the last token that top-k keeps, found by all CTAs, and the team's next exchange.
struct LastOfTopK {
  uint32_t key, turn;
};
template <typename T>
__device__ __noinline__ LastOfTopK find_last_of_top_k(Team team, RowShare<T> part, Row row, uint32_t top,
                                                      uint32_t guess) {
  const uint32_t key = Filters<T>{team, part, row, top, guess, 0}.by_top_k().key;
  return LastOfTopK{key, team.turn};
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

__device__ __noinline__ void sample_many_candidates(Team team, Row row, uint32_t least, int by_k,
                                                    bool counts_all, Masses masses, Survey survey) {
  sample_candidates<kMaxCandidates / kThreads>(team, row, least, by_k, counts_all, masses, survey);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) sample_rows(const __grid_constant__ SampleParams p) {
  Team team{};
  team.zero = ptx::unknown_zero();
  team.smem = reinterpret_cast<SampleShared*>(storage + team.zero);
  team.ctas = static_cast<int>(gridDim.x) / p.rows;
  team.rank = static_cast<int>(blockIdx.x) % team.ctas;
  team.thread = threadIdx.x, team.warp = threadIdx.x >> 5, team.lane = threadIdx.x & 31;
  SampleShared& smem = *team.smem;
  const int row = static_cast<int>(blockIdx.x) / team.ctas;
  const bool writer = team.rank == 0 && team.thread == 0;
  ptx::grid_take_over();

  const T* const scores = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const RowShare<T> part(p, team);
  part.fetch(scores, reinterpret_cast<uintptr_t>(scores) % 16 == 0, p.vocabulary, team.lane);
  if (team.thread == 0) {
    smem.read = read_parameters(p, row);
    smem.word = kMaxKey;
    team.init_barriers();
  }
#pragma unroll
  for (auto& limbs : smem.limbs) limbs[team.thread] = 0;
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_arrive();
  __syncthreads();
  const RowParameters read = smem.read;
  const uint32_t* const allow = read.allow_row >= 0 ? p.allow + read.allow_row * p.allow_stride : nullptr;
  ptx::wait_copies<0>();
  const ThreadBest mine = take_row(part, allow, p.vocabulary, team.lane);
  uint64_t best = 0;
  if (mine.vector >= 0) best = ranked(order_key(mine.value), first_token(part, mine.vector, mine.value));
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_wait();  // All CTAs run, so that there is somewhere to send to.
  const RowTop top = top_of(team, best, mine.nan, share_of(read, team.ctas));

  const bool nothing = top.best == 0;
  const int flags = (top.nan ? kFlagNan : 0) | (nothing ? kFlagNoCandidate : 0);
  const Row about{p,     team.ctas == 1 ? smem.read : smem.parameters,
                  row,   nothing ? -INFINITY : value_of(top.best),
                  flags, writer};
  if (about.own.skipped) {
    skip_row(team, p, row);
    return;
  }
  if (is_greedy(about.own.temperature) || about.own.top_k == 1 || nothing) {
    // The team is passed by value, and the search for a number is an exchange of it.
    const int token = nothing ? first_number(team, part, scores, allow, p.vocabulary) : token_of(top.best);
    take_one(team, part, about, token);
    return;
  }
  const Filters<T> filters{team, part, about, key_of(top.best), top.guess, 0};
  if (!filters.any()) {
    sample_from_row(team, part, about, key_of(top.best), top.guess, 0);
    return;
  }
  uint32_t least = filters.least_expected();
  const auto survey_from = [&](uint32_t key) {
    return survey_row(team, part, key_to_float(key), filters.counts_all(), filters.masses(),
                      about.wants_raw(), about.masses(1.0f));
  };
  Survey survey = survey_from(least);
  if (!filters.hold(survey, least) && filters.has_top_k() && about.own.top_k <= kMaxCandidates) {
    const LastOfTopK last = find_last_of_top_k(team, part, about, key_of(top.best), top.guess);
    team.turn = last.turn;
    least = last.key;
    survey = survey_from(least);
  }
  if (!filters.hold(survey, least)) {
    sample_from_row(team, part, about, key_of(top.best), top.guess, survey.all);
    return;
  }
  send_candidates(team, part, key_to_float(least), survey);
  if (team.rank > 0) return;
  wait_for_candidates(team, survey);
  team.ctas = 1;
  const int by_k = filters.has_top_k() ? about.own.top_k : INT_MAX;
  if (survey.count <= kThreads) {
    sample_candidates<1>(team, about, least, by_k, filters.counts_all(), filters.masses(), survey);
  } else {
    sample_many_candidates(team, about, least, by_k, filters.counts_all(), filters.masses(), survey);
  }
}

}  // namespace gvr_topk::sampling
