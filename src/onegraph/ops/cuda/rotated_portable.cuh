// A rotated linear for up to 16 tokens without clusters, bulk copies and wgmma, in 99 KB of shared memory: for every card from
// compute capability 8.0 on. How codes are read, decoded and multiplied a format says in front of this: KERNEL and TURN, names of
// the kernels; CODE_FIELDS of Arguments; TABLE_BYTES and Tables, what decoding looks up; Reader and Codes, a lane's codes of a row
// tile; Product, a slice of GROUP_TOKENS tokens as products take it, of whose results a lane ends LANE_TOKENS; `to_bytes`, `keep`
// and `take`, activations on their way there; `multiply_all` and `result`.
//
// Cut. The matrix is a grid of STRIPS strips of rows by PARTS parts of k, a block each. A block has ACROSS slices of 256
// columns side by side, and DOWN such rows of warps; a warp has one slice, whose activations stay in its registers, and
// walks down every DOWN-th row tile of the strip. It reads codes straight into registers, AHEAD row tiles at a time: no ring
// in shared memory, of whose 99 KB the tables leave a third.
//
// Sums of slices meet in shared memory, HOLD row tiles at a time. Where a block has whole blocks of 128 rows and all of k
// (WHOLE), it ends them there. Elsewhere they go through memory (L2): of 128 rows, the block that comes last adds what all
// brought, in a fixed order, so that the bits do not depend on who that is. It also sets their counter back to zero.
//
// Few tokens are rotated by the block itself (TURNS). More come from e8p_portable_turn, a warp a slice and token.
//
// EXPERTS: of many matrices blockIdx.y takes one, for a chunk of up to TOKENS pairs of a token and an expert. A format's source
// defines before this file what that adds: EXPERT_FIELDS and EXPERT_COUNTS of Arguments; `enter`, which moves pointers to the expert's matrix and
// to places of the chunk's own; and `Asked`, `ask`, `take_asked` and `row_of`, where x and y of a pair are.
//
// Set when compiled: BITS (2, 3, 4), TOKENS (1, 4, 8 or 16 at most), TURNS, HALF (1: x and y are float16, 0: bfloat16),
// AHEAD, HOLD, ACROSS, DOWN, PARTS, STRIPS, UNIT (row tiles that stay in one strip), START (where shared memory begins,
// another place before compute capability 9.0), and what `Shape` is made of.

#pragma once

#ifndef EXPERTS
#define EXPERTS 0
#endif
#if !EXPERTS
#define EXPERT_FIELDS
#define EXPERT_COUNTS
typedef Raw Asked;
template <class A> __device__ __forceinline__ Asked ask(const A& p, int token, int column, bool inside) {
  return ask_x(p, p.silu, token, column, inside);
}
template <class A> __device__ __forceinline__ void take_asked(float (&v)[8], const Asked& asked, const A& p) { take_x(v, asked, p.silu); }
__device__ __forceinline__ int row_of(int token) { return token; }
#endif

struct Shape {
  static constexpr int n = N, k = K;
  static constexpr bool normed = NORMED,                // x is normed in front (RMSNorm)
                        silu = SILU,                    // x is [tokens, 2 k], gate beside up
                        biased = BIASED, added = ADDED,  // there is a bias, something to add
                        wide = WIDE;                    // y and add are float
};

struct Arguments : Shape {
  const u16* x;           // [tokens, k]
  CODE_FIELDS
  const float* in_scale;  // [k]
  const float* out_scale; // [n]
  const float* bias;      // [n] or null
  const void* add;        // [tokens, n] of y's type, or null
  void* y;                // [tokens, n], x's type, or float if wide
  u8* kept;               // [slices, tokens, KEPT] of rotated activations, unless TURNS
  float2* scales;         // [slices, tokens], likewise
  float* squares;         // [slices, tokens]: of x, if normed
  float* sums;            // [PARTS, tokens, n], unless WHOLE
  u32* arrived;           // blocks, by 128 rows; zero between launches
  EXPERT_FIELDS
  float norm;             // of both Hadamard transforms
  float eps;              // of the RMSNorm in front
  float inverse_k;        // 1 / k
  int tokens;             // 1 to TOKENS
  EXPERT_COUNTS
};

