// Ranks the largest values of each row, and gives their log-probabilities and those of a given token.
//
// Grid: one cluster of up to 8 CTAs for each row, of 256 threads each, as the sampler has. Each CTA holds its
// part of the row in shared memory, so the row is read once.
//
// Phases:
// - take: the row is copied, and NaN becomes -inf. CTAs exchange their largest values, a value that enough
//   threads have reached, the guess, and the value of the given token;
// - count: masses, the values at or above the guess, and those at or above the given token's are added up;
// - list: the values from the guess on go to the first CTA. If they are too few or too many, all CTAs first
//   find the value of rank n (sampling/select.cuh), and exactly n go there;
// - report: the first CTA sorts what it has got, and writes the first n.
//
// Every decision of a row follows from numbers that all its CTAs have got from one of them, so no value that
// changes meanwhile makes them disagree.
#pragma once

#include "core/ids.cuh"
#include "ptx/barrier.cuh"
#include "sampling/candidates.cuh"

namespace gvr_topk::topk_logprobs {

using sampling::Candidates;
using sampling::distance;
using sampling::KeptSet;
using sampling::kThreads;
using sampling::Masses;
using sampling::Record;
using sampling::Records;
using sampling::RowShare;
using sampling::SampleShared;
using sampling::storage;
using sampling::Survey;
using sampling::Team;
using sampling::WarpSums;

constexpr int kNoToken = -1;
static_assert(sampling::kMaxCandidates == kMaxRankedTokens);

// What all CTAs know of a row when it has been read.
struct RowSummary {
  uint32_t best;   // key of the largest value
  uint32_t guess;  // a key that about n values reach
  uint32_t key;    // that of the given token, or 0
  int token;       // the given token, or kNoToken

  GVR_DEVICE float max() const { return key_to_float(best); }
};

// Exchanges what the CTAs have found. `token` is what this CTA has read as the given token.
template <typename T>
GVR_DEVICE RowSummary top_of(Team& team, const RowShare<T>& part, float most, int token, int n) {
  const int share = min((n + team.ctas - 1) / team.ctas, kThreads);
  const uint32_t own = sampling::put_maximum(team, order_key(most), false);
  uint32_t key = 0;
  const int in_cta = token / kPerVec<T> - team.rank * sampling::kWarps * part.vectors;
  if (token >= 0 && in_cta >= 0 && in_cta < sampling::kWarps * part.vectors) {
    const uint4 vec = ptx::load_shared(part.address + 16 * (in_cta - team.warp * part.vectors));
    key = order_key(element<T>(vec, token % kPerVec<T>));
  }
  ptx::reconverge(team.zero);
  __syncthreads();
  const uint32_t guess = sampling::find_reached(team, false, own, share);
  const uint32_t best = __reduce_max_sync(0xffffffffu, own);
  const auto last_word = [](int given, uint32_t reached) {
    return static_cast<uint64_t>(static_cast<uint32_t>(given)) << 32 | reached;
  };
  const auto summary_of = [&](const Records& records, int count) {
    const auto word = [&](int i) { return records.word[i][min(team.lane, count - 1)]; };
    return RowSummary{__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(word(0))),
                      __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(word(2))),
                      __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(word(1))),
                      static_cast<int>(records.word[2][0] >> 32)};
  };
  const Records& ctas =
      team.exchange<3>(Record{{best, key, last_word(token, guess)}}, [&](const Records& warps) {
        const RowSummary top = summary_of(warps, sampling::kWarps);
        const uint64_t last = last_word(token, top.guess);
        return team.lane < 8 ? top.best : team.lane < 16 ? uint64_t{top.key} : last;
      });
  return summary_of(ctas, team.ctas);
}

// The sums over a row: its mass, and how many of its values are at or above the guess, and the given token's.
struct RowSums {
  Survey survey;
  uint64_t rank;
};

