// policy.h for callers without a C++ compiler: Python calls it through ctypes, on every machine.
#include "gvr_topk/policy.h"

#define GVR_TOPK_EXPORT extern "C" __attribute__((visibility("default")))

using gvr_topk::HintQuery;
using gvr_topk::Path;
using gvr_topk::Plan;
using gvr_topk::PlanInput;

// Returns the architectures that the library is compiled for, or all that there are kernels for, as text.
GVR_TOPK_EXPORT const char* gvr_topk_archs(int32_t all) {
  return all ? GVR_TOPK_ALL_ARCHS : GVR_TOPK_BUILT_FOR;
}

// Returns whether code for these architectures runs on a GPU of this one.
GVR_TOPK_EXPORT int32_t gvr_topk_has_code(int32_t arch, const char* archs) {
  return gvr_topk::has_code(arch, archs) ? 1 : 0;
}

// Returns the HintReason of a row; the arguments are HintQuery's members in their order.
GVR_TOPK_EXPORT int32_t gvr_topk_can_use_heuristic(int32_t enabled, int32_t has_state, int64_t slot,
                                                   int64_t slots, int64_t length, int64_t k,
                                                   int64_t min_length, int64_t max_length, int32_t known) {
  const HintQuery row{enabled != 0, has_state != 0, slot,      slots, length, k,
                      min_length,   max_length,     known != 0};
  return static_cast<int32_t>(gvr_topk::can_use_heuristic(row));
}

// `aligned`: whether every row starts at a 16-byte boundary. Fills plan[8]: path, family, CTAs per row,
// threads, values per thread, list capacity, ring depth, staged results. Returns the PlanProblem, 0 for none.
GVR_TOPK_EXPORT int32_t gvr_topk_make_plan(int64_t rows, int64_t width, int64_t k, int32_t dtype,
                                           int32_t path, int32_t sm_count, int32_t arch, int32_t ctas_per_row,
                                           int32_t max_ctas, int32_t aligned, int32_t* plan) {
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
  in.lead = gvr_topk::lead_of_rows(aligned != 0, in.dtype);
  const auto problem = static_cast<int32_t>(gvr_topk::plan_problem(in));
  if (problem != 0) return problem;
  const Plan planned = gvr_topk::make_plan(in);
  plan[0] = static_cast<int32_t>(planned.path);
  plan[1] = static_cast<int32_t>(planned.family);
  plan[2] = planned.ctas_per_row;
  plan[3] = planned.threads;
  plan[4] = planned.values_per_thread;
  plan[5] = planned.list_capacity;
  plan[6] = planned.ring_depth;
  plan[7] = planned.staged;
  return 0;
}
