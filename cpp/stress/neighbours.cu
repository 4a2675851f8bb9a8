// A library for stress tests only. It has kernels that run beside the op and take resources which the op
// shares with them, a kernel that rewrites the op's arguments while the op runs, and a kernel that compares
// everything the op has written.
//
// Every neighbour works for a given time and ends by itself, so that a stopped test leaves no kernel behind,
// and a cluster that needs the SMs a neighbour holds gets them soon. Functions return CUDA's status.
#include <cuda_runtime.h>

#include <cstdint>

#include "registry.h"

namespace gvr_topk::stress {
namespace {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return h ^ (h >> 16);
}

// A number below `count`; all such numbers are equally likely.
__device__ __forceinline__ uint32_t below(uint32_t drawn, uint32_t count) {
  return static_cast<uint32_t>((static_cast<uint64_t>(drawn) * count) >> 32);
}

// Holds SMs, with one CTA on each. If a CTA takes all shared memory of its SM, no other CTA that needs some
// fits beside it.
__global__ void hold_sms(uint64_t ns) {
  const uint64_t end = nanoseconds() + ns;
  while (nanoseconds() < end) __nanosleep(200);
}

// Keeps the shared-memory pipe of its SM full: 32 lanes add to one bank. With 32 registers per thread, a CTA
// of the op fits beside this one.
__global__ void __maxnreg__(32) hammer_shared(uint64_t ns, int* never) {
  __shared__ int words[32 * 32];
  const uint64_t end = nanoseconds() + ns;
  const int lane = threadIdx.x & 31;
  int sum = threadIdx.x;
  do {
#pragma unroll 8
    for (int i = 0; i < 64; ++i) sum += atomicAdd(&words[lane * 32], sum & 1);
  } while (nanoseconds() < end);
  if (never != nullptr) *never = sum;
}

// Keeps the tag stage of its SM's L1 busy: each lane of a load asks for a sector of its own.
__global__ void __maxnreg__(32) hammer_l1(uint64_t ns, const int* words, uint32_t count, int* never) {
  const uint64_t end = nanoseconds() + ns;
  uint32_t state = mix(threadIdx.x + blockIdx.x * blockDim.x + static_cast<uint32_t>(end));
  int sum = 0;
  do {
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      state = state * 1664525u + 1013904223u;
      sum += __ldcg(words + below(state, count));
    }
  } while (nanoseconds() < end);
  if (never != nullptr) *never = sum;
}

// Reads a buffer that exceeds L2.
__global__ void __maxnreg__(32) stream_dram(uint64_t ns, const uint4* vecs, uint64_t count, int* never) {
  const uint64_t end = nanoseconds() + ns;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  // A launch starts at an arbitrary place, so that short launches do not read the same part each time.
  uint64_t i = (mix(static_cast<uint32_t>(end)) + blockIdx.x * static_cast<uint64_t>(blockDim.x)) % count;
  i += threadIdx.x;
  uint32_t sum = 0;
  do {
#pragma unroll 4
    for (int step = 0; step < 16; ++step) {
      if (i >= count) i %= count;
      const uint4 v = __ldcs(vecs + i);
      sum += v.x ^ v.y ^ v.z ^ v.w;
      i += threads;
    }
  } while (nanoseconds() < end);
  if (never != nullptr) *never = static_cast<int>(sum);
}

// Times of the device, in nanoseconds, in the order in which they were taken; none is added once the log is
// full.
struct Log {
  int64_t* times;
  unsigned long long* count;
  int64_t capacity;
};

__device__ __forceinline__ void add_times(const Log& log, int64_t first, int64_t second) {
  const auto at = static_cast<int64_t>(atomicAdd(log.count, 2ull));
  if (at + 2 > log.capacity) return;
  log.times[at] = first;
  log.times[at + 1] = second;
}

// Adds the time, and whether a sequence of launches begins here, so that each launch of a stream lies between
// two times.
__global__ void stamp(Log log, int begins) { add_times(log, static_cast<int64_t>(nanoseconds()), begins); }

// A tensor that is rewritten: `rows` of `columns` words, `pitch` words from one row to the next.
struct Target {
  uint32_t* words;
  uint32_t rows, columns, pitch;
};

