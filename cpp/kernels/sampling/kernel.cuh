// Samples one token of each row: temperature, min-p, top-k and top-p, and the draw.
//
// Grid: one cluster of up to 8 CTAs for each row, of 256 threads each. Each CTA holds its part of the row in
// shared memory, so the row is read once.
//
// Phases:
// - take: the row is copied, NaN and forbidden tokens become -inf, and the largest value is found. With its
//   own, the first CTA sends the parameters that it has read to all CTAs. A greedy row ends here;
// - cut: every filter keeps a prefix of the tokens in descending order of values. If few tokens surely hold
//   all of it, the first CTA sorts them and finishes the row alone (sampling/candidates.cuh); flat rows of
//   top-p are not asked. For a large top-k all CTAs first search for a value that few reach. Otherwise they
//   find where the prefix ends by sums over bins of keys (sampling/select.cuh), the first of which lie where
//   it is guessed: for top-k above a value that enough threads have reached, for top-p in an interval that
//   follows from how many tokens lie at which distance from the best one, or above a value behind which no
//   mass is expected. The few tokens of such an interval come to all CTAs, and each searches them itself;
// - draw: the kept masses are added up, and the token is found at which their sum exceeds a random share of
//   the whole; or the largest kept score with noise wins. Masses above the interval are known by then, and
//   few scores are computed, because the hash of most tokens is too large to win (sampling/draw.cuh);
// - report: the token, and what else is asked for.
//
// Every decision of a row follows from numbers that all its CTAs have got from one of them, so no value that
// changes meanwhile makes them disagree.
#pragma once

#include "ptx/barrier.cuh"
#include "sampling/row.cuh"

namespace gvr_topk::sampling {

// What is known of a row when all of it has been read.
struct RowTop {
  uint64_t best;   // `ranked` largest value; its key is 0 if no value is finite or +inf
  uint32_t guess;  // a key that about k tokens reach, or 0
  bool nan;
};

// How many threads of each CTA are to reach the guess, or 0 if no filter takes one. Without top-k as many as
// one CTA takes well.
GVR_DEVICE int share_of(const RowParameters& own, int ctas) {
  constexpr int kUsual = 128;
  if (is_greedy(own.temperature) || own.top_k == 1 || !(own.top_k > 0 || own.top_p < 1.0f)) return 0;
  const int wanted = own.top_k > 0 && own.top_k <= ctas * kThreads ? own.top_k : kUsual;
  return min((wanted + ctas - 1) / ctas, kThreads);
}

// What warps or CTAs have found of a row.
GVR_DEVICE RowTop top_of_records(const Records& records, int count, int lane) {
  const uint64_t other = records.word[1][min(lane, count - 1)];
  return RowTop{max_of(records.word[0], count, lane),
                __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(other)),
                __any_sync(0xffffffffu, other >> 32 != 0) != 0};
}

// Finds the largest value of the row, and hands out what the first CTA has read as its parameters. If `share`
// is not 0, the guess is a key that so many threads, or groups of four, of each CTA reach.
GVR_DEVICE RowTop top_of(Team& team, uint64_t best, bool nan, int share) {
  uint32_t reached = 0;
  ptx::reconverge(team.zero);
  if (share > 0) {
    const bool by_group = share <= kGroups / 3;
    const uint32_t own = put_maximum(team, key_of(best), by_group);
    ptx::reconverge(team.zero);
    __syncthreads();
    reached = find_reached(team, by_group, own, share);
  }
  const auto other_word = [](bool any_nan, uint32_t guess) {
    return static_cast<uint64_t>(any_nan) << 32 | guess;
  };
  ptx::reconverge(team.zero);
  const bool any_nan = __any_sync(0xffffffffu, nan) != 0;
  const Records& ctas = team.exchange<2>(
      Record{{warp_max(best), other_word(any_nan, reached)}},
      [&](const Records& warps) {
        const RowTop top = top_of_records(warps, kWarps, team.lane);
        return team.lane < Records::kMost ? top.best : other_word(top.nan, top.guess);
      },
      sizeof(RowParameters), [&](int rank, uint32_t completes) { send_parameters(team, rank, completes); });
  return top_of_records(ctas, team.ctas, team.lane);
}

