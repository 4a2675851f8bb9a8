// policy.h for callers without a C++ compiler: Python reads it through ctypes, on every machine.
#include "gvr_topk/policy.h"

#define GVR_TOPK_EXPORT extern "C" __attribute__((visibility("default")))

using gvr_topk::GateInput;
using gvr_topk::GateReason;
using gvr_topk::Path;
using gvr_topk::Plan;
using gvr_topk::PlanInput;

GVR_TOPK_EXPORT int32_t gvr_topk_can_use_heuristic(int32_t enabled, int32_t has_prior, int64_t prior_count,
                                                   int64_t inner_stride, int64_t k, int64_t length,
                                                   int32_t arch, int32_t forced) {
  GateInput in{};
  in.enabled = enabled != 0;
  in.has_prior = has_prior != 0;
  in.prior_count = prior_count;
  in.inner_stride = inner_stride;
  in.k = k;
  in.length = length;
  in.arch = arch;
  in.forced = static_cast<Path>(forced);
  return static_cast<int32_t>(gvr_topk::can_use_heuristic(in));
}

// Fills plan[10]: path, family, CTAs per row, threads, values per thread, list capacity, candidate capacity,
// masks, ring depth, staged results. Returns the PlanProblem, 0 for none.
GVR_TOPK_EXPORT int32_t gvr_topk_make_plan(int64_t rows, int64_t width, int64_t k, int32_t dtype,
                                           int32_t path, int32_t sm_count, int32_t arch, int32_t ctas_per_row,
                                           int32_t max_ctas, int32_t* plan) {
  PlanInput in{};
  in.rows = rows;
  in.width = width;
  in.k = k;
  in.dtype = static_cast<gvr_topk::Dtype>(dtype);
  in.path = static_cast<Path>(path);
  in.sm_count = sm_count;
  in.arch = arch;
  in.forced_ctas = ctas_per_row;
  in.max_ctas = max_ctas;
  const auto problem = static_cast<int32_t>(gvr_topk::plan_problem(in));
  if (problem != 0) return problem;
  const Plan made = gvr_topk::make_plan(in);
  plan[0] = static_cast<int32_t>(made.path);
  plan[1] = static_cast<int32_t>(made.family);
  plan[2] = made.ctas_per_row;
  plan[3] = made.threads;
  plan[4] = made.values_per_thread;
  plan[5] = made.list_capacity;
  plan[6] = made.candidate_capacity;
  plan[7] = made.masks;
  plan[8] = made.ring_depth;
  plan[9] = made.staged;
  return 0;
}

GVR_TOPK_EXPORT int64_t gvr_topk_constant(int32_t which) {
  switch (which) {
    case 0:
      return gvr_topk::kGvrMinLength;
    case 1:
      return gvr_topk::kGvrMaxLength;
    case 2:
      return gvr_topk::kMinArch;
    case 3:
      return gvr_topk::kFourPhaseMaxWidth;
    case 4:
      return gvr_topk::kMaxWidth;
    case 5:
      return gvr_topk::kMaxRows;
    case 6:
      return gvr_topk::kMaxPageSize;
    default:
      return -1;
  }
}
