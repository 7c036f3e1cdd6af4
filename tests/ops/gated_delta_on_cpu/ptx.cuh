// What ops/cuda/ptx.cuh gives gated_delta.cu, for a CPU: fibers of hyper_on_cpu/ptx.cuh, blocks one after the other.
#pragma once

#define blockIdx their_block
#include "fibers.cuh"
#undef blockIdx
#undef __shared__
#define __shared__ thread_local  // also behind `extern`

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct Grid { int x, y; };
static Grid blockIdx;
static int max(int a, int b) { return a > b ? a : b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float2 halves_to_floats(u32 v) { return {half_to_float(v), half_to_float(v >> 16)}; }
static u32 floats_to_halves(float a, float b) { return float_to_half(a) | (u32)float_to_half(b) << 16; }
static u32 floats_to_bf16s(float a, float b) { return float_to_bf16(a) | (u32)float_to_bf16(b) << 16; }

enum Fetch { ALONE };
template <Fetch> static void copy16(char* to, const void* from) { memcpy(to, from, 16); }
template <int BYTES> static void copy_few(char* to, const void* from) { memcpy(to, from, BYTES); }
static void commit() {}
static void copies_there() {}
static void prefetch_l1(const void*) {}
static void fetch_to_l2(const void* p, u32 bytes) {  // what is there can be read
  for (u32 i = 0; i < bytes; i += 16) (void)*((volatile const char*)p + i);
}
