// E8P linear for prefill: codes decoded into the registers that wgmma reads its first operand from, so that
// the weights are never written anywhere. Decoding and its tables are told in e8p_decode.cu; here too a nibble masked in place is
// a subnormal float16, and stages are added first.
//
//   e8p_rotate   x -> H_k(in_scale * x) as float16 on a scale of each token's own, in the very bytes that a stage of
//                shared memory holds: [token tile][64 columns][TOKENS][128 bytes], 16-byte units swizzled, columns in the
//                order in which a lane's codes come.
//   e8p_prefill     128 rows (MT 1) or 256 (MT 2) by TOKENS, two warpgroups; one more warp copies. With k cut into several
//                splits, partial sums go to memory.
//   e8p_add_parts   adds the splits in order, rotates, scales.
//
// Three kernels that agree on two layouts, which is why this file is long.
//
// Set when compiled: BITS, HALF (1: x and y are float16, 0: bfloat16), TOKENS (32, 64, 128 or 256 a tile), MT (1 or 2
// times 64 rows a warpgroup), DEPTH (stages of 64 columns), MOST (slices of 256 columns that a warp of e8p_rotate
// holds).
//
// One file past 400 lines: the three kernels hand each other their layouts.

#include "e8p_common.cuh"

constexpr int STAGE_BYTES = TOKENS * 128;
static_assert(DEPTH >= 2, "a stage is given back behind the next one's first products");
constexpr int PITCH = ROWS + 4;  // floats of a token in the epilogue
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
  float* partial;         // [splits, tokens, n] if there are splits
  int tokens, n, k;
  int slices;             // of 256 columns
  int per_split;          // slices of a split
  int splits;
  int silu;               // x is [tokens, 2 k], gate beside up
  int wide;               // y and add are float
  float norm;             // of both Hadamard transforms
  float eps;              // of the RMSNorm in front; negative: none
};

__device__ __forceinline__ float sum_of_block(float v, float* exchange) {  // 256 threads
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < 8; w++) sum += exchange[w];
  return sum;
}

// A block a token.
extern "C" __global__ void __launch_bounds__(256) e8p_rotate(const __grid_constant__ Arguments p) {
  __shared__ float exchange[3][8];
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_start();
  wait_for_previous();
  float v[MOST][8], length = 0.f, squares = 0.f;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int column = (i * 8 + warp) * SLICE + lane * 8;
    if (i * 8 + warp >= p.slices) continue;
    float in_scale[8];
    load_x(v[i], p, token, column, column < p.k);
    load8(in_scale, p.in_scale + column, column < p.k);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      squares = fmaf(v[i][e], v[i][e], squares);
      v[i][e] *= in_scale[e];
      length = fmaf(v[i][e], v[i][e], length);
    }
  }
  length = sqrtf(sum_of_block(length, exchange[0]));  // no rotated value is larger, up to the norm of the rotation
  squares = sum_of_block(squares, exchange[1]);
  const int block = p.k % 128 ? 64 : 128;
  const float largest = length * (block == 128 ? 11.3137085f : 8.f);
  const float inverse = largest > 0.f ? __fdividef(LEVELS, largest) : 0.f, sixteenth = inverse * 0.0625f;
  const float ones[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  u8* to = p.spread + (size_t)(token / TOKENS) * p.slices * 4 * STAGE_BYTES + token % TOKENS * 128;
  float sum = 0.f;
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
    u8* stage = to + (size_t)(slice * 4 + lane % 8 / 2) * STAGE_BYTES;
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const float2 f = widen<true>(w[u]);
      sum += (f.x + f.y) * (u % 2 ? 16.f : 1.f);
      *(u32*)(stage + (((lane % 2 * 4 + u) ^ (token % 8)) * 16) + lane / 8 * 4) = w[u];
    }
  }
  sum = sum_of_block(sum, exchange[2]);
  if (threadIdx.x == 0) {
    float scale = largest * (1.f / LEVELS);
    if (p.eps >= 0.f) scale *= rsqrtf(squares / (float)p.k + p.eps);
    p.scales[token] = make_float2(scale, sum);
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

struct Codes {  // four of a row's: half of a slice's eight
  uint2 first;
  uint2 second;  // 3 bits: .x alone
};
// The I-th code: eight weights as two operands of four, {even pairs, odd pairs}.
template <int I> __device__ __forceinline__ void operands(u32 (&a)[4], const Codes& c, u32 bank) {
  const u32 v = decode<I % 2>(I < 2 ? c.first.x : c.first.y, bank), w = v >> 8;
  a[0] = v & 0x000F000Fu, a[1] = v & 0x00F000F0u, a[2] = w & 0x000F000Fu, a[3] = w & 0x00F000F0u;
  if (STAGES == 2) {
    u32 r;
    if (BITS == 4) r = decode<I % 2>(I < 2 ? c.second.x : c.second.y, bank);
    else r = decode_e81b<I % 4>(c.second.x, bank);
    const u32 q = r >> 8, ratio = BITS == 4 ? 4 : 2;
    a[0] = a[0] * ratio + (r & 0x000F000Fu), a[1] = a[1] * ratio + (r & 0x00F000F0u);
    a[2] = a[2] * ratio + (q & 0x000F000Fu), a[3] = a[3] * ratio + (q & 0x00F000F0u);
  }
}

// What follows the rotation, of four neighbouring rows.
struct Epilogue {
  float4 scale, bias;
  __device__ __forceinline__ void load(const Arguments& p, int row) {
    scale = bias = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row >= p.n) return;
    scale = *(const float4*)(p.out_scale + row);
    scale.x *= p.norm, scale.y *= p.norm, scale.z *= p.norm, scale.w *= p.norm;
    if (p.bias) bias = *(const float4*)(p.bias + row);
  }
  __device__ __forceinline__ void store(const Arguments& p, int token, int row, float4 v) const {
    if (row >= p.n) return;
    const size_t at = (size_t)token * p.n + row;
    float4 c = bias;
    add4(c, p, at);
    v.x = fmaf(v.x, scale.x, c.x), v.y = fmaf(v.y, scale.y, c.y);
    v.z = fmaf(v.z, scale.z, c.z), v.w = fmaf(v.w, scale.w, c.w);
    store4(p, at, v);
  }
};
__device__ __forceinline__ float affine(float v, float2 scale) {  // of one product: from nibbles to values
  return fmaf(OFFSET, scale.y, v * (BITS == 3 ? SUBNORMAL : 2.f * SUBNORMAL)) * scale.x;
}
__device__ __forceinline__ void pair(float4& a, float4& b) {
  pair(a.x, b.x), pair(a.y, b.y), pair(a.z, b.z), pair(a.w, b.w);
}