constexpr int WARPS = ACROSS * DOWN, GROUPS = (TOKENS + GROUP_TOKENS - 1) / GROUP_TOKENS;
constexpr int SLICES = (K + SLICE - 1) / SLICE, TILES = N / 16, UNITS = (TILES + UNIT - 1) / UNIT, PER_BLOCK = ROWS / 16;
constexpr bool WHOLE = PARTS == 1 && UNIT % PER_BLOCK == 0;
constexpr int PITCH = HOLD * 16 + 8;  // floats of a token's sums: other banks for each t
static_assert(PARTS * ACROSS >= SLICES, "a warp has one slice");
constexpr bool ROUNDS = HOLD < (UNITS + STRIPS - 1) / STRIPS * UNIT;  // or all of a strip at a time
static_assert(!ROUNDS || HOLD % (AHEAD * DOWN) == 0, "a round ends where the registers ahead begin again");
static_assert(!ROUNDS || !WHOLE || HOLD % PER_BLOCK == 0, "a round ends whole blocks of rows");

struct Shared {            // after the tables
  float2 scales[TOKENS][ACROSS];
  u32 last;                // blocks of rows that this block ends
};
constexpr int SHARED_STRUCT = (sizeof(Shared) + 127) / 128 * 128;

// ------------------------------------------------------------------------------------------------------------- activations

// A slice of a token, rotated: its bytes, and what set_scale() makes a product's scale of.
__device__ __forceinline__ uint4 turn(const Arguments& p, const Asked& raw, const float (&in_scale)[8], int slice, int token,
                                      float2& scale, int lane) {
  float v[8];
  take_asked(v, raw, p);
  if (p.normed) {  // every strip finds the same, and writes it
    const float square = sum_of_squares(v);
    if (lane == 0) p.squares[slice * p.tokens + token] = square;
  }
  rotate(v, in_scale, p.k % 128 ? 64 : 128, lane);
  return to_bytes(v, scale);
}

#if !EXPERTS
extern "C" __global__ void __launch_bounds__(128, 1) TURN(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % 32, job = blockIdx.x * 4 + threadIdx.x / 32, token = job % p.tokens, slice = job / p.tokens;
  const int column = slice * SLICE + lane * 8;
  const bool inside = column < p.k;
  float in_scale[8];
  load8(in_scale, p.in_scale + column, inside);
  pdl_wait();
  pdl_trigger();
  if (slice >= SLICES) return;
  float2 scale;
  const uint4 bytes = turn(p, ask(p, token, column, inside), in_scale, slice, token, scale, lane);
  keep(p.kept + (size_t)job * KEPT, bytes, lane);
  if (lane == 0) p.scales[job] = scale;
}
#endif

// --------------------------------------------------------------------------------------------------------------------- sums

__device__ __forceinline__ int first_tile(u32 strip) { return min(UNITS * strip / STRIPS * UNIT, (u32)TILES); }
__device__ __forceinline__ u32 strip_of(u32 tile) { return ((tile / UNIT + 1) * STRIPS - 1) / UNITS; }
// How many blocks bring sums of 128 rows.
__device__ __forceinline__ u32 contributors(int block) {
  const int first = block * PER_BLOCK, last = min(first + PER_BLOCK, TILES) - 1;
  return PARTS * (strip_of(last) - strip_of(first) + 1);
}

