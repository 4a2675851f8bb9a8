// Samples rows that need to be read only once: those of which few tokens can be chosen, which are greedy rows
// and those with top-k or min-p, and those without filters that are drawn with noise. Such a row streams
// through shared memory and is not held, so that many rows keep the memory busy.
//
// Grid: one CTA for each row, or a cluster of two, of 256 threads each.
//
// Phases:
// - guess: the largest of some thousand scattered elements say which value more tokens reach than are needed,
//   and few others;
// - list: each warp streams its part of the row and keeps the tokens from that value on, in ascending order.
//   Of more tokens than one CTA sorts, those from a greater value on stay, found by sums over bins of keys;
// - draw: the first CTA gets the tokens of all, sorts them and draws (sampling/row.cuh).
// Of a row without filters the token with the greatest noisy score is found on the way, and nothing is
// listed.
//
// Rows of other kinds, rows whose list does not hold what the filters keep, and those with NaN or +inf are
// left to the kernel that holds rows (sampling/kernel.cuh), which follows: `pending` says which. So nothing
// here has to succeed.
#pragma once

#include "core/chunked_store.cuh"
#include "core/part_stream.cuh"
#include "ptx/barrier.cuh"
#include "sampling/row.cuh"

namespace gvr_topk::sampling_stream {

using sampling::kMaxCandidates;
using sampling::kThreads;
using sampling::kWarps;
using sampling::Prefix8;
using sampling::Record;
using sampling::Records;
using sampling::Row;
using sampling::RowParameters;
using sampling::SampleShared;
using sampling::Team;

template <typename T>
using Stream = PartStream<T, kWarps, 16 / sizeof(T)>;
constexpr int kRingBytes = kWarps * Stream<float>::Ring::kBytes;
static_assert(kRingBytes >= kSampleLeastPart);  // Candidates are sorted where the rings were.
constexpr int kListChunks = 88;
// Tokens for which there is room at least, also where min-p alone says how many are kept.
constexpr int kLikelyKept = 32;

// The tokens that a CTA lists, as `ranked` numbers, more than twice as many as one CTA sorts. The rings
// follow SampleShared, and this follows them.
struct ListShared {
  uint64_t items[kListChunks * kChunk];
  uint8_t chunks[kWarps][kListChunks];
  uint32_t chunks_used;
};
using TokenList = ChunkedStore<uint64_t, kWarps>;

// What a CTA has listed, in place of its part of a row (see RowShare).
struct ListedPart {
  const TokenList& list;

  GVR_DEVICE uint64_t steps_from(float, int) const { return 1; }
  template <typename Holds, typename Visit>
  GVR_DEVICE void for_each(uint64_t, int lane, Holds holds, Visit visit) const {
    list.for_each(lane, 0, 0, [&](uint64_t item) {
      const float x = sampling::value_of(item);
      const int token = sampling::token_of(item);
      if (item != 0 && holds(x, token)) visit(x, token);
    });
  }
};
constexpr int kSharedBytes = kSampleFixedBytes + kRingBytes + static_cast<int>(sizeof(ListShared));

// A sample of a row: one vector in 32 or a greater share, at hashed positions, four neighbouring ones for
// each four threads. The positions are the same in every CTA.
template <typename T>
struct VectorSample {
  static constexpr int kMost = 8;  // of the longest row (kLongestStreamed)
  int vectors, each;               // of the row, and of a thread
  uint4 vec[kMost];

  // Starts the loads, if it is `needed`.
  GVR_DEVICE VectorSample(const T* row, int vocabulary, bool needed)
      : vectors(vocabulary / kPerVec<T>), each(needed ? (vectors + 32 * kThreads - 1) / (32 * kThreads) : 0) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      vec[i] = negative_infinity_vec<T>();
      const uint32_t hash = sampling::hash32(0, (i * kThreads + threadIdx.x) / 4);
      const uint32_t at = __umulhi(hash, vectors / 4) * 4 + threadIdx.x % 4;
      if (i < each) vec[i] = ptx::load_streaming(row + at * kPerVec<T>);
    }
  }

  // The key of the largest of this thread's elements; that of -inf if they are NaN.
  GVR_DEVICE uint32_t greatest() const {
    float most = -INFINITY;
#pragma unroll
    for (const uint4& each_vec : vec) {
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) most = fmaxf(most, element<T>(each_vec, e));
    }
    return order_key(most);
  }

  // How many threads are to reach a value that more than k tokens reach, and not many more.
  GVR_DEVICE int share_of(int k) const {
    const int tokens = k + k / (k > kThreads ? 2 : 4) + 300;
    return min(max(tokens * each * kThreads / vectors, 2), kThreads / 2);
  }
};

