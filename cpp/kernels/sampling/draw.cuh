// Sums over the kept tokens of a row, and finds tokens by such sums: the last kept one of equal values, the
// drawn one, and the place of each kept one.
#pragma once

#include "ptx/warp.cuh"
#include "sampling/select.cuh"

namespace gvr_topk::sampling {

// A token as one number: of two tokens the one that ranks first has the larger number.
GVR_DEVICE uint64_t ranked(uint32_t key, int token) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(token);
}
GVR_DEVICE uint32_t key_of(uint64_t ranked) { return static_cast<uint32_t>(ranked >> 32); }
GVR_DEVICE int token_of(uint64_t ranked) { return static_cast<int>(~static_cast<uint32_t>(ranked)); }
GVR_DEVICE float value_of(uint64_t ranked) { return key_to_float(key_of(ranked)); }

// The largest values of a row, and of those equal to the least of them the tokens up to `token`.
struct KeptSet {
  float least;
  uint32_t token;

  GVR_DEVICE bool has(float x, int id) const {
    return x > least | (x == least & static_cast<uint32_t>(id) <= token);  // no branches
  }
};

// Counts the elements for which `holds(value, token)`, over the row. They lie at `steps`.
template <typename T, typename Holds>
GVR_DEVICE WarpSums count_elements(Team& team, const RowShare<T>& part, uint64_t steps, Holds holds) {
  uint64_t own = 0;
  part.for_each(steps, team.lane, [&](float x, int token) { own += holds(x, token); });
  return sum_threads(team, own);
}

// An element that a search has come to, in one thread of the row.
struct Found {
  bool here;
  float value;
  int token;
};

// Finds the element at which the running sum of `measure(value, token)`, in ascending order of tokens,
// exceeds `target`. The first words of `sums` are those of the same measure. The threads of the CTA that has
// the element share the part of the warp that has it.
template <typename T, typename Measure>
GVR_DEVICE Found find_token(const Team& team, const RowShare<T>& part, const WarpSums& sums, uint64_t target,
                            Measure measure) {
  Found found{false, 0.0f, 0};
  target -= sums.before_cta.word[0];
  if (target >= sums.cta) return found;  // It is elsewhere, also if the difference was negative.
  const Prefix8 warps = Prefix8::of(sums.warps->word[0], kWarps, team.lane);
  uint64_t before = warps.upto - warps.own;
  const bool there = team.lane < kWarps && before <= target && target - before < warps.own;
  const int warp = (__ffs(static_cast<int>(__ballot_sync(0xffffffffu, there))) - 1) & (kWarps - 1);
  before = __shfl_sync(0xffffffffu, before, warp);
  const int each = (part.vectors + kThreads - 1) / kThreads, shift = (warp - team.warp) * part.vectors;
  const auto visit = [&](auto&& take) {
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
      const int at = team.thread * each + i;
      if (at >= part.vectors) break;
      const uint4 vec = ptx::load_shared(part.address + 16 * (at + shift));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const float x = element<T>(vec, e);
        take(x, part.token(at + shift, e), measure(x, part.token(at + shift, e)));
      }
    }
  };
  uint64_t sum = 0, total;
  visit([&](float, int, uint64_t value) { sum += value; });
  ptx::reconverge(team.zero);
  before += next_block_prefix(team, sum, total);  // The exchange of `sums` was a barrier.
  if (before <= target && target - before < sum) {
    visit([&](float x, int token, uint64_t value) {
      if (before <= target && target - before < value) found = Found{true, x, token};
      before += value;
    });
  }
  ptx::reconverge(team.zero);
  return found;
}

// Sends a word to all CTAs. It is there behind the next barrier of the team.
GVR_DEVICE void send_word(const Team& team, uint32_t word) {
  const uint32_t address = ptx::shared_address(&team.smem().word);
  for (int rank = 0; rank < team.ctas; ++rank) ptx::store_to_rank(address, rank, word);
}

