// Trellis codes -> the weight they stand for, both rotations undone: W = norm * diag(out_scale) H_n Q H_k diag(in_scale), in the
// dtype of the activations. For many tokens: W is written once and cuBLAS multiplies by it.
//
// A block has 128 rows by 128 columns, 8 by 8 tiles, and both Hadamard matrices are products of one of 8, between tiles, and one
// of 16, inside them. A warp decodes a column of tiles and adds up between its registers. Through shared memory it gets a row of
// tiles, adds up likewise, and multiplies each tile by both matrices of 16 on tensor cores. The first product is made
// transposed, so that its registers are the second operand of the second one.
//
// Up to 2048 float16 has all integers. Sums of 64 of them are as large as 1182 by their standard deviation, so that few are
// rounded; the product is rounded to float16 once. exllamav3's float16 numbers are rounded in each of the six sums.
//
// Set when compiled: BITS (1 to 8), CODE (0 to 3), HALF (1: W is float16, 0: bfloat16).

#include "rotated_common.cuh"
#include "trellis_decode.cuh"

constexpr int WARPS = 8;
constexpr int TILES = 8;  // of a row or column of a block

struct Arguments {
  const u8* codes;         // int16 [n / 16, k BITS]
  const float* in_scale;   // [k]
  const float* out_scale;  // [n]
  u16* weight;             // [n, k]
  int n, k;
  int row_block;           // of the Hadamard rotation of the n rows that the whole layer has: 64 or 128
  float norm;              // of both rotations
};

// ONE and -ONE of a Hadamard matrix at an even row, the next one, and a column: float16 pairs.
__device__ __forceinline__ u32 signs(u32 one, int row, int column) {
  return one ^ (__popc(row & column) & 1) * 0x80008000u ^ (u32)column << 31;
}
__device__ __forceinline__ u32 flipped(u32 pair, int bits) { return pair ^ (__popc(bits) & 1) * 0x80008000u; }
constexpr u32 UNIT = 0x3C003C00u, SMALL = 0x2C002C00u;  // 1; 1/16, with which the largest sums stay below float16's largest

__device__ __forceinline__ void pair2(u32& a, u32& b) {
  const u32 s = fma_f16(a, UNIT, b);
  b = subtract_f16(a, b);
  a = s;
}
// The Hadamard matrix of 8, or two of 4, between tiles.
__device__ __forceinline__ void between_tiles(uint4 (&v)[TILES], bool narrow) {
#pragma unroll
  for (int o = 1; o < TILES; o <<= 1) {
    if (o == 4 && narrow) break;
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (!(i & o)) pair2(v[i].x, v[i | o].x), pair2(v[i].y, v[i | o].y), pair2(v[i].z, v[i | o].z), pair2(v[i].w, v[i | o].w);
  }
}

// Grid (columns / 128, rows / 128). Shared memory: tiles [8][8][32] of 16 bytes, whose rows then hold the warps' results;
// matrices of 16 [2][32] of 16 bytes, lanes' operands; scales of columns [128].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) trellis_dequantize(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * 128;
  uint4* const tiles = (uint4*)smem;
  uint4* const matrices = tiles + TILES * TILES * 32;
  float* const scales = (float*)(matrices + 64);
  pdl_trigger();
  uint4 v[TILES];  // beyond n and k anything: n and k are multiples of 64, and the blocks that rotations mix then end there
  {
    const int column = first_column + warp * 16;
    const size_t pitch = (size_t)(p.k / 16) * TILE_BYTES;
    const u8* const from = p.codes + first_row / 16 * pitch + column / 16 * TILE_BYTES + lane_bytes(lane);
    u32 word[TILES][FIRST];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int w = 0; w < FIRST; w++)
        word[i][w] = column < p.k && first_row + i * 16 < p.n ? stream4(from + i * pitch + w * 4) : 0;
    if (warp < 4) {
      const int own = first_column + threadIdx.x;
      scales[threadIdx.x] = own < p.k ? p.in_scale[own] : 0.f;
    } else if (warp == 4) {
      // The columns of a lane's results are four side by side, 4 t and on: rows m, m + 1, m + 8 and m + 9 of H_k, m = 2 t.
      const int in = IN * t, column = g / 2 * 4 + g % 2;
      const u32 one = signs(SMALL, in, column), low = flipped(one, in & 2);
      matrices[lane] = make_uint4(one, low, flipped(one, NEXT & column), flipped(low, NEXT & (column + 2)));
    } else if (warp == 5) {
      const u32 one = signs(UNIT, 2 * t, g);  // also at 2 t and g + 8, 2 t + 8 and g
      matrices[32 + lane] = make_uint4(one, one, one, one ^ 0x80008000u);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const uint4 q = decode(word[i], lane);
      v[i] = make_uint4(without_offset(q.x), without_offset(q.z), without_offset(q.y), without_offset(q.w));  // operands side by side
    }
  }
  between_tiles(v, p.row_block == 64);
#pragma unroll
  for (int i = 0; i < TILES; i++) tiles[(i * TILES + warp) * 32 + lane] = v[i];
  __syncthreads();

  const int first = first_row + warp * 16;  // of this warp's rows
  if (first >= p.n) return;
#pragma unroll
  for (int i = 0; i < TILES; i++) v[i] = tiles[(warp * TILES + i) * 32 + lane];
  between_tiles(v, p.k % 128);
  __syncwarp();  // all were read

  const uint4 a = matrices[lane], b = matrices[32 + lane];  // computed here they would be put together for each product
  const float norm = p.norm * 16.f;
  const float upper = p.out_scale[first + g] * norm, lower = p.out_scale[first + g + 8] * norm;
  u8* const rows = smem + warp * TILES * 512;  // [16] of 256 bytes: 16-byte pieces in an order in which eight rows take all banks
  const int turned = (g & 3) << 1;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    float y[2][4] = {};  // of rows 0 to 7, 8 to 15
    mma_f16(y[0], a.x, a.y, a.z, a.w, v[i].x, v[i].y);
    mma_f16(y[1], a.x, a.y, a.z, a.w, v[i].z, v[i].w);
    float w[2][4] = {};
    mma_f16(w[0], b.x, b.y, b.z, b.w, floats_to_halves(y[0][0], y[0][1]), floats_to_halves(y[1][0], y[1][1]));
    mma_f16(w[1], b.x, b.y, b.z, b.w, floats_to_halves(y[0][2], y[0][3]), floats_to_halves(y[1][2], y[1][3]));
    const float4 s = *(const float4*)(scales + i * 16 + t * 4);
    u8* const to = rows + g * 256 + (((2 * i + t / 2) ^ turned) * 16 + t % 2 * 8);
    *(uint2*)to = make_uint2(narrow<HALF>(w[0][0] * (s.x * upper), w[0][1] * (s.y * upper)),
                             narrow<HALF>(w[1][0] * (s.z * upper), w[1][1] * (s.w * upper)));
    *(uint2*)(to + 8 * 256) = make_uint2(narrow<HALF>(w[0][2] * (s.x * lower), w[0][3] * (s.y * lower)),
                                         narrow<HALF>(w[1][2] * (s.z * lower), w[1][3] * (s.w * lower)));
  }
  __syncwarp();
  pdl_wait();  // the product before may still read the weight
  const int piece = lane % 16;
  if (first_column + piece * 8 >= p.k) return;
  u16* to = p.weight + (size_t)(first + lane / 16) * p.k + first_column + piece * 8;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = i * 2 + lane / 16;
    *(uint4*)to = *(const uint4*)(rows + row * 256 + ((piece ^ (row & 3) << 1) * 16));
    to += 2 * p.k;
  }
}
