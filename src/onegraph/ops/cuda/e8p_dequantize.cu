// E8P codes -> the weight they stand for, both rotations undone: W = norm * diag(out_scale) H_n Q H_k diag(in_scale), in
// the dtype of the activations. For many tokens: W is written once and cuBLAS multiplies by it, so that the activations
// need no rotation on either side.
//
// Decoding is told in e8p_decode.cu: eight nibbles in one word. Here they become float16 pairs, of neighbouring columns. A
// thread first holds half a row, and undoes the rotation of columns between its own registers; then, through shared
// memory, two columns of 128 rows, and undoes the rotation of rows. Sums of the first half are exact, and scaled so that
// 128 * 128 of the largest integers stay below float16's largest; the second half rounds what is past eleven bits.
//
// Set when compiled: BITS (2, 3, 4), HALF (1: W is float16, 0: bfloat16).

#include "e8p_common.cuh"

constexpr int THREADS = 128;
// Blocks of an SM that registers are kept for; from 10.0 on a thread of three would spill. Of shared memory an SM of 228 KB
// holds three, of 164 KB two, of 100 KB one.
constexpr int PER_SM = __CUDA_ARCH__ >= 1000 ? 2 : 3;
constexpr int PITCH = SLICE / 2 + 4;  // words of a row of pairs: 16-byte stores of eight rows take all banks
constexpr int WORDS = BITS == 3 ? 768 : 512;
constexpr float UNIT = BITS == 4 ? 32.f : 8.f;  // what the sums count in

struct Arguments {
  const u8* codes;         // int16 [n, k/8]
  const u8* residual;      // uint8 or int16 [n, k/8]
  const uint2* codebook;   // int8 [512, 8]
  const float* in_scale;   // [k]
  const float* out_scale;  // [n]
  u32* weight;             // [n, k / 2], pairs
  int n, k;
  int row_block;           // of the Hadamard rotation of the n rows that the whole layer has: 64 or 128
  float norm;              // of both rotations
};

__device__ __forceinline__ u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ void pair2(u32& a, u32& b) {
  const u32 s = add2(a, b);
  b = subtract_f16(a, b);
  a = s;
}

// Nibbles at bits 4 to 7 of each half: as float16, 64 + nibble.
__device__ __forceinline__ u32 plus64(u32 v) { return (v & 0x00F000F0u) | 0x54005400u; }

// Two words of nibbles, the second 0 at 2 bits -> columns (0, 1), (2, 3), (4, 5), (6, 7) of a code, rotated among them.
__device__ __forceinline__ void code_to_pairs(u32 (&to)[4], u32 v, u32 w) {
  // a = 2 u - 15 and e = u - 8 of u + 64, over UNIT: a / 8, (a + e) / 8 or (4 a + b) / 32
  const u32 quarter = 0x34003400u, offset = BITS == 2 ? 0xCC78CC78u : BITS == 3 ? 0xCEB8CEB8u : 0xCD96CD96u;
  const u32 second = BITS == 3 ? 0x30003000u : 0x2C002C00u;  // 1/8, 1/16
  u32 a = fma_f16(plus64(v << 4), quarter, offset), b = fma_f16(plus64(v), quarter, offset);           // 0, 2 and 4, 6
  u32 c = fma_f16(plus64(v >> 4), quarter, offset), d = fma_f16(plus64(v >> 8), quarter, offset);      // 1, 3 and 5, 7
  if (BITS > 2) {
    a = fma_f16(plus64(w << 4), second, a), b = fma_f16(plus64(w), second, b);
    c = fma_f16(plus64(w >> 4), second, c), d = fma_f16(plus64(w >> 8), second, d);
  }
  pair2(a, c), pair2(b, d);
  to[0] = prmt(a, c, 0x5410), to[1] = prmt(a, c, 0x7632), to[2] = prmt(b, d, 0x5410), to[3] = prmt(b, d, 0x7632);
  pair2(to[0], to[1]), pair2(to[2], to[3]);
  pair2(to[0], to[2]), pair2(to[1], to[3]);
}

// Grid (slices of 256 columns, row blocks of 128). Shared memory: pairs [128][PITCH], the tables' words, scales of rows.
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) e8p_dequantize(const __grid_constant__ Arguments p) {
  const int thread = threadIdx.x, slice = blockIdx.x, first_row = blockIdx.y * ROWS, row = first_row + thread;
  u32* pairs = (u32*)smem;
  u32* words = pairs + ROWS * PITCH;
  float* row_scale = (float*)(words + WORDS);
  pdl_trigger();
  for (int q = thread; q < WORDS; q += THREADS) words[q] = table_word(codebook_row(p.codebook, q), q);
  row_scale[thread] = row < p.n ? p.out_scale[row] * p.norm * UNIT : 0.f;
  __syncthreads();

#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    const int column = slice * SLICE + half * 128;
    u32 v[16][4];
#pragma unroll
    for (int part = 0; part < 4; part++) {  // four codes
      uint2 first = make_uint2(0, 0), rest = first;
      const size_t at = (size_t)row * (p.k / 8) + column / 8 + part * 4;
      if (row < p.n && column + part * 32 < p.k) {
        first = *(const uint2*)(p.codes + at * 2);
        if (BITS == 4) rest = *(const uint2*)(p.residual + at * 2);
        if (BITS == 3) rest.x = *(const u32*)(p.residual + at);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 code = (i < 2 ? first.x : first.y) >> (i % 2 * 16);
        u32 second = 0;
        if (BITS == 4) {
          const u32 other = (i < 2 ? rest.x : rest.y) >> (i % 2 * 16);
          second = words[other >> 7 & 0x1FE] ^ words[(other & 255) * 2 + 1];
        } else if (BITS == 3) {
          second = words[512 + (rest.x >> (i * 8) & 255)];
        }
        code_to_pairs(v[part * 4 + i], words[code >> 7 & 0x1FE] ^ words[(code & 255) * 2 + 1], second);
      }
    }
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) {
      if (o == 8 && p.k % 128) break;
#pragma unroll
      for (int c = 0; c < 16; c++)
        if (!(c & o))
#pragma unroll
          for (int m = 0; m < 4; m++) pair2(v[c][m], v[c | o][m]);
    }
#pragma unroll
    for (int c = 0; c < 16; c++)
      *(uint4*)(pairs + thread * PITCH + half * 64 + c * 4) = make_uint4(v[c][0], v[c][1], v[c][2], v[c][3]);
  }
  __syncthreads();

  const int column = slice * SLICE + thread * 2;
  float2 in_scale = make_float2(0.f, 0.f);
  if (column < p.k) in_scale = *(const float2*)(p.in_scale + column);
  u32 v[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) v[r] = pairs[r * PITCH + thread];
#pragma unroll
  for (int o = 1; o < ROWS; o <<= 1) {
    if (o == 64 && p.row_block == 64) break;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (!(r & o)) pair2(v[r], v[r | o]);
  }
  pdl_wait();  // the product before may still read the weight
  if (column >= p.k) return;
  u32* to = p.weight + ((size_t)first_row * p.k + column) / 2;
  const int rows = min(ROWS, p.n - first_row);
#pragma unroll
  for (int r = 0; r < ROWS; r += 4) {
    if (r >= rows) break;  // n is a multiple of 64
    const float4 scale = *(const float4*)(row_scale + r);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 w = widen<true>(v[r + i]);
      const float s = i == 0 ? scale.x : i == 1 ? scale.y : i == 2 ? scale.z : scale.w;
      *to = narrow<HALF>(w.x * in_scale.x * s, w.y * in_scale.y * s);
      to += p.k / 2;
    }
  }
}