// The first token that is not NaN and allowed, of a row in which no value is above -inf; 0 if there is none.
// It reads the row again.
template <typename T>
__device__ __noinline__ int first_number(Team& team, const RowShare<T>& part, const T* row,
                                         const uint32_t* allow, int vocabulary) {
  uint64_t first = 0;
  part.for_each(part.every_step(team.lane), team.lane, [&](float, int token) {
    if (token >= vocabulary || isnan(to_float(row[token]))) return;
    if (allow == nullptr || (allow[token / 32] >> (token % 32) & 1) != 0)
      first = max(first, ranked(1, token));
  });
  first = team_max(team, first);
  return first == 0 ? 0 : token_of(first);
}

// The set that a prefix keeps.
template <typename T>
GVR_DEVICE KeptSet set_of(Team& team, const RowShare<T>& part, const Prefix& prefix, const Border& border) {
  const float least = key_to_float(prefix.key);
  if (prefix.equal == kAllEqual) return KeptSet{least, 0xffffffffu};
  return set_through(team, part, least, border.steps_of(least),
                     [&](uint64_t all) { return min(prefix.equal, all) - 1; });
}

// Counts the values at or above that of the token.
template <typename T>
GVR_DEVICE void write_rank(Team& team, const RowShare<T>& part, const Row& row, const Found& found) {
  if (found.here) send_word(team, __float_as_uint(found.value));
  team.sync();
  const float value = __uint_as_float(team.smem().word);
  const WarpSums above = count_elements(team, part, part.every_step(team.lane), [&](float x, int token) {
    return x >= value && token < row.p.vocabulary;
  });
  if (row.writer) row.p.ranks[row.number] = static_cast<int64_t>(above.all.word[0]);
}

// Reports a row of which one token is kept.
template <typename T>
__device__ __noinline__ void take_one(Team team, RowShare<T> part, Row row, int token) {
  uint64_t raw = 0;
  if (row.wants_raw()) {
    raw = sum_threads(team, add_all_masses(part, row.raw_masses(), team.lane)).all.word[0];
  }
  report_one(team, row, token, raw, [&](const Found& found) { write_rank(team, part, row, found); });
}

// The best of this thread's kept tokens, with noise, as far as no other thread of the CTA has a better one.
// The tokens lie at `steps`.
template <bool kFiltered, typename T>
GVR_DEVICE uint64_t best_noisy(const Team& team, const RowShare<T>& part, const Row& row, const KeptSet& set,
                               uint64_t steps) {
  NoisySearch search(team, row);
  const auto visit = [&](int j, const uint4& vec) {
    search.visit<T>(
        vec, part.token(j, 0), [&](float x, int token) { return set.has(x, token); },
        [&](int e) { return part.value(j, e); });
  };
  if constexpr (kFiltered) {
    part.for_each_vector(steps, team.lane, visit);
  } else {
#pragma unroll 1
    for (int j = team.lane; j < part.vectors; j += 32) visit(j, part.load(j));
  }
  return search.best;
}

