// What ops/cuda/system.cuh gives a kernel, for a CPU: memory that GPUs share is memory that threads share.
#pragma once

#include <chrono>
#include <thread>

static void store_system(u64* to, u64 v) { __atomic_store_n(to, v, __ATOMIC_RELAXED); }
static u64 load_system(const u64* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
static void store_system(u64* to, u64 first, u64 second) { store_system(to, first), store_system(to + 1, second); }
static void load_system(const u64* from, u64& first, u64& second) {
  first = load_system(from), second = load_system(from + 1);
}
static u64 nanoseconds() {
  std::this_thread::yield();  // there are more threads than cores, and who waits keeps others from sending
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
static u64 atomicCAS(u64* to, u64 old, u64 v) {
  __atomic_compare_exchange_n(to, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}
static void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
