// What ops/cuda/ptx.cuh gives sampling_portable.cu, for a CPU (cpu.cuh: nvfp4_on_cpu/nvfp4_common.cuh). Blocks run one after the
// other, so the last of them ends what all brought; `run` is told in which order.
#pragma once

#define HALF 0
#include "cpu.cuh"
#undef __launch_bounds__
#define __launch_bounds__(...)

static u32 __float_as_uint(float v) { return as_bits(v); }
static float __uint_as_float(u32 v) { return as_float(v); }
static float __int_as_float(u32 v) { return as_float(v); }
static long long __double_as_longlong(double v) {
  long long bits;
  memcpy(&bits, &v, 8);
  return bits;
}
template <class T, class Lane> static T of_place(T own, const Lane& place) {  // of another lane of the warp
  static_assert(sizeof(T) <= sizeof fibers[0].fragments);
  memcpy(fibers[current].fragments, &own, sizeof own);
  meet(WARP);
  T v;
  memcpy(&v, fibers[current / 32 * 32 + place(current % 32)].fragments, sizeof v);
  meet(WARP);
  return v;
}
template <class T> static T __shfl_xor_sync(u32, T v, int mask) {
  return of_place<T>(v, [=](int lane) { return lane ^ mask; });
}
template <class T> static T __shfl_up_sync(u32, T v, int by) {
  return of_place<T>(v, [=](int lane) { return max(lane - by, 0); });
}
template <class T> static T __shfl_sync(u32, T v, int from) {
  return of_place<T>(v, [=](int) { return from; });
}
static u32 __reduce_max_sync(u32, u32 v) {
  for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
static u32 __reduce_min_sync(u32, u32 v) { return ~__reduce_max_sync(~0u, ~v); }
static int __syncthreads_count(int own) {
  fibers[current].fragments[0] = own != 0;
  meet(BLOCK);
  int count = 0;
  for (int i = 0; i < fibers_now; ++i) count += fibers[i].fragments[0];
  meet(BLOCK);
  return count;
}
static int __syncthreads_or(int own) { return __syncthreads_count(own) != 0; }
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static float exp2_fast(float x) { return exp2f(x); }
static float log2_fast(float x) { return log2f(x); }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, const T& v) { *p = v; }
static void __threadfence() {}
template <class T> static T atomicAdd(T* to, T v) { return (*to += v) - v; }
template <class T> static T atomicMax(T* to, T v) {
  const T was = *to;
  *to = max(was, v);
  return was;
}
