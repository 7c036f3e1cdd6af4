// E8P linear for 5 to 64 tokens (5 to 8 of up to 16384 outputs: e8p_decode.cu) in one pass over the codes, which are
// decoded into the registers that wgmma reads its first operand from. Decoding and its tables are told in e8p_decode.cu, and
// so is the trick by which bytes of two nibbles are multiplied as they are: u8 weights by s8 activations, of which each
// token has two columns, high and low byte.
//
//   e8p_rotate   a block a token: x -> H_k(in_scale * x) on a scale of the token's own, in the very bytes that a stage
//               of shared memory holds: [stage of 128 columns][COLUMNS][128 bytes], 16-byte units swizzled, columns of
//               x in the order in which a lane's codes come.
//   e8p_batch     GROUPS warpgroups of 64 rows each by TOKENS; the blocks of a cluster share k, and sums meet in their
//               shared memory. Each warp has a ring of its own rows' codes, one more warp copies activations.
//
// Two kernels that agree on one layout of activations, which is why this file is long.
//
// Set when compiled: BITS (2, 3, 4), HALF (1: x and y are float16, 0: bfloat16), TOKENS (8, 16, 32 or 64 in one pass),
// GROUPS (2 or 4), DEPTH (slices of codes that a warp has under way), AHEAD (stages of activations), and what `Shape` is
// made of.

#include "e8p_common.cuh"

constexpr int COLUMNS = 2 * TOKENS;             // of the product: high byte, low byte
constexpr int STAGE_BYTES = COLUMNS * 128;      // 128 columns of x: half a slice
constexpr int TILE_ROWS = GROUPS * 64;
constexpr int BLOCKS = TILE_ROWS / ROWS;        // of the output's rotation
constexpr int PITCH = TILE_ROWS + 8;            // floats of a token's sums: other banks for each of a lane's tokens
constexpr int WARPS = GROUPS * 4;
// Two stages are a product each, or, for many tokens, added to bytes first: more instructions and half the products.
constexpr bool MERGED = STAGES == 2 && TOKENS >= 32;
constexpr int SETS = MERGED ? 1 : STAGES;       // of sums
constexpr u32 RATIO = BITS == 4 ? 4 : 2, NIBBLES = 0x0F0F0F0Fu;
constexpr int SLOT = BITS == 2 ? 1024 : BITS == 3 ? 1536 : 2048;  // bytes of 16 rows' codes of a slice
constexpr float LEVELS = 32512.f;               // of the largest activation: 127 * 256, both bytes stay in int8
constexpr float OFFSET = BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f;

// With a shape that is known at run time 16 tokens on 14336 -> 4096 take 15.5 us at 2 bits in place of 13.8.
struct Shape {
  static constexpr int n = N, k = K, slices = (K + SLICE - 1) / SLICE,
                       per_block = PER_BLOCK,  // slices that a block of the cluster owns
                       tiles = (N + TILE_ROWS - 1) / TILE_ROWS,
                       silu = SILU,  // x is [tokens, 2 k], gate beside up
                       wide = WIDE;  // y and add are float
  static constexpr u32 cluster = CLUSTER;  // blocks that share k
};
constexpr int MOST = (Shape::slices + 15) / 16;  // slices that a warp of e8p_rotate holds

struct Arguments : Shape {
  TensorMap codes_map;      // of codes, boxes of 16 rows x 256 columns
  TensorMap residual_map;   // ... of residual
  const u16* x;             // [tokens, k]
  const uint2* codebook;    // int8 [512, 8]
  const float* in_scale;    // [k]
  const float* out_scale;   // [n]
  const float* bias;        // [n] or null
  const void* add;          // [tokens, n] of y's type, or null
  void* y;                  // [tokens, n], x's type, or float if wide
  u8* bytes;                // [2 slices, STAGE_BYTES]
  float2* scales;           // [tokens]: of a sum, and what is added to it
  int tokens;
  float norm;               // of both Hadamard transforms
  float eps;                // of the RMSNorm in front; negative: none
};

