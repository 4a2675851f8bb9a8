// Few candidates: if the filters surely keep nothing below a value that few tokens reach, the first CTA of
// the row takes these tokens and finishes alone. It sorts them, and everything follows from sums in that
// order.
#pragma once

#include "sampling/draw.cuh"

namespace gvr_topk::sampling {

// How many tokens of a row have at least some value, the candidates, and what masses there are.
struct Survey {
  uint64_t place;   // candidates before this warp's
  uint64_t count;   // candidates
  uint64_t listed;  // their mass for the filters, if that is asked for
  uint64_t all;     // that of all tokens
  uint64_t raw;     // mass of all tokens at temperature 1, if that is asked for
  uint64_t steps;   // bits of the steps at which this thread has a candidate
};

// Counts the tokens with values from `least` on, and adds up the masses that are asked for.
template <typename T>
GVR_DEVICE Survey survey_row(Team& team, const RowShare<T>& part, float least, bool wants_masses,
                             const Masses& filters, bool wants_raw, const Masses& raw) {
  Survey survey{};
  Record own{};
  if (wants_masses) {
    const MassSums mine = add_masses<Listing::kFew>(part, filters, least, team.lane);
    ptx::reconverge(team.zero);
    survey.steps = mine.steps;
    own.word[0] = __reduce_add_sync(0xffffffffu, mine.count);
    own.word[1] = warp_sum(mine.listed), own.word[2] = warp_sum(mine.all);
  } else {
    uint32_t count = 0;
    survey.steps = part.steps_from(least, team.lane);
    part.for_each(survey.steps, team.lane, [&](float x, int) { count += x >= least; });
    ptx::reconverge(team.zero);
    own.word[0] = __reduce_add_sync(0xffffffffu, count);
  }
  const WarpSums sums = sum_warps<3>(team, own);
  survey.place = sums.before(team);
  survey.count = sums.all.word[0], survey.listed = sums.all.word[1], survey.all = sums.all.word[2];
  if (wants_raw) survey.raw = sum_threads(team, add_all_masses(part, raw, team.lane)).all.word[0];
  return survey;
}

// Where candidates go: to the first CTA.
struct CandidateSink {
  const Team& team;
  uint32_t address, barrier;

  GVR_DEVICE explicit CandidateSink(const Team& team_)
      : team(team_),
        address(ptx::map_to_rank(ptx::shared_address(team.smem().candidates), 0)),
        barrier(team.address_of(team.smem().barriers[kCandidatesBarrier], 0)) {}

  // `at` follows from counts that all CTAs have got; it is clamped all the same.
  GVR_DEVICE void put(uint32_t at, uint64_t candidate) const {
    const uint32_t offset = 8 * min(at, kMaxCandidates - 1u);
    if (team.ctas > 1) {
      ptx::store_async(address + offset, candidate, barrier);
    } else {
      team.smem().candidates[offset / 8] = candidate;
    }
  }
};

// Sends this CTA's candidates to the first one, in ascending order of tokens. There is room for all of them.
template <typename T>
GVR_DEVICE void send_candidates(const Team& team, const RowShare<T>& part, float least,
                                const Survey& survey) {
  uint32_t place = static_cast<uint32_t>(survey.place);
  const CandidateSink sink(team);
  uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(survey.steps));
  uint32_t high = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(survey.steps >> 32));
  for (uint64_t left = static_cast<uint64_t>(high) << 32 | low; left != 0; left &= left - 1) {
    const int vector = (__ffsll(static_cast<long long>(left)) - 1) * 32 + team.lane;
    const uint4 vec = part.load(vector);
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) bits |= (element<T>(vec, e) >= least) << e;
    ptx::reconverge(team.zero);
    const uint32_t upto = ptx::inclusive_scan(static_cast<uint32_t>(__popc(bits)));
    uint32_t at = place + upto - __popc(bits);
    place += __shfl_sync(0xffffffffu, upto, 31);
    part.for_each_bit(bits, vector, [&](float x, int token) { sink.put(at++, ranked(order_key(x), token)); });
  }
}

// How many holds(i) of all threads hold.
template <int kEach, typename Holds>
GVR_DEVICE int block_count(Holds holds) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) count += __syncthreads_count(holds(i));
  return count;
}

// Waits for the candidates of all CTAs, in the first one.
GVR_DEVICE void wait_for_candidates(const Team& team, const Survey& survey) {
  ptx::reconverge(team.zero);
  if (team.ctas == 1) {
    __syncthreads();
    return;
  }
  if (team.thread == 0) {
    ptx::barrier_expect_tx(team.address_of(team.smem().barriers[kCandidatesBarrier], 0),
                           static_cast<uint32_t>(survey.count) * sizeof(uint64_t));
  }
  ptx::reconverge(team.zero);
  ptx::barrier_wait(ptx::shared_address(&team.smem().barriers[kCandidatesBarrier]), 0);
  ptx::reconverge(team.zero);
}

