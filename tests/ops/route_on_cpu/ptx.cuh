// What ops/cuda/ptx.cuh gives route.cu, for a CPU: fibers of hyper_on_cpu/ptx.cuh, some blocks at once.
#pragma once

#include "fibers.cuh"

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static Index gridDim;
static u32 max(u32 a, u32 b) { return a > b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float2 halves_to_floats(u32 v) { return {half_to_float(v), half_to_float(v >> 16)}; }
static u32 floats_to_halves(float a, float b) { return float_to_half(a) | (u32)float_to_half(b) << 16; }
static u32 floats_to_bf16s(float a, float b) { return float_to_bf16(a) | (u32)float_to_bf16(b) << 16; }
static u32 __ballot_sync(u32, bool own) {
  u32 found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= __shfl_sync(~0u, (u32)own, lane) << lane;
  return found;
}
static u32 __reduce_max_sync(u32, u32 v) {
  for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
static std::atomic_ref<u32> word(const u32* p) { return std::atomic_ref<u32>(*(u32*)p); }
static void publish(u32* to, u32 v) { word(to).store(v, std::memory_order_relaxed); }
static u32 look_one(const u32* from) { return yield(), word(from).load(std::memory_order_relaxed); }
static uint4 look(const u32* from) {
  const uint4 found = {look_one(from), look_one(from + 1), look_one(from + 2), look_one(from + 3)};
  return found;
}
