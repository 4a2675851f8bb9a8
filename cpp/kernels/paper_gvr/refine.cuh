// Phases 3 and 4. Collect gathers the candidates in index order, without ballots or atomics (paper, section
// 4.2.3). Refine snaps to the exact k-th value, and selects (section 4.2.4).
#pragma once

#include "paper_gvr/verify.cuh"

namespace gvr_topk::paper_gvr {

// Collects the positions of the elements whose bits the last pass has set. The count cache (`result.before`)
// says where this warp's positions go.
template <typename T>
GVR_DEVICE void collect(const PaperContext<T>& ctx, const SearchResult& result) {
  const int words = (ctx.stream.length + kTileElements - 1) / kTileElements * (kTileElements / 32);
  const int each = (words + 31) / 32 | 1;  // Odd, so that lanes read from different banks.
  const int first = min(ctx.lane * each, words), last = min(first + each, words);
  const uint32_t* word = ctx.own.bitmap + ctx.stream.begin / 32 + first;
  uint32_t here = 0;
#pragma unroll 4
  for (int w = 0; w < last - first; ++w) here += __popc(word[w]);
  ptx::reconverge(ctx.zero);  // The last lanes have fewer words.
  int32_t* const end = ctx.own.list.position + result.before + ptx::inclusive_scan(here);
  int position = ctx.stream.first_position() + 32 * first - 1;
  uint32_t bits = here > 0 ? *word : 0;
  // A turn takes a candidate or an empty word, so that lanes do not wait for each other at every word. What
  // an empty word stores is overwritten by the next candidate.
#pragma unroll 1
  for (int32_t* next = end - here; next != end;) {
    *next = position + __ffs(bits);
    next += bits != 0;
    bits &= bits - 1;
    if (bits == 0 && next != end) {
      bits = *++word;
      position += 32;
    }
  }
  __syncthreads();
}

// Finds the exact k-th key from the lower edge of the bin that holds it; bins are even in value. Where more
// than kRankDirectly candidates lie between that edge and the k-th key, bins even in key lead to it.
template <typename T>
GVR_DEVICE KeyOfRank snap(const PaperContext<T>& ctx, int count) {
  auto& list = ctx.own.list;
  const auto for_each = [&](auto visit) { list.for_each_key(ctx.thread, count, visit); };
  const KeyStatistics finite = key_statistics(ctx, [&](auto visit) {  // of all keys if all are selected
    list.load_keys(ctx, count, [&](uint32_t x) {
      if (is_finite_key(x) || (count == ctx.k && x != kAbsentKey)) visit(x);
    });
  });
  if (count == ctx.k) return KeyOfRank{finite.least, 0};
  // NaN if no key is finite.
  const float low = key_to_float(finite.least), high = key_to_float(finite.greatest);
  constexpr uint32_t kBins = decltype(ctx.own.bins)::kBins;
  float scale = __fdiv_rn(static_cast<float>(kBins), __fsub_rn(high, low));
  const bool usable = is_finite(scale) && scale > 0.0f;
  if (!usable) scale = 0.0f;  // Then all candidates fall into the lowest bin.
  const auto bin_of = [&](uint32_t x) -> uint32_t {
    const float value = fmaxf(fminf(key_to_float(x), high), low);  // NaN falls into the highest bin.
    return min(__float2uint_rz(__fmul_rn(__fsub_rn(value, low), scale)), kBins - 1);
  };
  const BinHit hit = locate_items(ctx, ctx.own.bins, ctx.k, [&](auto add) {
    for_each([&](uint32_t x) { add(max(bin_of(x), x == kAbsentKey ? kBins : 0)); });
  });
  const uint32_t rank = ctx.k - hit.above;
  const uint32_t edge =
      usable ? order_key(__fadd_rn(low, __fdiv_rn(static_cast<float>(hit.bin), scale))) : kZeroKey;
  if (hit.count <= kRankDirectly) {
    // The list takes the bin's members, and what rounding has put between them and the computed edge. All of
    // them lie within the bin and its neighbours, whose edges are off by far less than a bin;
    // `width` may be denormal, which this build does not flush to zero.
    const float bin = static_cast<float>(hit.bin), width = (high - low) / kBins;
    const uint32_t least = usable && hit.bin > 0 ? order_key(low + (bin - 1) * width) - 1 : kMinKey;
    const uint32_t greatest =
        usable && hit.bin < kBins - 1 ? order_key(low + (bin + 2) * width) + 1 : kMaxKey;
    uint32_t near = 0, bit = 1;  // bits of the visits whose keys may be listed
    for_each([&](uint32_t x) {
      if (x - least <= greatest - least) near |= bit;
      bit *= 2;
    });
#pragma unroll 1
    for (; near != 0; near &= near - 1) {
      const uint32_t x = list.key_of_visit(ctx.thread, __ffs(near) - 1);
      const uint32_t bin_of_x = bin_of(x);
      if (x > edge ? bin_of_x <= hit.bin : bin_of_x >= hit.bin) add_small(*ctx.shared, x);
    }
    __syncthreads();
    ptx::reconverge(ctx.zero);  // Lanes have added different keys.
    const int listed = static_cast<int>(ctx.shared->few_count);
    if (listed <= kRankDirectly) {
      const bool higher = ctx.lane < listed && bin_of(ctx.shared->few_keys[ctx.lane]) > hit.bin;
      return key_in_list(ctx, listed, rank + __popc(__ballot_sync(0xffffffffu, higher)), edge, 0);
    }
  }
  const KeyStatistics members = key_statistics(ctx, [&](auto visit) {
    for_each([&](uint32_t x) {
      if (x != kAbsentKey && bin_of(x) == hit.bin) visit(x);
    });
  });
  return key_in_range(ctx, ctx.own.bins, members.least, members.greatest, rank, for_each);
}

}  // namespace gvr_topk::paper_gvr
