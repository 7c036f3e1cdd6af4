// What the E8P kernels share: the tables that codes are decoded with, activations on their way in, results on theirs out.

#include "ptx.cuh"

constexpr int SLICE = 256;       // columns that four lanes' 16-byte loads of codes cover
constexpr int ROWS = 128;        // rows that the output's rotation mixes at most
constexpr float SUBNORMAL = 16777216.f;            // 2^24, what a subnormal float16 counts in
constexpr int STAGES = BITS == 2 ? 1 : 2;
#ifndef E81B_RUN
#define E81B_RUN 128  // bytes that a word of E81B's table is repeated in
#endif
constexpr int TABLE_BYTES = 65536 + (BITS == 3 ? 256 * E81B_RUN : 0);
#ifndef START
#define START 1024  // from compute capability 9.0 on, where the first KB is the system's; before, 0
#endif
constexpr int SMEM_START = START;  // where a block's own shared memory begins; checked at the start

extern __shared__ __align__(1024) u8 smem[];

template <bool IS_HALF> __device__ __forceinline__ float2 widen(u32 v) {  // two 16-bit floats
  return IS_HALF ? halves_to_floats(v) : make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}
template <bool IS_HALF> __device__ __forceinline__ u32 narrow(float a, float b) {
  return IS_HALF ? floats_to_halves(a, b) : floats_to_bf16s(a, b);
}

__device__ __forceinline__ float butterfly(float v, int lane, int o) {
  return fmaf(v, (lane & o) ? -1.f : 1.f, __shfl_xor_sync(~0u, v, o));
}
__device__ __forceinline__ void across_lanes(float4& v, int lane, int o) {
  v.x = butterfly(v.x, lane, o), v.y = butterfly(v.y, lane, o);
  v.z = butterfly(v.z, lane, o), v.w = butterfly(v.w, lane, o);
}
__device__ __forceinline__ void pair(float& a, float& b) {
  const float s = a + b;
  b = a - b;
  a = s;
}

__device__ __forceinline__ void unpack8(float (&v)[8], const uint4& raw) {
  const float2 f0 = widen<HALF>(raw.x), f1 = widen<HALF>(raw.y), f2 = widen<HALF>(raw.z), f3 = widen<HALF>(raw.w);
  v[0] = f0.x, v[1] = f0.y, v[2] = f1.x, v[3] = f1.y, v[4] = f2.x, v[5] = f2.y, v[6] = f3.x, v[7] = f3.y;
}
// Eight columns of one token a lane, in two parts: asked for, then taken, after SwiGLU if there is one; zero outside.
struct Raw {
  uint4 x, up;
};
template <class A> __device__ __forceinline__ Raw ask_x(const A& p, bool silu, int token, int column, bool inside) {
  Raw raw;
  raw.x = raw.up = make_uint4(0, 0, 0, 0);
  if (!inside) return raw;
  const u16* from = p.x + (size_t)token * (silu ? 2 * p.k : p.k) + column;
  raw.x = *(const uint4*)from;
  if (silu) raw.up = *(const uint4*)(from + p.k);
  return raw;
}
__device__ __forceinline__ void take_x(float (&v)[8], const Raw& raw, bool silu) {
  unpack8(v, raw.x);
  if (!silu) return;
  float up[8];
  unpack8(up, raw.up);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = __fdividef(v[e], 1.f + exp2_fast(v[e] * -1.4426950408889634f)) * up[e];
}
template <class A>
__device__ __forceinline__ void load_x(float (&v)[8], const A& p, int token, int column, bool inside) {
  take_x(v, ask_x(p, p.silu, token, column, inside), p.silu);
}
__device__ __forceinline__ float over_lanes(float v) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ float squares_of(const float (&v)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < 8; e++) sum = fmaf(v[e], v[e], sum);
  return sum;
}
__device__ __forceinline__ float sum_of_squares(const float (&v)[8]) { return over_lanes(squares_of(v)); }
__device__ __forceinline__ void rotate8(float (&v)[8]) {
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (!(e & o)) pair(v[e], v[e | o]);
}
__device__ __forceinline__ void rotate(float (&v)[8], const float (&in_scale)[8], int block, int lane) {
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] *= in_scale[e];
  rotate8(v);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, o);
  if (block == 128)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, 8);
}

