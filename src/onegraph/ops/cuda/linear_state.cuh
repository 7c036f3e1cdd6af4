// What kernels of recurrent layers share: S of a head in registers, and what a token does to it.
//
// S [DV, 128] of one head lies in a block of 8 warps: a lane has 16 keys' columns (4 of every 32) of ROWS rows, eight
// lanes a row, so that a sum over keys is three shuffles.
#pragma once

#include "numbers.cuh"

constexpr int KEYS = 128, WARPS = 8, THREADS = 32 * WARPS;

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + __expf(-v)); }
__device__ __forceinline__ float softplus(float v) { return v > 20.f ? v : log1pf(expf(v)); }

// Sums over the eight lanes of a row, in all of them.
template <int ROWS> __device__ __forceinline__ void sum_rows(float (&v)[ROWS]) {
#pragma unroll
  for (int o = 1; o < 8; o *= 2)
#pragma unroll
    for (int i = 0; i < ROWS; ++i) v[i] += __shfl_xor_sync(~0u, v[i], o);
}

// Four numbers of S and what a token does to them. Every product and sum is rounded where it is written: a replay has the
// bits of the step that it repeats.
__device__ __forceinline__ float4 scale(float4 s, float by) {
  return make_float4(__fmul_rn(s.x, by), __fmul_rn(s.y, by), __fmul_rn(s.z, by), __fmul_rn(s.w, by));
}
__device__ __forceinline__ float4 scale(float4 s, float4 by) {
  return make_float4(__fmul_rn(s.x, by.x), __fmul_rn(s.y, by.y), __fmul_rn(s.z, by.z), __fmul_rn(s.w, by.w));
}
__device__ __forceinline__ float4 add(float4 s, float delta, float4 key) {
  return make_float4(__fmaf_rn(delta, key.x, s.x), __fmaf_rn(delta, key.y, s.y), __fmaf_rn(delta, key.z, s.z),
                     __fmaf_rn(delta, key.w, s.w));
}
