// E8P linear for 5 to 64 tokens (5 to 8 of up to 16384 outputs: e8p_decode.cu) in one pass over the codes, which are
// decoded into the registers that wgmma reads its first operand from. Decoding and its tables are told in e8p_decode.cu, and
// so is the trick by which bytes of two nibbles are multiplied as they are: u8 weights by s8 activations, of which each
// token has two columns, high and low byte.
//
//   e8p_rotate   a block for a token and each share of k: x -> H_k(in_scale * x) on a scale of their own, in the very
//               bytes that a stage of shared memory holds: [stage of 128 columns][COLUMNS][128 bytes], 16-byte units
//               swizzled, columns of x in the order in which a lane's codes come.
//   e8p_batch     GROUPS warpgroups of 64 rows each by TOKENS; the blocks of a cluster share k, and sums meet in their
//               shared memory. Each warp has a ring of its own rows' codes, one more warp copies activations. Where
//               clusters would leave many SMs idle, PARTS of them share k: their sums meet in memory (L2), and of 128
//               rows of a token the cluster that comes last adds what all brought, always in the same order.
//
// Two kernels that agree on one layout of activations, which is why this file is long.
//
// Set when compiled: BITS (2, 3, 4), HALF (1: x and y are float16, 0: bfloat16), TOKENS (8, 16, 32 or 64 in one pass),
// GROUPS (2 or 4), DEPTH (slices of codes that a warp has under way), AHEAD (stages of activations), and what `Shape` is
// made of.

#include "e8p_common.cuh"
#include "wgmma_bytes.cuh"

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
                       per_block = PER_BLOCK,  // slices that a block owns
                       tiles = (N + TILE_ROWS - 1) / TILE_ROWS,
                       silu = SILU,  // x is [tokens, 2 k], gate beside up
                       wide = WIDE;  // y and add are float
  static constexpr u32 cluster = CLUSTER, parts = PARTS,  // blocks of a cluster, and clusters, that share k
                       cuts = CLUSTER * PARTS;            // shares of k
};
// Of e8p_rotate: slices that a warp holds, and warps of a block.
constexpr int MOST = (PER_BLOCK + 15) / 16, ROTATING = (PER_BLOCK + MOST - 1) / MOST;

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
  float4* scales;           // [tokens, cuts]: of a sum, what is added to it, sum of squares of x
  float* sums;              // [parts, tiles, TOKENS, TILE_ROWS] where there are several
  u32* arrived;             // [tiles, TOKENS, BLOCKS]: parts whose sums are there
  int tokens;
  float norm;               // of both Hadamard transforms
  float eps;                // of the RMSNorm in front; negative: none
};

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// Grid: for each token its shares of k. A lane has eight columns of each of its slices.
extern "C" __global__ void __launch_bounds__(ROTATING * 32, 1) e8p_rotate(const __grid_constant__ Arguments p) {
  __shared__ float squares_of_warp[ROTATING], sum_of_warp[ROTATING];
  __shared__ u32 top_of_warp[ROTATING];
  const int token = blockIdx.x / p.cuts, cut = blockIdx.x % p.cuts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = cut * p.per_block + warp, end = min((cut + 1) * p.per_block, p.slices);
  pdl_trigger();
  float in_scale[MOST][8], v[MOST][8];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int slice = first + i * ROTATING, column = slice * SLICE + lane * 8;
    load8(in_scale[i], p.in_scale + column, slice < end && column < p.k);
  }
  pdl_wait();
  if (p.parts > 1) {
    const int threads = ROTATING * 32;
    for (int i = blockIdx.x * threads + threadIdx.x; i < p.tiles * TOKENS * BLOCKS; i += gridDim.x * threads)
      p.arrived[i] = 0;
  }
  float squares = 0.f;
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int slice = first + i * ROTATING, column = slice * SLICE + lane * 8;
    load_x(v[i], p, token, column, slice < end && column < p.k);
  }
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    if (first + i * ROTATING >= end) continue;
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
  squares = over_lanes(squares);
  if (lane == 0) top_of_warp[warp] = top, squares_of_warp[warp] = squares;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < ROTATING; w++) top = max(top, top_of_warp[w]);  // as integers NaN is the largest of all
  const float largest = __uint_as_float(top), inverse = largest > 0.f ? __fdividef(LEVELS, largest) : 0.f;
  // Adding 1.5 * 2^23 + 128 leaves q + 128 in the low bits: byte 1 is the high part, byte 0 the low part plus 128.
  const float magic = 12582912.f + 128.f;
  const int n = token * 2, t = lane / 8, code = lane % 8;
  u8* to = p.bytes + t * 4;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int slice = first + i * ROTATING;
    if (slice >= end) continue;
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
  sum = over_lanes(sum);
  if (lane == 0) sum_of_warp[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = squares = 0.f;
#pragma unroll
    for (int w = 0; w < ROTATING; w++) sum += sum_of_warp[w], squares += squares_of_warp[w];
    const float scale = largest * (1.f / LEVELS) * p.norm;
    p.scales[blockIdx.x] = make_float4(scale * (BITS == 3 ? 1.f : 2.f), OFFSET * sum * scale, squares, 0.f);
  }
}

__device__ __forceinline__ void sync_consumers() { some_meet(1, WARPS * 32); }

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

// What 128 rows of a token, a warp's job at the end, are multiplied with and added to.
struct Around {
  float4 scale;  // of the lane's share of k, see Arguments
  float4 out_scale, bias;
  uint4 add;
};
__device__ __forceinline__ float over_cuts(float v) { return Shape::cuts == 1 ? v : over_lanes(v); }

