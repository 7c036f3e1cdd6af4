// INT4 linears for several tokens, up to 16 a pass, and for any k % 64 == 0: 16-bit floats on tensor cores.
//
// Cut. A tile is 16 rows, a slice 256 columns. A block stays on its SM and owns a run of row tiles; its warps share k out,
// slice by slice, and walk down the tiles, so that a warp's activations stay in its registers. What a warp reads next is
// a fixed list (tile after tile, then its next slice), and DEPTH entries of it are always under way, into a ring of its
// own in shared memory: no warp waits for another before the sums are added, in a fixed order, at the end of a round.
//
// Arithmetic. A code's bits in the mantissa of a float are the code and a power of two; subtracted is the same of the zero,
// and their difference is exact. All lanes of a product have columns of one group, whose scale its sum is multiplied by.
//
// Set when compiled: HALF (1: x is float16, 0: bfloat16), SCALE_BF16 (1: scales are bfloat16, 0: float16), FLOAT32 (1: y
// is float32, 0: as x), GROUP (32, 64, or 128, for larger ones too), TILES (column tiles of 8 tokens), DEPTH.

#include "int4_common.cuh"

constexpr int ROWS = 16, SLICE = 256, CODES = ROWS * SLICE / 2, TOKENS = TILES * 8;
constexpr u32 ONE = HALF ? 0x64006400u : 0x43004300u;  // 2^10 and 2^7, whose last bit of mantissa is 1

struct Arguments {
  const u16* x;       // [tokens, k]
  const u8* codes;    // [n, k/2]
  const u16* scale;   // [n, groups]
  const u8* zero;     // [n, groups]
  const float* bias;  // [n] or null
  u16* y;             // [tokens, n]
  int tokens, n, k, groups;
  int shift;   // a column's group is column >> shift
  int across;  // warps side by side in k; groups of so many warps share a block's tiles
  int hold;    // row tiles of a round
};

