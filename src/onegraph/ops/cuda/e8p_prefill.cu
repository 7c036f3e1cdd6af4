// E8P linear for prefill: codes decoded into the registers that wgmma reads its first operand from, so that the weights are
// never written anywhere. Decoding and its tables are told in e8p_decode.cu; here too a nibble masked in place is a subnormal
// float16, and stages are added first.
//
//   e8p_rotate      x -> H_k(in_scale * x) as float16 on a scale of each token's own, in the very bytes that a stage of
//                   shared memory holds: [token tile][64 columns][TOKENS][128 bytes], 16-byte units swizzled, columns in the
//                   order in which a lane's codes come.
//   e8p_prefill     128 rows by TOKENS, two warpgroups; a thread of a third one copies. Where k is cut in two, the blocks of a
//                   pair (JOIN 2) end half of the tokens each and send each other the sums of the others; of more splits
//                   partial sums go to memory.
//   e8p_add_parts   adds these in order, rotates, scales.
//
// Set when compiled: BITS, HALF (1: x and y are float16, 0: bfloat16), TOKENS (32, 64, 128 or 256 a tile), DEPTH (stages of
// 64 columns), JOIN (1 or 2 blocks of a cluster), MOST (slices of 256 columns that a warp of e8p_rotate holds).
//
// One file past 400 lines: the three kernels hand each other their layouts.

#include "e8p_common.cuh"

constexpr int STAGE_BYTES = TOKENS * 128;
static_assert(DEPTH >= 2, "a stage is given back behind the next one's first products");
static_assert(JOIN <= 2, "a pair of blocks");
constexpr int PITCH = ROWS + 4;     // floats of a token in the epilogue
constexpr int OWN = TOKENS / JOIN;  // tokens that a block ends
constexpr int LANES = OWN >= 128 ? 2 : OWN == 64 ? 4 : OWN == 32 ? 8 : 16;  // that share a token at the end
constexpr int RUNS = 16 / LANES;    // of eight rows, that a lane has of a token
constexpr int LOOP_BYTES = TABLE_BYTES + 1024 + DEPTH * STAGE_BYTES;
constexpr int SUM_BYTES = (TOKENS + (JOIN - 1) * OWN) * PITCH * 4 + 2 * ROWS * 4;
constexpr int END_BYTES = SUM_BYTES > LOOP_BYTES ? SUM_BYTES : LOOP_BYTES;  // then a pair's barriers, one a warp
constexpr float LEVELS = 32768.f;
constexpr int CONSUMERS = 256;
constexpr float OFFSET = BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f;

struct Arguments {
  const u16* x;           // [tokens, k]
  const u8* codes;        // int16 [n, k/8]
  const u8* residual;     // uint8 or int16 [n, k/8]
  const uint2* codebook;  // int8 [512, 8]
  const float* in_scale;  // [k]
  const float* out_scale; // [n]
  const float* bias;      // [n] or null
  const void* add;        // [tokens, n] of y's type, or null
  void* y;                // [tokens, n], x's type, or float if wide
  u8* spread;             // [token tiles, 4 slices, STAGE_BYTES]
  float2* scales;         // [tokens]: scale, sum
  float* partial;         // [parts, tokens, n] if there are several
  int tokens, n, k;
  int slices;             // of 256 columns
  int per_split;          // slices of a split
  int splits;             // of k
  int parts;              // of the sums, that go to memory: splits, or 1 of a pair
  int ratio;              // of the stages: 2 or 4
  int silu;               // x is [tokens, 2 k], gate beside up
  int wide;               // y and add are float
  float norm;             // of both Hadamard transforms
  float eps;              // of the RMSNorm in front; negative: none
};

// Over the 256 threads of a block; `exchange` is of one call.
template <int N> __device__ __forceinline__ void sums_of_block(float (&v)[N], float (&exchange)[N][8]) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    v[n] = over_lanes(v[n]);
    if (threadIdx.x % 32 == 0) exchange[n][threadIdx.x / 32] = v[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; n++) {
    v[n] = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) v[n] += exchange[n][w];
  }
}
// Of lanes that differ by o: the one without it has both a, the other one both b.
__device__ __forceinline__ void exchange_words(u32& a, u32& b, int lane, int o) {
  const u32 got = __shfl_xor_sync(~0u, lane & o ? a : b, o);
  if (lane & o) a = got;
  else b = got;
}