// Rewrites words of a tensor in random order. Each word gets the value that one of several prepared contents
// has in the same row and column. The log gets the time at which this begins, and that at which it ends.
__global__ void __maxnreg__(32)
    rewrite(uint64_t ns, Target target, const uint32_t* pool, uint32_t contents, Log log) {
  const uint64_t begin = nanoseconds(), end = begin + ns;
  const uint64_t words = static_cast<uint64_t>(target.rows) * target.columns;
  uint32_t state = mix(threadIdx.x + blockIdx.x * blockDim.x + static_cast<uint32_t>(end));
  const auto draw = [&](uint32_t count) {
    state = state * 1664525u + 1013904223u;
    return below(mix(state), count);
  };
  do {
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const uint64_t row = draw(target.rows), column = draw(target.columns);
      const uint32_t value = __ldg(pool + draw(contents) * words + row * target.columns + column);
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target.words + row * target.pitch + column),
                   "r"(value)
                   : "memory");
    }
  } while (nanoseconds() < end);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    add_times(log, static_cast<int64_t>(begin), static_cast<int64_t>(nanoseconds()));
  }
}

// These numbers are also in eval/stress/stress_workload.py.
constexpr int32_t kGuard = -1515870811;
constexpr int32_t kPoison = -7777;
constexpr int64_t kResult = 0;  // kind of a segment: results of one launch, which are poisoned again
constexpr int kSegmentColumns = 3;

enum Counter : int {
  kLaunches = 0,
  kWrongLaunches,
  kWrongWords,
  kGuardWords,
  kWrongHints,
  kFirstWrong,  // index of the first wrong word, plus 1
  kFirstGot,
  kCounters,
};

// One CTA compares one segment, {first word, word after the last, kind}, with what it should hold.
// Overwritten guard words are put back, and results are poisoned for the next run of the launches.
__global__ void __launch_bounds__(1024)
    check_words(int32_t* words, const int32_t* expected, const int64_t* segments, int64_t* counters) {
  const int64_t* segment = segments + static_cast<int64_t>(blockIdx.x) * kSegmentColumns;
  const int64_t first = segment[0], last = segment[1];
  const bool is_result = segment[2] == kResult;
  unsigned long long guards = 0, wrong = 0;
  const auto counter = reinterpret_cast<unsigned long long*>(counters);
  constexpr int kUnroll = 8;  // words of a thread that are loaded at once
  for (int64_t begin = first + threadIdx.x; begin < last; begin += kUnroll * blockDim.x) {
    int32_t got[kUnroll], want[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * static_cast<int64_t>(blockDim.x);
      got[u] = i < last ? words[i] : 0;
      want[u] = i < last ? expected[i] : 0;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = begin + u * static_cast<int64_t>(blockDim.x);
      if (i >= last) break;
      const bool is_guard = want[u] == kGuard;
      if (got[u] != want[u]) {
        if (is_guard) {
          ++guards;
          words[i] = kGuard;
        } else {
          ++wrong;
          const auto index = static_cast<unsigned long long>(i + 1);
          if (counters[kFirstWrong] == 0 && atomicCAS(&counter[kFirstWrong], 0ull, index) == 0) {
            counters[kFirstGot] = got[u];
          }
        }
      }
      if (is_result && !is_guard) words[i] = kPoison;
    }
  }
  if (guards > 0) atomicAdd(&counter[kGuardWords], guards);
  if (wrong > 0) atomicAdd(&counter[kWrongWords], wrong);
  const bool any = __syncthreads_or(wrong > 0) != 0;
  if (threadIdx.x != 0) return;
  if (is_result) atomicAdd(&counter[kLaunches], 1ull);
  if (any) atomicAdd(&counter[is_result ? kWrongLaunches : kWrongHints], 1ull);
}

// Asks for as much shared memory as possible on the SMs of a neighbour. Otherwise the driver would set aside
// for L1 what the op needs as shared memory on an SM that a neighbour comes to first, and the op's CTAs would
// have to stay away until the neighbour ends.
template <typename Kernel>
cudaError_t leave_shared_memory(Kernel* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

uint64_t nanoseconds_of(double microseconds) { return static_cast<uint64_t>(1000.0 * microseconds); }

}  // namespace
}  // namespace gvr_topk::stress

// In the functions below, `stream` is a cudaStream_t, and a neighbour runs for at least `microseconds`.