template <typename T>
GVR_DEVICE RowSums sum_row(Team& team, const RowShare<T>& part, const RowSummary& top, int vocabulary) {
  RowSums sums{};
  const float least = key_to_float(top.guess), given = key_to_float(top.key);
  const Masses masses{top.max(), sampling::mass_scale(1.0f)};
  uint32_t listed = 0, above = 0;
  uint64_t mass = 0;
#pragma unroll 1
  for (int j = team.lane; j < part.vectors; j += 32) {
    const uint4 vec = ptx::load_shared(part.address + 16 * j);
    uint32_t here = 0;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      const float x = element<T>(vec, e);
      here += x >= least;
      above += x >= given && part.token(j, e) < vocabulary;
      mass += masses(x);
    }
    listed += here;
    sums.survey.steps |= static_cast<uint64_t>(here > 0) << (j / 32);
  }
  ptx::reconverge(team.zero);
  Record own{};
  own.word[0] = __reduce_add_sync(0xffffffffu, listed);
  own.word[1] = __reduce_add_sync(0xffffffffu, above);
  own.word[2] = sampling::warp_sum(mass);
  const WarpSums all = sampling::sum_warps<3>(team, own);
  sums.survey.place = all.before(team);
  sums.survey.count = all.all.word[0], sums.rank = all.all.word[1], sums.survey.raw = all.all.word[2];
  return sums;
}

// Sends exactly n values, the first ones of the row's ranking, to the first CTA, in any order. Returns the
// least of their keys.
template <typename T>
__device__ __noinline__ uint32_t send_exactly(Team team, RowShare<T> part, RowSummary top, int n) {
  uint64_t target;
  sampling::Border border;
  const sampling::Cut cut = sampling::find_cut<T>(
      team, part, kNegInfKey, sampling::Span{top.guess, top.best}, top.best, 0, sampling::Ones{},
      [&](uint64_t) { return static_cast<uint64_t>(n); }, target, border);
  const KeptSet set = sampling::set_through(team, part, key_to_float(cut.key), border.steps,
                                            [&](uint64_t) { return n - cut.above - 1; });
  const WarpSums sums = sampling::count_elements(team, part, border.steps,
                                                 [&](float x, int token) { return set.has(x, token); });
  if (team.thread == 0) team.smem().word = 0;  // how many this CTA has sent
  __syncthreads();
  const sampling::CandidateSink sink(team);
  part.for_each(border.steps, team.lane, [&](float x, int token) {
    if (!set.has(x, token)) return;
    const uint32_t at = static_cast<uint32_t>(sums.before_cta.word[0]) + atomicAdd(&team.smem().word, 1u);
    sink.put(at, sampling::ranked(order_key(x), token));
  });
  team.sync();  // CTAs have read sums in each other's memory, so none of them ends before the others.
  return cut.key;
}

// The row whose results are written.
struct Results {
  const TopkLogprobsParams& p;
  int row;

  GVR_DEVICE void write(int column, int token, float logprob) const {
    p.ids[row * p.ids_stride + column] = token;
    p.logprobs[row * p.logprobs_stride + column] = logprob;
  }
};

// Reports a row without a value above -inf: all tokens rank by their ids, and the first one that is a number
// has all the mass. It reads the row again.
template <typename T>
__device__ __noinline__ void report_empty(Team team, Results results, const T* row, int given) {
  const int vocabulary = results.p.row.vocabulary;
  uint32_t first = 0;  // as a number that is the larger, the smaller the token
  for (int token = team.thread; token < vocabulary && first == 0; token += kThreads) {
    if (!isnan(to_float(row[token]))) first = ~static_cast<uint32_t>(token);
  }
  ptx::reconverge(team.zero);
  first = __reduce_max_sync(0xffffffffu, first);
  if (team.lane == 0) team.smem().of_warp[team.warp] = first;
  __syncthreads();
  for (int w = 0; w < sampling::kWarps; ++w) {
    first = max(first, static_cast<uint32_t>(team.smem().of_warp[w]));
  }
  const int stand_in = first == 0 ? 0 : static_cast<int>(~first);
  const auto logprob = [&](int token) { return token == stand_in ? 0.0f : -INFINITY; };
  for (int i = team.thread; i < results.p.n; i += kThreads) results.write(1 + i, i, logprob(i));
  if (team.thread > 0) return;
  results.write(0, given, given == kNoToken ? 0.0f : logprob(given));
  results.p.ranks[results.row] = given == kNoToken ? 0 : vocabulary;
}

