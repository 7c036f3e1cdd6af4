// NVFP4 and MXFP4 weights (GROUP: 16, 32) to bfloat16 or float16 (HALF: 1), for products of many tokens.

#include "nvfp4_common.cuh"

struct Arguments {
  const u8* codes;            // [n, k/2]
  const u8* scale;            // [n, k/GROUP]
  const float* global_scale;  // [n]; MXFP4: null
  u16* y;                     // [n, k]
  int n, k;
};

// Eight codes a thread.
extern "C" __global__ void nvfp4_dequantize(const Arguments a) {
  pdl_trigger();
  pdl_wait();  // y may still be read by the kernel before
  const long long words = (long long)a.n * a.k / 8;
  for (long long at = blockIdx.x * 256ll + threadIdx.x; at < words; at += gridDim.x * 256ll) {
    u32 word = ((const u32*)a.codes)[at];
    const u32 bits = (u32)a.scale[at / (GROUP / 8)];
#if GROUP == 32
    const float gain = __uint_as_float(bits ? bits << 23 : 1u << 22);
#else  // E4M3 as the exponent's low bits and the mantissa of a float32
    const float gain = a.global_scale[at / (a.k / 8)] * (__uint_as_float(bits << 20) * 0x1p120f);
#endif
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 code = word >> (8 * i + 4 * j);
        v[j] = __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f * gain;
      }
      out[i] = (u32)narrow(v[0]) | (u32)narrow(v[1]) << 16;
    }
    ((uint4*)a.y)[at] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
