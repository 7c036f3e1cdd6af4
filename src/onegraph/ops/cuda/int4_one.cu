// INT4 linears for one to four tokens, weights only: int8 tensor cores on codes that the copy engine brings.
//
// Cut. A unit is 16 rows by 256 columns; a block owns a run of row tiles, and its warps take the units of these, tile
// after tile, in turn. Eight units are a stage; one more warp keeps DEPTH stages under way, which the copy engine brings
// (swizzled by 128 bytes). Scales and zeros of all of a block's rows lie in shared memory from the beginning, a word each.
// Registers allow one block an SM: where two fit, those of the next launch gather in pairs on SMs that this one left free,
// and the slowest SM sets the time.
//
// Arithmetic. Codes are bytes of a product as they are: a mask gives the four even columns of a word, another the four
// odd ones, times 16. x is brought to integers of 15 bits, by a power of two for every 256 columns; they go in as two
// bytes. A product has eight columns: the upper and lower bytes of four tokens. All its lanes have columns of one group,
// so its sum needs one zero, times the sum of x over the group, which is made once; integers until there, exact. Then
// scales are multiplied in float32.
//
// Set when compiled: HALF (1: x and y are float16, 0: bfloat16), SCALE_BF16 (1: scales are bfloat16, 0: float16), FLOAT32
// (1: y is float32), GROUP (32, 64, or 128, for larger ones too), WARPS (that multiply: 16), DEPTH, PACE (nanoseconds between
// the first stages).

#include "int4_common.cuh"

constexpr int ROWS = 16, SLICE = 256, THREADS = WARPS * 32;
constexpr int STAGE = 8;  // units; groups of so many warps take turns
static_assert(DEPTH % (WARPS / STAGE) == 0, "a group would not see every turn of a stage's barriers");
constexpr int REGISTERS = 80;                      // of a thread
constexpr int CODES = ROWS * SLICE / 2;            // bytes of a unit
constexpr int PAIRS = WORDS == 1 ? 1 : WORDS / 2;  // of words that are multiplied together
constexpr int FACTOR_BITS = GROUP == 32 ? 0 : 4;   // sums are times 2^FACTOR_BITS
constexpr u32 LOW = 0x0F0F0F0Fu, HIGH = 0xF0F0F0F0u;

struct Arguments {
  TensorMap codes;    // uint8 [k/256, n, 128] in boxes of `box` by 16 rows
  const u16* x;       // [tokens, k]
  const u16* scale;   // [n, groups]
  const u8* zero;     // [n, groups]
  const int* order;   // [k], or null: which of x a column multiplies
  const float* bias;  // [n] or null
  u16* y;             // [tokens, n]
  int tokens, n, k, groups;
  int shift;  // a column's group is column >> shift
  int hold;   // row tiles of a block at most
  int round;  // row tiles whose sums it holds: more take several rounds
  int box;    // slices of a box: divides k / 256 and STAGE
};