// Sorts the values that this CTA has got, and writes the first ones.
template <int kEach>
GVR_DEVICE void report(const Team& team, const Results& results, const RowSummary& top, uint32_t least,
                       int count, uint64_t mass) {
  const Candidates<kEach> list(team, least, top.best, count);
  const float log_total = sampling::log_mass(mass);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (list.place(i) >= results.p.n) continue;
    const float x = sampling::value_of(list.sorted[i]);
    results.write(1 + list.place(i), sampling::token_of(list.sorted[i]),
                  sampling::log_probability(distance(x, top.max()), 1.0f, log_total));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) rank_rows(const __grid_constant__ TopkLogprobsParams p) {
  Team team = Team::here();
  SampleShared& smem = team.smem();
  const int row = static_cast<int>(ptx::cluster_number()), vocabulary = p.row.vocabulary;
  ptx::grid_take_over();

  const T* const scores = static_cast<const T*>(p.row.logits) + row * p.row.logits_stride;
  const RowShare<T> part(p.row, team);
  part.fetch(scores, reinterpret_cast<uintptr_t>(scores) % 16 == 0, vocabulary, team.lane);
  if (team.thread == 0) {
    const int64_t given = read_id(p.sampled, row);
    smem.word = given >= 0 && given < vocabulary ? static_cast<int32_t>(given) : kNoToken;
    team.init_barriers();
  }
#pragma unroll
  for (auto& limbs : smem.limbs) limbs[team.thread] = 0;
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_arrive_relaxed();
  __syncthreads();
  const int token = static_cast<int>(smem.word);
  ptx::wait_copies<0>();
  const float most = sampling::take_row<false>(part, nullptr, vocabulary, team.lane).value;
  ptx::reconverge(team.zero);
  __syncthreads();                         // All of this CTA's part is there, and the token has been read.
  if (team.ctas > 1) ptx::cluster_wait();  // All CTAs run, so that there is somewhere to send to.
  const RowSummary top = top_of(team, part, most, token, p.n);

  const Results results{p, row};
  if (top.best == kNegInfKey) {
    if (team.rank == 0) report_empty(team, results, scores, top.token);
    return;
  }
  const RowSums sums = sum_row(team, part, top, vocabulary);
  Survey survey = sums.survey;
  // Behind a warp's last vector lie elements of -inf, which are no candidates.
  const bool holds = top.guess > kNegInfKey && survey.count >= static_cast<uint64_t>(p.n) &&
                     survey.count <= sampling::kMaxCandidates;
  uint32_t least = top.guess;
  if (p.n > 0 && holds) {
    sampling::send_candidates(team, part, key_to_float(top.guess), survey);
  } else if (p.n > 0) {
    least = send_exactly(team, part, top, p.n);
    survey.count = p.n;
  }
  if (team.rank > 0) return;
  if (team.thread == 0) {
    const bool known = top.token != kNoToken;
    const float of = distance(key_to_float(top.key), top.max());
    const float logprob = sampling::log_probability(of, 1.0f, sampling::log_mass(survey.raw));
    results.write(0, top.token, known ? logprob : 0.0f);
    p.ranks[row] = known ? static_cast<int64_t>(sums.rank) : 0;
  }
  if (p.n == 0) return;
  sampling::wait_for_candidates(team, survey);
  if (survey.count <= kThreads) {
    report<1>(team, results, top, least, static_cast<int>(survey.count), survey.raw);
  } else {
    report<sampling::kMaxCandidates / kThreads>(team, results, top, least, static_cast<int>(survey.count),
                                                survey.raw);
  }
}

}  // namespace gvr_topk::topk_logprobs