// The rotation of rows, of which a lane has four: in blocks of 128, or 64.
__device__ __forceinline__ void rotate_rows(float4& v, int block, int lane) {
  pair(v.x, v.y), pair(v.z, v.w), pair(v.x, v.z), pair(v.y, v.w);
#pragma unroll
  for (int o = 1; o < 16; o <<= 1) across_lanes(v, lane, o);
  if (block == 128) across_lanes(v, lane, 16);
}
__device__ __forceinline__ void add_to(float4& v, const float4& u) { v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w; }

// Four results of a row: what is added to them, beside `c`, and their place in y.
template <class A> __device__ __forceinline__ uint4 ask_add(const A& p, size_t at) {
  if (p.wide) return *(const uint4*)((const float*)p.add + at);
  const uint2 two = *(const uint2*)((const u16*)p.add + at);
  return make_uint4(two.x, two.y, 0, 0);
}
template <class A> __device__ __forceinline__ void take_add(float4& c, const A& p, const uint4& raw) {
  if (p.wide) {
    c.x += __uint_as_float(raw.x), c.y += __uint_as_float(raw.y);
    c.z += __uint_as_float(raw.z), c.w += __uint_as_float(raw.w);
  } else {
    const float2 lower = widen<HALF>(raw.x), upper = widen<HALF>(raw.y);
    c.x += lower.x, c.y += lower.y, c.z += upper.x, c.w += upper.y;
  }
}
template <class A> __device__ __forceinline__ void add4(float4& c, const A& p, size_t at) {
  if (p.add) take_add(c, p, ask_add(p, at));
}
template <class A> __device__ __forceinline__ void store4(const A& p, size_t at, const float4& v) {
  if (p.wide) *(float4*)((float*)p.y + at) = v;
  else *(uint2*)((u16*)p.y + at) = make_uint2(narrow<HALF>(v.x, v.y), narrow<HALF>(v.z, v.w));
}