// Grid (row tiles of MT * 128, token tiles, splits). Shared memory: tables, barriers, DEPTH stages; then the sums.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) e8p_prefill(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile_row = blockIdx.x * (MT * 128), token_tile = blockIdx.y;
  const int begin = blockIdx.z * p.per_split, end = min(begin + p.per_split, p.slices), chunks = (end - begin) * 4;
  const u32 base = address(smem), full = base + TABLE_BYTES, empty = full + 8 * DEPTH;
  const u32 stages = base + TABLE_BYTES + 1024;
  let_next_start();
  check_start(base);
  if (threadIdx.x == 0) {
    for (int s = 0; s < DEPTH; s++) {
      make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, 2);
    }
    barriers_visible();
  }
  if (warp < 8) build_tables(p.codebook, load_table_words(p.codebook, warp, 8, lane), warp, 8, lane);
  __syncthreads();
  wait_for_previous();
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
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

  const u32 bank = bank_of(base, lane);
  const int group = warp / 4;  // the warpgroup's own rows
  const int first_row = tile_row + group * (MT * 64) + warp % 4 * 16 + g;
  const u32 row_bytes = (u32)p.k / 4, rest_bytes = (u32)p.k / (BITS == 4 ? 4 : 8);
  float acc[MT][TOKENS / 2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[m][i] = 0.f;
  Codes codes[2][MT][2];
  auto fetch = [&](Codes (&c)[MT][2], int half) {  // of the split's halves of slices
    const int slice = begin + half / 2, column = slice * SLICE + t * 64;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = first_row + m * 64 + r * 8;
        if (slice < end && column < p.k && row < p.n) {
          const u32 at = column / 4 + half % 2 * 8;
          c[m][r].first = __ldg((const uint2*)(p.codes + (size_t)row * row_bytes + at));
          if (BITS == 4) c[m][r].second = __ldg((const uint2*)(p.residual + (size_t)row * rest_bytes + at));
          if (BITS == 3) c[m][r].second.x = __ldg((const u32*)(p.residual + (size_t)row * rest_bytes + at / 2));
        }
      }
  };
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) codes[h][m][r].first = codes[h][m][r].second = make_uint2(0, 0);

  u32 a[2][MT][2][4];  // of a step of 32 columns: [turn][..][16 columns][operand]
  auto decode_step = [&](auto index, u32 (&to)[MT][2][4], const Codes (&c)[MT][2]) {
    constexpr int I = decltype(index)::value;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      u32 top[4], low[4];
      operands<I>(top, c[m][0], bank);
      operands<I>(low, c[m][1], bank);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        to[m][j][0] = top[2 * j], to[m][j][1] = low[2 * j];
        to[m][j][2] = top[2 * j + 1], to[m][j][3] = low[2 * j + 1];
        // made here, while the product before runs, not behind the fence where they are used
        asm volatile("" : "+r"(to[m][j][0]), "+r"(to[m][j][1]), "+r"(to[m][j][2]), "+r"(to[m][j][3]));
      }
    }
  };
  auto multiply = [&](u32 (&from)[MT][2][4], u32 at) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      // K-major, 128-byte swizzle: groups of 8 tokens are 1024 bytes apart
      const u64 b = (u64)((at + j * 32) >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
#pragma unroll
      for (int m = 0; m < MT; m++) wgmma(acc[m], from[m][j], b);
    }
    wgmma_commit();
  };
  fetch(codes[0], 0);
  fetch(codes[1], 1);
  decode_step(Index<0>(), a[0], codes[0]);
  auto keep_step = [&](u32 (&of)[MT][2][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) keep(of[m]);
  };
  int chunk = 0;
  auto stage_of_chunk = [&]() {
    wait_barrier(full + 8 * (chunk % DEPTH), (chunk / DEPTH) & 1);
    return stages + chunk % DEPTH * STAGE_BYTES;
  };
  // Behind a step's products, those of the step before are done: its operands may be written, its stage filled.
  auto step_before_done = [&](u32 (&of)[MT][2][4], int done) {
    wgmma_wait<1>();
    keep_step(of);
    if (done >= 0 && threadIdx.x % 128 == 0) arrive(empty + 8 * (done % DEPTH));
  };
  auto half_slice = [&](Codes (&now)[MT][2], Codes (&next)[MT][2], int half) {  // two stages, four steps
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
#pragma unroll 1
  for (int half = 0; half < (end - begin) * 2; half += 2) {
    half_slice(codes[0], codes[1], half);
    half_slice(codes[1], codes[0], half + 1);
  }
  wgmma_wait<0>();

  // A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight.
  if (p.splits > 1) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) {
        const int row = first_row + m * 64 + i % 4 / 2 * 8, token = token_tile * TOKENS + i / 4 * 8 + t * 2 + i % 2;
        if (row < p.n && token < p.tokens) p.partial[((size_t)blockIdx.z * p.tokens + token) * p.n + row] = acc[m][i];
      }
    return;
  }
  some_meet(1, CONSUMERS);  // no one decodes any more: the sums take the place of everything
  float* sums = (float*)smem;  // [row blocks of 128][TOKENS][PITCH]
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      const int row = (MT == 2 ? m * 64 : group * 64) + warp % 4 * 16 + i % 4 / 2 * 8 + g;
      const int token = i / 4 * 8 + t * 2 + i % 2;
      sums[((MT == 2 ? group : 0) * TOKENS + token) * PITCH + row] = acc[m][i];
    }
  some_meet(1, CONSUMERS);
  // Eight lanes a token, 16 rows each: 4 l + 32 i. Warps share the tokens.
  const int l = lane % 8, block_warps = MT == 2 ? 4 : 8, row_block = MT == 2 ? group : 0;
  const int block_row = tile_row + row_block * 128, size = p.n % 128 ? 64 : 128;
  Epilogue epilogue[4];