// Grid: of each tile its shares of k, those of a cluster beside each other; where k is not shared each block walks over
// several tiles. Shared memory: tables, barriers, stages of activations, rings of codes, sums [TOKENS][PITCH].
extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, 1) e8p_batch(const __grid_constant__ Arguments p) {
  const u32 cluster = p.cluster, rank = cluster > 1 ? cluster_rank() : 0;
  const u32 first_cut = blockIdx.x / cluster % p.parts * cluster;  // of the cluster
  const u32 first_tile = blockIdx.x / p.cuts, tile_step = gridDim.x / p.cuts;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int begin = (first_cut + rank) * p.per_block, end = min(begin + p.per_block, p.slices), count = end - begin;
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
    pdl_wait();
    pdl_trigger();
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
  if (warp == 0 && lane < TILE_ROWS / 32) {  // whole lines, which are needed at the end
    const int row = min((int)first_tile * TILE_ROWS + lane * 32, p.n - 1);
    prefetch(p.out_scale + row);
    if (p.bias) prefetch(p.bias + row);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();

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
    const int jobs = p.tokens * BLOCKS, first_job = rank + warp * cluster, job_step = WARPS * cluster;
    auto ask = [&](int job) {
      const int token = job / BLOCKS, row = tile * TILE_ROWS + job % BLOCKS * ROWS + lane * 4;
      const int cut = p.cuts == 1 ? 0 : lane;
      Around a;
      a.scale = a.out_scale = a.bias = make_float4(0.f, 0.f, 0.f, 0.f);
      a.add = make_uint4(0, 0, 0, 0);
      if (job >= jobs) return a;
      if (cut < p.cuts) a.scale = __ldcg(p.scales + token * p.cuts + cut);
      if (row < p.n) {
        a.out_scale = *(const float4*)(p.out_scale + row);
        if (p.bias) a.bias = *(const float4*)(p.bias + row);
        if (p.add) a.add = ask_add(p, (size_t)token * p.n + row);
      }
      return a;
    };
    auto over_cluster = [&](int job, float scales) {
      const u32 from = address(sums + job / BLOCKS * PITCH + job % BLOCKS * ROWS + lane * 4);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < cluster; r++) {
        const float4 u = pull(at_rank(from, r));
        const float scale = p.cuts == 1 ? scales : __shfl_sync(~0u, scales, first_cut + r);
        v.x = fmaf(u.x, scale, v.x), v.y = fmaf(u.y, scale, v.y);
        v.z = fmaf(u.z, scale, v.z), v.w = fmaf(u.w, scale, v.w);
      }
      return v;
    };
    auto finish = [&](int job, const Around& a, float4 v) {
      const int token = job / BLOCKS, row = tile * TILE_ROWS + job % BLOCKS * ROWS + lane * 4;
      const size_t at = (size_t)token * p.n + row;
      const float offset = over_cuts(a.scale.y), squares = over_cuts(a.scale.z);
      const float rms = p.eps < 0.f ? 1.f : rsqrtf(squares / (float)p.k + p.eps);
      v.x = (v.x + offset) * rms, v.y = (v.y + offset) * rms, v.z = (v.z + offset) * rms, v.w = (v.w + offset) * rms;
      rotate_rows(v, p.n % 128 ? 64 : 128, lane);
      if (row >= p.n) return;
      const float4& s = a.out_scale;
      float4 c = a.bias;
      if (p.add) take_add(c, p, a.add);
      v.x = fmaf(v.x, s.x, c.x), v.y = fmaf(v.y, s.y, c.y), v.z = fmaf(v.z, s.z, c.z), v.w = fmaf(v.w, s.w, c.w);
      store4(p, at, v);
    };
    Around around = ask(first_job);  // on its way while the others come
    if (cluster > 1) cluster_sync(); else sync_consumers();
    if constexpr (Shape::parts == 1) {
#pragma unroll 1
      for (int job = first_job; job < jobs; job += job_step) {
        const float4 v = over_cluster(job, around.scale.x);
        const Around next = ask(job + job_step);
        finish(job, around, v);
        around = next;
      }
    } else {
      constexpr size_t PART = (size_t)Shape::tiles * TOKENS * TILE_ROWS;
      float* const of_first = p.sums + (size_t)tile * TOKENS * TILE_ROWS + lane * 4;
      float* const own = of_first + first_cut / cluster * PART;
#pragma unroll 1
      for (int job = first_job; job < jobs; job += job_step)
        __stcg((float4*)(own + job * ROWS), over_cluster(job, (job == first_job ? around : ask(job)).scale.x));
      __syncwarp();
      const int counted = first_job + lane * job_step;  // by this lane: a warp has fewer jobs than lanes
      const bool last = counted < jobs && count_in(p.arrived + tile * TOKENS * BLOCKS + counted) + 1 == p.parts;
      u32 left = __ballot_sync(~0u, last);
      __syncwarp();
#pragma unroll 1
      for (; left; left &= left - 1) {
        const int job = first_job + (__ffs(left) - 1) * job_step;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f), u[Shape::parts];
#pragma unroll
        for (int i = 0; i < p.parts; i++) u[i] = __ldcg((const float4*)(of_first + i * PART + job * ROWS));
#pragma unroll
        for (int i = 0; i < p.parts; i++) add_to(v, u[i]);
        finish(job, job == first_job ? around : ask(job), v);
      }
    }
    // Whoever has stored what it made of others' sums has read them: no memory is to be ordered.
    if (cluster > 1) cluster_begun(), all_begun(); else sync_consumers();
  }
}