// Whether few tokens are likely to be kept of a row. `one`: the best one is kept.
template <typename T>
GVR_DEVICE bool is_streamed(const sampling::Filters<T>& filters, bool one) {
  const RowParameters& own = filters.own();
  if (own.skipped) return false;
  return one || (!filters.own().counts_all &&
                 (filters.has_top_k() ? sampling::streams_top_k(own.top_k, filters.row.p.vocabulary)
                                      : own.min_p > 0.0f));
}

// Whether a list of the tokens from the key `least` on surely holds what the filters keep.
template <typename T>
GVR_DEVICE bool holds(const sampling::Filters<T>& filters, const sampling::Survey& survey, uint32_t least) {
  return filters.hold(survey, least) && (filters.has_top_k() || filters.by_min_p().key >= least);
}

// What the warps of a row have listed.
struct Listed {
  uint64_t before = 0, count = 0;  // tokens before this warp's, and all
  uint64_t best = 0;               // the one that ranks first
  uint32_t least = 0;              // a key from which on all are listed
};

// Adds up what each warp says of its list, and each CTA of its guess: the row may have changed between them.
// A list that is not complete counts as longer than any.
constexpr uint32_t kNotComplete = 1u << 28;
GVR_DEVICE Listed add_lists(Team& team, uint64_t count, bool whole, uint64_t best, uint32_t least) {
  ptx::reconverge(team.zero);
  whole = __all_sync(0xffffffffu, whole);
  const auto listed_by = [&](const Records& records, int records_count, int at) {
    const Prefix8 counts = Prefix8::of(records.word[0], records_count, team.lane);
    return Listed{counts.before(at), counts.all(),
                  sampling::max_of(records.word[1], records_count, team.lane),
                  static_cast<uint32_t>(sampling::max_of(records.word[2], records_count, team.lane))};
  };
  const Records& of_warps = team.smem().warps[team.turn & 1];
  const Record own{{whole ? count : kNotComplete, sampling::warp_max(best), least}};
  const Records& of_ctas = team.exchange<3>(own, [&](const Records& warps) {
    const Listed here = listed_by(warps, kWarps, 0);
    return team.lane < 8 ? here.count : team.lane < 16 ? here.best : here.least;
  });
  Listed listed = listed_by(of_ctas, team.ctas, team.rank);
  listed.before += Prefix8::of(of_warps.word[0], kWarps, team.lane).before(team.warp);
  return listed;
}

// Finds a prefix of lists that are too long for one CTA, which holds the first k and no more than it takes.
template <typename T>
GVR_DEVICE sampling::Prefix bound_listed_top_k(Team& team, const TokenList& list, const Row& row,
                                               const Listed& listed) {
#pragma unroll
  for (auto& limbs : team.smem().limbs) limbs[team.thread] = 0;
  __syncthreads();
  const ListedPart part{list};
  sampling::Border border;
  const uint32_t top = sampling::key_of(listed.best);
  const sampling::Filters<T, ListedPart> filters{team, part, row, top, listed.least};
  return filters.by_top_k(border, kMaxCandidates);
}

// Reports the best token of a row, from its candidates.
GVR_DEVICE void take_best(const Team& team, const Row& row, uint64_t best, int count) {
  sampling::report_one(team, row, sampling::token_of(best), 0, [&](const sampling::Found&) {
    int equal = 0;
    for (int i = team.thread; i - team.thread < count; i += kThreads) {
      const bool has = i < count && sampling::key_of(team.smem().candidates[i]) == sampling::key_of(best);
      equal += __syncthreads_count(has);
    }
    if (row.writer) row.p.ranks[row.number] = equal;
  });
}