#if PORTABLE
constexpr int MOST = GROUP == 32 ? 256 : 384;  // threads of a block: with more some forms spill
#else
constexpr int MOST = 512;
#endif
extern "C" __global__ void __launch_bounds__(MOST, 1) int4_batch(const Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, row = row_of_lane(g);
  const int across = a.across, down = blockDim.x / 32 / across, own_slice = warp % across, own_tile = warp / across;
  const int first_token = blockIdx.z * TOKENS, count = min(a.tokens - first_token, TOKENS);
  const int slices = (a.k + SLICE - 1) / SLICE, row_tiles = (a.n + ROWS - 1) / ROWS;
  const int begin = (long long)row_tiles * blockIdx.x / gridDim.x, end = (long long)row_tiles * (blockIdx.x + 1) / gridDim.x;
  const int turns = own_slice < slices ? (slices - own_slice + across - 1) / across : 0;
  pdl_trigger();

  u8* const ring = shared + warp * (DEPTH * CODES);
  uint2* const table = (uint2*)(shared + blockDim.x / 32 * (DEPTH * CODES));  // [hold][groups][8]
  float4* const partial = (float4*)(table + a.hold * a.groups * 8);           // [hold][across][TILES][32]

  auto tiles_of = [&](int first) { return max(0, (min(a.hold, end - first) - own_tile + down - 1) / down); };
  int ahead_first = begin, ahead_turn = 0, ahead_tile = 0, ahead_tiles = turns ? tiles_of(begin) : 0;
  int put = 0, get = 0;
  auto fetch = [&]() {  // the next of the list into the ring; nothing at its end
    if (ahead_tiles) {
      const int first_row = (ahead_first + own_tile + ahead_tile * down) * ROWS;
      const int column = (own_slice + ahead_turn * across) * SLICE + lane % 8 * 32;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i * 4 + lane / 8;
        const bool inside = column < a.k && first_row + r < a.n;
        copy16(ring + put * CODES + r * 128 + (lane % 8 ^ r % 8) * 16,
               a.codes + (long long)(inside ? first_row + r : 0) * (a.k / 2) + (inside ? column / 2 : 0), inside);
      }
      put = put + 1 == DEPTH ? 0 : put + 1;
      if (++ahead_tile == ahead_tiles) {
        ahead_tile = 0;
        if (++ahead_turn == turns) ahead_turn = 0, ahead_first += a.hold, ahead_tiles = tiles_of(ahead_first);
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch();

  const u32 one = ONE | (u32)count >> 31;  // the compiler is not to know it: a mask and it are then one instruction
  u32 x[TILES][8][4];
  int loaded = -1;
  auto load_x = [&](int slice) {
    if (slice == loaded) return;
    loaded = slice;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const bool there = tile * 8 + g < count;
      const u16* const from = a.x + (long long)(first_token + tile * 8 + g) * a.k;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = slice * SLICE + j / WORDS * GROUP + (t * WORDS + j % WORDS) * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there && column < a.k) v = *(const uint4*)(from + column);
        x[tile][j][0] = prmt(v.x, v.z, 0x5410);  // codes p and p + 4 of a word come out as a pair
        x[tile][j][1] = prmt(v.x, v.z, 0x7632);
        x[tile][j][2] = prmt(v.y, v.w, 0x5410);
        x[tile][j][3] = prmt(v.y, v.w, 0x7632);
      }
    }
  };

  for (int first = begin; first < end; first += a.hold) {
    const int tiles = min(a.hold, end - first), own_tiles = tiles_of(first);
    load_table(table, a.scale, a.zero, first, tiles, a.n, a.groups, threadIdx.x, blockDim.x / 32);
    __syncthreads();
    if (first == begin) pdl_wait();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int slice = own_slice + turn * across;
      load_x(slice);
#pragma unroll 1
      for (int tile = 0; tile < own_tiles; ++tile) {
        wait_but<DEPTH - 1>();
        __syncwarp();
        u32 codes[2][8];
        load_codes(codes, ring + get * CODES, row, t);
        get = get + 1 == DEPTH ? 0 : get + 1;
        __syncwarp();
        fetch();

        const int round_tile = own_tile + tile * down;
        const uint2* const rows = table + round_tile * a.groups * 8 + row;
        float sum[TILES][4] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const uint2 about = rows[min((slice * SLICE + part * GROUP) >> a.shift, a.groups - 1) * 8];
          const u32 zero[2] = {prmt(about.x, about.x, 0x4040) & 0x00FF00FFu | one,
                               prmt(about.y, about.y, 0x4040) & 0x00FF00FFu | one};
          float acc[TILES][4] = {};
#pragma unroll
          for (int word = 0; word < WORDS; ++word) {
            const int j = part * WORDS + word;
            u32 v[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int p = 0; p < 4; ++p) v[half][p] = subtract(codes[half][j] >> 4 * p & 0x000F000Fu | one, zero[half]);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
              mma(acc[i], v[0][0], v[1][0], v[0][1], v[1][1], x[i][j][0], x[i][j][1]);
              mma(acc[i], v[0][2], v[1][2], v[0][3], v[1][3], x[i][j][2], x[i][j][3]);
            }
          }
          const float scale[2] = {scale_to_float(about.x >> 16), scale_to_float(about.y >> 16)};
#pragma unroll
          for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += acc[i][j] * scale[j / 2];
        }
        // A lane's four sums: rows `row` and `row` + 8 of tokens 2 t and 2 t + 1.
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          float4* const to = partial + ((round_tile * across + own_slice) * TILES + i) * 32 + lane;
          float4 v = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
          if (turn) {
            const float4 before = *to;
            v.x += before.x, v.y += before.y, v.z += before.z, v.w += before.w;
          }
          *to = v;
        }
      }
    }
    __syncthreads();
    const int used = min(across, slices);
    for (int i = threadIdx.x; i < tiles * TILES * 32; i += blockDim.x) {
      const int tile = i / (TILES * 32), part = i % (TILES * 32), token = part / 32 * 8 + part % 4 * 2;
      const int own_row = row_of_lane(part % 32 / 4);
      if (token >= count) continue;
      float sum[4] = {};
      for (int w = 0; w < used; ++w) {
        const float4 v = partial[(tile * across + w) * (TILES * 32) + part];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = (first + tile) * ROWS + own_row + j / 2 * 8;
        if (r >= a.n || token + j % 2 >= count) continue;
        const float v = sum[j] + (a.bias ? a.bias[r] : 0.f);
        const long long at = (long long)(first_token + token + j % 2) * a.n + r;
        write<FLOAT32>(a.y, at, v);
      }
    }
    __syncthreads();
  }
}
