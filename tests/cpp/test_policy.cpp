// Tests what must hold of every plan over a grid of calls. tests/cpu/test_policy.py tests the gate and
// single plans through the compiled policy.
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "check.h"
#include "gvr_topk/policy.h"

using namespace gvr_topk;

// The parameters of a launch are copied into the kernel byte by byte.
static_assert(std::is_trivially_copyable_v<TopkParams> && std::is_standard_layout_v<TopkParams>);
static_assert(std::is_trivially_copyable_v<Plan>);
static_assert(std::is_trivially_copyable_v<PrefillParams> && std::is_standard_layout_v<PrefillParams>);

// The gate is usable at compile time, so no kernel needs a rule of its own.
static_assert(can_use_heuristic({true, true, 0, 1, 2, 1, 0, 2, true}) == HintReason::kUsed);

// The first CTA alone selects from a row that is longer than k, and much shorter than its buffer.
constexpr int32_t kOfResident = longest_solo_row(Family::kResident);
constexpr int32_t kOfStreaming = longest_solo_row(Family::kStreaming);
static_assert(kOfResident == 8192 && kOfStreaming == 16384);
static_assert(is_solo_row(Family::kResident, 131072, kOfResident, 2048));
static_assert(!is_solo_row(Family::kResident, 131072, kOfResident + 1, 2048));
static_assert(!is_solo_row(Family::kResident, 131072, kOfResident, 2048, 1));
static_assert(is_solo_row(Family::kResident, 131072, 2049, 2048));
static_assert(!is_solo_row(Family::kResident, 131072, 2048, 2048));
static_assert(!is_solo_row(Family::kResident, 131072, 8000, 2049));
static_assert(!is_solo_row(Family::kResident, 16384, 8000, 2048));
static_assert(is_solo_row(Family::kStreaming, kMaxWidth, kOfStreaming, 2048));
static_assert(!is_solo_row(Family::kStreaming, kMaxWidth, kOfStreaming + 1, 2048));
static_assert(!is_solo_row(Family::kFallback, 131072, 8000, 2048));
static_assert(values_of_solo_row(kOfResident) == 16 && values_of_solo_row(kOfResident + 1) == 32);

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

void check_plan(const PlanInput& in) {
  CHECK(plan_problem(in) == PlanProblem::kNone);
  const Plan plan = make_plan(in);
  const int64_t ctas = plan.ctas_per_row;
  CHECK(is_power_of_two(ctas) && ctas <= max_cluster_size(in.arch));
  CHECK(in.width <= ctas * max_elements_per_cta(in.arch));
  // Only a row that is too wide for the cap makes a plan exceed it.
  if (in.max_ctas > 0) CHECK(ctas <= in.max_ctas || in.width > ctas / 2 * max_elements_per_cta(in.arch));
  // A kernel that holds the row in registers has room for all of it.
  const bool in_registers = plan.family == Family::kSmallRow || plan.family == Family::kResident;
  if (in_registers) CHECK(ctas * plan.threads * plan.values_per_thread >= in.width + in.lead);
  if (plan.family == Family::kSmallRow) CHECK(ctas == 1);
  if (plan.family == Family::kStreaming) CHECK(in.k <= kStreamingMaxK && in.k <= ctas * kStreamingMaxShare);
  CHECK(plan.staged == (in.k < in.width ? in.k : in.width));
  CHECK(plan.list_capacity > 0 && plan.ring_depth > 0);
  // Kernels are compiled to a trap where this does not hold.
  CHECK(has_family(plan.family, in.arch));
  if (plan.family == Family::kResident) CHECK(plan.values_per_thread <= max_resident_values(in.arch));
}

// Every call of the grid has a plan that can hold its rows.
void test_plans() {
  PlanInput in{};
  in.path = Path::kAuto;
  for (const int64_t rows : {1, 2, 8, 64, 1000, 1 << 20}) {
    for (int64_t width = 1; width <= kMaxWidth; width = width * 3 / 2 + 1) {
      for (const int64_t k : {1, 512, 2048, 2049, 100000}) {
        for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
          for (const int32_t arch : {90, 100, 120}) {
            for (const int32_t max_ctas : {0, 1, 4, 16}) {
              for (const int32_t sm_count : {1, 16, 132}) {
                in.rows = rows;
                in.width = width;
                in.k = k;
                in.dtype = dtype;
                in.arch = arch;
                in.max_ctas = max_ctas;
                in.sm_count = sm_count;
                for (const bool aligned : {true, false}) {
                  in.lead = lead_of_rows(aligned, dtype);
                  check_plan(in);
                }
              }
            }
          }
        }
      }
    }
  }
}