extern "C" __global__ void __maxnreg__(REGISTERS) int4_one(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int all_tiles = (a.n + ROWS - 1) / ROWS, slices = a.k / SLICE, tokens = a.tokens, groups = a.groups;
  const int begin = (long long)all_tiles * blockIdx.x / gridDim.x;
  const int tiles = (int)((long long)all_tiles * (blockIdx.x + 1) / gridDim.x) - begin, units = tiles * slices;
  const int pair_bytes = tokens * 128, slice_bytes = tokens * 512;  // of x

  u8* const ring = shared;                                      // [DEPTH][STAGE][CODES]
  Barrier* const full = (Barrier*)(ring + DEPTH * STAGE * CODES);  // [DEPTH]
  Barrier* const empty = full + DEPTH;                          // [DEPTH]
  u8* const bytes = (u8*)(empty + DEPTH);                       // of x: [slices][4][tokens, upper or lower][4][16]
  u32* const zeros = (u32*)(bytes + slices * slice_bytes);      // [4]
  uint2* const table = (uint2*)(zeros + 4);                     // [hold][groups][8]: scale and zero of rows r and r + 8
  int* const x_sum = (int*)(table + a.hold * groups * 8);       // [tokens][slices][PARTS]
  float* const x_scale = (float*)(x_sum + tokens * slices * PARTS);  // [tokens][slices]
  float* const partial = x_scale + tokens * slices;             // [round][WARPS][tokens][ROWS]

  if (threadIdx.x == THREADS) {
    for (int i = 0; i < DEPTH; ++i) make_barrier(full + i, 1), make_barrier(empty + i, STAGE);
    barriers_made();
  }
  pdl_trigger();

  if (warp == WARPS) {
    __syncwarp();
    int tile = begin, slice = 0;
#pragma unroll 1
    for (int stage = 0, put = 0, parity = 1, left = units; left > 0 || stage == 0; ++stage) {
      if (stage == DEPTH) __syncthreads();
      if (stage >= DEPTH) wait_barrier(empty + put, parity);
      const int count = min(STAGE, left);
      if (lane == 0 && count) {
        expect(full + put, count * CODES);
        for (int i = 0; i < count; i += a.box) {
          copy_box(ring + (put * STAGE + i) * CODES, a.codes, tile * ROWS, slice, full + put);
          slice += a.box;
          if (slice == slices) slice = 0, ++tile;
        }
      }
      left -= count;
      if (++put == DEPTH) put = 0, parity ^= 1;
      if (PACE && stage + 1 < DEPTH) pause(PACE);  // or the last launch's activations would come behind all of them
    }
    if (units <= DEPTH * STAGE) __syncthreads();
    return;
  }

  if (threadIdx.x < 4) zeros[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < a.round * WARPS * tokens * ROWS; i += THREADS) partial[i] = 0.f;
  // Scales and zeros come nearer while the launch before ends; they and x are then waited for together.
  const long long about = (long long)begin * ROWS * groups;
  const long long numbers = (long long)min(tiles * ROWS, a.n - begin * ROWS) * groups;
  for (int i = threadIdx.x * 64; i < numbers; i += THREADS * 64) {
    prefetch(a.scale + about + i);
    if (i % 128 == 0) prefetch(a.zero + about + i);
  }
  pdl_wait();

  auto load_x = [&](int item) {  // a lane takes eight columns, a word of codes
    const int column = item % slices * SLICE + lane * 8;
    const u16* const x = a.x + (long long)(item / slices) * a.k;
    if (!a.order) return *(const uint4*)(x + column);
    const uint4 at[2] = {((const uint4*)(a.order + column))[0], ((const uint4*)(a.order + column))[1]};
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = x[min((&at[i / 4].x)[i % 4], (u32)a.k - 1)];
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
  };
  auto convert = [&](int item, const uint4& v) {
    const int token = item / slices, slice = item % slices;
    float f[8];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      f[i] = widen(i % 2 ? (&v.x)[i / 2] >> 16 : (&v.x)[i / 2] & 0xFFFF);
      most = max(most, as_bits(f[i]) & 0x7FFFFFFFu);
    }
    const u32 exponent = max(warp_max(most) >> 23, 32u);  // biased; what is below 2^-95 all over is zero
    const float to_integer = as_float((267 - exponent) << 23);
    u32 q[8];  // low half: the integer, below 2^14
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float integer = f[i] * to_integer + 12582912.f;
      q[i] = as_bits(integer);
      sum += integer - 12582912.f;
    }