// Draws with noise from a row without filters that streams by. Returns whether that is done: a row with NaN
// or +inf, or without a candidate, is left.
template <typename T>
GVR_DEVICE bool draw_noisy(Team& team, const Stream<T>& stream, Row row) {
  constexpr uint32_t kWholeVec = (1u << kPerVec<T>)-1;
  sampling::complete(row.own, row.p.vocabulary);
  sampling::NoisySearch search(team, row);
  uint32_t greatest = negative_infinity_vec<T>().x;
  bool nan = false;
  stream.for_each_tile([&](int step, uint32_t slot, uint32_t valid) {
    const int first = stream.first_position() + step * kTileElements + team.lane * kValuesPerThread;
#pragma unroll 1
    for (int j = 0; j < kVecsOfTile<T>; ++j, valid >>= kPerVec<T>) {
      uint4 vec = ptx::load_shared(stream.ring.read_address + slot ^ j * sizeof(uint4));
      if ((~valid & kWholeVec) != 0) nan |= sampling::mask_vector<T>(vec, valid);
      greatest = sampling::larger<T>(greatest, sampling::larger<T>(vec));
      search.visit<T>(
          vec, first + j * kPerVec<T>, [](float x, int) { return x > -INFINITY; },
          [&](int e) { return stream.ring.value(slot, j * kPerVec<T> + e); });
    }
  });
  ptx::reconverge(team.zero);
  const uint32_t own = nan ? kMaxKey : order_key(sampling::largest<T>(greatest));  // of NaN the greatest
  // Nothing is listed, and the last number is the greatest key.
  const Listed all = add_lists(team, 0, true, search.best, __reduce_max_sync(0xffffffffu, own));
  if (all.least < kLeastFiniteKey || all.least >= kPosInfKey) return false;
  sampling::Outcome{sampling::Found{row.writer, 0.0f, sampling::token_of(all.best)}}.write(row);
  return true;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) stream_rows(const __grid_constant__ SampleParams p) {
  Team team = Team::here();
  SampleShared& smem = team.smem();
  unsigned char* const rings = sampling::storage + kSampleFixedBytes + team.zero;
  ListShared& lists = *reinterpret_cast<ListShared*>(rings + kRingBytes);
  const int number = static_cast<int>(ptx::cluster_number());
  const bool writer = team.rank == 0 && team.thread == 0;
  ptx::grid_take_over();

  const RowView<T> row{static_cast<const T*>(p.logits) + number * p.logits_stride, p.vocabulary, 0};
  const Stream<T> stream(row, rings, team.warp, team.lane, team.rank, __ffs(team.ctas) - 1);
  // Behind a full ring its loads would wait.
  const VectorSample<T> sample(row.data, p.vocabulary, !(p.one_kind && p.noise_alone));
  if (p.one_kind) stream.start();
  if (team.thread == 0) {
    smem.read = sampling::read_parameters(p, number);
    lists.chunks_used = kWarps * TokenList::initial_chunks(kListChunks);
    team.init_barriers();
  }
  ptx::reconverge(team.zero);
  if (team.ctas > 1) ptx::cluster_arrive_relaxed();
  __syncthreads();
  if (team.ctas > 1) {
    ptx::cluster_wait();
    // Each CTA has to go the same way, so all of them take the parameters that the first one has read.
    team.exchange<1>(
        Record{}, [](const Records&) { return uint64_t{0}; }, sizeof(RowParameters),
        [&](int rank, uint32_t completes) { sampling::send_parameters(team, rank, completes); });
  }

  // Guess.
  const auto row_with = [&](float max) {
    return Row{p, sampling::parameters_of(team), number, max, 0, writer};
  };
  const sampling::RowShare<T> unheld(p, team);
  const Row unread = row_with(0.0f);
  const bool one = sampling::is_greedy(unread.own.temperature) || unread.own.top_k == 1;
  const sampling::Filters<T> expected{team, unheld, unread, kPosInfKey, 0};
  const bool noise_alone = p.noise_alone && !one && !unread.own.skipped && !expected.any();
  if (!noise_alone && !is_streamed(expected, one)) {
    ptx::wait_copies<0>();
    if (writer) p.pending[number] = 1;
    return;
  }
  if (!p.one_kind) stream.start();
  if (noise_alone) {
    const bool drawn = draw_noisy(team, stream, unread);
    if (writer) p.pending[number] = !drawn;
    return;
  }
  const int likely = expected.has_top_k() ? max(unread.own.top_k, kLikelyKept) : kLikelyKept;
  const int share = sample.share_of(one ? 1 : likely);
  constexpr int kMostOfGroups = sampling::kGroups / 5;
  const uint32_t guess = sampling::reached_by(team, sample.greatest(), share <= kMostOfGroups, share);
  const uint32_t least = min(max(guess, kLeastFiniteKey), kPosInfKey);

  // List.
  TokenList list(lists.items, lists.chunks[team.warp], kListChunks, team.warp);
  list.claim_part(team.lane);
  bool whole = true;
  uint64_t best = 0;
  const float level = key_to_float(least);
  stream.for_each_tile([&](int step, uint32_t slot, uint32_t valid) {
    const int first = stream.first_position() + step * kTileElements + team.lane * kValuesPerThread;
    const uint32_t there = stream.ring.not_below(level, slot) & valid;
    list.append(&lists.chunks_used, there, team.lane, [&](int index, int at) {
      const float x = stream.ring.value(slot, index);
      const uint64_t item = sampling::ranked(order_key(x), first + index);
      whole &= !isnan(x);
      best = max(best, item);
      list.store[at] = item;
    });
  });
  Listed listed = add_lists(team, list.count, whole && !list.full, best, least);

  Row about = row_with(sampling::value_of(listed.best));
  if (!one) sampling::complete(about.own, p.vocabulary);
  const sampling::Filters<T> filters{team, unheld, about, sampling::key_of(listed.best), 0};
  // The items that are sent, and counted: those with keys above this, and so many of those that equal it.
  sampling::Prefix sent{0, 0};
  uint32_t ties = 0;  // items equal to that key in lists of earlier warps, and of this one so far
  if (!one && filters.has_top_k() && listed.count > kMaxCandidates && listed.count < kNotComplete) {
    sent = bound_listed_top_k<T>(team, list, about, listed);
    uint32_t above = 0, equal = 0;
    list.for_each(team.lane, 0, 0, [&](uint64_t item) {
      above += sampling::key_of(item) > sent.key, equal += sampling::key_of(item) == sent.key;
    });
    ptx::reconverge(team.zero);
    above = __reduce_add_sync(0xffffffffu, above), equal = __reduce_add_sync(0xffffffffu, equal);
    listed = add_lists(team, uint64_t{equal} << 32 | above, true, listed.best, sent.key);
    const auto taken = [&](uint64_t counts) { return (counts & ~0u) + min(counts >> 32, sent.equal); };
    ties = static_cast<uint32_t>(listed.before >> 32);
    const uint64_t all_ties = listed.count >> 32;
    listed.before = taken(listed.before), listed.count = taken(listed.count);
    if (p.ranks != nullptr && all_ties > sent.equal) listed.count = kNotComplete;  // All ties count.
  }
  sampling::Survey survey{};
  survey.count = listed.count;
  const bool holds_kept = one ? listed.count <= kMaxCandidates : holds(filters, survey, listed.least);
  const bool done = holds_kept && listed.count > 0 && sampling::key_of(listed.best) < kPosInfKey;
  if (writer) p.pending[number] = !done;
  if (!done) return;

  // Draw.
  const bool sends = !one || p.ranks != nullptr;
  ptx::reconverge(team.zero);
  if (sends) {
    const sampling::CandidateSink sink(team);
    uint32_t place = static_cast<uint32_t>(listed.before);
    list.for_each(team.lane, 0, 0, [&](uint64_t item) {
      const uint32_t key = sampling::key_of(item);
      ptx::reconverge(team.zero);
      const LaneRank equal = rank_lanes(key == sent.key, team.lane);
      const bool is_sent = key > sent.key || (key == sent.key && ties + equal.before < sent.equal);
      ptx::reconverge(team.zero);
      const LaneRank rank = rank_lanes(is_sent, team.lane);
      if (is_sent) sink.put(place + rank.before, item);
      place += rank.all, ties += equal.all;
    });
  }
  if (team.rank > 0) return;
  if (sends) sampling::wait_for_candidates(team, survey);
  if (one) {
    team.ctas = 1;
    take_best(team, about, listed.best, static_cast<int>(listed.count));
  } else {
    sampling::sample_alone(team, about, filters, listed.least, survey);
  }
}

}  // namespace gvr_topk::sampling_stream
