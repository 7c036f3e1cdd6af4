// Numbers of three types as float32, few at a time, and their sum over a warp.
#pragma once

#include "ptx.cuh"

constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;

// T: one of the three above.
template <int T> __device__ __forceinline__ float load_one(const void* p, size_t at) {
  if (T == FLOAT32) return ((const float*)p)[at];
  const u16 v = ((const u16*)p)[at];
  return T == FLOAT16 ? half_to_float(v) : __uint_as_float((u32)v << 16);
}
template <int T> __device__ __forceinline__ float2 unpack_two(u32 v) {
  return T == FLOAT16 ? halves_to_floats(v) : make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <int T> __device__ __forceinline__ u32 pack_two(float lower, float upper) {
  return T == FLOAT16 ? floats_to_halves(lower, upper) : floats_to_bf16s(lower, upper);
}
template <int T> __device__ __forceinline__ float2 load_two(const void* p, size_t at) {  // at an even place
  if (T == FLOAT32) return ((const float2*)p)[at / 2];
  return unpack_two<T>(((const u32*)p)[at / 2]);
}
template <int T> __device__ __forceinline__ float4 load_four(const void* p, size_t at) {  // at a multiple of 4
  if (T == FLOAT32) return ((const float4*)p)[at / 4];
  const uint2 v = ((const uint2*)p)[at / 4];
  const float2 a = unpack_two<T>(v.x), b = unpack_two<T>(v.y);
  return make_float4(a.x, a.y, b.x, b.y);
}
template <int T> __device__ __forceinline__ void store_two(void* p, size_t at, float2 v) {
  if (T == FLOAT32) ((float2*)p)[at / 2] = v;
  else ((u32*)p)[at / 2] = pack_two<T>(v.x, v.y);
}
template <int T> __device__ __forceinline__ void store_four(void* p, size_t at, float4 v) {
  if (T == FLOAT32) ((float4*)p)[at / 4] = v;
  else ((uint2*)p)[at / 4] = make_uint2(pack_two<T>(v.x, v.y), pack_two<T>(v.z, v.w));
}
template <int T> __device__ __forceinline__ float4 rounded(float4 v) {  // as `store_four` would
  if (T == FLOAT32) return v;
  const float2 a = unpack_two<T>(pack_two<T>(v.x, v.y)), b = unpack_two<T>(pack_two<T>(v.z, v.w));
  return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ float dot(float4 a, float4 b, float before) {
  return __fmaf_rn(a.x, b.x, __fmaf_rn(a.y, b.y, __fmaf_rn(a.z, b.z, __fmaf_rn(a.w, b.w, before))));
}
__device__ __forceinline__ float sum_warp(float v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