__device__ __forceinline__ float sum_of_16(float v, float* exchange) {  // over 512 threads
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < 16; w++) sum += exchange[w];
  return sum;
}
__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// Grid: tokens. 16 warps; a lane has eight columns of each of its slices.
extern "C" __global__ void __launch_bounds__(512, 1) e8p_rotate(const __grid_constant__ Arguments p) {
  __shared__ float exchange[2][16];
  __shared__ u32 top_of[16];
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_start();
  float in_scale[MOST][8], v[MOST][8];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int column = (i * 16 + warp) * SLICE + lane * 8;
    load8(in_scale[i], p.in_scale + column, column < p.k);
  }
  wait_for_previous();
  float squares = 0.f;
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int column = (i * 16 + warp) * SLICE + lane * 8;
    load_x(v[i], p, token, column, column < p.k);
  }
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    if (i * 16 + warp >= p.slices) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) squares = fmaf(v[i][e], v[i][e], squares);
    rotate(v[i], in_scale[i], p.k % 128 ? 64 : 128, lane);
    // Bytes of a code word are 16 h + l, those of word << 4 are 16 l + h of the byte below: 16 b1[j] + b2[j + 1] stands
    // beside h, b1[j] + 16 b2[j] beside l. v becomes b1 | b2, but where l and h are bytes of their own.
    float above = 0.f;
#pragma unroll
    for (int j = 3; j >= 0; j--) {
      if (!MERGED) {
        const float b1 = (v[i][4 + j] - above) * 0.0625f;
        above = (v[i][j] - b1) * 0.0625f;
        v[i][j] = b1, v[i][4 + j] = above;
      }
      top = max(top, max(magnitude(v[i][j]), magnitude(v[i][4 + j])));
    }
  }
  top = __reduce_max_sync(~0u, top);
  if (lane == 0) top_of[warp] = top;
  squares = sum_of_16(squares, exchange[0]);
#pragma unroll
  for (int w = 0; w < 16; w++) top = max(top, top_of[w]);  // as integers NaN is the largest of all
  const float largest = __uint_as_float(top), inverse = largest > 0.f ? __fdividef(LEVELS, largest) : 0.f;
  // Adding 1.5 * 2^23 + 128 leaves q + 128 in the low bits: byte 1 is the high part, byte 0 the low part plus 128.
  const float magic = 12582912.f + 128.f;
  const int n = token * 2, t = lane / 8, code = lane % 8;
  u8* to = p.bytes + t * 4;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int slice = i * 16 + warp;
    if (slice >= p.slices) continue;
    u32 q[8];
    int mine = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      q[e] = __float_as_uint(fmaf(v[i][e], inverse, magic));
      mine += (int)q[e] - 0x4B400080;
    }
    sum += (float)(MERGED ? mine : 17 * mine - ((int)q[4] - 0x4B400080));
    u8* stage = to + (size_t)(slice * 2 + code / 4) * STAGE_BYTES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32* b = q + half * 4;
      const int unit = code % 4 * 2 + half;
      const u32 high = prmt(prmt(b[0], b[1], 0x5151), prmt(b[2], b[3], 0x5151), 0x5410);
      const u32 low = prmt(prmt(b[0], b[1], 0x4040), prmt(b[2], b[3], 0x4040), 0x5410) ^ 0x80808080u;
      *(u32*)(stage + n * 128 + (unit ^ (n % 8)) * 16) = high;
      *(u32*)(stage + (n + 1) * 128 + (unit ^ (n % 8 + 1)) * 16) = low;
    }
  }
  sum = sum_of_16(sum, exchange[1]);
  if (threadIdx.x == 0) {
    float scale = largest * (1.f / LEVELS) * p.norm;
    if (p.eps >= 0.f) scale *= rsqrtf(squares / (float)p.k + p.eps);
    p.scales[token] = make_float2(scale * (BITS == 3 ? 1.f : 2.f), OFFSET * sum * scale);
  }
}

