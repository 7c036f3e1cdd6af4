// Activations to NVFP4 as FP4 tensor cores take them, and scales of weights into the order in which they read them. x is
// bfloat16, float16 (HALF) or float32 (FLOAT).
//
// Bits are those of torch's float32 operations (ops/nvfp4.py): divisions are divisions, ties go to even.

#include "nvfp4_common.cuh"

struct Arguments {
  const void* x;      // [rows, k]; of nvfp4_tiles u8 [rows, k/16]
  const float* unit;  // []: the global scale
  u8* codes;          // [rows, k/2]
  u8* tiles;          // [rows / 128, k / 64, 512], both rounded up, zeros in the padding
  int rows, k;
};

constexpr float SMALLEST = 0x1p-126f;  // as in ops/nvfp4.py

struct Spot { int row, group; long long tile; };  // one scale: its row, its group of 16 columns, where it goes

// The place of this thread; false where there is none.
__device__ __forceinline__ bool find(const Arguments& a, Spot& to) {
  const int across = (a.k / 16 + 3) / 4, down = (a.rows + 127) / 128;
  const long long at = blockIdx.x * 256ll + threadIdx.x;
  to.row = (int)(at / (across * 4)), to.group = (int)(at % (across * 4));
  const int inside = to.row % 128;
  to.tile = ((long long)(to.row / 128) * across + to.group / 4) * 512 + inside % 32 * 16 + inside / 32 * 4 + to.group % 4;
  return to.row < down * 128;
}

__device__ __forceinline__ u32 to_e4m3(float v) {  // of 0 to 448, or NaN
  if (v != v) return 0x7F;
  if (v < 0x1p-6f) return as_bits(v * 512.f + 8388608.f) & 15;
  const u32 bits = as_bits(v);
  return ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
}

__device__ __forceinline__ u32 to_e2m1(float v) {
  const float a = v < 0.f ? -v : v;
  const u32 size = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
  return size | as_bits(v) >> 31 << 3;
}

// A group of 16 columns a thread.
extern "C" __global__ void nvfp4_activations(const Arguments a) {
  let_next_start();
  wait_for_previous();
  Spot to;
  if (!find(a, to)) return;
  if (to.row >= a.rows || to.group >= a.k / 16) {
    a.tiles[to.tile] = 0;
    return;
  }
  const long long from = (long long)to.row * a.k + to.group * 16;
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; i += FLOAT ? 4 : 8) {
    const uint4 q = FLOAT ? ((const uint4*)a.x)[(from + i) / 4] : ((const uint4*)a.x)[(from + i) / 8];
    const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (FLOAT) v[i + j] = as_float(words[j]);
      else v[i + 2 * j] = widen(words[j]), v[i + 2 * j + 1] = widen(words[j] >> 16);
    }
  }
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float size = v[i] < 0.f ? -v[i] : v[i];
    if (size > most || size != size) most = size;  // NaN stays
  }
  const float unit = *a.unit;
  float scale = most / (unit * 6.f);
  if (scale > 448.f) scale = 448.f;
  const u32 byte = to_e4m3(scale);
  a.tiles[to.tile] = (u8)byte;
  float step = byte == 0x7F ? as_float(0x7FC00000u) : as_float(byte << 20) * 0x1p120f * unit;
  if (step < SMALLEST) step = SMALLEST;
  u32 out[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) out[i / 8] |= to_e2m1(v[i] / step) << 4 * (i % 8);
  ((uint2*)a.codes)[from / 16] = uint2{out[0], out[1]};
}

// A scale a thread.
extern "C" __global__ void nvfp4_tiles(const Arguments a) {
  let_next_start();
  wait_for_previous();
  Spot to;
  if (!find(a, to)) return;
  const int groups = a.k / 16;
  const bool inside = to.row < a.rows && to.group < groups;
  a.tiles[to.tile] = inside ? ((const u8*)a.x)[(long long)to.row * groups + to.group] : 0;
}
