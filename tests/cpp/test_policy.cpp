// The gate and the plan: what must hold of every plan, over a grid of calls.
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "check.h"
#include "gvr_topk/policy.h"

using namespace gvr_topk;

// What launches a kernel is copied into it byte by byte.
static_assert(std::is_trivially_copyable_v<TopkParams> && std::is_standard_layout_v<TopkParams>);
static_assert(std::is_trivially_copyable_v<Plan>);

GateInput usual_gate() {
  GateInput in{};
  in.enabled = in.has_prior = true;
  in.prior_count = in.k = 2048;
  in.inner_stride = 1;
  in.length = 70690;
  in.arch = kMinArch;
  in.forced = Path::kAuto;
  return in;
}

// The hint is used between two lengths, both included.
void test_gate_lengths() {
  GateInput in = usual_gate();
  CHECK(can_use_heuristic(in) == GateReason::kAllowed);
  in.length = kGvrMinLength;
  CHECK(can_use_heuristic(in) == GateReason::kAllowed);
  in.length = kGvrMinLength - 1;
  CHECK(can_use_heuristic(in) == GateReason::kTooShort);
  in.length = kGvrMaxLength;
  CHECK(can_use_heuristic(in) == GateReason::kAllowed);
  in.length = kGvrMaxLength + 1;
  CHECK(can_use_heuristic(in) == GateReason::kTooLong);
  in.length = -1;
  CHECK(can_use_heuristic(in) == GateReason::kTooShort);
}

// A forced path waives the lengths, but not what a kernel needs to be correct.
void test_gate_forced() {
  GateInput in = usual_gate();
  in.length = 1;
  in.forced = Path::kGvr;
  CHECK(can_use_heuristic(in) == GateReason::kForcedOn);
  in.inner_stride = 2;
  CHECK(can_use_heuristic(in) == GateReason::kLayout);
  in.forced = Path::kRadix;
  CHECK(can_use_heuristic(in) == GateReason::kForcedOff);
}

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

void check_plan(const PlanInput& in) {
  CHECK(plan_problem(in) == PlanProblem::kNone);
  const Plan plan = make_plan(in);
  const int64_t ctas = plan.ctas_per_row;
  CHECK(is_power_of_two(ctas) && ctas <= max_cluster_size(in.arch));
  CHECK(in.width <= ctas * max_elements_per_cta(in.arch));
  // The cap gives way to nothing but a row that is too wide for it.
  if (in.max_ctas > 0) CHECK(ctas <= in.max_ctas || in.width > ctas / 2 * max_elements_per_cta(in.arch));
  // A kernel that holds the row in registers has room for all of it.
  const bool in_registers = plan.family == Family::kSingle || plan.family == Family::kResident;
  if (in_registers) CHECK(ctas * plan.threads * plan.values_per_thread >= in.width);
  if (plan.family == Family::kSingle) CHECK(ctas == 1);
  if (plan.family == Family::kStream) CHECK(in.k <= kStreamMaxK);
  CHECK(plan.staged == (in.k < in.width ? in.k : in.width));
  CHECK(plan.list_capacity > 0 && plan.candidate_capacity > 0);
  if (is_small_arch(in.arch)) CHECK(plan.ring_depth == 0);
}

// Every call of the grid has a plan that can hold it.
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
                check_plan(in);
              }
            }
          }
        }
      }
    }
  }
}

// What cannot be planned is named.
void test_problems() {
  PlanInput in{1, 70690, 2048, Dtype::kFloat32, Path::kAuto, 132, 90, 0, 0};
  in.forced_ctas = 3;
  CHECK(plan_problem(in) == PlanProblem::kCtas);
  in.forced_ctas = 16;
  in.max_ctas = 8;
  CHECK(plan_problem(in) == PlanProblem::kCtasAboveMax);
  in.forced_ctas = 0;
  in.max_ctas = 32;
  CHECK(plan_problem(in) == PlanProblem::kMaxCtas);
  in.max_ctas = 0;
  in.path = Path::kGvr;
  CHECK(plan_problem(in) == PlanProblem::kNone);
  in.k = 700;
  CHECK(plan_problem(in) == PlanProblem::kFourPhaseK);
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
        CHECK(int64_t{steps_of(span)} * 32 * kValuesPerThread >= span);
      }
    }
  }
}

int main() {
  test_gate_lengths();
  test_gate_forced();
  test_plans();
  test_problems();
  test_spans();
  return report("policy");
}
