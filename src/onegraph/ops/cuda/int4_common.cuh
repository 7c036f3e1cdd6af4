// What the INT4 kernels share: where codes, scales and zeros lie. What they need of PTX comes through nvfp4_common.cuh, in
// whose place a CPU has other functions of these names (tests/ops/int4_on_cpu).

#include "nvfp4_common.cuh"

__device__ __forceinline__ float scale_to_float(u32 bits) {  // of the low half
  return SCALE_BF16 ? as_float(bits << 16) : half_to_float((u16)bits);
}
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {  // two 16-bit floats at a time
  return HALF ? subtract_f16(a, b) : subtract_bf16(a, b);
}

// A lane's codes of two rows, r and r + 8, of a unit of 16 rows by 256 columns in shared memory: rows of 128 bytes, whose
// pieces of 16 change places, to number ^ row % 8. All lanes of a row have words of one group of GROUP columns at a time:
// WORDS of them, eight columns each, behind one another. Rows are so given to lanes that those that read together read
// other banks, for groups of any size.
constexpr int WORDS = GROUP / 32, PARTS = 8 / WORDS;  // groups of the unit
__device__ __forceinline__ int row_of_lane(int g) { return (g & 1) << 2 | (g & 2) | g >> 2; }
__device__ __forceinline__ void load_codes(u32 (&codes)[2][8], const u8* unit, int row, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u8* const at = unit + (half * 8 + row) * 128;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      u32* const to = codes[half] + part * WORDS;
      if (GROUP == 128) {
        const uint4 v = *(const uint4*)(at + ((part * 4 + t) ^ row) * 16);
        to[0] = v.x, to[WORDS > 1] = v.y, to[WORDS > 2 ? 2 : 0] = v.z, to[WORDS > 2 ? 3 : 0] = v.w;
      } else if (GROUP == 64) {
        const uint2 v = *(const uint2*)(at + ((part * 2 + t / 2) ^ row) * 16 + t % 2 * 8);
        to[0] = v.x, to[WORDS > 1] = v.y;
      } else {
        to[0] = *(const u32*)(at + (part ^ row) * 16 + t * 4);
      }
    }
  }
}

// Scales (upper half) and zeros (lowest byte) of row tiles as words, [tiles][groups][8] of rows r and r + 8, from the
// layout on disk. A lane takes EACH groups of a row, a warp those of eight rows by four, and some times as many before it
// waits for any. Rows beyond the last have the first one's, and no result.
template <int EACH>
__device__ __forceinline__ void load_table(u32* table, const u16* scale, const u8* zero, int rows, int tiles, int groups,
                                           int thread, int warps) {
  constexpr int AT_ONCE = EACH == 1 ? 8 : 4;
  const int lane = thread % 32, steps = (groups + 4 * EACH - 1) / (4 * EACH);
  int strip = 0, step = thread / 32;  // half of a tile, groups: those from number `at` on disk go to number `to` on
  int at = lane % 8 * groups + (step * 4 + lane / 8) * EACH, to = (step * 4 + lane / 8) * EACH * 16 + lane % 8 * 2;
  auto settle = [&]() {
    while (step >= steps) {
      step -= steps, ++strip;
      at += 8 * groups - 4 * EACH * steps;
      to += (strip % 2 ? 1 : groups * 16 - 1) - 64 * EACH * steps;
    }
  };
  settle();
  while (strip < 2 * tiles) {
    u32 scales[AT_ONCE][(EACH + 1) / 2], zeros[AT_ONCE];
    int places[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool there = strip < 2 * tiles && (step * 4 + lane / 8) * EACH < groups;
      const int from = there && strip * 8 + lane % 8 < rows ? at : 0;
      if (EACH == 4) {
        const uint2 v = *(const uint2*)(scale + from);
        scales[i][0] = v.x, scales[i][EACH / 4] = v.y, zeros[i] = *(const u32*)(zero + from);
      } else {
        scales[i][0] = scale[from], zeros[i] = zero[from];
      }
      places[i] = there ? to : -1;
      step += warps, at += 4 * EACH * warps, to += 64 * EACH * warps;
      settle();
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (places[i] >= 0)
#pragma unroll
        for (int j = 0; j < EACH; ++j)
          table[places[i] + j * 16] = (scales[i][j / 2] >> 16 * (j % 2)) << 16 | (zeros[i] >> 8 * j & 0xFF);
  }
}
__device__ __forceinline__ void load_table(uint2* table, const u16* scale, const u8* zero, int first_tile, int tiles,
                                           int n, int groups, int thread, int warps) {
  const int rows = n - first_tile * 16;
  scale += (long long)first_tile * 16 * groups, zero += (long long)first_tile * 16 * groups;
  if (groups % 4 == 0) load_table<4>((u32*)table, scale, zero, rows, tiles, groups, thread, warps);
  else load_table<1>((u32*)table, scale, zero, rows, tiles, groups, thread, warps);
}