// The warps' shares cover a row, in whole vectors.
void test_spans() {
  for (int32_t log2_ctas = 0; log2_ctas <= 4; ++log2_ctas) {
    for (const int32_t bytes : {2, 4}) {
      for (int32_t n = 0; n < 300000; n += 997) {
        const int32_t span = warp_span(n, log2_ctas, bytes);
        const int64_t warps = int64_t{kClusterThreads / 32} << log2_ctas;
        CHECK(span % (32 * 16 / bytes) == 0);
        CHECK(warps * span >= n);
      }
    }
  }
}

// More blocks must be chosen than positions, and the widest row of one launch has a register and room in
// shared memory for each block.
void test_blocks() {
  CHECK(blocks_hold_topk(512, 513) && !blocks_hold_topk(512, 512) && !blocks_hold_topk(512, 511));
  CHECK(kOneLaunchBlocksWidth / kBlockSize <= int64_t{kClusterThreads} * kMaxValuesPerThread);
  CHECK(block_keys_bytes(1) == 16 && block_keys_bytes(32) == 16 && block_keys_bytes(33) == 32);
  for (const int32_t arch : {90, 100, 120}) {
    const int64_t widest = is_small_arch(arch) ? 102400 : kOneLaunchBlocksWidth;
    CHECK(takes_one_blocks_launch(widest, arch) && !takes_one_blocks_launch(widest + 1, arch));
    CHECK(kBlocksFixedBytes + block_keys_bytes(widest) <= shared_bytes_of_block(arch));
  }
}

// Every CTA of a prefill has a row in each of its runs, its memory fits, and k decides whether it collects
// candidates.
void test_prefill_plans() {
  for (const int32_t arch : {90, 100, 103, 120}) {
    const int64_t shared_bytes = (is_small_arch(arch) ? 99 : 227) * 1024;
    for (const int64_t rows : {int64_t{1}, int64_t{7}, int64_t{396}, int64_t{8192}, kMaxRows}) {
      for (const int64_t width : {int64_t{1}, int64_t{511}, int64_t{4096}, int64_t{32768}, kMaxWidth}) {
        for (const int64_t k : {int64_t{1}, kPrefillMaxK, kPrefillMaxK + 1, int64_t{32767}}) {
          for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16}) {
            PrefillInput in{rows, width, k, dtype, Path::kAuto, 132, arch, true, false};
            const PrefillPlan either = make_prefill_plan(in);
            CHECK(either.ctas >= 1 && either.ctas <= 132 * kClusterThreads / kLeastShortPrefillThreads);
            CHECK(either.runs_per_cta >= 1 && int64_t{either.ctas} * either.runs_per_cta <= rows);
            const int64_t threads = either.threads, element = element_bytes(dtype);
            CHECK(threads == 0 || threads * kMaxValuesPerThread >= width);
            CHECK(threads == 0 || has_short_prefill(threads, element, arch));
            const int64_t staged = 2 * (k < width ? k : width);
            const int64_t arriving =
                short_prefill_buffers(element) * short_prefill_row_bytes(threads, element);
            CHECK(threads == 0 || short_prefill_fixed_bytes(threads) + staged + arriving <= shared_bytes);
            in.streams = true;
            const PrefillPlan plan = make_prefill_plan(in);
            CHECK(plan.threads == 0 && plan.lists == (k <= kPrefillMaxK));
            CHECK(kPrefillFixedBytes + plan.bitmap_pairs * (kPrefillPairElements / 8) <= shared_bytes);
            const bool covers = int64_t{plan.bitmap_pairs} * kPrefillPairElements >= width + kMaxLineLead;
            CHECK(covers || plan.bitmap_pairs == max_prefill_pairs(arch));
            in.path = Path::kRadixRounds;
            const PrefillPlan radix = make_prefill_plan(in);
            CHECK(!radix.lists && radix.ctas == plan.ctas && radix.runs_per_cta == plan.runs_per_cta);
          }
        }
      }
    }
  }
  // Registers hold rows of 32,768 columns only if rows start at 16-byte boundaries. Otherwise the elements
  // between a boundary and a window take registers as well.
  PrefillInput in{8192, kMaxSmallRowWidth, 2048, Dtype::kFloat32, Path::kAuto, 132, 90, true, false};
  CHECK(make_prefill_plan(in).threads == kClusterThreads);
  in.aligned = false;
  CHECK(make_prefill_plan(in).threads == 0);
  in.width -= kMaxLead;
  CHECK(make_prefill_plan(in).threads == kClusterThreads);
  in.width = 8192;
  in.aligned = true;
  CHECK(make_prefill_plan(in).threads == 128 && make_prefill_plan(in).ctas == 4 * 132);
  in.rows = 0;
  CHECK(make_prefill_plan(in).ctas == 0);
}

int main() {
  test_plans();
  test_prefill_plans();
  test_spans();
  test_blocks();
  return report("policy");
}