// Draws from the tokens of a set that all CTAs hold. `measured`: the border knows the masses of the draw, not
// those at another temperature.
template <bool kFiltered, typename T>
GVR_DEVICE void draw_from_row(Team& team, const RowShare<T>& part, const Row& row, const KeptSet& set,
                              const Border& border, bool measured) {
  const SampleParams& p = row.p;
  const Masses masses = row.masses();
  const auto kept_mass = [&](float x, int token) { return masses(set.has(x, token) ? x : -INFINITY); };
  const bool counts = p.counts != nullptr || p.limits != nullptr || p.kept_columns < INT64_MAX;
  WarpSums sums{};
  if (!p.gumbel || counts || p.logprobs != nullptr) {
    uint64_t mass, raw = 0;
    uint32_t count;
    if constexpr (!kFiltered) {
      // Tokens outside of the set have no mass. Those in it are counted if somebody asks.
      const MassSums mine = counts ? add_masses<Listing::kFew>(part, masses, set.least, team.lane)
                                   : add_masses<Listing::kNone>(part, masses, INFINITY, team.lane);
      mass = mine.all, count = mine.count;
    } else {
      const bool split = measured && set.least <= border.high;
      const float high = split ? border.high : INFINITY;
      mass = split ? border.above : 0, count = split ? border.count : 0;
      part.for_each(
          split ? border.inside : border.steps, team.lane,
          [&](float x, int token) { return x <= high && set.has(x, token); },
          [&](float x, int) { mass += masses(x), ++count; });
    }
    if (row.wants_raw()) raw = add_all_masses(part, row.raw_masses(), team.lane);
    ptx::reconverge(team.zero);
    const Record own{{warp_sum(mass), __reduce_add_sync(0xffffffffu, count), warp_sum(raw)}};
    sums = sum_warps<3>(team, own);
  }
  const uint64_t place = p.kept != nullptr ? sums.before(team, 1) : 0;
  Outcome outcome{Found{}, static_cast<int>(sums.all.word[1]), row.own.temperature, sums.all.word[0],
                  sums.all.word[2]};
  Found& found = outcome.found;
  if (p.gumbel) {
    const uint64_t best = team_max(team, best_noisy<kFiltered>(team, part, row, set, border.steps));
    const int in_cta = token_of(best) / kPerVec<T> - team.rank * kWarps * part.vectors;
    found.here = team.thread == 0 && in_cta >= 0 && in_cta < kWarps * part.vectors;
    found.token = token_of(best);
    if (found.here) {  // This thread's warp is the first, so its vectors are the first ones.
      found.value = element<T>(ptx::load_shared(part.address + 16 * in_cta), found.token % kPerVec<T>);
    }
    ptx::reconverge(team.zero);
  } else {
    found = find_token(team, part, sums, draw_target(row.own.uniform, outcome.mass), kept_mass);
  }
  outcome.last = ranked(order_key(set.least), p.vocabulary - 1);
  if (p.limits != nullptr && kFiltered) {
    uint64_t last = 0;
    part.for_each(border.steps, team.lane, [&](float x, int token) {
      if (set.has(x, token)) last = max(last, ~ranked(order_key(x), token));
    });
    outcome.last = ~team_max(team, last);
  }
  outcome.write(row);
  ptx::reconverge(team.zero);
  if (p.ranks != nullptr) write_rank(team, part, row, found);
  if (p.kept == nullptr) return;
  const float log_total = log_mass(outcome.mass);
  visit_kept(team, part, set, place, [&](uint64_t at, int token, float x) {
    row.write_kept(at, token, x, row.own.temperature, log_total);
  });
  clear_kept(team, p, row.number, outcome.count);
}

// Writes what a row gets that is not sampled.
GVR_DEVICE void skip_row(const Team& team, const SampleParams& p, int row) {
  if (p.kept != nullptr) clear_kept(team, p, row, 0);
  if (team.rank != 0 || team.thread != 0) return;
  write_id(p.out, row, -1);
  if (p.logprobs != nullptr) p.logprobs[row] = 0.0f;
  if (p.ranks != nullptr) p.ranks[row] = 0;
  if (p.counts != nullptr) p.counts[row] = 0;
  if (p.flags != nullptr) p.flags[row] = 0;
  if (p.limits != nullptr) p.limits[row] = SampleLimits{};
}

// Samples a row whose kept tokens may be many, which all CTAs do together.
template <typename T>
__device__ __noinline__ void sample_from_row(Team team, RowShare<T> part, Row row, uint32_t top,
                                             uint32_t guess) {
  const Filters<T> filters{team, part, row, top, guess};
  Border border{-INFINITY};
  const Prefix prefix = filters.kept(border);
  const float least = key_to_float(prefix.key);
  if (!(border.low > -INFINITY && border.low <= least)) border = border_from(team, part, least);
  const KeptSet set = set_of(team, part, prefix, border);
  draw_from_row<true>(team, part, row, set, border, filters.masses().scale == row.own.scale);
}

// A key that all tokens of top-k reach, and no more than one CTA takes if possible, found by all CTAs; and
// the team's next turns.
struct TopKBound {
  uint32_t key, turn, bins_turn;
};
template <typename T>
__device__ __noinline__ TopKBound bound_top_k(Team team, RowShare<T> part, Row row, uint32_t top,
                                              uint32_t guess) {
  Border border;
  const Prefix prefix = Filters<T>{team, part, row, top, guess}.by_top_k(border, kMaxCandidates);
  return TopKBound{prefix.key, team.turn, team.bins_turn};
}