// A block a token.
extern "C" __global__ void __launch_bounds__(256, MOST > 8 ? 1 : 2) e8p_rotate(const __grid_constant__ Arguments p) {
  __shared__ float exchange[2][8], exchange_sum[1][8];
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  pdl_trigger();
  // The codes that every block of e8p_prefill begins with, on their way into the L2.
  for (int i = token * 256 + threadIdx.x; i < p.n * p.splits; i += gridDim.x * 256) {
    const int row = i % p.n, slice = i / p.n * p.per_split;
    const size_t rest_bytes = (size_t)p.k / (BITS == 4 ? 4 : 8), at = (size_t)slice * (SLICE / 4);
    prefetch(p.codes + (size_t)row * (p.k / 4) + at);
    if (STAGES == 2) prefetch(p.residual + row * rest_bytes + at / (BITS == 4 ? 1 : 2));
  }
  auto column_of = [&](int i) { return (i * 8 + warp) * SLICE + lane * 8; };
  constexpr int EARLY = MOST < 2 ? MOST : 2;  // what follows waits for these alone
  float in_scale[EARLY][8];
#pragma unroll
  for (int i = 0; i < EARLY; i++) load8(in_scale[i], p.in_scale + column_of(i), column_of(i) < p.k);
  pdl_wait();
  constexpr int AT_ONCE = MOST > 8 ? (MOST + 1) / 2 : MOST;  // that are asked for
  Raw raw[AT_ONCE];
  float v[MOST][8], lengths[2] = {0.f, 0.f};  // scaled, and as it is
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    if (i % AT_ONCE == 0)
#pragma unroll
      for (int j = i; j < MOST && j < i + AT_ONCE; j++)
        raw[j - i] = ask_x(p, p.silu, token, column_of(j), column_of(j) < p.k);
    float late[8];
    if (i >= EARLY) load8(late, p.in_scale + column_of(i), column_of(i) < p.k);
    take_x(v[i], raw[i % AT_ONCE], p.silu);
    lengths[1] += squares_of(v[i]);
#pragma unroll
    for (int e = 0; e < 8; e++) v[i][e] *= i < EARLY ? in_scale[i % EARLY][e] : late[e];
    lengths[0] += squares_of(v[i]);
  }
  sums_of_block(lengths, exchange);
  const int block = p.k % 128 ? 64 : 128;
  // no rotated value is larger, up to the norm of the rotation
  const float largest = sqrtf(lengths[0]) * (block == 128 ? 11.3137085f : 8.f), squares = lengths[1];
  const float inverse = largest > 0.f ? __fdividef(LEVELS, largest) : 0.f, sixteenth = inverse * 0.0625f;
  const float ones[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  u8* const to = p.spread + (size_t)(token / TOKENS) * p.slices * 4 * STAGE_BYTES + token % TOKENS * 128;
  float sum[1] = {0.f};
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int slice = i * 8 + warp;
    if (slice >= p.slices) continue;
    rotate(v[i], ones, block, lane);
    u32 w[4];
    w[0] = narrow<true>(v[i][0] * inverse, v[i][2] * inverse);
    w[1] = narrow<true>(v[i][4] * sixteenth, v[i][6] * sixteenth);
    w[2] = narrow<true>(v[i][1] * inverse, v[i][3] * inverse);
    w[3] = narrow<true>(v[i][5] * sixteenth, v[i][7] * sixteenth);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const float2 f = widen<true>(w[u]);
      sum[0] += (f.x + f.y) * (u % 2 ? 16.f : 1.f);
    }
    // Lanes l, l + 8, l + 16, l + 24 have a word each of four units of 16 bytes: they exchange them for a unit each.
    exchange_words(w[0], w[1], lane, 8), exchange_words(w[2], w[3], lane, 8);
    exchange_words(w[0], w[2], lane, 16), exchange_words(w[1], w[3], lane, 16);
    const int unit = (lane % 2 * 4 + lane / 8) ^ (token % 8);
    *(uint4*)(to + (size_t)(slice * 4 + lane % 8 / 2) * STAGE_BYTES + unit * 16) = make_uint4(w[0], w[1], w[2], w[3]);
  }
  sums_of_block(sum, exchange_sum);
  if (threadIdx.x == 0) {
    float scale = largest * (1.f / LEVELS);
    if (p.eps >= 0.f) scale *= rsqrtf(squares / (float)p.k + p.eps);
    p.scales[token] = make_float2(scale, sum[0]);
  }
}

