// What ops/cuda/ptx.cuh gives decode_portable.cu and decode_round.cu, for a CPU (experts.cuh:
// e8p_experts_on_cpu/ptx.cuh, with what that includes).
// Blocks run one after the other, so the last of them ends what all brought; `run` is told in which order.
#pragma once

#define widen their_widen
#define narrow their_narrow
#include "experts.cuh"
#undef widen
#undef narrow
#undef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define memory shared

enum Fetch { ALONE };
template <Fetch> static void copy16(u32 to, const void* from, bool real) { copy16(to, from, real); }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, const T& v) { *p = v; }
static void __threadfence() {}
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float exp2_fast(float v) { return exp2f(v); }
static u32 atomicAdd(u32* to, u32 v) { return (*to += v) - v; }
static void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma(c, a0, a1, a2, a3, b0, b1); }
static void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma(c, a0, a1, a2, a3, b0, b1); }
static u32 transpose(u32 x) {  // a row of eight in four lanes
  return of_lanes<u32>(x, [](int warp) {
    const int g = current % 32 / 4, t = current % 4;
    auto at = [&](int row) { return of_lane<u32>(warp + row * 4 + g / 2) >> g % 2 * 16 & 0xFFFF; };
    return at(2 * t) | at(2 * t + 1) << 16;
  });
}
static uint4 load_transposed(const uint4* row) {
  address(row);
  memcpy(fibers[current].fragments, &row, sizeof row);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  u32 v[4];
  for (int matrix = 0; matrix < 4; ++matrix) {
    auto at = [&](int r) {
      const u16* from;
      memcpy(&from, fibers[warp + matrix * 8 + r].fragments, sizeof from);
      return (u32)from[g];
    };
    v[matrix] = at(2 * t) | at(2 * t + 1) << 16;
  }
  meet(WARP);
  return {v[0], v[1], v[2], v[3]};
}
#define NONE nobodys_score  // Wait has a name like it