#pragma unroll
    for (int apart = 1; apart < 4 * WORDS; apart *= 2) sum += shuffle_xor(sum, apart);  // of a group, below 2^21
    if (lane % (4 * WORDS) == 0) x_sum[item * PARTS + lane / (4 * WORDS)] = (int)sum << FACTOR_BITS;
    // The word is word `in` of lane `of` among those of its group.
    const int group = lane / (4 * WORDS), of = lane % (4 * WORDS) / WORDS, in = group * WORDS + lane % WORDS;
    u8* const to = bytes + slice * slice_bytes + in / 2 * pair_bytes + (token * 8 + of) * 16 + in % 2 * 4;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const u32 *const p = q + odd;
      *(u32*)(to + odd * 8) = prmt(prmt(p[0] + 128, p[2] + 128, 0x51), prmt(p[4] + 128, p[6] + 128, 0x51), 0x5410);
      *(u32*)(to + odd * 8 + 64) = prmt(prmt(p[0], p[2], 0x40), prmt(p[4], p[6], 0x40), 0x5410);
    }
    // The power of two undone, and the factor; not a number where x has one that is not finite.
    if (lane == 0) x_scale[item] = as_float(exponent == 255 ? 0x7FFFFFFFu : (exponent - 13 - FACTOR_BITS) << 23);
  };
  constexpr int AT_ONCE = 4;  // slices that a warp waits for together
  for (int first = warp, turn = 0; first < tokens * slices || turn == 0; first += AT_ONCE * WARPS, ++turn) {
    uint4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * WARPS < tokens * slices) v[i] = load_x(first + i * WARPS);
    if (turn == 0) load_table(table, a.scale, a.zero, begin, tiles, a.n, groups, threadIdx.x, WARPS);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * WARPS < tokens * slices) convert(first + i * WARPS, v[i]);
  }
  __syncthreads();

  const int row = row_of_lane(g);   // and row + 8
  const bool own = g < 2 * tokens;                  // else the lane holds zeros of x
  const u8* const x_from = own ? bytes + lane * 16 : (const u8*)zeros;
  const int x_slice = own ? slice_bytes : 0, x_pair = own ? pair_bytes : 0, token = min(t, tokens - 1);
  int tile = 0, slice = warp;  // the warp's unit
  while (slice >= slices) slice -= slices, ++tile;
  int get = warp / STAGE, parity = 0;
  float sum[2] = {};
  for (int from_tile = 0; from_tile < tiles; from_tile += a.round) {
    const int round = min(a.round, tiles - from_tile);
#pragma unroll 1
    while (tile < from_tile + round) {
      wait_barrier(full + get, parity);
      u32 codes[2][8];
      load_codes(codes, ring + (get * STAGE + warp % STAGE) * CODES, row, t);
      __syncwarp();
      if (lane == 0) arrive(empty + get);
      get += WARPS / STAGE;
      if (get >= DEPTH) get -= DEPTH, parity ^= 1;

      const u8* const x_at = x_from + slice * x_slice;
      const int x_item = token * slices + slice;
      const int* const sums = x_sum + x_item * PARTS;
      const uint2* const rows = table + tile * groups * 8 + row;
      float total[2] = {};
      auto finish = [&](int part, const int (&upper)[2], const int (&lower)[2]) {  // by half
        const uint2 about = rows[((slice * SLICE + part * GROUP) >> a.shift) * 8];
        const int x_total = sums[part];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 word = half ? about.y : about.x;
          const int sum = upper[half] * 256 + lower[half] - (int)(word & 0xFF) * x_total;
          total[half] += (float)sum * scale_to_float(word >> 16);
        }
      };
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // of words
        static_assert(SLICE == 256, "a lane has eight words of a row");
        if (GROUP == 32) {
          const uint4 v = *(const uint4*)(x_at + pair * x_pair);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const u32 w0 = codes[0][pair * 2 + i], w1 = codes[1][pair * 2 + i];
            int c[4] = {};
            mma_u8s8(c, w0 & LOW, w1 & LOW, w0 >> 4 & LOW, w1 >> 4 & LOW, i ? make_uint2(v.y, v.w) : make_uint2(v.x, v.z));
            finish(pair * 2 + i, {c[0], c[2]}, {c[1], c[3]});
          }
        } else if (pair % PAIRS == 0) {
          int even[4] = {}, odd[4] = {};
#pragma unroll
          for (int p = pair; p < pair + PAIRS; ++p) {
            const uint4 v = *(const uint4*)(x_at + p * x_pair);
            const u32 *const w0 = codes[0] + p * 2, *const w1 = codes[1] + p * 2;
            mma_u8s8(even, w0[0] & LOW, w1[0] & LOW, w0[1] & LOW, w1[1] & LOW, make_uint2(v.x, v.y));
            mma_u8s8(odd, w0[0] & HIGH, w1[0] & HIGH, w0[1] & HIGH, w1[1] & HIGH, make_uint2(v.z, v.w));
          }
          finish(pair / PAIRS, {even[0] * 16 + odd[0], even[2] * 16 + odd[2]},
                 {even[1] * 16 + odd[1], even[3] * 16 + odd[3]});
        }
      }
      sum[0] += total[0] * x_scale[x_item];
      sum[1] += total[1] * x_scale[x_item];
      slice += WARPS;
      if (slice >= slices) {  // that was the warp's last of the tile
        float* const to = partial + (((tile - from_tile) * WARPS + warp) * tokens + t) * ROWS + row;
        if (t < tokens) to[0] = sum[0], to[8] = sum[1];
        sum[0] = sum[1] = 0.f;
      }
      while (slice >= slices) slice -= slices, ++tile;
    }
    some_meet(1, THREADS);
    for (int i = threadIdx.x; i < round * tokens * ROWS; i += THREADS) {
      const int r = i % ROWS, own_token = i / ROWS % tokens, own_tile = i / (ROWS * tokens);
      const int y_row = (begin + from_tile + own_tile) * ROWS + r;
      const float* const sums = partial + (own_tile * WARPS * tokens + own_token) * ROWS + r;
      float result = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) result += sums[w * tokens * ROWS];
      if (y_row >= a.n) continue;
      if (a.bias) result += a.bias[y_row];
      const long long at = (long long)own_token * a.n + y_row;
      write<FLOAT32>(a.y, at, result);
    }
    if (from_tile + round == tiles) break;
    some_meet(1, THREADS);
    for (int i = threadIdx.x; i < a.round * WARPS * tokens * ROWS; i += THREADS) partial[i] = 0.f;
    some_meet(1, THREADS);
  }
}
