// Every rule about which kernel runs: the gate, the per-row rule, and the launch plan. The rules are pure
// functions of plain values, usable on host and device. They are compiled into the CUDA library and into a
// small C library that Python calls, so there is no second copy of a rule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gvr_topk/params.h"

#if defined(__CUDACC__)
#define GVR_TOPK_HOST_DEVICE __host__ __device__
#else
#define GVR_TOPK_HOST_DEVICE
#endif

namespace gvr_topk {

// The way in which a call is served. All paths select the same items, and differ in time only.
enum class Path : int32_t {
  kAuto = 0,         // the k-th value is predicted from the last step's state where the gate allows it
  kPaperGvr = 1,     // the paper's four-phase kernel
  kNoHint = 2,       // the state is not read: the k-th value is estimated from a sample of the row
  kRadixRounds = 3,  // nothing is estimated: radix rounds over the keys, which settle every missed estimate
};

// Longest row the kernels are built and tested for.
constexpr int64_t kMaxWidth = int64_t{1} << 21;
// Most rows of one call: with the largest cluster for each row, the blocks still fit the grid's first
// dimension, 2^31 - 1.
constexpr int64_t kMaxRows = int64_t{1} << 26;
// Most rows of one request: its token and its draft tokens.
constexpr int64_t kMaxNextN = 1024;
// Largest page of a page table: positions inside a page are 32-bit numbers.
constexpr int64_t kMaxPageSize = (int64_t{1} << 31) - 1;

// Widest buffer of the paper's kernel: its bitmap of a row must fit shared memory.
constexpr int64_t kPaperMaxWidth = 262144;
// Oldest architecture the library holds code for (Hopper; the published kernel needs 100).
constexpr int32_t kMinArch = 90;

// The architectures that there are kernels for, and those that this library is compiled for.
#define GVR_TOPK_ALL_ARCHS "90a 100f 120f"
#ifndef GVR_TOPK_BUILT_FOR
#define GVR_TOPK_BUILT_FOR GVR_TOPK_ALL_ARCHS
#endif
constexpr std::string_view kBuiltFor = GVR_TOPK_BUILT_FOR;

// Whether code that is compiled for one of these architectures runs on a GPU of compute capability
// arch / 10.0. The library holds machine code alone, which no driver translates for other GPUs. Code of an
// architecture with the letter a runs on this one alone; other code also runs on later ones of the same major
// number. An exception is 10.1, which is no member of the family 100f.
constexpr bool has_code(int32_t arch, std::string_view built_for = kBuiltFor) {
  int32_t number = 0;
  for (size_t i = 0; i <= built_for.size(); ++i) {
    const char next = i < built_for.size() ? built_for[i] : ' ';
    if (next >= '0' && next <= '9') {
      number = 10 * number + (next - '0');
      continue;
    }
    const bool same_family = next != 'a' && number / 10 == arch / 10 && number <= arch && arch != 101;
    if (number > 0 && (number == arch || same_family)) return true;
    number = 0;
  }
  return false;
}
static_assert(has_code(kMinArch, GVR_TOPK_ALL_ARCHS) && !has_code(110, GVR_TOPK_ALL_ARCHS));

// ---------------------------------------------------------------- gate (canUseHeuristic)

// Whether the last step's state is used for a row, or why not: the first column of the statistics.
enum class HintReason : int32_t {
  kUsed = 0,
  kDisabled = 1,   // the configuration or the path asks for no hint
  kNoState = 2,    // the call has no state
  kNoSlot = 3,     // the row has no slot: a padding row, or a request without one
  kShortRow = 4,   // the row is no longer than k, so no selection is needed
  kTooShort = 5,   // the row is shorter than the configuration allows
  kTooLong = 6,    // the row is longer than the configuration allows
  kFirstStep = 7,  // no earlier step has left a state in the slot
};

struct HintQuery {
  bool enabled;
  bool has_state;
  int64_t slot;
  int64_t slots;
  int64_t length;  // the row's own, not the width of the buffer that it lies in
  int64_t k;
  int64_t min_length;  // limits of the configuration; a launch has none, because the host
  int64_t max_length;  // gives no slot to requests outside of these limits
  bool known;          // the slot holds a state that a step has left
};

// The gate: one rule for one row, for the kernels, the CPU implementation, the replay and `doctor`.
GVR_TOPK_HOST_DEVICE constexpr HintReason can_use_heuristic(const HintQuery& row) {
  if (!row.enabled) return HintReason::kDisabled;
  if (!row.has_state) return HintReason::kNoState;
  if (row.length <= row.k) return HintReason::kShortRow;
  if (row.slot < 0 || row.slot >= row.slots) return HintReason::kNoSlot;
  if (row.length < row.min_length) return HintReason::kTooShort;
  if (row.length > row.max_length) return HintReason::kTooLong;
  return row.known ? HintReason::kUsed : HintReason::kFirstStep;
}

// ---------------------------------------------------------------- plan

// The kernel that a plan launches.
enum class Family : int32_t {
  kPaperGvr = 0,   // the paper's four phases, one CTA per row
  kResident = 1,   // a cluster holds the row in registers
  kStreaming = 2,  // a longer row streams through a cluster, which keeps candidates
  kFallback = 3,   // any k and architecture; also finishes rows that other kernels hand over
  kSmallRow = 4,   // one CTA holds a short row in registers
};

constexpr int32_t kClusterThreads = 512;
// Elements of a row that one thread holds in registers: kernels are compiled for these numbers.
constexpr int32_t kMinValuesPerThread = 8;
constexpr int32_t kValuesPerThread = 16;
constexpr int32_t kWideValuesPerThread = 32;
constexpr int32_t kMaxValuesPerThread = 64;
constexpr int32_t kMaxClusterSize = 16;
// Tiles per warp that are being loaded at once while a long row streams through shared memory. They take 96
// KB, which keeps DRAM busy. Consumer Blackwell (120) has 99 KB for a block, and loads one tile at a time.
constexpr int32_t kRingDepth = 3;

struct PlanInput {
  int64_t rows;
  int64_t width;
  int64_t k;
  Dtype dtype;
  Path path;
  int32_t sm_count;  // SMs that the stream's context may use: all of the device, or fewer in a green context
  int32_t arch;
  int32_t forced_ctas;  // 0: decide; otherwise CTAs per row of the cluster family (1, 2, 4, 8, 16)
  int32_t max_ctas;     // 0: no cap; otherwise CTAs per row at most (1, 2, 4, 8, 16), see choose_ctas
  int32_t lead;         // elements that kernels may read ahead of a row: see lead_of_rows
};

struct Plan {
  Path path;
  Family family;
  int32_t ctas_per_row;
  int32_t threads;
  int32_t values_per_thread;
  int32_t list_capacity;  // candidate keys one CTA can receive
  int32_t ring_depth;     // tiles per warp that are being loaded at once where a row streams
  // Results of one row that are staged in shared memory: min(k, width), because a row that is no longer than
  // k is written without a selection.
  int32_t staged;
};

GVR_TOPK_HOST_DEVICE constexpr int32_t log2_of(int32_t power_of_two) {
  int32_t log2 = 0;
  while ((1 << log2) < power_of_two) ++log2;
  return log2;
}

// Elements of one warp's part of a row. Warps own contiguous spans, so that (CTA, warp, position) is index
// order. Spans are whole groups of 32 lanes x 16 bytes. The kernels compute this too, so it shifts instead of
// dividing.
GVR_TOPK_HOST_DEVICE constexpr int32_t warp_span(int32_t n, int32_t log2_ctas, int32_t element_bytes) {
  const int32_t log2_warps = log2_ctas + log2_of(kClusterThreads / 32);
  const int32_t part = (n + (1 << log2_warps) - 1) >> log2_warps;
  const int32_t group = 32 * 16 / element_bytes;
  return (part + group - 1) / group * group;
}

GVR_TOPK_HOST_DEVICE constexpr int32_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// Bytes of a line of memory, at a multiple of which every allocation starts.
constexpr int32_t kLineBytes = 128;

// Whether every row starts at a multiple of `bytes`. `stride`: bytes from one row to the next.
inline bool are_aligned(const void* logits, int64_t rows, int64_t stride, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(logits) % bytes == 0 && (rows <= 1 || stride % bytes == 0);
}

// `PlanInput::lead`. Rows that do not start at a 16-byte boundary are read from that of a line on, so that
// registers hold up to this many elements ahead of a row. `aligned`: every row starts at a 16-byte boundary.
// In the streaming kernel, and in rows of less than kProbeElements columns, aligned rows may have leads as
// well, and there is room for them.
GVR_TOPK_HOST_DEVICE constexpr int32_t lead_of_rows(bool aligned, Dtype dtype) {
  return aligned ? 0 : kLineBytes / element_bytes(dtype) - 1;
}

// Consumer Blackwell offers neither clusters of 16, which need the non-portable size, nor the 227 KB of
// shared memory that the ring and the paper's kernel need.
GVR_TOPK_HOST_DEVICE constexpr bool is_small_arch(int32_t arch) { return arch >= 120; }
GVR_TOPK_HOST_DEVICE constexpr int32_t max_cluster_size(int32_t arch) { return is_small_arch(arch) ? 8 : 16; }

// Whether a GPU of this architecture can launch a kernel family; other kernels are compiled to a trap.
GVR_TOPK_HOST_DEVICE constexpr bool has_family(Family family, int32_t arch) {
  return !is_small_arch(arch) || (family != Family::kStreaming && family != Family::kPaperGvr);
}
// Most elements of a row that one thread of the resident kernel holds.
GVR_TOPK_HOST_DEVICE constexpr int32_t max_resident_values(int32_t arch) {
  return is_small_arch(arch) ? kValuesPerThread : kWideValuesPerThread;
}

// Longer rows are shared by several CTAs, however many rows there are.
constexpr int64_t kMaxElementsPerCta = int64_t{1} << 20;
constexpr int64_t kMaxElementsPerSmallCta = int64_t{1} << 18;
GVR_TOPK_HOST_DEVICE constexpr int64_t max_elements_per_cta(int32_t arch) {
  return is_small_arch(arch) ? kMaxElementsPerSmallCta : kMaxElementsPerCta;
}

// The reason why a call cannot be planned as requested.
enum class PlanProblem : int32_t {
  kNone = 0,
  kCtas = 1,
  kPaperK = 2,
  kPaperWidth = 3,
  kPaperArch = 4,
  kMaxCtas = 5,
  kCtasAboveMax = 6,
};

// Values of k that the paper's kernel is compiled for.
GVR_TOPK_HOST_DEVICE constexpr bool paper_supports_k(int64_t k) { return k == 512 || k == 1024 || k == 2048; }

GVR_TOPK_HOST_DEVICE constexpr PlanProblem plan_problem(const PlanInput& in) {
  const int32_t cap = in.max_ctas;
  if (cap < 0 || cap > kMaxClusterSize || (cap & (cap - 1)) != 0) return PlanProblem::kMaxCtas;
  const int32_t c = in.forced_ctas;
  if (cap > 0 && c > cap) return PlanProblem::kCtasAboveMax;
  const bool size_exists = c > 0 && (c & (c - 1)) == 0 && c <= max_cluster_size(in.arch);
  if (c != 0 && !(size_exists && in.width <= c * max_elements_per_cta(in.arch))) return PlanProblem::kCtas;
  if (in.path != Path::kPaperGvr) return PlanProblem::kNone;
  if (!paper_supports_k(in.k)) return PlanProblem::kPaperK;
  if (in.width > kPaperMaxWidth) return PlanProblem::kPaperWidth;
  if (!has_family(Family::kPaperGvr, in.arch)) return PlanProblem::kPaperArch;
  return PlanProblem::kNone;
}

// Rows of buffers up to kSmallRowWidth take one CTA, because two or more are not faster. Where there are so
// many rows that clusters would have two CTAs, rows of buffers up to kMaxSmallRowWidth take one CTA too. One
// CTA can hold no more. Elements ahead of unaligned rows count as well, as they take registers.
constexpr int64_t kSmallRowWidth = 16384;
constexpr int64_t kMaxSmallRowWidth = int64_t{kClusterThreads} * kMaxValuesPerThread;

// Buffers of captured CUDA graphs are as wide as the longest row that an engine admits, and the plan is made
// for that width. Where a row is short enough, the cluster's first CTA selects from it alone, as in a buffer
// of the row's own width (cpp/kernels/small_row/solo_row.cuh). In a buffer up to kSmallRowWidth a cluster
// exists only if the caller asks for it or rows are not aligned, and it then shares its rows. k is limited
// because the selected positions must fit in shared memory beside what clusters keep there.
constexpr int32_t kMaxSoloK = 2048;
// The longest row that the first CTA selects from alone. It is shorter where the cluster holds rows in
// registers than where rows stream: for longer rows the cluster is faster (measured on an H200).
GVR_TOPK_HOST_DEVICE constexpr int32_t longest_solo_row(Family family) {
  return family == Family::kResident    ? kClusterThreads * kValuesPerThread
         : family == Family::kStreaming ? static_cast<int32_t>(kSmallRowWidth)
                                        : 0;
}
// `lead`: elements that are read ahead of the row (`PlanInput::lead`), for which its registers have to have
// room.
GVR_TOPK_HOST_DEVICE constexpr bool is_solo_row(Family family, int32_t width, int32_t length, int32_t k,
                                                int32_t lead = 0) {
  return length > k && length <= longest_solo_row(family) - lead && width > kSmallRowWidth && k <= kMaxSoloK;
}

// Elements that each thread of the first CTA holds of a row that this CTA selects from alone.
GVR_TOPK_HOST_DEVICE constexpr int32_t values_of_solo_row(int32_t length) {
  return length <= kClusterThreads * kValuesPerThread ? kValuesPerThread : kWideValuesPerThread;
}

// CTAs per row. All rows together take at most half of the SMs: a cluster lives in one GPC of 16 or 18 SMs,
// so large clusters never fill the chip, and a second wave costs more than halving the cluster. Clusters of
// two do fill the chip, and where even those do not fit, each row takes one CTA. A row that is too long for
// one CTA takes more CTAs nevertheless. In the sweep (eval/results/h200/tune.json) no other
// size is faster by more than a twentieth. `max_ctas` caps the size, because a cluster starts only when one
// GPC has room for all of it: 16 CTAs wait for a whole free GPC, and while another kernel occupies 32 SMs or
// more they wait until that kernel ends; 8 CTAs still start beside 64 occupied SMs and 4 beside 96 (measured
// on an H200). A row too wide for the cap takes the smallest size that holds it.
GVR_TOPK_HOST_DEVICE constexpr int32_t choose_ctas(const PlanInput& in) {
  if (in.forced_ctas > 0) return in.forced_ctas;
  const int64_t held = in.width + in.lead;
  if (held <= kSmallRowWidth) return 1;
  const int32_t largest = max_cluster_size(in.arch);
  const int32_t most = in.max_ctas > 0 && in.max_ctas < largest ? in.max_ctas : largest;
  int32_t ctas = most;
  while (ctas > 2 && in.rows * ctas > in.sm_count / 2) ctas /= 2;
  if (in.rows * ctas > in.sm_count || (ctas == 2 && held <= kMaxSmallRowWidth)) ctas = 1;
  while (ctas < largest && in.width > ctas * max_elements_per_cta(in.arch)) ctas *= 2;
  return ctas;
}

// Largest k of the streaming kernel, and the largest for each CTA of a row. The candidate buffer of one CTA
// has room for its share of what is selected, if shares are even, and for a wide interval besides. With twice
// the share buffers fill up, and the fallback kernel is faster (measured on an H200).
constexpr int64_t kStreamingMaxK = 16384;
constexpr int64_t kStreamingMaxShare = 2048;
constexpr int64_t kWideInterval = 2048;

// Shared memory that one block may have, in bytes.
GVR_TOPK_HOST_DEVICE constexpr int64_t shared_bytes_of_block(int32_t arch) {
  return (is_small_arch(arch) ? 99 : 227) * 1024;
}

// Whether a block of the kernel of short rows has room for its selected positions, of two bytes each, beside
// what it always needs.
constexpr int64_t kSmallRowFixedBytes = 37 * 1024;
GVR_TOPK_HOST_DEVICE constexpr bool has_small_row_memory(const PlanInput& in) {
  const int64_t staged = in.k < in.width ? in.k : in.width;
  return kSmallRowFixedBytes + 2 * staged <= shared_bytes_of_block(in.arch);
}

// `per_thread`: elements that each thread would hold if registers held the row.
GVR_TOPK_HOST_DEVICE constexpr Family choose_family(const PlanInput& in, int32_t ctas, int64_t per_thread) {
  if (in.path == Path::kPaperGvr) return Family::kPaperGvr;
  if (in.path == Path::kRadixRounds) return Family::kFallback;
  if (ctas == 1 && per_thread <= kMaxValuesPerThread && has_small_row_memory(in)) return Family::kSmallRow;
  if (per_thread <= max_resident_values(in.arch)) return Family::kResident;
  const bool has_room = in.k <= kStreamingMaxK && in.k <= ctas * kStreamingMaxShare;
  return has_room && has_family(Family::kStreaming, in.arch) ? Family::kStreaming : Family::kFallback;
}

// Elements per thread of the smallest instantiation that holds the row in registers. Other kernels work in
// steps.
GVR_TOPK_HOST_DEVICE constexpr int32_t choose_values_per_thread(Family family, int64_t per_thread) {
  if (family != Family::kResident && family != Family::kSmallRow) return kValuesPerThread;
  if (family == Family::kSmallRow && per_thread <= kMinValuesPerThread) return kMinValuesPerThread;
  if (per_thread <= kValuesPerThread) return kValuesPerThread;
  return per_thread <= kWideValuesPerThread ? kWideValuesPerThread : kMaxValuesPerThread;
}

// Keys that the CTAs of a cluster can list together.
constexpr int32_t kLongList = 16384;

GVR_TOPK_HOST_DEVICE constexpr Plan make_plan(const PlanInput& in) {
  Plan plan{};
  plan.path = in.path;
  plan.ctas_per_row = plan.path == Path::kPaperGvr ? 1 : choose_ctas(in);
  plan.threads = kClusterThreads;
  const int64_t threads = int64_t{plan.ctas_per_row} * kClusterThreads;
  const int64_t per_thread = (in.width + in.lead + threads - 1) / threads;
  plan.family = choose_family(in, plan.ctas_per_row, per_thread);
  plan.values_per_thread = choose_values_per_thread(plan.family, per_thread);
  // In a streaming cluster of few CTAs, few CTAs share the list, and the candidate buffer needs the memory
  // more. In the paper's kernel, which hardly ever lists keys, the cache does.
  plan.list_capacity = plan.family != Family::kStreaming ? kLongList : plan.ctas_per_row <= 4 ? 8192 : 11264;
  if (plan.family == Family::kPaperGvr) plan.list_capacity = 4096;
  plan.ring_depth = kRingDepth;
  plan.staged = static_cast<int32_t>(in.k < in.width ? in.k : in.width);
  if (is_small_arch(in.arch)) {
    plan.list_capacity = 4096;
    plan.ring_depth = 1;
  }
  return plan;
}

// ---------------------------------------------------------------- prefill

// Threads of a block of the prefill kernel, and how many blocks share an SM.
constexpr int32_t kPrefillThreads = 256;
constexpr int32_t kPrefillCtasPerSm = 2;
// Largest k for which the prefill kernel collects candidates. For a larger k, radix rounds select from every
// row.
constexpr int64_t kPrefillMaxK = 2048;

// Shared memory of a block of the prefill kernel without its bitmap, which has one bit for each element of a
// row. The bitmap takes at most what is left of an SM's shared memory; longer rows take radix rounds.
constexpr int32_t kPrefillFixedBytes = 89 * 1024;
// Elements of two tiles, which a warp takes at a time.
constexpr int32_t kPrefillPairElements = 1024;
GVR_TOPK_HOST_DEVICE constexpr int32_t max_prefill_pairs(int32_t arch) {
  return static_cast<int32_t>((shared_bytes_of_block(arch) - kPrefillFixedBytes) * 8 / kPrefillPairElements);
}

// The prefill kernel of short rows: each thread of a block of 128, 256 or 512 threads holds
// kMaxValuesPerThread elements of the row. Smaller blocks share an SM, so that an SM has as many warps with
// every block size.
constexpr int32_t kLeastShortPrefillThreads = 128;

// Shared memory of such a block, without the staged results and the buffers where rows arrive: 32 bytes of
// bins for each thread, and 1024 bytes for everything else.
GVR_TOPK_HOST_DEVICE constexpr int64_t short_prefill_fixed_bytes(int64_t threads) {
  return 32 * threads + 1024;
}

GVR_TOPK_HOST_DEVICE constexpr int64_t short_prefill_row_bytes(int64_t threads, int64_t element_bytes) {
  return threads * kMaxValuesPerThread * element_bytes;
}

// Buffers in shared memory where rows arrive. Where there is room for two, a row is fetched before the
// previous row has been taken.
GVR_TOPK_HOST_DEVICE constexpr int64_t short_prefill_buffers(int64_t element_bytes) {
  return element_bytes < 4 ? 2 : 1;
}

// A window may start up to so many elements after a 16-byte boundary, and after the start of a line.
constexpr int64_t kMaxLead = 16 / 2 - 1;
constexpr int64_t kMaxLineLead = kLineBytes / 2 - 1;

struct PrefillPlan {
  int32_t ctas;          // blocks, each of which takes runs of neighbouring rows
  int32_t runs_per_cta;  // runs of each block
  int32_t bitmap_pairs;  // pairs of tiles of a row for which a block's bitmap has room
  bool lists;            // whether candidates are collected
  int32_t threads;       // of a block that holds its row in registers; 0: rows stream through shared memory
};

struct PrefillInput {
  int64_t rows;
  int64_t width;
  int64_t k;
  Dtype dtype;
  Path path;
  int32_t sm_count;
  int32_t arch;
  bool aligned;  // whether every row starts at a 16-byte boundary
  bool streams;  // whether rows stream, however short they are
};

GVR_TOPK_HOST_DEVICE constexpr int64_t shared_bytes_of_sm(int32_t arch) {
  return (is_small_arch(arch) ? 100 : 228) * 1024;
}

// Blocks that an SM has room for. Each block takes a kilobyte of shared memory more than it asks for.
GVR_TOPK_HOST_DEVICE constexpr int64_t blocks_of_sm(int64_t shared_bytes, int32_t arch) {
  return shared_bytes_of_sm(arch) / (shared_bytes + 1024);
}

// Threads of a block of the prefill kernel of short rows; 0: rows are too long for it, or must stream.
GVR_TOPK_HOST_DEVICE constexpr int32_t short_prefill_threads(const PrefillInput& in) {
  // In aligned rows, the elements between a 16-byte boundary and a window belong to the row's width.
  const int64_t longest = in.width + (in.aligned ? 0 : kMaxLead);
  if (in.streams) return 0;
  for (int32_t threads = kLeastShortPrefillThreads; threads <= kClusterThreads; threads *= 2) {
    if (longest <= threads * kMaxValuesPerThread) return threads;
  }
  return 0;
}

// Whether an SM has room for a block of this many threads whose registers hold a row.
GVR_TOPK_HOST_DEVICE constexpr bool has_short_prefill(int64_t threads, int64_t element_bytes, int32_t arch) {
  const int64_t rows = short_prefill_buffers(element_bytes) * short_prefill_row_bytes(threads, element_bytes);
  return blocks_of_sm(short_prefill_fixed_bytes(threads) + rows, arch) > 0;
}

// Rows of a run, so many at least where a block takes several runs.
constexpr int64_t kRowsOfPrefillRun = 8;

// Runs of each block. Where there are many rows the number is even, because rows that grow longer would
// otherwise leave the last blocks working alone.
GVR_TOPK_HOST_DEVICE constexpr int32_t runs_per_cta(int64_t rows, int64_t ctas, int64_t rows_of_run) {
  constexpr int32_t kMaxRunsPerCta = 4;
  const int64_t runs = rows / (ctas > 0 ? ctas * rows_of_run : 1);
  return runs < 2 ? 1 : runs < kMaxRunsPerCta ? 2 : kMaxRunsPerCta;
}

// A block takes few runs, because the first row of each run has no neighbour to be predicted from, which
// costs least where rows are short.
GVR_TOPK_HOST_DEVICE constexpr PrefillPlan make_prefill_plan(const PrefillInput& in) {
  PrefillPlan plan{};
  plan.threads = short_prefill_threads(in);
  const int64_t element = element_bytes(in.dtype), staged = 2 * (in.k < in.width ? in.k : in.width) + 16;
  int64_t bytes = short_prefill_fixed_bytes(plan.threads) + staged +
                  short_prefill_buffers(element) * short_prefill_row_bytes(plan.threads, element);
  if (blocks_of_sm(bytes, in.arch) == 0) plan.threads = 0;
  int64_t per_sm = plan.threads > 0 ? kClusterThreads / plan.threads : 0;
  if (plan.threads == 0) {
    const int64_t pairs_of_row = (in.width + kMaxLineLead + kPrefillPairElements - 1) / kPrefillPairElements;
    const int64_t most_pairs = max_prefill_pairs(in.arch);
    const int64_t pairs = pairs_of_row < most_pairs ? pairs_of_row : most_pairs;
    plan.bitmap_pairs = static_cast<int32_t>(pairs);
    plan.lists = in.path != Path::kRadixRounds && in.k <= kPrefillMaxK;
    bytes = kPrefillFixedBytes + pairs * kPrefillPairElements / 8;
    per_sm = kPrefillCtasPerSm;
  }
  const int64_t room = blocks_of_sm(bytes, in.arch);
  const int64_t most = in.sm_count * (room < 1 ? 1 : room < per_sm ? room : per_sm);
  plan.ctas = static_cast<int32_t>(in.rows < most ? in.rows : most);
  plan.runs_per_cta =
      runs_per_cta(in.rows, plan.ctas, plan.threads == kLeastShortPrefillThreads ? 3 : kRowsOfPrefillRun);
  return plan;
}

// ---------------------------------------------------------------- prefill in slices

// Shared memory of a block without its list, and of one chunk of the list. The list takes what
// kPrefillCtasPerSm blocks leave of an SM, or one block where no more fit.
constexpr int32_t kSliceFixedBytes = 76 * 1024;
constexpr int32_t kSliceChunkBytes = 256;
constexpr int32_t kMaxSliceChunks = 256;

struct SlicePlan {
  int32_t ctas;
  int32_t runs_per_cta;
  int32_t list_chunks;
};

GVR_TOPK_HOST_DEVICE constexpr SlicePlan make_slice_plan(int64_t rows, int32_t sm_count, int32_t arch) {
  SlicePlan plan{};
  const int32_t per_sm = is_small_arch(arch) ? 1 : kPrefillCtasPerSm;
  const int64_t room = shared_bytes_of_sm(arch) / per_sm - 1024 - kSliceFixedBytes;
  const int64_t chunks = room / kSliceChunkBytes, ctas = int64_t{sm_count} * per_sm;
  plan.list_chunks = static_cast<int32_t>(chunks < kMaxSliceChunks ? chunks : kMaxSliceChunks);
  plan.ctas = static_cast<int32_t>(rows < ctas ? rows : ctas);
  plan.runs_per_cta = runs_per_cta(rows, plan.ctas, kRowsOfPrefillRun);
  return plan;
}

// ---------------------------------------------------------------- blocks

// Consecutive scores that count as one block.
constexpr int64_t kBlockSize = 8;
// Most blocks of a row that are chosen, or selected in: a CTA holds all of their scores in registers.
constexpr int64_t kMaxChosenBlocks = 2048;
static_assert(kMaxChosenBlocks * kBlockSize == int64_t{kClusterThreads} * kWideValuesPerThread);
// Widest buffer in which one launch chooses blocks: a CTA has the keys of all blocks in shared memory, and
// then in registers. For a wider one, three launches and a workspace of one value for each block take its
// place.
constexpr int64_t kOneLaunchBlocksWidth = 262144;
static_assert(kOneLaunchBlocksWidth == kMaxSmallRowWidth * kBlockSize);
// Shared memory of a CTA beside the keys.
constexpr int64_t kBlocksFixedBytes = 49 * 1024;
// Bytes of the keys in a buffer of this width, in whole vectors.
GVR_TOPK_HOST_DEVICE constexpr int64_t block_keys_bytes(int64_t width) {
  return (width + 4 * kBlockSize - 1) / (4 * kBlockSize) * 16;
}
GVR_TOPK_HOST_DEVICE constexpr bool takes_one_blocks_launch(int64_t width, int32_t arch) {
  return width <= kOneLaunchBlocksWidth &&
         kBlocksFixedBytes + block_keys_bytes(width) <= shared_bytes_of_block(arch);
}
static_assert(takes_one_blocks_launch(kOneLaunchBlocksWidth, kMinArch));

// Whether the k largest scores of every row lie in its `block_k` chosen blocks. The newest block is always
// chosen. Each other chosen block has a score that ranks before all scores of the blocks that are not chosen:
// it is greater, or as great and earlier. So there must be k other blocks.
GVR_TOPK_HOST_DEVICE constexpr bool blocks_hold_topk(int64_t k, int64_t block_k) { return block_k > k; }

// ---------------------------------------------------------------- sampler

constexpr int32_t kSampleThreads = 256;
// Most tokens of a row that one CTA ranks: candidates of a draw, and what `topk_logprobs` returns.
constexpr int32_t kMaxRankedTokens = 1024;
constexpr int32_t kMaxSampleCtas = 8;  // the largest cluster that every GPU runs
// Shared memory of a CTA beside its part of the row.
constexpr int32_t kSampleFixedBytes = 9216;
// What a CTA may have in all; consumer Blackwell has less.
constexpr int32_t sample_most_bytes(int32_t arch) { return arch / 10 == 12 ? 101376 : 221184; }
// Bytes of the longest row.
constexpr int64_t max_sample_bytes(int32_t arch) {
  return int64_t{kMaxSampleCtas} * (sample_most_bytes(arch) - kSampleFixedBytes);
}
// A CTA that finishes a row alone needs so much where the row was.
constexpr int32_t kSampleLeastPart = 9216;
// A part of this size leaves room for three CTAs on an SM.
constexpr int32_t kSamplePartBytes = 65536;

// The launch of the sampler for rows of `vocabulary` elements of `element_bytes`.
struct SamplePlan {
  int32_t ctas = 1;              // of each row
  int32_t vectors_per_warp = 0;  // 0: the row fits no cluster
  int32_t shared_bytes = 0;
  int32_t streamed_ctas = 0;  // of each row in a launch ahead that streams rows of few candidates; 0: none
};

// Rows with top-k up to this may be streamed.
constexpr int32_t kMaxStreamedK = 128;
// Bytes of the longest row that is streamed. In longer ones a sample of this size would say too little.
constexpr int64_t kLongestStreamed = 1 << 20;
// Many rows are read once and not held, each by a CTA or a few.
constexpr int32_t streamed_sample_ctas(int64_t rows, int64_t vocabulary, int64_t row_bytes,
                                       int32_t sm_count) {
  constexpr int64_t kLeastVocabulary = 8192;
  if (vocabulary < kLeastVocabulary || row_bytes > kLongestStreamed || 3 * rows < sm_count) return 0;
  return rows <= sm_count ? 2 : 1;
}

constexpr SamplePlan make_sample_plan(int64_t rows, int64_t vocabulary, int32_t element_bytes,
                                      int32_t sm_count, int32_t arch) {
  const int64_t vectors = (vocabulary * element_bytes + 15) / 16;
  const auto bytes = [&](int32_t ctas) { return (vectors + ctas - 1) / ctas * 16; };
  SamplePlan plan;
  while (plan.ctas < kMaxSampleCtas &&
         (bytes(plan.ctas) > kSamplePartBytes ||
          (bytes(plan.ctas) > kSamplePartBytes / 16 && 2 * rows * plan.ctas <= sm_count))) {
    plan.ctas *= 2;
  }
  const int64_t warps = int64_t{plan.ctas} * kSampleThreads / 32;
  const int64_t each = (vectors + warps - 1) / warps;
  const int64_t shared =
      kSampleFixedBytes + std::max<int64_t>(each * 16 * (kSampleThreads / 32), kSampleLeastPart);
  if (shared > sample_most_bytes(arch)) return SamplePlan{};
  plan.vectors_per_warp = static_cast<int32_t>(each);
  plan.shared_bytes = static_cast<int32_t>(shared);
  return plan;
}

}  // namespace gvr_topk