#define ACC4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define ACC16(i) ACC4(i), ACC4(i + 4), ACC4(i + 8), ACC4(i + 12)
__device__ __forceinline__ void wgmma(float (&c)[16], const u32 (&a)[4], u64 b) {  // m64n32k16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : ACC16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&c)[32], const u32 (&a)[4], u64 b) {  // m64n64k16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : ACC16(0), ACC16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&c)[64], const u32 (&a)[4], u64 b) {  // m64n128k16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : ACC16(0), ACC16(16), ACC16(32), ACC16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&c)[128], const u32 (&a)[4], u64 b) {  // m64n256k16
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "{%128,%129,%130,%131}, %132, 1, 1, 1, 0;"
      : ACC16(0), ACC16(16), ACC16(32), ACC16(48), ACC16(64), ACC16(80), ACC16(96), ACC16(112)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int I> struct Index { static constexpr int value = I; };

// Codes of a row. Its whole line of 128 bytes comes to the L2 with them, and so what the next halves of slices ask for.
__device__ __forceinline__ void load_codes(uint2& v, const u8* from) {
  asm("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
}
__device__ __forceinline__ void load_codes(u32& v, const u8* from) {
  asm("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
}

struct Codes {  // four of a row's: half of a slice's eight
  uint2 first;
  uint2 second;  // 3 bits: .x alone
};
// The I-th code: eight weights as two operands of four, {even pairs, odd pairs}.
// ratio: of the stages, which the compiler is not to know: it would make shifts and additions of it, on the pipe that the
// masks already fill.
template <int I> __device__ __forceinline__ void operands(u32 (&a)[4], const Codes& c, u32 bank, u32 ratio) {
  const u32 v = decode<I % 2>(I < 2 ? c.first.x : c.first.y, bank), w = v >> 8;
  a[0] = v & 0x000F000Fu, a[1] = v & 0x00F000F0u, a[2] = w & 0x000F000Fu, a[3] = w & 0x00F000F0u;
  if (STAGES == 2) {
    u32 r;
    if (BITS == 4) r = decode<I % 2>(I < 2 ? c.second.x : c.second.y, bank);
    else r = decode_e81b<I % 4>(c.second.x, bank);
    const u32 q = r >> 8;
    a[0] = a[0] * ratio + (r & 0x000F000Fu), a[1] = a[1] * ratio + (r & 0x00F000F0u);
    a[2] = a[2] * ratio + (q & 0x000F000Fu), a[3] = a[3] * ratio + (q & 0x00F000F0u);
  }
}

// Eight neighbouring rows of a token in memory, as floats or as x is.
template <bool WIDE> struct Rows {
  uint4 raw[WIDE ? 2 : 1];
  __device__ __forceinline__ void ask(const void* from, size_t at) {
    const uint4* const first = (const uint4*)((const u8*)from + at * (WIDE ? 4 : 2));
    raw[0] = first[0];
    if (WIDE) raw[WIDE] = first[1];
  }
  __device__ __forceinline__ void onto(float (&v)[8]) const {
    float mine[8];
    if (WIDE) set8(mine, *(const float4*)&raw[0], *(const float4*)&raw[WIDE]);
    else unpack8(mine, raw[0]);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] += mine[e];
  }
  static __device__ __forceinline__ void store(void* to, size_t at, const float (&v)[8]) {
    if (WIDE) {
      ((float4*)((float*)to + at))[0] = make_float4(v[0], v[1], v[2], v[3]);
      ((float4*)((float*)to + at))[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
      *(uint4*)((u16*)to + at) = make_uint4(narrow<HALF>(v[0], v[1]), narrow<HALF>(v[2], v[3]), narrow<HALF>(v[4], v[5]),
                                            narrow<HALF>(v[6], v[7]));
    }
  }
};
__device__ __forceinline__ float2 scale_of(const Arguments& p, int token) {
  return token < p.tokens ? __ldcg(p.scales + token) : make_float2(0.f, 0.f);
}
// A sum of products v is worth v * x + y. rows_in: rows that are added up in it, less those subtracted.
__device__ __forceinline__ float2 affine_of(float2 scale, float rows_in) {
  return make_float2((BITS == 3 ? SUBNORMAL : 2.f * SUBNORMAL) * scale.x, rows_in * OFFSET * scale.y * scale.x);
}

// Grid (row tiles of 128, of JOIN blocks each; token tiles; splits that go to memory). Shared memory: tables, barriers, DEPTH
// stages; then [TOKENS][PITCH] sums, a pair's [OWN][PITCH] of the other block, 128 scales and 128 biases of rows.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) e8p_prefill(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % JOIN, tile_row = blockIdx.x / JOIN * ROWS, token_tile = blockIdx.y;
  const int begin = (JOIN > 1 ? rank : blockIdx.z) * p.per_split, end = min(begin + p.per_split, p.slices);
  const int chunks = (end - begin) * 4;
  const u32 base = address(smem), full = base + TABLE_BYTES, empty = full + 8 * DEPTH;
  const u32 stages = base + TABLE_BYTES + 1024;
  pdl_trigger();
  check_start(base);
  if (threadIdx.x == 0) {
    for (int s = 0; s < DEPTH; s++) {
      make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, 2);
    }
    if (JOIN > 1)
      for (int w = 0; w < 8; w++) make_barrier(base + END_BYTES + 8 * w, 1);
    barriers_visible();
  }
  __syncthreads();
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    pdl_wait();
    if (threadIdx.x == CONSUMERS) {
      const u8* from = p.spread + ((size_t)token_tile * p.slices + begin) * 4 * STAGE_BYTES;
      for (int c = 0; c < chunks; c++) {
        const int s = c % DEPTH;
        if (c >= DEPTH) wait_barrier(empty + 8 * s, (c / DEPTH - 1) & 1);
        expect(full + 8 * s, STAGE_BYTES);
        copy(stages + s * STAGE_BYTES, from + (size_t)c * STAGE_BYTES, STAGE_BYTES, full + 8 * s);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  const int first_row = warp * 16 + g;  // of the tile, and eight rows on
  const u32 row_bytes = (u32)p.k / 4, rest_bytes = (u32)p.k / (BITS == 4 ? 4 : 8);
  Codes codes[2][2];
  auto fetch = [&](Codes (&c)[2], int half) {  // of the split's halves of slices
    const int slice = begin + half / 2, column = slice * SLICE + t * 64;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = tile_row + first_row + r * 8;
      if (slice < end && column < p.k && row < p.n) {
        const u32 at = column / 4 + half % 2 * 8;
        load_codes(c[r].first, p.codes + (size_t)row * row_bytes + at);
        if (BITS == 4) load_codes(c[r].second, p.residual + (size_t)row * rest_bytes + at);
        if (BITS == 3) load_codes(c[r].second.x, p.residual + (size_t)row * rest_bytes + at / 2);
      }
    }
  };
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int r = 0; r < 2; r++) codes[h][r].first = codes[h][r].second = make_uint2(0, 0);
  fetch(codes[0], 0);
  fetch(codes[1], 1);
  build_tables(p.codebook, load_table_words(p.codebook, warp, 8, lane), warp, 8, lane);
  some_meet(1, CONSUMERS);
  const u32 bank = bank_of(base, lane);
  float acc[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.f;

  u32 a[2][2][4];  // of a step of 32 columns: [turn][16 columns][operand]
  auto decode_step = [&](auto index, u32 (&to)[2][4], const Codes (&c)[2]) {
    constexpr int I = decltype(index)::value;
    u32 top[4], low[4];
    operands<I>(top, c[0], bank, p.ratio);
    operands<I>(low, c[1], bank, p.ratio);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      to[j][0] = top[2 * j], to[j][1] = low[2 * j];
      to[j][2] = top[2 * j + 1], to[j][3] = low[2 * j + 1];
    }
    keep(to);  // made here, while the product before runs, not behind the fence where they are used
  };
  auto multiply = [&](u32 (&from)[2][4], u32 at) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      // K-major, 128-byte swizzle: groups of 8 tokens are 1024 bytes apart
      const u64 b = (u64)((at + j * 32) >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
      wgmma(acc, from[j], b);
    }
    wgmma_commit();
  };
  int chunk = 0;
  // Behind a step's products, those of the step before are done: its operands may be written, its stage filled.
  auto step_before_done = [&](u32 (&of)[2][4], int done) {
    wgmma_wait<1>();
    keep(of);
    if (done >= 0 && threadIdx.x % 128 == 0) arrive(empty + 8 * (done % DEPTH));
  };
  auto stage_of_chunk = [&]() {
    wait_barrier(full + 8 * (chunk % DEPTH), (chunk / DEPTH) & 1);
    return stages + chunk % DEPTH * STAGE_BYTES;
  };
  auto half_slice = [&](Codes (&now)[2], Codes (&next)[2], int half) {  // two stages, four steps
    u32 stage = stage_of_chunk();
    multiply(a[0], stage);
    step_before_done(a[1], chunk - 1);
    decode_step(Index<1>(), a[1], now);
    multiply(a[1], stage + 64);
    step_before_done(a[0], -1);
    decode_step(Index<2>(), a[0], now);
    chunk++;
    stage = stage_of_chunk();
    multiply(a[0], stage);
    step_before_done(a[1], chunk - 1);
    decode_step(Index<3>(), a[1], now);
    fetch(now, half + 2);
    multiply(a[1], stage + 64);
    step_before_done(a[0], -1);
    decode_step(Index<0>(), a[0], next);
    chunk++;
  };
  decode_step(Index<0>(), a[0], codes[0]);
#pragma unroll 1
  for (int half = 0; half < (end - begin) * 2; half += 2) {
    half_slice(codes[0], codes[1], half);
    half_slice(codes[1], codes[0], half + 1);
  }
  wgmma_wait<0>();
  pdl_wait();  // the rotation's scales of tokens, and what is added

  // A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight.
  if (p.parts > 1) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      const int row = tile_row + first_row + i % 4 / 2 * 8, token = token_tile * TOKENS + i / 4 * 8 + t * 2 + i % 2;
      if (row < p.n && token < p.tokens) p.partial[((size_t)blockIdx.z * p.tokens + token) * p.n + row] = acc[i];
    }
    return;
  }
  // The rotation of 128 rows has seven stages: that of rows g and g + 8 here, the others in lanes that have up to 64 rows of a
  // token, so that hardly anything crosses lanes.
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i += 4) pair(acc[i], acc[i + 2]), pair(acc[i + 1], acc[i + 3]);
  const int size = p.n % 128 ? 64 : 128;
  // No one decodes or multiplies any more: the sums take the place of everything.
  some_meet(1, CONSUMERS);
  if (JOIN > 1) cluster_begun(), all_begun();  // of the other block, too, which is sent sums
  float *const sums = (float*)smem, *const others = sums + TOKENS * PITCH, *const scales = others + (JOIN - 1) * OWN * PITCH;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++)
    sums[(i / 4 * 8 + t * 2 + i % 2) * PITCH + first_row + i % 4 / 2 * 8] = acc[i];
  const int rows = min(p.n - tile_row, ROWS);
  if (threadIdx.x < rows) {
    scales[threadIdx.x] = p.out_scale[tile_row + threadIdx.x] * p.norm;
    scales[ROWS + threadIdx.x] = p.bias ? p.bias[tile_row + threadIdx.x] : 0.f;
  }
  // Neighbouring lanes have neighbouring tokens, whose pitch spreads them over the banks.
  constexpr int TOKENS_OF_WARP = 32 / LANES, AT_ONCE = 8 * TOKENS_OF_WARP;
  static_assert(JOIN == 1 || OWN == AT_ONCE, "a warp ends at once what it is sent");
  const int l = lane / TOKENS_OF_WARP, before = token_tile * TOKENS + rank * OWN;
  const float rows_in = l % 2 ? 0.f : 2.f;  // rows g and g + 8, or their difference
  int own = warp * TOKENS_OF_WARP + lane % TOKENS_OF_WARP;
  float2 scale = scale_of(p, before + own);
  if (JOIN > 1) copies_ordered();
  some_meet(1, CONSUMERS);
  if (JOIN > 1) {
    constexpr int BYTES = TOKENS_OF_WARP * PITCH * 4;
    const u32 arrived = base + END_BYTES + 8 * warp;
    if (lane == 0) {
      const int first = warp * TOKENS_OF_WARP * PITCH;
      expect(arrived, BYTES);
      copy_across(at_rank(others + first, rank ^ 1), address(sums + (rank ^ 1) * OWN * PITCH + first), BYTES,
                  at_rank(arrived, rank ^ 1));
    }
    receive(arrived);
    __syncwarp();
    cluster_begun();  // a block stays until its sums are where they were sent
  }
  auto ends = [&](auto wide) {
    constexpr bool WIDE = decltype(wide)::value;
#pragma unroll 1
    for (; own < OWN; own += AT_ONCE) {
      const bool there = before + own < p.tokens;
      const size_t at = (size_t)(before + own) * p.n + tile_row + l * 8;
      auto inside = [&](int i) { return RUNS > 1 && i < RUNS / 2 || l * 8 + i * LANES * 8 < rows; };
      Rows<WIDE> added[RUNS];
      if (p.add && there)
#pragma unroll
        for (int i = 0; i < RUNS; i++)
          if (inside(i)) added[i].ask(p.add, at + i * LANES * 8);
      float v[RUNS][8];
      const float2 values = affine_of(scale, rows_in);
      scale = scale_of(p, before + own + AT_ONCE);  // under way while this token is rotated
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const float4* const from = (const float4*)(sums + (rank * OWN + own) * PITCH + l * 8 + i * LANES * 8);
        float4 lower = from[0], upper = from[1];
        if (JOIN > 1) {
          const float4* const other = (const float4*)(others + own * PITCH + l * 8 + i * LANES * 8);
          add_to(lower, other[0]), add_to(upper, other[1]);
        }
        set8(v[i], lower, upper);
#pragma unroll
        for (int e = 0; e < 8; e++) v[i][e] = fmaf(v[i][e], values.x, values.y);
        rotate8(v[i]);
#pragma unroll
        for (int o = 2; o < LANES; o <<= 1)
          if (o < 8 || size == 128)
#pragma unroll
            for (int e = 0; e < 8; e++) v[i][e] = butterfly(v[i][e], lane, o * TOKENS_OF_WARP);
      }
#pragma unroll
      for (int o = 1; o < RUNS; o <<= 1)
        if (o * LANES < 8 || size == 128)
#pragma unroll
          for (int i = 0; i < RUNS; i++)
#pragma unroll
            for (int e = 0; e < 8; e++)
              if (!(i & o)) pair(v[i][e], v[i | o][e]);
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const float4* const from = (const float4*)(scales + l * 8 + i * LANES * 8);
        float out_scale[8], bias[8];
        set8(out_scale, from[0], from[1]), set8(bias, from[ROWS / 4], from[ROWS / 4 + 1]);
#pragma unroll
        for (int e = 0; e < 8; e++) v[i][e] = fmaf(v[i][e], out_scale[e], bias[e]);
      }
      if (!there) continue;
      if (p.add)
