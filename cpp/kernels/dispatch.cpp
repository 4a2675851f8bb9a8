// Chooses the kernel of a plan and its instantiation for a dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/config.cuh"
#include "core/launch.cuh"
#include "gvr_topk/launch.h"

namespace gvr_topk {

#define GVR_TOPK_DECLARE_LAUNCH(kernel, ...)            \
  namespace kernel {                                    \
  template <typename T>                                 \
  cudaError_t launch(__VA_ARGS__, const LaunchTarget&); \
  }
GVR_TOPK_DECLARE_LAUNCH(small_row, const TopkParams&, const Plan&)
GVR_TOPK_DECLARE_LAUNCH(resident, const TopkParams&, const Plan&)
GVR_TOPK_DECLARE_LAUNCH(streaming, const TopkParams&, const Plan&)
GVR_TOPK_DECLARE_LAUNCH(fallback, const TopkParams&, const Plan&)
GVR_TOPK_DECLARE_LAUNCH(paper_gvr, const TopkParams&, const Plan&)
GVR_TOPK_DECLARE_LAUNCH(prefill, const PrefillParams&, const PrefillPlan&)
GVR_TOPK_DECLARE_LAUNCH(prefill_short, const PrefillParams&, const PrefillPlan&)
GVR_TOPK_DECLARE_LAUNCH(prefill_slice, const SliceParams&, const SlicePlan&)
GVR_TOPK_DECLARE_LAUNCH(blocks, const BlocksParams&)
GVR_TOPK_DECLARE_LAUNCH(sampling, const SampleParams&, const SamplePlan&)
GVR_TOPK_DECLARE_LAUNCH(sampling_stream, const SampleParams&, const SamplePlan&)
GVR_TOPK_DECLARE_LAUNCH(sampling_limits, const LimitsParams&)
GVR_TOPK_DECLARE_LAUNCH(topk_logprobs, const TopkLogprobsParams&, const SamplePlan&)
#undef GVR_TOPK_DECLARE_LAUNCH

namespace claims {
cudaError_t launch(const TopkParams&, cudaStream_t);
}

namespace {

template <typename T>
cudaError_t launch_as(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  switch (plan.family) {
    case Family::kSmallRow:
      return small_row::launch<T>(params, plan, target);
    case Family::kResident:
      return resident::launch<T>(params, plan, target);
    case Family::kStreaming:
      return streaming::launch<T>(params, plan, target);
    case Family::kFallback:
      return fallback::launch<T>(params, plan, target);
    case Family::kPaperGvr:
      return paper_gvr::launch<T>(params, plan, target);
  }
  return cudaErrorInvalidValue;
}

// Calls launch(T{}) for the type T of a dtype.
template <typename Launch>
cudaError_t for_dtype(Dtype dtype, Launch launch) {
  switch (dtype) {
    case Dtype::kFloat32:
      return launch(float{});
    case Dtype::kBfloat16:
      return launch(__nv_bfloat16{});
    case Dtype::kFloat16:
      return launch(__half{});
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  if (target.active_clusters == nullptr && claims_slots(params)) {
    const cudaError_t status = claims::launch(params, target.stream);
    if (status != cudaSuccess) return status;
  }
  return for_dtype(params.dtype, [&](auto type) { return launch_as<decltype(type)>(params, plan, target); });
}

}  // namespace

cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  return launch(params, plan, LaunchTarget{stream, pdl, nullptr});
}

cudaError_t launch_prefill(const PrefillParams& params, const PrefillPlan& plan, bool pdl,
                           cudaStream_t stream) {
  const LaunchTarget target{stream, pdl, nullptr};
  return for_dtype(params.dtype, [&](auto type) {
    using T = decltype(type);
    return plan.threads > 0 ? prefill_short::launch<T>(params, plan, target)
                            : prefill::launch<T>(params, plan, target);
  });
}

cudaError_t launch_prefill_slice(const SliceParams& params, const SlicePlan& plan, bool pdl,
                                 cudaStream_t stream) {
  const LaunchTarget target{stream, pdl, nullptr};
  return for_dtype(params.prefill.dtype,
                   [&](auto type) { return prefill_slice::launch<decltype(type)>(params, plan, target); });
}

cudaError_t launch_blocks(const BlocksParams& params, bool pdl, cudaStream_t stream) {
  const LaunchTarget target{stream, pdl, nullptr};
  return for_dtype(params.topk.dtype,
                   [&](auto type) { return blocks::launch<decltype(type)>(params, target); });
}

cudaError_t launch_sample(const SampleParams& params, const SamplePlan& plan, bool pdl, cudaStream_t stream) {
  const LaunchTarget target{stream, pdl, nullptr};
  return for_dtype(params.dtype, [&](auto type) {
    using T = decltype(type);
    if (plan.streamed_ctas == 0) return sampling::launch<T>(params, plan, target);
    const cudaError_t status = sampling_stream::launch<T>(params, plan, target);
    // The launch behind it may start while it ends.
    return status != cudaSuccess ? status : sampling::launch<T>(params, plan, {stream, true, nullptr});
  });
}

cudaError_t launch_limits(const LimitsParams& params, cudaStream_t stream) {
  const LaunchTarget target{stream, false, nullptr};
  return for_dtype(params.dtype,
                   [&](auto type) { return sampling_limits::launch<decltype(type)>(params, target); });
}

cudaError_t launch_topk_logprobs(const TopkLogprobsParams& params, const SamplePlan& plan,
                                 cudaStream_t stream) {
  const LaunchTarget target{stream, false, nullptr};
  return for_dtype(params.row.dtype,
                   [&](auto type) { return topk_logprobs::launch<decltype(type)>(params, plan, target); });
}

cudaError_t max_active_clusters(const TopkParams& params, const Plan& plan, cudaStream_t stream,
                                int* clusters) {
  return launch(params, plan, LaunchTarget{stream, false, clusters});
}

}  // namespace gvr_topk
