// Loads, stores and copies that the compiler would not choose.
#pragma once

#include <cstdint>

#include "ptx/macros.cuh"

namespace gvr_topk::ptx {

// Returns a parameter of the kernel, of which only the words that are used are loaded. A function out of line
// has a reference, through which the compiler would load from global memory.
template <typename P>
GVR_DEVICE P kernel_parameter(const P& parameter) {
  static_assert(sizeof(P) % sizeof(uint32_t) == 0);
  alignas(P) uint32_t words[sizeof(P) / sizeof(uint32_t)];
  const size_t address = __cvta_generic_to_grid_constant(&parameter);
#pragma unroll
  for (size_t at = 0; at < sizeof(P); at += sizeof(uint32_t)) {
    asm("ld.param::entry.b32 %0, [%1];" : "=r"(words[at / sizeof(uint32_t)]) : "l"(address + at));
  }
  return reinterpret_cast<const P&>(words);
}

// Returns the 32-bit address of a pointer to shared memory.
GVR_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads 16 bytes without allocating in L1, for scores, which are read once.
GVR_DEVICE uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// As `load_streaming`, from `p` + kOffset bytes, if index < end. Otherwise `v` is undefined. The load is not
// `.nc`, because ptxas moves such loads past warp barriers, behind waits for other loads.
template <int kOffset>
GVR_DEVICE void load_streaming_before(int index, int end, uint4& v, const void* p) {
  asm volatile(
      GVR_PREDICATED("lt.s32", "%4, %5", "ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%6 + %7]")
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(index), "r"(end), "l"(p), "n"(kOffset)
      : "memory");
}

// As `load_streaming_before`, but the line stays in L1, for data that is read half a sector at a time or
// again.
template <int kOffset>
GVR_DEVICE void load_before(int index, int end, uint4& v, const void* p) {
  asm volatile(GVR_PREDICATED("lt.s32", "%4, %5", "ld.global.v4.u32 {%0, %1, %2, %3}, [%6 + %7]")
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(index), "r"(end), "l"(p), "n"(kOffset));
}

// Loads 4, 8 or 16 bytes under a predicate. A branch would make the compiler move the loads, and so wait for
// them. The destination keeps its value if the condition is false.
GVR_DEVICE void load_if(bool condition, uint32_t (&word)[2], const void* p) {
  asm volatile(GVR_PREDICATED("ne.u32", "%2, 0", "ld.global.v2.u32 {%0, %1}, [%3]")
               : "+r"(word[0]), "+r"(word[1])
               : "r"(static_cast<uint32_t>(condition)), "l"(p)
               : "memory");
}

template <typename Word>
GVR_DEVICE void load_if(bool condition, Word& value, const void* p) {
  static_assert(sizeof(Word) == 4);
  asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "ld.global.u32 %0, [%2]")
               : "+r"(value)
               : "r"(static_cast<uint32_t>(condition)), "l"(p)
               : "memory");
}

GVR_DEVICE void load_if(bool condition, uint32_t (&word)[4], const void* p) {
  asm volatile(GVR_PREDICATED("ne.u32", "%4, 0", "ld.global.v4.u32 {%0, %1, %2, %3}, [%5]")
               : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
               : "r"(static_cast<uint32_t>(condition)), "l"(p)
               : "memory");
}

GVR_DEVICE void load_if(bool condition, float4& value, const void* p) {
  load_if(condition, reinterpret_cast<uint32_t (&)[4]>(value), p);
}

// Sets a vector if `condition`. Written in C++ this makes the compiler keep an array of vectors in local
// memory.
GVR_DEVICE void set_if(bool condition, uint4& vec, const uint32_t (&word)[4]) {
  asm("{\n .reg .pred p;\n setp.ne.u32 p, %4, 0;\n selp.b32 %0, %5, %0, p;\n selp.b32 %1, %6, %1, p;\n"
      " selp.b32 %2, %7, %2, p;\n selp.b32 %3, %8, %3, p;\n}"
      : "+r"(vec.x), "+r"(vec.y), "+r"(vec.z), "+r"(vec.w)
      : "r"(static_cast<uint32_t>(condition)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]));
}

// Copies 16 bytes from global to shared memory without a register. The bytes have arrived after the matching
// wait.
GVR_DEVICE void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// As `copy_async`, kOffset bytes further on at both ends, if index < end. From C++ code the compiler would
// compute condition and address again for each copy.
template <int kOffset>
GVR_DEVICE void copy_async_before(int index, int end, uint32_t shared, const void* global) {
  asm volatile(
      GVR_PREDICATED("lt.s32", "%0, %1", "cp.async.cg.shared.global [%2 + %4], [%3 + %4], 16")::"r"(index),
      "r"(end), "r"(shared), "l"(global), "n"(kOffset)
      : "memory");
}

// If `condition`, copies kBytes: 8, which go through L1, or 16.
template <int kBytes>
GVR_DEVICE void copy_async_if(bool condition, uint32_t shared, const void* global) {
  const auto copied = static_cast<uint32_t>(condition);
  if constexpr (kBytes == 8) {
    asm volatile(GVR_PREDICATED("ne.u32", "%0, 0", "cp.async.ca.shared.global [%1], [%2], 8")::"r"(copied),
                 "r"(shared), "l"(global)
                 : "memory");
  } else {
    static_assert(kBytes == 16);
    asm volatile(GVR_PREDICATED("ne.u32", "%0, 0", "cp.async.cg.shared.global [%1], [%2], 16")::"r"(copied),
                 "r"(shared), "l"(global)
                 : "memory");
  }
}