// Samples one row. The team is passed by value, because the first CTA may go on alone.
template <typename T>
GVR_DEVICE void sample_row(Team team, const SampleParams& p, int row) {
  SampleShared& smem = team.smem();
  const bool writer = team.rank == 0 && team.thread == 0;
  const T* const scores = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const RowShare<T> part(p, team);
  RowParameters given{};
  if (team.thread == 0) given = read_parameters(p, row);
  part.fetch(scores, reinterpret_cast<uintptr_t>(scores) % 16 == 0, p.vocabulary, team.lane);
  if (team.thread == 0) {
    complete(given, p.vocabulary);  // while the row is on its way
    smem.read = given;
    team.init_barriers();
  }
#pragma unroll
  for (auto& limbs : smem.limbs) limbs[team.thread] = 0;
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_arrive_relaxed();
  __syncthreads();
  const RowParameters read = smem.read;
  const uint32_t* const allow = read.allow_row >= 0 ? p.allow + read.allow_row * p.allow_stride : nullptr;
  ptx::wait_copies<0>();
  // Which token is the best is asked of rows that keep no other.
  const bool one = is_greedy(read.temperature) || read.top_k == 1;
  const ThreadBest mine = one ? take_row<true>(part, allow, p.vocabulary, team.lane)
                              : take_row<false>(part, allow, p.vocabulary, team.lane);
  uint64_t best = 0;
  if (mine.value > -INFINITY) {
    best = ranked(order_key(mine.value), one ? first_token(part, mine.vector, mine.value) : 0);
  }
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_wait();  // All CTAs run, so that there is somewhere to send to.
  const RowTop top = top_of(team, best, mine.nan, share_of(read, team.ctas));

  const bool nothing = top.best == 0;
  const int flags = (top.nan ? kFlagNan : 0) | (nothing ? kFlagNoCandidate : 0);
  const Row about{p, parameters_of(team), row, nothing ? -INFINITY : value_of(top.best), flags, writer};
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
  const Filters<T> filters{team, part, about, key_of(top.best), top.guess};
  if (!filters.any()) {
    const KeptSet all{key_to_float(filters.everything().key), 0xffffffffu};
    draw_from_row<false>(team, part, about, all, Border{}, true);
    return;
  }
  uint32_t least = filters.least_expected();
  const auto survey_from = [&](uint32_t key) {
    return survey_row(team, part, key_to_float(key), filters.own().counts_all, filters.masses(),
                      about.wants_raw(), about.raw_masses());
  };
  // More tokens than k reach the guess. Of a large k they are too many, so the search comes first.
  constexpr int kMostGuessed = kMaxCandidates * 2 / 3;
  const bool searches = filters.has_top_k() && about.own.top_k <= kMaxCandidates;
  bool holds = false;
  Survey survey{};
  if (!filters.expects_many() && (!searches || about.own.top_k <= kMostGuessed)) {
    survey = survey_from(least);
    holds = filters.hold(survey, least);
  }
  if (!holds && searches) {
    const TopKBound bound = bound_top_k(team, part, about, key_of(top.best), top.guess);
    team.turn = bound.turn, team.bins_turn = bound.bins_turn;
    least = bound.key;
    survey = survey_from(least);
    holds = filters.hold(survey, least);
  }
  if (!holds) {
    sample_from_row(team, part, about, key_of(top.best), top.guess);
    return;
  }
  send_candidates(team, part, key_to_float(least), survey);
  if (team.rank > 0) return;
  wait_for_candidates(team, survey);
  sample_alone(team, about, filters, least, survey);
}

// Samples one row in each cluster. Behind the kernel that streams rows, only pending ones.
template <typename T>
__global__ void __launch_bounds__(kThreads, 3) sample_rows(const __grid_constant__ SampleParams p) {
  const int row = static_cast<int>(ptx::cluster_number());
  ptx::grid_take_over();
  if (p.pending != nullptr && p.pending[row] == 0) return;
  sample_row<T>(Team::here(), p, row);
}

// Samples pending rows where hardly any are expected: each of a few clusters takes every so many of them.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) sample_pending_rows(const __grid_constant__ SampleParams p) {
  const Team team = Team::here();
  const int teams = static_cast<int>(ptx::cluster_count());
  ptx::grid_take_over();
#pragma unroll 1
  for (int begin = static_cast<int>(ptx::cluster_number()); begin < p.rows; begin += 32 * teams) {
    const int own = begin + team.lane * teams;
    const bool waits = own < p.rows && p.pending[own] != 0;
    ptx::reconverge(team.zero);
    uint32_t left = __ballot_sync(0xffffffffu, waits);
#pragma unroll 1
    while (left != 0) {
      sample_row<T>(team, p, begin + (__ffs(static_cast<int>(left)) - 1) * teams);
      left &= left - 1;
      if (left == 0 && begin + 32 * teams >= p.rows) return;
      team.sync();
      if (team.thread == 0) team.invalidate_barriers();
    }
  }
}

}  // namespace gvr_topk::sampling
