// Trellis codes -> the weight they stand for, both rotations undone: W = norm * diag(out_scale) H_n Q H_k diag(in_scale), in the
// dtype of the activations. For many tokens: W is written once and cuBLAS multiplies by it.
//
// A block has 128 rows by 128 columns. Each warp decodes a row of eight tiles, as float16 in the order of m16n8k16's operands, for
// all of them. Then each has 16 columns of all rows, and both Hadamard matrices are products: H_k Q^T of 16 columns and 16 rows
// ends in the registers where the second product, by H_n, has its first operand. Integers and signs are exact, so is the first
// product (below 2^16, in float32); it is rounded to float16 in between, to 2^-11 of a number.
//
// Set when compiled: BITS (1 to 8), CODE (0 to 3), HALF (1: W is float16, 0: bfloat16).

#include "rotated_common.cuh"
#include "trellis_decode.cuh"

constexpr int WARPS = 8, PITCH = 136;  // halves of a row on its way out: 16-byte pieces of rows take all banks

struct Arguments {
  const u8* codes;         // int16 [n / 16, k BITS]
  const float* in_scale;   // [k]
  const float* out_scale;  // [n]
  u16* weight;             // [n, k]
  int n, k;
  int row_block;           // of the Hadamard rotation of the n rows that the whole layer has: 64 or 128
  float norm;              // of both rotations
};

// 1 and -1 of a Hadamard matrix at a row, the next one, and a column: float16 pairs.
__device__ __forceinline__ u32 signs(int row, int column) {
  return 0x3C003C00u ^ (__popc(row & column) & 1) << 15 ^ (u32)(__popc((row + 1) & column) & 1) << 31;
}
__device__ __forceinline__ u32 flipped(u32 pair, int odd) { return odd & 1 ? pair ^ 0x80008000u : pair; }

// Grid (columns / 128, rows / 128). Shared memory: tiles [8][8][32] of 16 bytes, then [128][PITCH] halves in their place.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) trellis_dequantize(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * 128;
  uint4* const tiles = (uint4*)smem;
  pdl_trigger();
  {
    const int row = first_row / 16 + warp;
    const u8* const from = p.codes + ((size_t)row * (p.k / 16) + first_column / 16) * TILE_BYTES + lane_bytes(lane);
    u32 word[8][FIRST];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int w = 0; w < FIRST; w++)
        word[i][w] = row * 16 < p.n && first_column + i * 16 < p.k ? stream4(from + i * TILE_BYTES + w * 4) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint4 v = decode(word[i], lane);
      v.x = without_offset(v.x), v.y = without_offset(v.y), v.z = without_offset(v.z), v.w = without_offset(v.w);
      if (row * 16 >= p.n || first_column + i * 16 >= p.k) v = make_uint4(0, 0, 0, 0);
      tiles[(warp * 8 + i) * 32 + lane] = v;
    }
  }
  __syncthreads();

  // Of this warp's 16 columns m: H_k at (m, a lane's inputs) of a tile, but for the sign of tile and warp.
  const bool narrow_columns = p.k % 128, narrow_rows = p.row_block == 64;
  const int in = IN * t;
  const u32 a0 = signs(in, g), a1 = signs(in, g + 8), a2 = signs(in + NEXT, g), a3 = signs(in + NEXT, g + 8);
  // H_n at (rows 2 t .. and 2 t + 8 .. of a tile, column g of eight), for even and odd eights, but for the sign of tile and eight.
  const u32 b[2][2] = {{signs(2 * t, g), signs(2 * t + 8, g)}, {signs(2 * t, g + 8), signs(2 * t + 8, g + 8)}};
  float out[16][4];
#pragma unroll
  for (int j = 0; j < 16; j++) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.f;
#pragma unroll 1
  for (int r = 0; r < 8; r++) {
    float y[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (narrow_columns && i / 4 != warp / 4) continue;
      const uint4 q = tiles[(r * 8 + i) * 32 + lane];
      const int odd = __popc(i & warp & (narrow_columns ? 3 : 7));
      const u32 h0 = flipped(a0, odd), h1 = flipped(a1, odd), h2 = flipped(a2, odd), h3 = flipped(a3, odd);
      mma_f16(y[0], h0, h1, h2, h3, q.x, q.z);
      mma_f16(y[1], h0, h1, h2, h3, q.y, q.w);
    }
    const u32 y0 = floats_to_halves(y[0][0], y[0][1]), y1 = floats_to_halves(y[0][2], y[0][3]);
    const u32 y2 = floats_to_halves(y[1][0], y[1][1]), y3 = floats_to_halves(y[1][2], y[1][3]);
#pragma unroll
    for (int j = 0; j < 16; j++) {
      if (narrow_rows && j / 8 != r / 4) continue;
      const int odd = __popc(r & j / 2 & (narrow_rows ? 3 : 7));
      mma_f16(out[j], y0, y1, y2, y3, flipped(b[j % 2][0], odd), flipped(b[j % 2][1], odd));
    }
  }
  __syncthreads();  // tiles were read

  u16* const rows = (u16*)smem;
  const int column = first_column + warp * 16 + g;
  const float left = column < p.k ? p.in_scale[column] * p.norm : 0.f, right = column + 8 < p.k ? p.in_scale[column + 8] * p.norm : 0.f;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const int row = j * 8 + 2 * t;  // and the next one
    float2 scale = make_float2(0.f, 0.f);
    if (first_row + row < p.n) scale = *(const float2*)(p.out_scale + first_row + row);
    const u32 a = narrow<HALF>(out[j][0] * left * scale.x, out[j][1] * left * scale.y);
    const u32 c = narrow<HALF>(out[j][2] * right * scale.x, out[j][3] * right * scale.y);
    u16* const to = rows + row * PITCH + warp * 16 + g;
    to[0] = (u16)a, to[PITCH] = (u16)(a >> 16), to[8] = (u16)c, to[PITCH + 8] = (u16)(c >> 16);
  }
  __syncthreads();
  pdl_wait();  // the product before may still read the weight
  for (int i = threadIdx.x; i < ROWS * 16; i += WARPS * 32) {
    const int row = i / 16, piece = i % 16 * 8;
    if (first_row + row < p.n && first_column + piece < p.k)
      *(uint4*)(p.weight + (size_t)(first_row + row) * p.k + first_column + piece) = *(const uint4*)(rows + row * PITCH + piece);
  }
}