// 128 rows of a token, four a lane: what `total` gives, rotated, scaled and written.
template <class Total> __device__ __forceinline__ void finish(const Arguments& p, int block, int token, int lane, Total total) {
  const int row = block * ROWS + lane * 4;
  const bool own = row < p.n;
  const size_t at = (size_t)row_of(token) * p.n + row;
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f), c = s;
  if (own) s = *(const float4*)(p.out_scale + row);
  if (own && p.biased) c = *(const float4*)(p.bias + row);
  if (own && p.added) take_add(c, p, ask_add(p, at));
  float squares = 0.f;
  if (p.normed)
    for (int slice = lane; slice < SLICES; slice += 32) squares += __ldcg(p.squares + slice * p.tokens + token);
  float4 v = total(row, own);  // behind what is waited for together
  const float norm = p.normed ? p.norm * rsqrtf(fmaf(over_lanes(squares), p.inverse_k, p.eps)) : p.norm;
  rotate_rows(v, p.n % 128 ? 64 : 128, lane);
  if (!own) return;
  v.x = fmaf(v.x * norm, s.x, c.x), v.y = fmaf(v.y * norm, s.y, c.y);
  v.z = fmaf(v.z * norm, s.z, c.z), v.w = fmaf(v.w * norm, s.w, c.w);
  store4(p, at, v);
}

// What all brought of the rows that this block was the last to bring sums of.
__device__ __forceinline__ void finish_shared(const Arguments& p, Shared& beside, int begin, int end, int warp, int lane) {
  __threadfence();  // the sums before the count
  __syncthreads();
  for (int first = begin / PER_BLOCK; first * PER_BLOCK < end; first += 32) {
    if (warp == 0) {
      const int block = first + lane;
      const bool last =
          block * PER_BLOCK < end && atomicAdd(p.arrived + block, 1u) + 1 == contributors(block);
      if (last) p.arrived[block] = 0;
      const u32 all = __ballot_sync(~0u, last);
      if (lane == 0) beside.last = all;
      __threadfence();  // the count before the sums
    }
    __syncthreads();
    int job = 0;
    for (u32 last = beside.last; last; last &= last - 1)
      for (int token = 0; token < p.tokens; token++, job++) {
        if (job % WARPS != warp) continue;
        finish(p, first + __ffs(last) - 1, token, lane, [&](int row, bool own) {
          const float* from = p.sums + (size_t)token * p.n + (own ? row : 0);
          float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
          for (int part = 0; part < PARTS; part++) {
            const float4 u = __ldcg((const float4*)(from + (size_t)part * p.tokens * p.n));
            if (own) add_to(v, u);
          }
          return v;
        });
      }
    __syncthreads();
  }
}

// Grid: STRIPS * PARTS. Shared memory: tables, Shared, sums [ACROSS][TOKENS][PITCH], which rotated activations
// [ACROSS][TOKENS][KEPT] stand in before them.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) KERNEL(const __grid_constant__ Arguments given) {
#if EXPERTS
  Arguments p = given;
  if (!enter(p)) return;
#else
  const Arguments& p = given;
#endif
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp / ACROSS, column_warp = warp % ACROSS;
  const int strip = blockIdx.x / PARTS, part = blockIdx.x % PARTS, tokens = TOKENS == 1 ? 1 : p.tokens;
  const int begin = first_tile(strip), end = first_tile(strip + 1), slice = part * ACROSS + column_warp;
  const bool real = slice < SLICES;
  const int used = min(ACROSS, SLICES - part * ACROSS);
  const int column = slice * SLICE + lane * 8;
  Shared& beside = *(Shared*)(smem + TABLE_BYTES);
  float* const partial = (float*)(smem + TABLE_BYTES + SHARED_STRUCT);
  u8* const kept = (u8*)partial;

  // What comes from near first: it would queue behind codes.
  float in_scale[8];
  Asked raw;
  const bool inside = TURNS && column < p.k, mine = inside && row_warp < tokens;
  load8(in_scale, p.in_scale + column, inside);
  if (!OVERLAPS) raw = ask(p, row_warp, column, mine);
  const Tables tables(p, warp, WARPS, lane);
  Reader reader(p, slice, begin + row_warp, real ? end : begin, g, t);
  Codes ahead[AHEAD];