// The set of the values above `least`, and of those equal to it up to number last_of(how many there are). The
// latter lie at `steps`.
template <typename T, typename LastOf>
GVR_DEVICE KeptSet set_through(Team& team, const RowShare<T>& part, float least, uint64_t steps,
                               LastOf last_of) {
  KeptSet set{least, 0xffffffffu};
  const auto equal = [&](float x, int) -> uint64_t { return x == set.least; };
  const WarpSums sums = count_elements(team, part, steps, equal);
  const Found found = find_token(team, part, sums, last_of(sums.all.word[0]), equal);
  if (found.here) send_word(team, found.token);
  team.sync();
  set.token = team.smem().word;
  return set;
}

constexpr int kGroups = kThreads / 4;  // of neighbouring threads

// Puts half of this thread's key to `maxima`, or of the greatest of its group's, and returns the key.
GVR_DEVICE uint32_t put_maximum(const Team& team, uint32_t key, bool by_group) {
  if (by_group) {
    key = max(key, __shfl_xor_sync(0xffffffffu, key, 1));
    key = max(key, __shfl_xor_sync(0xffffffffu, key, 2));
  }
  team.smem().maxima[by_group ? team.thread / 4 : team.thread] = key / 2;
  return key;
}

// The least of this warp's keys that fewer than `share` of those in `maxima` exceed. `own` is one of them. A
// block barrier stands before. Halves differ by less than 2^31, so the sign of their difference is a
// comparison in one instruction; of keys with one half none exceeds the other.
GVR_DEVICE uint32_t find_reached(const Team& team, bool by_group, uint32_t own, int share) {
  const int count = by_group ? kGroups : kThreads;
  const uint32_t half = own / 2;
  uint32_t greater = 0;
#pragma unroll 4
  for (int i = 0; i < count; i += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(&team.smem().maxima[i]);
    greater += ((half - others.x) >> 31) + ((half - others.y) >> 31) + ((half - others.z) >> 31) +
               ((half - others.w) >> 31);
  }
  ptx::reconverge(team.zero);
  const bool reaches = static_cast<int>(greater) < share;
  return __reduce_min_sync(0xffffffffu, reaches ? own : kMaxKey);
}

// A key that the keys of `share` threads, or of so many groups, reach, and few others. Block barriers stand
// before and within.
GVR_DEVICE uint32_t reached_by(const Team& team, uint32_t key, bool by_group, int share) {
  if (team.thread == 0) team.smem().word = kMaxKey;
  ptx::reconverge(team.zero);
  key = put_maximum(team, key, by_group);
  ptx::reconverge(team.zero);
  __syncthreads();
  const uint32_t reached = find_reached(team, by_group, key, share);
  if (team.lane == 0) atomicMin(&team.smem().word, reached);
  ptx::reconverge(team.zero);
  __syncthreads();
  return team.smem().word;
}

// Calls visit(place, token, value) for the kept tokens that lie in this warp's part of the row, where `place`
// tokens are before them.
template <typename T, typename Visit>
GVR_DEVICE void visit_kept(const Team& team, const RowShare<T>& part, const KeptSet& set, uint64_t place,
                           Visit visit) {
#pragma unroll 1
  for (int j = team.lane; j - team.lane < part.vectors; j += 32) {
    const uint4 vec = part.load(j);
    uint32_t kept = 0;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (set.has(element<T>(vec, e), part.token(j, e))) kept |= 1u << e;
    }
    ptx::reconverge(team.zero);
    const uint32_t upto = ptx::inclusive_scan(static_cast<uint32_t>(__popc(kept)));
    uint64_t at = place + upto - __popc(kept);
    place += __shfl_sync(0xffffffffu, upto, 31);
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if ((kept >> e & 1) != 0) visit(at++, part.token(j, e), element<T>(vec, e));
    }
  }
  ptx::reconverge(team.zero);
}

}  // namespace gvr_topk::sampling
