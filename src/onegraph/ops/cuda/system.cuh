// Memory that other GPUs and the host see while a kernel runs: loads and stores of 8 bytes, whole or not at all, that no
// cache of this GPU keeps back; and a clock. They order nothing else: what belongs together stands in one word.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ void store_system(u64* to, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(to), "l"(v) : "memory");
}
__device__ __forceinline__ u64 load_system(const u64* from) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
// Two at once, 16 bytes side by side; each of them is whole.
__device__ __forceinline__ void store_system(u64* to, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" :: "l"(to), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void load_system(const u64* from, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}
