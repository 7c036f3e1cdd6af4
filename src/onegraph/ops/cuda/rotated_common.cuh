// What kernels of rotated weights share, whatever codes them: activations on their way in, results on theirs out.
#pragma once

#include "ptx.cuh"

constexpr int SLICE = 256;       // columns of a warp: of E8P what four lanes' 16-byte loads of codes cover
constexpr int ROWS = 128;        // rows that the output's rotation mixes at most
#ifndef START
#define START 1024  // from compute capability 9.0 on, where the first KB is the system's; before, 0
#endif
constexpr int SMEM_START = START;  // where a block's own shared memory begins; checked at the start

extern __shared__ __align__(1024) u8 smem[];

template <bool IS_HALF> __device__ __forceinline__ float2 widen(u32 v) {  // two 16-bit floats
  return IS_HALF ? halves_to_floats(v) : make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}
template <bool IS_HALF> __device__ __forceinline__ u32 narrow(float a, float b) {
  return IS_HALF ? floats_to_halves(a, b) : floats_to_bf16s(a, b);
}

__device__ __forceinline__ float butterfly(float v, int lane, int o) {
  return fmaf(v, (lane & o) ? -1.f : 1.f, __shfl_xor_sync(~0u, v, o));
}
__device__ __forceinline__ void across_lanes(float4& v, int lane, int o) {
  v.x = butterfly(v.x, lane, o), v.y = butterfly(v.y, lane, o);
  v.z = butterfly(v.z, lane, o), v.w = butterfly(v.w, lane, o);
}
__device__ __forceinline__ void pair(float& a, float& b) {
  const float s = a + b;
  b = a - b;
  a = s;
}

__device__ __forceinline__ void unpack8(float (&v)[8], const uint4& raw) {
  const float2 f0 = widen<HALF>(raw.x), f1 = widen<HALF>(raw.y), f2 = widen<HALF>(raw.z), f3 = widen<HALF>(raw.w);
  v[0] = f0.x, v[1] = f0.y, v[2] = f1.x, v[3] = f1.y, v[4] = f2.x, v[5] = f2.y, v[6] = f3.x, v[7] = f3.y;
}
// Eight columns of one token a lane, in two parts: asked for, then taken, after SwiGLU if there is one; zero outside.
struct Raw {
  uint4 x, up;
};
template <class A> __device__ __forceinline__ Raw ask_x(const A& p, bool silu, int token, int column, bool inside) {
  Raw raw;
  raw.x = raw.up = make_uint4(0, 0, 0, 0);
  if (!inside) return raw;
  const u16* from = p.x + (size_t)token * (silu ? 2 * p.k : p.k) + column;
  raw.x = *(const uint4*)from;
  if (silu) raw.up = *(const uint4*)(from + p.k);
  return raw;
}
__device__ __forceinline__ void take_x(float (&v)[8], const Raw& raw, bool silu) {
  unpack8(v, raw.x);
  if (!silu) return;
  float up[8];
  unpack8(up, raw.up);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = __fdividef(v[e], 1.f + exp2_fast(v[e] * -1.4426950408889634f)) * up[e];
}
template <class A>
__device__ __forceinline__ void load_x(float (&v)[8], const A& p, int token, int column, bool inside) {
  take_x(v, ask_x(p, p.silu, token, column, inside), p.silu);
}
__device__ __forceinline__ float over_lanes(float v) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ float squares_of(const float (&v)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; e++) sum = fmaf(v[e], v[e], sum);
  return sum;
}
__device__ __forceinline__ float sum_of_squares(const float (&v)[8]) { return over_lanes(squares_of(v)); }
__device__ __forceinline__ void rotate8(float (&v)[8]) {
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (!(e & o)) pair(v[e], v[e | o]);
}
__device__ __forceinline__ void rotate(float (&v)[8], const float (&in_scale)[8], int block, int lane) {
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] *= in_scale[e];
  rotate8(v);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, o);
  if (block == 128)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, 8);
}

// The rotation of rows, of which a lane has four: in blocks of 128, or 64.
__device__ __forceinline__ void rotate_rows(float4& v, int block, int lane) {
  pair(v.x, v.y), pair(v.z, v.w), pair(v.x, v.z), pair(v.y, v.w);
#pragma unroll
  for (int o = 1; o < 16; o <<= 1) across_lanes(v, lane, o);
  if (block == 128) across_lanes(v, lane, 16);
}
__device__ __forceinline__ void add_to(float4& v, const float4& u) { v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w; }

// Four results of a row: what is added to them, beside `c`, and their place in y.
template <class A> __device__ __forceinline__ uint4 ask_add(const A& p, size_t at) {
  if (p.wide) return *(const uint4*)((const float*)p.add + at);
  const uint2 two = *(const uint2*)((const u16*)p.add + at);
  return make_uint4(two.x, two.y, 0, 0);
}
template <class A> __device__ __forceinline__ void take_add(float4& c, const A& p, const uint4& raw) {
  if (p.wide) {
    c.x += __uint_as_float(raw.x), c.y += __uint_as_float(raw.y);
    c.z += __uint_as_float(raw.z), c.w += __uint_as_float(raw.w);
  } else {
    const float2 lower = widen<HALF>(raw.x), upper = widen<HALF>(raw.y);
    c.x += lower.x, c.y += lower.y, c.z += upper.x, c.w += upper.y;
  }
}
template <class A> __device__ __forceinline__ void add4(float4& c, const A& p, size_t at) {
  if (p.add) take_add(c, p, ask_add(p, at));
}
template <class A> __device__ __forceinline__ void store4(const A& p, size_t at, const float4& v) {
  if (p.wide) *(float4*)((float*)p.y + at) = v;
  else *(uint2*)((u16*)p.y + at) = make_uint2(narrow<HALF>(v.x, v.y), narrow<HALF>(v.z, v.w));
}

__device__ __forceinline__ void set8(float (&to)[8], const float4& a, const float4& b) {
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
__device__ __forceinline__ void load8(float (&to)[8], const float* from, bool inside) {
  float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
  if (inside) a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  set8(to, a, b);
}