#pragma unroll
  for (int d = 0; d < AHEAD; d++) reader.next(ahead[d]);
  // What ends the rows is near when it is wanted.
  for (int row = begin * 16 + threadIdx.x * 32; row < end * 16; row += WARPS * 1024) {
    prefetch(p.out_scale + row);
    if (p.biased) prefetch(p.bias + row);
  }
  tables.build(p, warp, WARPS, lane);
  pdl_wait();
  pdl_trigger();

  if (TURNS && real) {
    if (OVERLAPS) raw = ask(p, row_warp, column, mine);
#pragma unroll 1
    for (int token = row_warp; token < tokens; token += DOWN) {
      float2 scale;
      const uint4 bytes = turn(p, raw, in_scale, slice, token, scale, lane);
      if (token + DOWN < tokens) raw = ask(p, token + DOWN, column, inside);
      keep(kept + (column_warp * TOKENS + token) * KEPT, bytes, lane);
      if (lane == 0) beside.scales[token][column_warp] = scale;
    }
  }
  __syncthreads();
  Product product[GROUPS];
#pragma unroll
  for (int j = 0; j < GROUPS; j++)
    take(
        product[j], j * GROUP_TOKENS, g, t, [&](int token) { return real && token < tokens; },
        [&](int token, bool there) {
          const size_t at = TURNS ? column_warp * TOKENS + token : slice * tokens + token;
          return (const u8*)((TURNS ? kept : p.kept) + (there ? at : 0) * KEPT);
        },
        [&](int token) {
          float2 scale = make_float2(0.f, 0.f);
          if (real && token < tokens) scale = TURNS ? beside.scales[token][column_warp] : p.scales[slice * tokens + token];
          return scale;
        });
  __syncthreads();  // `kept` was read

  const u32 bank = tables.bank(lane);
  float* const own_sums = partial + column_warp * TOKENS * PITCH;
  int tile = begin + row_warp;
#pragma unroll 1
  for (int from = begin; from < end; from += HOLD) {
    const int until = min(from + HOLD, end);
#pragma unroll 1
    while (real && tile < until) {
#pragma unroll
      for (int d = 0; d < AHEAD; d++) {
        if (tile >= until) break;
        Product::Sums acc[GROUPS];
        multiply_all(acc, product, ahead[d], bank);
        reader.next(ahead[d]);
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
          for (int e = 0; e < LANE_TOKENS; e++) {
            const int token = TOKENS == 1 ? 0 : j * GROUP_TOKENS + t * LANE_TOKENS + e;
            const float top = result(product[j], acc[j], 0, e), low = result(product[j], acc[j], 1, e);
            if (TOKENS == 1 ? t > 0 || e > 0 : token >= tokens) continue;
            float* const sum = own_sums + token * PITCH + (tile - from) * 16 + g;
            sum[0] = top, sum[8] = low;
          }
        tile += DOWN;
      }
    }
    __syncthreads();
    auto total = [&](int token, int row) {  // of this part, four rows from `row` of the round on
      const float* const at = partial + token * PITCH + row;
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
      for (int w = 0; w < used; w++) add_to(v, *(const float4*)(at + w * TOKENS * PITCH));
      return v;
    };
    if (WHOLE) {
      const int blocks = (until - from + PER_BLOCK - 1) / PER_BLOCK;
      for (int job = warp; job < tokens * blocks; job += WARPS) {
        const int token = TOKENS == 1 ? 0 : job / blocks, block = job - token * blocks;
        finish(p, from / PER_BLOCK + block, token, lane, [&](int, bool own) {
          return own ? total(token, block * ROWS + lane * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
        });
      }
    } else {
      const int rows = (until - from) * 16;
      for (int i = threadIdx.x * 4; i < tokens * rows; i += WARPS * 128) {
        const int token = TOKENS == 1 ? 0 : i / rows, row = i - token * rows;
        __stcg((float4*)(p.sums + ((size_t)part * tokens + token) * p.n + from * 16 + row), total(token, row));
      }
    }
    if (until < end) __syncthreads();
  }
  if (!WHOLE) finish_shared(p, beside, begin, end, warp, lane);
}