#pragma unroll
        for (int i = 0; i < RUNS; i++) added[i].onto(v[i]);
#pragma unroll
      for (int i = 0; i < RUNS; i++)
        if (inside(i)) Rows<WIDE>::store(p.y, at + i * LANES * 8, v[i]);
    }
  };
  if (p.wide) ends(Index<1>()); else ends(Index<0>());
  if (JOIN > 1) all_begun();
}

// Sixteen lanes a token and 128 rows: grid (row blocks, tokens / 16), 8 warps.
template <bool WIDE> __device__ __forceinline__ void add_parts(const Arguments& p) {
  const int lane = threadIdx.x % 32, token = blockIdx.y * 16 + threadIdx.x / 16, row = blockIdx.x * ROWS + lane % 16 * 8;
  const size_t at = (size_t)token * p.n + row;
  float out_scale[8], bias[8];
  load8(out_scale, p.out_scale + row, row < p.n), load8(bias, p.bias + row, p.bias && row < p.n);
  pdl_wait();
  const bool there = token < p.tokens && row < p.n;
  Rows<WIDE> added;
  if (p.add && there) added.ask(p.add, at);
  float4 lower = make_float4(0.f, 0.f, 0.f, 0.f), upper = lower;
  if (there)
    for (int s = 0; s < p.parts; s++) {
      const float4* const from = (const float4*)(p.partial + (size_t)s * p.tokens * p.n + at);
      add_to(lower, __ldcg(from)), add_to(upper, __ldcg(from + 1));
    }
  float v[8];
  set8(v, lower, upper);
  const float2 values = affine_of(scale_of(p, token), 1.f);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = fmaf(v[e], values.x, values.y);
  rotate8(v);
#pragma unroll
  for (int o = 1; o < 16; o <<= 1)
    if (o < 8 || p.n % 128 == 0)
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, o);
  if (!there) return;
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = fmaf(v[e], out_scale[e] * p.norm, bias[e]);
  if (p.add) added.onto(v);
  Rows<WIDE>::store(p.y, at, v);
}
extern "C" __global__ void __launch_bounds__(256) e8p_add_parts(const __grid_constant__ Arguments p) {
  pdl_trigger();
  if (p.wide) add_parts<true>(p); else add_parts<false>(p);
}
