// Answers what the stream of a launch can run: how many SMs its context has, and whether one of the plan's
// clusters finds room on them.
//
// A green context owns some of the device's SMs. A cluster lives in one GPC, so it matters which SMs those
// are, and two green contexts of the same size can differ. Every other context has the SMs that the device
// attribute counts; a MIG slice and an MPS share of threads lower that count for the whole process. Answers
// are therefore kept per device and green context. The key is the id of the green context, which the driver
// never gives twice in a process. Handles of streams and contexts are reused after destruction, so they
// cannot be keys, and every call asks for the green context of its stream; that query only reads the handle's
// own data.
//
// All of this may happen during stream capture. None of these functions enqueues anything, and the
// documentation names no capture error among their results. Queries that are made only once (symbols of the
// driver, limits of the kernel, the occupancy) use the relaxed capture mode besides, which by documentation
// lets a thread make calls that are unsafe to capture.
#pragma once

#include <cuda.h>  // types only: the driver's functions are looked up, so that the library loads without it
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "gvr_topk/launch.h"

namespace gvr_topk {

// Lets this thread make calls that need not be captured, whatever is being captured meanwhile.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The driver's functions about green contexts. A pointer is null if the driver is too old for its function.
struct GreenContextApi {
  decltype(&cuStreamGetGreenCtx) of_stream = nullptr;      // CUDA 12.4
  decltype(&cuGreenCtxGetDevResource) resource = nullptr;  // CUDA 12.4
  decltype(&cuGreenCtxGetId) id = nullptr;                 // CUDA 12.9

  static const GreenContextApi& get() {
    static const GreenContextApi api;
    return api;
  }

 private:
  GreenContextApi() {
    const RelaxedCapture relaxed;
    look_up("cuStreamGetGreenCtx", 12040, of_stream);
    look_up("cuGreenCtxGetDevResource", 12040, resource);
    look_up("cuGreenCtxGetId", 12090, id);
  }

  template <typename Function>
  static void look_up(const char* name, unsigned version, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableLegacyStream, &result);
    if (status == cudaSuccess && result == cudaDriverEntryPointSuccess) {
      function = reinterpret_cast<Function>(found);
    }
  }
};

// The context in which a launch on a stream will run.
struct StreamContext {
  int32_t device = 0;
  int32_t sm_count = 0;
  uint64_t green_id = 0;  // 0 for every ordinary context
  bool has_id = true;     // false: a green context whose driver gives it no id
};

// `device_sms` is the number of SMs by the device attribute, which holds for every context that is not green.
inline StreamContext context_of(cudaStream_t stream, int32_t device, int32_t device_sms) {
  StreamContext context{device, device_sms};
  const GreenContextApi& api = GreenContextApi::get();
  CUgreenCtx green = nullptr;
  if (api.of_stream == nullptr || api.of_stream(stream, &green) != CUDA_SUCCESS || green == nullptr) {
    return context;
  }
  CUdevResource resource{};
  if (api.resource != nullptr && api.resource(green, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
    context.sm_count = static_cast<int32_t>(resource.sm.smCount);
  }
  unsigned long long id = 0;
  context.has_id = api.id != nullptr && api.id(green, &id) == CUDA_SUCCESS;
  context.green_id = context.has_id ? uint64_t{id} + 1 : 0;
  return context;
}

// Everything that an answer depends on, packed into one number without collisions. The number is 0 where
// something does not fit, and such answers are not kept. The call's buffers also decide the instantiation and
// a part of the shared memory, but these do not change the answer: a block of the kernels that run in
// clusters takes more than half of an SM's registers (512 threads of more than 64 each), so every block has
// an SM to itself.
inline uint64_t capability_key(const StreamContext& context, const Plan& plan, Dtype dtype) {
  uint64_t key = 1;  // so that no key is 0
  bool fits = context.has_id;
  const auto add = [&](uint64_t value, int bits) {
    fits = fits && value < uint64_t{1} << bits;
    key = key << bits | value;
  };
  add(static_cast<uint64_t>(context.device), 5);
  add(context.green_id, 31);
  add(static_cast<uint64_t>(plan.family), 3);
  add(static_cast<uint64_t>(log2_of(plan.ctas_per_row)), 3);
  add(static_cast<uint64_t>(log2_of(plan.values_per_thread / kMinValuesPerThread)), 2);
  add(static_cast<uint64_t>(dtype), 2);
  add(static_cast<uint64_t>(plan.list_capacity / 1024), 5);
  return fits ? key : 0;
}

// Keeps answers by key. An entry is one atomic word that holds the key and the answer, so no reader needs a
// lock. Two keys that share an entry replace each other, which costs one more query to the driver.
class CapabilityCache {
 public:
  static CapabilityCache& get() {
    static CapabilityCache cache;
    return cache;
  }

  // Whether the cache has an answer for the key. If so, `runs` becomes that answer.
  bool find(uint64_t key, bool& runs) const {
    const uint64_t entry = entries_[index_of(key)].load(std::memory_order_relaxed);
    runs = (entry & 1) != 0;
    return key != 0 && entry >> 1 == key;
  }

  void keep(uint64_t key, bool runs) {
    if (key != 0) entries_[index_of(key)].store(key << 1 | uint64_t{runs}, std::memory_order_relaxed);
  }

 private:
  static constexpr int kLog2Entries = 9;

  // Multiplicative hashing by 2^64 over the golden ratio: the product's upper bits depend on the whole key.
  static constexpr size_t index_of(uint64_t key) {
    return static_cast<size_t>(key * 0x9e3779b97f4a7c15u >> (64 - kLog2Entries));
  }

  std::array<std::atomic<uint64_t>, size_t{1} << kLog2Entries> entries_{};
};

// Whether the context has room for one of the plan's clusters. An error counts as no, because every smaller
// cluster gives the same result and the launch of a single CTA reports what is wrong. The only error that is
// kept as an answer is the one that says that clusters of this size do not exist here.
inline bool can_run(const TopkParams& params, const Plan& plan, cudaStream_t stream,
                    const StreamContext& context) {
  CapabilityCache& cache = CapabilityCache::get();
  const uint64_t key = capability_key(context, plan, params.dtype);
  bool runs = false;
  if (cache.find(key, runs)) return runs;
  const RelaxedCapture relaxed;
  int clusters = 0;
  const cudaError_t status = max_active_clusters(params, plan, stream, &clusters);
  if (status != cudaSuccess && status != cudaErrorInvalidClusterSize) return false;
  runs = status == cudaSuccess && clusters > 0;
  cache.keep(key, runs);
  return runs;
}

}  // namespace gvr_topk
