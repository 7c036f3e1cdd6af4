// What the E8P kernels share besides `rotated_common.cuh`: the tables that codes are decoded with.

#include "rotated_common.cuh"

constexpr float SUBNORMAL = 16777216.f;            // 2^24, what a subnormal float16 counts in
constexpr int STAGES = BITS == 2 ? 1 : 2;
#ifndef E81B_RUN
#define E81B_RUN 128  // bytes that a word of E81B's table is repeated in
#endif
constexpr int TABLE_BYTES = 65536 + (BITS == 3 ? 256 * E81B_RUN : 0);

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
