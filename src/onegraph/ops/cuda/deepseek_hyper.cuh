// What the kernels of hyper-connections share: numbers of 16 bits, sums over a warp, Sinkhorn's iterations.
#pragma once

#include "ptx.cuh"

constexpr int H = 4, ROWS = H * (H + 2), BLOCKS = 16;
constexpr int PAIRS = DIM / BLOCKS / 2, THREADS = 2 * PAIRS, SIDE = PAIRS / 32, MINE = ROWS / 2;

__device__ __forceinline__ float widen(u16 v) {
  return HALF ? half_to_float(v) : __uint_as_float((u32)v << 16);
}
__device__ __forceinline__ u16 narrow(float v) { return HALF ? float_to_half(v) : float_to_bf16(v); }
__device__ __forceinline__ float2 widen2(u32 v) { return make_float2(widen((u16)v), widen((u16)(v >> 16))); }
__device__ __forceinline__ u32 narrow2(float2 v) { return (u32)narrow(v.x) | (u32)narrow(v.y) << 16; }
__device__ __forceinline__ void load4(float (&to)[4], const float* p) {
  const float4 v = *(const float4*)p;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + __expf(-v)); }

// Lanes 2 N apart swap halves of their 2 N values and add: which values a lane is left with follows from its number.
template <int N> __device__ __forceinline__ void halve(float (&v)[16], u32 lane) {
  const bool upper = lane & (2 * N);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float given = upper ? v[i] : v[i + N];
    v[i] = (upper ? v[i + N] : v[i]) + __shfl_xor_sync(~0u, given, 2 * N);
  }
}
// Values 0 to 15 of all lanes added up; value i comes out in lanes 2 i and 2 i + 1.
__device__ __forceinline__ float add_lanes(float (&v)[16], u32 lane) {
  halve<8>(v, lane), halve<4>(v, lane), halve<2>(v, lane), halve<1>(v, lane);
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

__device__ __forceinline__ void sinkhorn(float (&c)[H][H], int iterations, float floor) {
#pragma unroll
  for (int i = 0; i < H; ++i) {
    const float top = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
#pragma unroll
    for (int j = 0; j < H; ++j) c[i][j] = __expf(c[i][j] - top);
    const float unit = 1.0f / ((c[i][0] + c[i][1]) + (c[i][2] + c[i][3]));
#pragma unroll
    for (int j = 0; j < H; ++j) c[i][j] = c[i][j] * unit + floor;
  }
  for (int n = 0;; ++n) {
#pragma unroll
    for (int j = 0; j < H; ++j) {
      const float unit = __fdividef(1.0f, (c[0][j] + c[1][j]) + (c[2][j] + c[3][j]) + floor);
#pragma unroll
      for (int i = 0; i < H; ++i) c[i][j] *= unit;
    }
    if (n + 1 >= iterations) break;
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const float unit = __fdividef(1.0f, (c[i][0] + c[i][1]) + (c[i][2] + c[i][3]) + floor);
#pragma unroll
      for (int j = 0; j < H; ++j) c[i][j] *= unit;
    }
  }
}
