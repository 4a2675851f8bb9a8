// Phases 3 and 4. Collect gathers the candidates in index order, without ballots or atomics (paper, section
// 4.2.3). Refine snaps to the exact k-th value, and selects (section 4.2.4).
#pragma once

#include "cluster/row_options.cuh"
#include "core/part_stream.cuh"
#include "paper_gvr/verify.cuh"

namespace gvr_topk::paper_gvr {

// Calls visit(i) for this thread's candidates: a warp owns a contiguous run, and a lane every 32nd of it.
template <typename T, typename Visit>
GVR_DEVICE void for_each_candidate(const PaperContext<T>& ctx, int count, Visit visit) {
  const int run = (count + kThreads - 1) / kThreads * 32, end = min((ctx.warp + 1) * run, count);
#pragma unroll 4
  for (int i = ctx.warp * run + ctx.lane; i < end; i += 32) visit(i);
}

// Collects the elements whose bits the last pass has set: their positions, and then their keys. The count
// cache (`result.before`) says where this warp's positions go.
template <typename T>
GVR_DEVICE void collect(const PaperContext<T>& ctx, const SearchResult& result) {
  const int words = (ctx.stream.length + kTileElements - 1) / kTileElements * (kTileElements / 32);
  const int each = (words + 31) / 32 | 1;  // Odd, so that lanes read from different banks.
  const int first = min(ctx.lane * each, words), last = min(first + each, words);
  const uint32_t* word = ctx.own.bitmap + ctx.stream.begin / 32 + first;
  uint32_t count = 0;
#pragma unroll 4
  for (int w = 0; w < last - first; ++w) count += __popc(word[w]);
  ptx::reconverge(ctx.zero);  // The last lanes have fewer words.
  int32_t* const end = ctx.own.position + result.before + ptx::inclusive_scan(count);
  int position = ctx.stream.begin - ctx.stream.lead + 32 * first - 1;
  uint32_t bits = count > 0 ? *word : 0;
  // A turn takes a candidate or an empty word, so that lanes do not wait for each other at every word. What
  // an empty word stores is overwritten by the next candidate.
#pragma unroll 1
  for (int32_t* next = end - count; next != end;) {
    *next = position + __ffs(bits);
    next += bits != 0;
    bits &= bits - 1;
    if (bits == 0 && next != end) {
      bits = *++word;
      position += 32;
    }
  }
  __syncthreads();
  for_each_candidate(ctx, result.count, [&](int i) {
    ctx.own.key[i] = order_key(to_float(__ldg(ctx.row.data + ctx.own.position[i])));
  });
}

// Finds the exact k-th key from the lower edge of the bin that holds it; bins are even in value. Where more
// than kRankDirectly candidates lie between that edge and the k-th key, bins even in key lead to it.
template <typename T>
GVR_DEVICE KeyOfRank snap(const PaperContext<T>& ctx, int count) {
  const auto for_each = [&](auto visit) {
    for_each_candidate(ctx, count, [&](int i) { visit(ctx.own.key[i]); });
  };
  uint32_t least = kMaxKey, greatest = kAbsentKey;  // of the finite keys; of all if all are selected
  for_each([&](uint32_t x) {
    if (!is_finite_key(x) && count != ctx.k) return;
    least = min(least, x);
    greatest = max(greatest, x);
  });
  block_extremes(ctx, least, greatest);
  if (count == ctx.k) return KeyOfRank{least, 0};
  const float low = key_to_float(least), high = key_to_float(greatest);  // NaN if no key is finite
  constexpr uint32_t kBins = decltype(ctx.own.bins)::kBins;
  float scale = __fdiv_rn(static_cast<float>(kBins), __fsub_rn(high, low));
  const bool usable = is_finite(scale) && scale > 0.0f;
  if (!usable) scale = 0.0f;  // Then all candidates fall into the lowest bin.
  const auto bin_of = [&](uint32_t x) -> uint32_t {
    const float value = fmaxf(fminf(key_to_float(x), high), low);  // NaN falls into the highest bin.
    return min(__float2uint_rz(__fmul_rn(__fsub_rn(value, low), scale)), kBins - 1);
  };
  const BinHit hit = locate_items(ctx, ctx.own.bins, ctx.k,
                                  [&](auto add) { for_each([&](uint32_t x) { add(bin_of(x)); }); });
  const uint32_t rank = ctx.k - hit.above;
  const uint32_t edge =
      usable ? order_key(__fadd_rn(low, __fdiv_rn(static_cast<float>(hit.bin), scale))) : kZeroKey;
  const bool few = hit.count <= kRankDirectly;
  least = kMaxKey, greatest = kAbsentKey;  // of the bin's members
  for_each([&](uint32_t x) {
    const uint32_t bin = bin_of(x);
    if (bin == hit.bin) least = min(least, x), greatest = max(greatest, x);
    // The list takes the bin's members, and what rounding has put between them and the computed edge.
    if (few && (x > edge ? bin <= hit.bin : bin >= hit.bin)) add_small(*ctx.shared, x);
  });
  __syncthreads();
  ptx::reconverge(ctx.zero);  // Lanes have added different keys.
  const int listed = static_cast<int>(ctx.shared->few_count);
  if (!few || listed > kRankDirectly) return key_in_range(ctx, ctx.own.bins, least, greatest, rank, for_each);
  const bool higher = ctx.lane < listed && bin_of(ctx.shared->few_keys[ctx.lane]) > hit.bin;
  return key_in_list(ctx, listed, rank + __popc(__ballot_sync(0xffffffffu, higher)), edge, 0);
}

// Writes the selected positions in ascending order, and returns how many there are. Of the elements equal to
// the k-th, the first ones are selected, or none if they are masked and dropped.
template <typename T>
GVR_DEVICE int partition(const PaperContext<T>& ctx, const LaunchTraits& traits, int count, uint32_t kth,
                         const OutputWriter& output) {
  constexpr uint32_t kLow = 0xffffu;
  uint32_t counts = 0;  // elements above the k-th key; from bit 16 on, elements equal to it
  for_each_candidate(ctx, count, [&](int i) {
    counts += ctx.own.key[i] > kth ? 1 : ctx.own.key[i] == kth ? kLow + 1 : 0;
  });
  const BlockSum sum = block_sum(ctx, counts);
  const int items = count_items(traits, ctx.k, kth, sum.all & kLow);
  OutputCursor cursor{0, items - (sum.all & kLow)};
  cursor.advance(sum.earlier & kLow, sum.earlier >> 16);
  // Warps own contiguous runs of candidates, as in `for_each_candidate`.
  const int runs = (count + kThreads - 1) / kThreads;
#pragma unroll 1
  for (int i = ctx.warp * runs * 32 + ctx.lane, run = 0; run < runs; i += 32, ++run) {
    const uint32_t key = i < count ? ctx.own.key[i] : kAbsentKey;
    cursor.put_lanes(key > kth, key == kth, ctx.lane,
                     [&](uint32_t item) { output.put(item, ctx.own.position[i]); });
  }
  return items;
}

}  // namespace gvr_topk::paper_gvr
