// What ops/cuda/turboquant_common.cuh, with ptx.cuh, gives the kernels of TurboQuant, for a CPU (cpu.cuh:
// nvfp4_on_cpu/nvfp4_common.cuh). Blocks run one after the other.
#pragma once

#define HALF (DTYPE == 1)
#define widen their_widen
#define narrow their_narrow
#include "experts.cuh"
#undef widen
#undef narrow
#undef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ SHARED
#define NONE no_reference  // Wait has a name like it, and like the next
#define __log2f log2f

#define INF INFINITY
constexpr float NONE = -1e30f;
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static float __int_as_float(u32 v) { return as_float(v); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static const u8 *nobodys, *nobodys_end;  // what may not be read: behind the copy of the rotation
template <class T> static T __ldg(const T* p) {
  if ((const u8*)p >= nobodys && (const u8*)p < nobodys_end) fail("read behind the rotation");
  return *p;
}
template <class T> static T __ldcg(const T* p) { return *p; }
static u32 __ballot_sync(u32, bool v) {
  return of_lanes<u32>(v, [](int warp) {
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= of_lane<u32>(warp + i) << i;
    return all;
  });
}
static bool __all_sync(u32, bool v) { return __ballot_sync(~0u, v) == ~0u; }
template <class T> static T __shfl_down_sync(u32, T v, int by) {
  return of_lanes<T>(v, [=](int warp) { return of_lane<T>(min(warp + 31, current + by)); });
}
static void copy16(u32 to, const void* from) { copy16(to, from, true); }

static float from_half(u32 v) {
  _Float16 h;
  const u16 bits = v;
  memcpy(&h, &bits, 2);
  return h;
}
static float lower_half_to_float(u32 v) { return from_half(v & 0xFFFF); }
static u16 float_to_half(float v) {
  const _Float16 h = (_Float16)v;
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static u16 float_to_bf16(float f) {
  const u32 v = as_bits(f);
  return (v & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : v + 0x7FFF + (v >> 16 & 1) >> 16;
}
// c [16, 8] += a [16, k] b [k, 8], of numbers that `wide` makes of 4 / PER bytes
template <class Sum, int PER, class A, class B>
static void product(Sum (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, A of_a, B of_b) {
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    decltype(of_a(0u, 0) * of_b(0u, 0)) sum = 0;
    for (int k = 0; k < 8 * PER; ++k) {
      const int lane = k % (4 * PER) / PER, upper = k / (4 * PER);
      sum += of_a(fibers[warp + row % 8 * 4 + lane].fragments[row / 8 + 2 * upper], k % PER) *
             of_b(fibers[warp + column * 4 + lane].fragments[4 + upper], k % PER);
    }
    c[i] += sum;
  }
  meet(WARP);
}
static int unsigned_byte(u32 word, int i) { return word >> 8 * i & 255; }
static int signed_byte(u32 word, int i) { return (signed char)(word >> 8 * i); }
static float a_half(u32 word, int i) { return from_half(word >> 16 * i & 0xFFFF); }
static float a_bf16(u32 word, int i) { return as_float(word >> 16 * i << 16); }
static void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  product<int, 4>(c, a0, a1, a2, a3, (u32)b, (u32)(b >> 32), unsigned_byte, signed_byte);
}
static void mma_signed(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  product<int, 4>(c, a0, a1, a2, a3, (u32)b, (u32)(b >> 32), signed_byte, signed_byte);
}
static void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  product<float, 2>(c, a0, a1, a2, a3, b0, b1, a_half, a_half);
}
static void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  product<float, 2>(c, a0, a1, a2, a3, b0, b1, a_bf16, a_bf16);
}
static void load_four(float (&v)[4], const void* p, size_t i) {
  for (int e = 0; e < 4; ++e) {
    const u16 bits = DTYPE == 2 ? 0 : ((const u16*)p)[i + e];
    v[e] = DTYPE == 2 ? ((const float*)p)[i + e] : DTYPE == 1 ? from_half(bits) : as_float((u32)bits << 16);
  }
}
static void store(void* p, size_t i, float v) {
  if (DTYPE == 2) ((float*)p)[i] = v;
  else ((u16*)p)[i] = DTYPE == 1 ? float_to_half(v) : float_to_bf16(v);
}
// Of the form that runs in clusters, which is not run here.
static void cluster_sync() { fail("a cluster"); }
static void cluster_wait() { fail("a cluster"); }
template <class T> static void push(u32, const T&) { fail("a cluster"); }
#define BLOCK block_tokens