__device__ __forceinline__ void set8(float (&to)[8], const float4& a, const float4& b) {
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
__device__ __forceinline__ void load8(float (&to)[8], const float* from, bool inside) {
  float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
  if (inside) a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  set8(to, a, b);
}

// The tables are runs of 128 bytes, one word 32 times: T1's at even and T2's at odd places, E81B's behind them, in runs of
// E81B_RUN. A warp builds 32 runs at a time, in two parts: the codebook is asked for, then used. T2 does not need it, and
// is built first.
constexpr int PAIRED = 16, TABLE_BLOCKS = PAIRED + (BITS == 3 ? 8 : 0);  // PAIRED: those of T1 and T2
struct TableWords {
  uint2 row[(TABLE_BLOCKS + 7) / 8];  // for 8 warps and more; fewer load the rest late
};
__device__ __forceinline__ uint2 codebook_row(const uint2* codebook, int q) {
  return q >= 512 ? codebook[q - 256] : codebook[q >> 1];
}
// The place in the tables whose word a lane makes of a block's: T1's in each half of a warp, or E81B's.
__device__ __forceinline__ int place_of(int block, int lane) {
  return block * 32 + (block < PAIRED ? lane % 16 * 2 : lane);
}
__device__ __forceinline__ TableWords load_table_words(const uint2* codebook, int warp, int warps, int lane) {
  TableWords words;
#pragma unroll
  for (int i = 0; i < (TABLE_BLOCKS + 7) / 8; i++) {
    const int block = warp + i * warps;
    if (block < TABLE_BLOCKS) words.row[i] = codebook_row(codebook, place_of(block, lane));
  }
  return words;
}
// The word at place q of the tables: T1's at even places, T2's at odd ones, E81B's from 512 on. `row` as codebook_row.
__device__ __forceinline__ u32 table_word(uint2 row, int q) {
  if (q >= 512) return ((row.x & 0x0F0F0F0Fu) | ((row.y & 0x0F0F0F0Fu) << 4)) ^ 0x88888888u;
  if (q & 1) {
    const u32 p = __popc(q >> 1) & 1, s = (q >> 1) ^ p;
    u32 word = ((s & 15) * 0x00204081u & 0x01010101u) * 0x0Eu;
    word |= ((s >> 4) * 0x00204081u & 0x01010101u) * 0xE0u;
    return word ^ p * 0x11111111u;
  }
  return ((row.x >> 1 & 0x0F0F0F0Fu) | ((row.y >> 1 & 0x0F0F0F0Fu) << 4)) ^ 0x88888888u;
}
// RUNS runs of RUN bytes, STEP bytes apart, of the words of lanes 0, 1, 2 ..
template <int RUNS, int STEP, int RUN = 128> __device__ __forceinline__ void build_runs(u32 word, u8* to, int lane) {
  constexpr int LANES = RUN / 16, AT_ONCE = 32 / LANES;
#pragma unroll
  for (int i = 0; i < RUNS / AT_ONCE; i++) {
    const int run = i * AT_ONCE + lane / LANES;
    const u32 v = __shfl_sync(~0u, word, run);
    *(uint4*)(to + run * STEP + lane % LANES * 16) = make_uint4(v, v, v, v);
  }
}
__device__ __forceinline__ void build_block(uint2 row, int block, int lane) {  // but for T2
  const u32 word = table_word(row, place_of(block, lane));
  u8* const to = smem + block * 4096;
  if (block < PAIRED) build_runs<16, 256>(word, to, lane);
  else build_runs<32, E81B_RUN, E81B_RUN>(word, to - (block - PAIRED) * (4096 - 32 * E81B_RUN), lane);
}
__device__ __forceinline__ void build_tables(const uint2* codebook, const TableWords& words, int warp, int warps,
                                             int lane) {
  for (int block = warp; block < PAIRED; block += warps)
    build_runs<16, 256>(table_word(make_uint2(0, 0), place_of(block, lane) + 1), smem + block * 4096 + 128, lane);
#pragma unroll
  for (int i = 0; i < (TABLE_BLOCKS + 7) / 8; i++)
    if (warp + i * warps < TABLE_BLOCKS) build_block(words.row[i], warp + i * warps, lane);
  for (int block = warp + (TABLE_BLOCKS + 7) / 8 * warps; block < TABLE_BLOCKS; block += warps)
    build_block(codebook_row(codebook, place_of(block, lane)), block, lane);
}

// The tables begin where the code of a lookup has it.
__device__ __forceinline__ void check_start(u32 base) {
  if ((base & 0xFFFFu) != SMEM_START) __trap();
}
// The high half of the tables' address and the lane's bank. Opaque, so that no lookup is moved before it.
__device__ __forceinline__ u32 bank_of(u32 base, int lane) { return hidden_or(base & 0xFFFF0000u, lane * 4); }
// `bank` as of `bank_of`; AT, the low half of the address, is an immediate.
template <int AT> __device__ __forceinline__ u32 lookup(u32 address) { return load_shared<SMEM_START + AT>(address); }
// The I-th of two codes in a word. The index byte becomes byte 1 of the address.
template <int I> __device__ __forceinline__ u32 decode(u32 codes, u32 bank) {
  return lookup<0>(prmt(codes, bank, I ? 0x7634 : 0x7614)) ^ lookup<128>(prmt(codes, bank, I ? 0x7624 : 0x7604));
}
template <int I> __device__ __forceinline__ u32 decode_e81b(u32 codes, u32 bank) {
  constexpr int LEFT = E81B_RUN == 128 ? 7 : 6;  // its place in the table, of 128 or 64 bytes a word
  static_assert(E81B_RUN == 1 << LEFT, "128 or 64");
  const u32 index = I * 8 < LEFT ? codes << (LEFT - I * 8) : codes >> (I * 8 - LEFT);
  return lookup<65536>((index & 255 << LEFT) | (bank & ~(128u - E81B_RUN)));
}
__device__ __forceinline__ u32 part(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Registers that a product still reads are not to be reused before this, which follows the wait for it.
__device__ __forceinline__ void keep(u32 (&a)[2][4]) {
#pragma unroll
  for (int j = 0; j < 2; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3]));
}
