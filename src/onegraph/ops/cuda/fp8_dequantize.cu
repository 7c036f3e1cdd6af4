// FP8 and MXFP8 (E4M3) weights to floats, for products of many tokens. OUT: 0 bfloat16, 1 float16, 2 float32, which is exact.
// BYTE_SCALES: 1: scales are bytes of E8M0, 0: float32.

#define HALF (OUT == 1)
#include "nvfp4_common.cuh"
#include "e8m0.cuh"

#if BYTE_SCALES
typedef u8 Scale;
__device__ __forceinline__ float widen_scale(u8 v) { return e8m0_to_float(v); }
#else
typedef float Scale;
__device__ __forceinline__ float widen_scale(float v) { return v; }
#endif

struct Arguments {
  const u8* codes;     // [matrices, n, k]
  const Scale* scale;  // [matrices, ceil(n / 2^row_shift), scale_pitch]
  void* y;             // [matrices, n, k]
  int matrices, n, k;
  int row_shift, column_shift, scale_pitch;
};

// Sixteen codes a thread at a time: they share a scale.
extern "C" __global__ void fp8_dequantize(const Arguments a) {
  pdl_trigger();
  pdl_wait();  // y may still be read by the kernel before
  const u32 chunks = a.k / 16, scale_rows = (a.n + (1 << a.row_shift) - 1) >> a.row_shift;
  const long long all = (long long)a.matrices * a.n * chunks;
  for (long long at = blockIdx.x * 256ll + threadIdx.x; at < all; at += gridDim.x * 256ll) {
    const u32 row = at / chunks, chunk = at % chunks, matrix = row / a.n, r = row % a.n;
    const uint4 codes = ((const uint4*)a.codes)[at];
    const float gain =
        widen_scale(a.scale[((long long)matrix * scale_rows + (r >> a.row_shift)) * a.scale_pitch + (chunk * 16 >> a.column_shift)]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[8];
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        float four[4];
        e4m3_to_float((&codes.x)[half * 2 + word], four);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[word * 4 + i] = four[i] * gain;
      }
#if OUT == 2
#pragma unroll
      for (int i = 0; i < 2; ++i) ((float4*)a.y)[at * 4 + half * 2 + i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
#else
      u32 out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = (u32)narrow(v[2 * i]) | (u32)narrow(v[2 * i + 1]) << 16;
      ((uint4*)a.y)[at * 2 + half] = make_uint4(out[0], out[1], out[2], out[3]);
#endif
    }
  }
}
