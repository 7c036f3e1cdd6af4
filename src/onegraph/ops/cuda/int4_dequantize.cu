// INT4 weights to bfloat16 or float16 (HALF: 1), for products of many tokens. SCALE_BF16 (1: scales are bfloat16, 0:
// float16), GROUP (128: of what int4_common.cuh has for products).

#include "int4_common.cuh"

struct Arguments {
  const u8* codes;   // [n, k/2]
  const u16* scale;  // [n, groups]
  const u8* zero;    // [n, groups]
  u16* y;            // [n, k]
  int n, k, groups;
};

// Eight codes a thread.
extern "C" __global__ void int4_dequantize(const Arguments a) {
  pdl_trigger();
  pdl_wait();  // y may still be read by the kernel before
  const int each = a.k / 8 / a.groups;  // words of a group, whole ones: groups are multiples of 32 columns
  const long long words = (long long)a.n * a.k / 8;
  for (long long at = blockIdx.x * 256ll + threadIdx.x; at < words; at += gridDim.x * 256ll) {
    const u32 word = ((const u32*)a.codes)[at];
    const long long group = at / each;
    const float scale = scale_to_float(a.scale[group]);
    const int zero = a.zero[group];
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = (u32)narrow((float)((int)(word >> 8 * i & 15) - zero) * scale) |
               (u32)narrow((float)((int)(word >> (8 * i + 4) & 15) - zero) * scale) << 16;
    ((uint4*)a.y)[at] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