// Copies the first `bytes` of 16, if there are any, and reads no more. Zeros follow them.
GVR_DEVICE void copy_part_async(int bytes, uint32_t shared, const void* global) {
  asm volatile(GVR_PREDICATED("gt.s32", "%2, 0", "cp.async.cg.shared.global [%0], [%1], 16, %2")::"r"(shared),
               "l"(global), "r"(bytes)
               : "memory");
}

// Returns the L2 policy for rows that stream by: they are evicted before anything else.
GVR_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As `copy_async`, kOffset bytes further on at both ends.
template <int kOffset>
GVR_DEVICE void copy_async_at(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %3], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy), "n"(kOffset)
               : "memory");
}

// Prefetches `bytes` bytes, a multiple of 16, into L2.
GVR_DEVICE void prefetch_to_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

GVR_DEVICE uint4 load_shared(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}

GVR_DEVICE void store_shared(uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Loads one element of 2 or 4 bytes.
template <typename T>
GVR_DEVICE T load_shared_element(uint32_t shared) {
  if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
    return *reinterpret_cast<const T*>(&v);
  } else {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
    return *reinterpret_cast<const T*>(&v);
  }
}

template <typename T>
GVR_DEVICE void store_shared(uint32_t shared, T value) {
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(*reinterpret_cast<const uint32_t*>(&value))
                 : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(*reinterpret_cast<const uint16_t*>(&value))
                 : "memory");
  }
}

GVR_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
  GVR_CHAOS_POINT();
}

// Waits until at most `kPending` of this thread's latest groups are still under way.
template <int kPending>
GVR_DEVICE void wait_copies() {
  GVR_CHAOS_POINT();
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  GVR_CHAOS_POINT();
}

// Stores in assembly, so that the compiler assumes nothing about the pointer.
GVR_DEVICE void store_global(int32_t* p, int32_t value) {
  asm volatile("st.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Stores 8 bytes at once where another GPU may read them.
GVR_DEVICE void store_system(uint64_t* p, uint64_t value) {
  GVR_CHAOS_POINT();
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Loads 8 bytes at once that another GPU may write.
GVR_DEVICE uint64_t load_system(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// Returns a clock in nanoseconds, which all SMs share.
GVR_DEVICE int64_t clock_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Adds to shared memory for the calling lane alone. If the compiler knew that all lanes have one address, it
// would add up over the active lanes first. So `zero` is `unknown_zero()`, which hides that.
GVR_DEVICE void add_shared(uint32_t& at, uint32_t value, uint32_t zero) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&at)) + zero;
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// As `add_shared`, and returns what was there before.
GVR_DEVICE uint32_t fetch_add_shared(uint32_t& at, uint32_t value, uint32_t zero) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&at)) + zero;
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}

// Adds one at a shared address.
GVR_DEVICE void increment_shared(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

// Stores 4, 8 or 16 bytes at a shared address if `condition`. C++ code may branch, and lanes would come
// apart.
template <typename T>
GVR_DEVICE void store_shared_if(bool condition, uint32_t shared, const T& value) {
  const auto stored = static_cast<uint32_t>(condition);
  if constexpr (sizeof(T) == 4) {
    asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "st.shared.u32 [%0], %2")::"r"(shared), "r"(stored),
                 "r"(*reinterpret_cast<const uint32_t*>(&value))
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "st.shared.u64 [%0], %2")::"r"(shared), "r"(stored),
                 "l"(*reinterpret_cast<const uint64_t*>(&value))
                 : "memory");
  } else {
    static_assert(sizeof(T) == 16);
    const uint4 v = *reinterpret_cast<const uint4*>(&value);
    asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "st.shared.v4.u32 [%0], {%2, %3, %4, %5}")::"r"(shared),
                 "r"(stored), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

// As `store_shared_if`, for 8 or 16 bytes in global memory.
GVR_DEVICE void store_global_if(bool condition, void* p, const float4& value) {
  asm volatile(GVR_PREDICATED("ne.u32", "%0, 0", "st.global.v4.f32 [%1], {%2, %3, %4, %5}")::"r"(
                   static_cast<uint32_t>(condition)),
               "l"(p), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

GVR_DEVICE void store_global_if(bool condition, void* p, uint64_t value) {
  asm volatile(
      GVR_PREDICATED("ne.u32", "%0, 0", "st.global.u64 [%1], %2")::"r"(static_cast<uint32_t>(condition)),
      "l"(p), "l"(value)
      : "memory");
}

// If `condition` is not zero, stores a value at the shared address `slot` and moves `slot` past it. C++ code
// would branch.
GVR_DEVICE void append_if(uint32_t condition, uint32_t& slot, uint16_t value) {
  asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "st.shared.u16 [%0], %2;\n @p add.u32 %0, %0, 2")
               : "+r"(slot)
               : "r"(condition), "h"(value)
               : "memory");
}

// If `condition` is not zero, moves `slot` down by one value and stores the value there.
GVR_DEVICE void prepend_if(uint32_t condition, uint32_t& slot, uint16_t value) {
  asm volatile(GVR_PREDICATED("ne.u32", "%1, 0", "st.shared.u16 [%0 + -2], %2;\n @p add.u32 %0, %0, -2")
               : "+r"(slot)
               : "r"(condition), "h"(value)
               : "memory");
}

}  // namespace gvr_topk::ptx