#pragma unroll
  for (int i = 0; i < 4; i++) epilogue[i].load(p, block_row + i * 32 + l * 4);
  const int last = min(TOKENS, p.tokens - token_tile * TOKENS);
  auto scale_of = [&](int token) {
    return token < last ? __ldcg(p.scales + token_tile * TOKENS + token) : make_float2(0.f, 0.f);
  };
  float2 next = scale_of(warp % block_warps * 4 + lane / 8);
  for (int token = warp % block_warps * 4 + lane / 8; token < TOKENS; token += block_warps * 4) {
    float4 v[4];
    const float2 scale = next;
    next = scale_of(token + block_warps * 4);  // under way while this token is rotated
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = *(const float4*)(sums + (row_block * TOKENS + token) * PITCH + i * 32 + l * 4);
      v[i].x = affine(v[i].x, scale), v[i].y = affine(v[i].y, scale);
      v[i].z = affine(v[i].z, scale), v[i].w = affine(v[i].w, scale);
      pair(v[i].x, v[i].y), pair(v[i].z, v[i].w), pair(v[i].x, v[i].z), pair(v[i].y, v[i].w);
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) across_lanes(v[i], lane, o);
    }
    pair(v[0], v[1]), pair(v[2], v[3]);
    if (size == 128) pair(v[0], v[2]), pair(v[1], v[3]);
    if (token < last) {
#pragma unroll
      for (int i = 0; i < 4; i++) epilogue[i].store(p, token_tile * TOKENS + token, block_row + i * 32 + l * 4, v[i]);
    }
  }
}

// A warp a token and 128 rows: grid (row blocks, tokens / 8), 8 warps.
extern "C" __global__ void __launch_bounds__(256) e8p_add_parts(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % 32, token = blockIdx.y * 8 + threadIdx.x / 32, row = blockIdx.x * 128 + lane * 4;
  Epilogue epilogue;
  let_next_start();
  epilogue.load(p, row);
  wait_for_previous();
  if (token >= p.tokens) return;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (row < p.n)
    for (int s = 0; s < p.splits; s++) {
      const float4 u = __ldcg((const float4*)(p.partial + ((size_t)s * p.tokens + token) * p.n + row));
      v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
    }
  const float2 scale = __ldcg(p.scales + token);
  v.x = affine(v.x, scale), v.y = affine(v.y, scale), v.z = affine(v.z, scale), v.w = affine(v.w, scale);
  pair(v.x, v.y), pair(v.z, v.w), pair(v.x, v.z), pair(v.y, v.w);
#pragma unroll
  for (int o = 1; o < 16; o <<= 1) across_lanes(v, lane, o);
  if (p.n % 128 == 0) across_lanes(v, lane, 16);
  epilogue.store(p, token, row, v);
}