// `shared_bytes` is the shared memory that each CTA takes of its SM; less than 0: all that a block can have.
GVR_TOPK_EXPORT int gvr_topk_hold_sms(void* stream, int sms, int shared_bytes, double microseconds) {
  using namespace gvr_topk::stress;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess && shared_bytes < 0) {
    status = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(hold_sms, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  hold_sms<<<sms, 64, shared_bytes, static_cast<cudaStream_t>(stream)>>>(nanoseconds_of(microseconds));
  return cudaGetLastError();
}

GVR_TOPK_EXPORT int gvr_topk_hammer_shared(void* stream, int ctas, double microseconds) {
  using namespace gvr_topk::stress;
  const cudaError_t status = leave_shared_memory(hammer_shared);
  if (status != cudaSuccess) return status;
  hammer_shared<<<ctas, 128, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds_of(microseconds), nullptr);
  return cudaGetLastError();
}

GVR_TOPK_EXPORT int gvr_topk_hammer_l1(void* stream, int ctas, double microseconds, const void* words,
                                       int64_t count) {
  using namespace gvr_topk::stress;
  if (count < 1 || count > UINT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t status = leave_shared_memory(hammer_l1);
  if (status != cudaSuccess) return status;
  hammer_l1<<<ctas, 128, 0, static_cast<cudaStream_t>(stream)>>>(
      nanoseconds_of(microseconds), static_cast<const int*>(words), static_cast<uint32_t>(count), nullptr);
  return cudaGetLastError();
}

GVR_TOPK_EXPORT int gvr_topk_stream_dram(void* stream, int ctas, double microseconds, const void* bytes,
                                         int64_t count) {
  using namespace gvr_topk::stress;
  if (count < 16) return cudaErrorInvalidValue;
  const cudaError_t status = leave_shared_memory(stream_dram);
  if (status != cudaSuccess) return status;
  stream_dram<<<ctas, 128, 0, static_cast<cudaStream_t>(stream)>>>(
      nanoseconds_of(microseconds), static_cast<const uint4*>(bytes), static_cast<uint64_t>(count) / 16,
      nullptr);
  return cudaGetLastError();
}

// `times` and `count` are a log of `capacity` numbers: for each call the time, and `begins`.
GVR_TOPK_EXPORT int gvr_topk_stamp(void* stream, void* times, void* count, int64_t capacity, int begins) {
  using namespace gvr_topk::stress;
  const Log log{static_cast<int64_t*>(times), static_cast<unsigned long long*>(count), capacity};
  stamp<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(log, begins);
  return cudaGetLastError();
}

// `pool` holds `contents` * `rows` * `columns` words. `times` and `count` are a log of `capacity` numbers:
// for each call the times at which the rewriting began and ended.
GVR_TOPK_EXPORT int gvr_topk_rewrite(void* stream, int ctas, int threads, double microseconds, void* target,
                                     int64_t rows, int64_t columns, int64_t pitch, const void* pool,
                                     int64_t contents, void* times, void* count, int64_t capacity) {
  using namespace gvr_topk::stress;
  for (const int64_t size : {rows, columns, pitch, contents}) {
    if (size < 1 || size > UINT32_MAX) return cudaErrorInvalidValue;
  }
  const Target where{static_cast<uint32_t*>(target), static_cast<uint32_t>(rows),
                     static_cast<uint32_t>(columns), static_cast<uint32_t>(pitch)};
  const Log log{static_cast<int64_t*>(times), static_cast<unsigned long long*>(count), capacity};
  rewrite<<<ctas, threads, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds_of(microseconds), where,
                                                                   static_cast<const uint32_t*>(pool),
                                                                   static_cast<uint32_t>(contents), log);
  return cudaGetLastError();
}

// `counters` has gvr_topk_counters() numbers.
GVR_TOPK_EXPORT int gvr_topk_check_words(void* stream, void* words, const void* expected,
                                         const void* segments, int count, void* counters) {
  using namespace gvr_topk::stress;
  check_words<<<count, 1024, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<int32_t*>(words), static_cast<const int32_t*>(expected),
      static_cast<const int64_t*>(segments), static_cast<int64_t*>(counters));
  return cudaGetLastError();
}

GVR_TOPK_EXPORT int gvr_topk_counters() { return gvr_topk::stress::kCounters; }