__device__ __forceinline__ void sync_consumers() { some_meet(1, WARPS * 32); }
// Registers that a product still reads are not to be reused before this, which follows the wait for it.
__device__ __forceinline__ void keep(u32 (&a)[2][4]) {
#pragma unroll
  for (int j = 0; j < 2; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3]));
}

#define ACC4(i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
__device__ __forceinline__ void wgmma(int (&c)[8], const u32 (&a)[4], u64 b) {  // 64 rows, 16 columns, 32 deep
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1;"
               : ACC4(0), ACC4(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(int (&c)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, 1;"
      : ACC16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(int (&c)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1;"
      : ACC16(0), ACC16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(int (&c)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1;"
      : ACC16(0), ACC16(16), ACC16(32), ACC16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int I> struct Index { static constexpr int value = I; };

struct Codes {  // a lane's of a slice: eight of row g, eight of row g + 8
  uint4 first[2];
  uint4 second[BITS == 4 ? 2 : 1];
  uint2 small[BITS == 3 ? 2 : 1];
};
// The two words whose XOR is the I-th of two codes.
template <int I> __device__ __forceinline__ void lookups(u32 (&to)[2], u32 codes, u32 bank) {
  to[0] = lookup<0>(prmt(codes, bank, I ? 0x7634 : 0x7614));
  to[1] = lookup<128>(prmt(codes, bank, I ? 0x7624 : 0x7604));
}
// The words of two stages as bytes: low nibbles, then high nibbles.
__device__ __forceinline__ void merged(u32 (&a)[4], int row, u32 x, u32 y) {
  a[row] = (x & NIBBLES) * RATIO + (y & NIBBLES);
  a[2 + row] = (x >> 4 & NIBBLES) * RATIO + (y >> 4 & NIBBLES);
}
__device__ __forceinline__ void operand(u32 (&a)[4], u32 top, u32 low) {
  a[0] = top, a[1] = low, a[2] = top << 4, a[3] = low << 4;
}

// Grid: clusters; with clusters of one block each walks over several tiles. Shared memory: tables,
// barriers, stages of activations, rings of codes, sums [TOKENS][PITCH].
extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1) e8p_batch(const __grid_constant__ Arguments p) {
  const u32 cluster = p.cluster;
  const u32 rank = cluster > 1 ? cluster_rank() : 0;
  const u32 first_tile = blockIdx.x / cluster, tile_step = gridDim.x / cluster;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int begin = rank * p.per_block, end = min(begin + p.per_block, p.slices), count = end - begin;
  const u32 base = address(smem), barriers = base + TABLE_BYTES, full = barriers,
            empty = full + 8 * AHEAD, arrived = empty + 8 * AHEAD;
  const u32 stages = barriers + 1024, rings = stages + AHEAD * STAGE_BYTES;
  float* sums = (float*)(smem + TABLE_BYTES + 1024 + AHEAD * STAGE_BYTES + WARPS * DEPTH * SLOT);

  check_start(base);

  if (warp == WARPS) {
    if (lane == 0) {
      for (int s = 0; s < AHEAD; s++) make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, GROUPS);
      barriers_visible();
    }
    __syncthreads();
    wait_for_previous();
    let_next_start();
    if (lane == 0) {
      const u8* from = p.bytes + (size_t)begin * 2 * STAGE_BYTES;
      int s = 0, turn = 0;
      for (int tile = first_tile; tile < p.tiles; tile += tile_step)
        for (int c = 0; c < count * 2; c++) {
          if (turn) wait_barrier(empty + 8 * s, (turn - 1) & 1);
          expect(full + 8 * s, STAGE_BYTES);
          copy(stages + s * STAGE_BYTES, from + (size_t)c * STAGE_BYTES, STAGE_BYTES, full + 8 * s);
          if (++s == AHEAD) s = 0, turn++;
        }
    }
    return;
  }

  // Codes: a warp's own 16 rows, a slice at a time; outside the matrix come zeros.
  const u32 mine = arrived + warp * DEPTH * 8, ring = rings + warp * DEPTH * SLOT;
  int wanted_tile = first_tile, wanted = begin;  // what is fetched next
  auto fetch = [&](int slot) {
    if (lane == 0 && wanted_tile < p.tiles) {
      const u32 barrier = mine + 8 * slot, to = ring + slot * SLOT;
      const int row = wanted_tile * TILE_ROWS + warp * 16;
      expect(barrier, SLOT);
      box(to, p.codes_map, wanted * 64, row, barrier);
      if (BITS == 4) box(to + 1024, p.residual_map, wanted * 64, row, barrier);
      if (BITS == 3) box(to + 1024, p.residual_map, wanted * 32, row, barrier);
    }
    if (++wanted == end) wanted = begin, wanted_tile += tile_step;
  };
  const TableWords words = load_table_words(p.codebook, warp, WARPS, lane);
  if (lane == 0) {
    for (int d = 0; d < DEPTH; d++) make_barrier(mine + 8 * d, 1);
    barriers_made();
  }
  __syncwarp();
#pragma unroll
  for (int d = 0; d < DEPTH; d++) fetch(d);
  build_tables(p.codebook, words, warp, WARPS, lane);
  __syncthreads();
  wait_for_previous();
  let_next_start();

  const u32 bank = bank_of(base, lane);  // after the barrier
  const u8* slots = smem + (ring - base);
  const u32 zero = hidden_zero();  // an operand must not be a lookup's own register, which is loaded too early
  int slot = 0, phase = 0, stage = 0, stage_phase = 0;
  constexpr int STEPS = SETS == 1 ? 4 : 8;  // of two products each
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
    int acc[SETS][COLUMNS / 2];
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; i++) acc[s][i] = 0;
    u32 a[2][2][4];  // a step's operands, and those of the step before, still being read
    u32 raw[2][2][2];  // lookups of the step after, under way while this one multiplies: [product][row][word]
    Codes codes;
    auto load = [&]() {
      wait_barrier(mine + 8 * slot, phase);
      const u8* at = slots + slot * SLOT;
      codes.first[0] = *(const uint4*)(at + lane * 16), codes.first[1] = *(const uint4*)(at + 512 + lane * 16);
      if (BITS == 4) {
        codes.second[0] = *(const uint4*)(at + 1024 + lane * 16);
        codes.second[BITS == 4] = *(const uint4*)(at + 1536 + lane * 16);
      }
      if (BITS == 3) {
        codes.small[0] = *(const uint2*)(at + 1024 + lane * 8);
        codes.small[BITS == 3] = *(const uint2*)(at + 1280 + lane * 8);
      }
    };
    u32 rest[2][2][2];  // the second stage's, if the two are merged
    auto second = [&](auto index, u32 (&to)[2], int r) {
      constexpr int I = decltype(index)::value;
      if (BITS == 4) {
        lookups<I % 2>(to, part(codes.second[BITS == 4 ? r : 0], I / 2), bank);
      } else {
        const uint2 v = codes.small[BITS == 3 ? r : 0];
        to[0] = decode_e81b<I % 4>(I < 4 ? v.x : v.y, bank), to[1] = zero;
      }
    };
    auto look = [&](auto index) {  // for the two products of a step: two codes, or two stages of one
      constexpr int S = decltype(index)::value, I = SETS == 1 ? 2 * S : S;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 c = part(codes.first[r], I / 2);
        lookups<I % 2>(raw[0][r], c, bank);
        if (SETS == 1) lookups<1>(raw[1][r], c, bank);
        if (STAGES == 2) second(Index<I>(), MERGED ? rest[0][r] : raw[1][r], r);
        if (MERGED) second(Index<(I + 1) % 8>(), rest[1][r], r);
      }
    };
    load();
    look(Index<0>());
    int behind = -1;  // stage whose last products may still read it
#pragma unroll 1
    for (int slice = begin; slice < end; slice++) {
      auto step = [&](auto index) {
        constexpr int S = decltype(index)::value, I = SETS == 1 ? 2 * S : S;
        u32 (&now)[2][4] = a[S % 2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (!MERGED) operand(now[j], raw[j][0][0] ^ raw[j][0][1], raw[j][1][0] ^ raw[j][1][1]);
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (MERGED) merged(now[j], r, raw[j][r][0] ^ raw[j][r][1], rest[j][r][0] ^ rest[j][r][1]);
        }
        if (I % 4 == 0) wait_barrier(full + 8 * stage, stage_phase);
        const u64 b = (u64)((stages + stage * STAGE_BYTES + I % 4 * 32) >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 |
                      (u64)1 << 62;
        wgmma_fence();
        wgmma(acc[0], now[0], b);
        wgmma(acc[SETS - 1], now[1], SETS == 1 ? b + 2 : b);
        wgmma_commit();
        if constexpr (S + 1 < STEPS) {
          look(Index<S + 1>());
        } else {
          if (++slot == DEPTH) slot = 0, phase ^= 1;
          if (slice + 1 < end) load(), look(Index<0>());
        }
        wgmma_wait<1>();
        keep(a[(S + 1) % 2]);
        if (I % 4 == 0) {
          if (behind >= 0 && threadIdx.x % 128 == 0) arrive(empty + 8 * behind);
          behind = -1;
        }
        if (S == STEPS / 2 - 1 || S == STEPS - 1) {
          behind = stage;
          if (++stage == AHEAD) stage = 0, stage_phase ^= 1;
        }
        if (S == 1) {
          __syncwarp();
          fetch(slot);
        }
      };
      step(Index<0>()), step(Index<1>()), step(Index<2>()), step(Index<3>());
      if constexpr (SETS == 2) step(Index<4>()), step(Index<5>()), step(Index<6>()), step(Index<7>());
    }
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]);
    if (threadIdx.x % 128 == 0) arrive(empty + 8 * behind);

    // A lane has rows g and g + 8 of its warp's 16, of token 4 j + t both bytes.
#pragma unroll
    for (int j = 0; j < TOKENS / 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = j * 4 + h * 2;
        float q = fmaf(256.f, (float)acc[0][i], (float)acc[0][i + 1]);
        if (SETS == 2) q = fmaf((float)RATIO, q, fmaf(256.f, (float)acc[SETS - 1][i], (float)acc[SETS - 1][i + 1]));
        sums[(j * 4 + t) * PITCH + warp * 16 + h * 8 + g] = q;
      }
    if (cluster > 1) cluster_sync(); else sync_consumers();
#pragma unroll 1
    for (int job = rank + warp * cluster; job < p.tokens * BLOCKS; job += WARPS * cluster) {  // 128 rows of a token
      const int token = job / BLOCKS, block = job % BLOCKS;
      const int row = tile * TILE_ROWS + block * ROWS + lane * 4;
      const bool own = row < p.n;
      const u32 from = address(sums + token * PITCH + block * ROWS + lane * 4);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int r = 0; r < cluster; r++) {
        const float4 u = pull(at_rank(from, r));
        v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
      }
      const float2 scale = __ldcg(p.scales + token);
      const size_t at = (size_t)token * p.n + row;
      float4 s = make_float4(0.f, 0.f, 0.f, 0.f), c = s;
      if (own) {
        s = *(const float4*)(p.out_scale + row);
        if (p.bias) c = *(const float4*)(p.bias + row);
        add4(c, p, at);
      }
      v.x = fmaf(v.x, scale.x, scale.y), v.y = fmaf(v.y, scale.x, scale.y);
      v.z = fmaf(v.z, scale.x, scale.y), v.w = fmaf(v.w, scale.x, scale.y);
      pair(v.x, v.y), pair(v.z, v.w), pair(v.x, v.z), pair(v.y, v.w);
#pragma unroll
      for (int o = 1; o < 16; o <<= 1) across_lanes(v, lane, o);
      if (p.n % 128 == 0) across_lanes(v, lane, 16);
      if (!own) continue;
      v.x = fmaf(v.x, s.x, c.x), v.y = fmaf(v.y, s.y, c.y), v.z = fmaf(v.z, s.z, c.z), v.w = fmaf(v.w, s.w, c.w);
      store4(p, at, v);
    }
    if (cluster > 1) cluster_sync(); else sync_consumers();
  }
}
