// What the INT4 kernels share: where codes, scales and zeros lie. What they need of PTX comes through nvfp4_common.cuh, in
// whose place a CPU has other functions of these names (tests/int4_on_cpu).

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
// layout on disk: a warp takes four groups of eight rows at a time, and eight times as many before it waits for any. Rows
// beyond the last are zeros.
__device__ __forceinline__ void load_table(uint2* table, const u16* scale, const u8* zero, int first_tile, int tiles,
                                           int n, int groups, int thread, int warps) {
  constexpr int BATCH = 8;
  const int lane = thread % 32, quads = (groups + 3) / 4;
  int strip = 0, quad = thread / 32;  // half of a tile, four groups
  auto settle = [&]() {
    while (quad >= quads) quad -= quads, ++strip;
  };
  settle();
  while (strip < 2 * tiles) {
    u32 word[BATCH];
    int to[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int group = quad * 4 + lane / 8, row = (first_tile + strip / 2) * 16 + strip % 2 * 8 + lane % 8;
      const bool there = strip < 2 * tiles && group < groups;
      to[i] = there ? (strip / 2 * groups + group) * 16 + lane % 8 * 2 + strip % 2 : -1;
      const long long at = there && row < n ? (long long)row * groups + group : 0;
      word[i] = row < n ? (u32)scale[at] << 16 | zero[at] : 0u;
      quad += warps;
      settle();
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (to[i] >= 0) ((u32*)table)[to[i]] = word[i];
  }
}