// What a CTA needs to sort candidates, where its part of the row was.
struct SortingSpace {
  uint64_t grouped[kMaxCandidates];  // those of a bin are neighbours
  uint32_t bins[kBins];              // how many there are; then the place of the first one, too
};
static_assert(sizeof(SortingSpace) <= kSampleLeastPart && kMaxCandidates < 1 << 16);

// The candidates of a row in one CTA, up to `kEach` for each thread. Thread t has those from t * kEach on, in
// ascending order of tokens and in that of ranks.
template <int kEach>
struct Candidates {
  const Team& team;
  const uint64_t* by_rank;  // [kMaxCandidates] in shared memory
  int count;
  int rank[kEach];         // of this thread's, by ascending tokens; `count` where there is none
  uint64_t own[kEach];     // they themselves
  uint64_t sorted[kEach];  // this thread's by descending ranks; 0 where there is none

  // Sorts `count` candidates with keys from `least` to `best`: those of a bin come together, and are compared
  // with each other.
  GVR_DEVICE Candidates(const Team& team_, uint32_t least, uint32_t best, int count_)
      : team(team_), by_rank(team_.smem().candidates), count(count_) {
    uint64_t* const listed = team.smem().candidates;
    SortingSpace& space = *reinterpret_cast<SortingSpace*>(storage + kSampleFixedBytes + team.zero);
    const uint64_t greatest = ranked(best, 0);
    const int shift = max(0, 64 - kLog2Bins - __clzll(static_cast<long long>(greatest - ranked(least, -1))));
    uint32_t bin[kEach], slot[kEach];
    __syncthreads();  // All warps have sent what they had of the row, which was here.
    space.bins[team.thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = place(i) < count ? listed[place(i)] : 0;
      rank[i] = count;
      bin[i] = static_cast<uint32_t>(min((greatest - own[i]) >> shift, uint64_t{kBins - 1}));
      if (place(i) < count) slot[i] = atomicAdd(&space.bins[bin[i]], 1u);
    }
    __syncthreads();
    const uint32_t mine = space.bins[team.thread];
    uint64_t total;
    const uint64_t first = block_prefix(team, mine, total);
    space.bins[team.thread] = static_cast<uint32_t>(first) << 16 | mine;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      bin[i] = space.bins[bin[i]];
      if (place(i) < count) space.grouped[min((bin[i] >> 16) + slot[i], kMaxCandidates - 1u)] = own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (place(i) >= count) continue;
      rank[i] = static_cast<int>(bin[i] >> 16);
      const uint64_t* const others = space.grouped + rank[i];
#pragma unroll 1
      for (uint32_t j = 0; j < (bin[i] & 0xffffu); ++j) rank[i] += others[j] > own[i];
      listed[rank[i]] = own[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) sorted[i] = place(i) < count ? listed[place(i)] : 0;
    ptx::reconverge(team.zero);
  }

  GVR_DEVICE int place(int i) const { return team.thread * kEach + i; }

  // How many candidates the filters keep. `rest` is the mass of the tokens that are no candidates, if top-p
  // counts them. `target_of` makes the mass at which top-p cuts of what it counts.
  GVR_DEVICE int kept(const Masses& masses, int by_k, uint64_t least, bool near_first, bool counts_all,
                      uint64_t rest, float top_p) const {
    uint64_t mass[kEach], sum = 0, total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mass[i] = sorted[i] != 0 ? masses(value_of(sorted[i])) : 0;
      sum += mass[i];
    }
    int near = count;
    if (least > 0) near = block_count<kEach>([&](int i) { return sorted[i] != 0 && mass[i] >= least; });
    if (!(top_p < 1.0f)) return min(by_k, near);
    uint64_t before = block_prefix(team, sum, total);
    const int counted = counts_all ? count : near_first ? min(by_k, near) : by_k;
    // The thread of the last counted candidate tells the others the sum.
    uint64_t* const shared_sum = &team.smem().found.above;
    uint64_t upto = before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      upto += mass[i];
      if (place(i) == counted - 1) *shared_sum = upto;
    }
    __syncthreads();
    const uint64_t cut = top_p_mass(top_p, *shared_sum + rest);
    uint64_t exclusive[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) exclusive[i] = before, before += mass[i];
    const int by_p = block_count<kEach>([&](int i) { return place(i) < counted && exclusive[i] < cut; });
    return min(min(by_k, near), by_p);
  }
};

}  // namespace gvr_topk::sampling
