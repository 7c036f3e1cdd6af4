// E8P linear for up to 16 tokens in one pass over the codes. The codes' layout is told in formats/e8p.py.
//
// Decoding. An E8P integer a is odd and |a| <= 11, so u = (a + 15) / 2 is a nibble, and both the sign and the shift of
// a code are XORs on it: eight nibbles in one word are  T1[index byte] ^ T2[sign byte],  two lookups in shared memory,
// where each entry stands 32 times, once a bank. E81B integers e are nibbles e + 8 likewise.
//
// Up to 4 tokens: int8. The word is not unpacked. Its bytes are 16 h + l (two nibbles), those of word << 4 are 16 l + h
// of the byte below; both go to the tensor cores as unsigned bytes, and the activations beside them solve, for the four
// pairs of a group,  16 b1[j] + b2[j+1] = z[4+j],  b1[j] + 16 b2[j] = z[j].  So a code of eight weights costs two byte
// permutes, two loads, one XOR and one shift. The activations have 16 bits, high and low byte as two columns of
// mma.m16n8k32 (u8 x s8, exact in 32 bits), on a scale of each slice's own.
//
// Up to 16 tokens: float16, since two int8 columns a token would be twice the products. A nibble masked in place is a
// subnormal float16, and exact; stages are added first.
//
// A warp owns a slice of 256 columns: it scales and rotates the activations, keeps them in registers and walks down the
// rows of its tile. Slices meet in shared memory (and across a cluster) as float32 and are added in a fixed order: the
// same bits whatever the timing. With more than 4 tokens the rotation would be repeated by too many blocks, so e8p_rotate
// does it once, into fragments that e8p_linear loads.
//
// Set when compiled: BITS (2, 3, 4), TOKENS (4, 8 or 16 in one pass), HALF (1: x and y are float16, 0: bfloat16), DEPTH
// (row tiles fetched ahead), WARPS and BLOCKS (__launch_bounds__), TRIGGER (when the next kernel may start: 0 at once, 1
// with the last fetch, 2 after the last product).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

constexpr int SLICE = 256;       // columns a warp owns at a time
constexpr int ROWS = 128;        // rows that the output's rotation mixes at most
constexpr bool INTEGER = TOKENS == 4;
constexpr int TILES = (TOKENS + 7) / 8;            // column tiles of the product
constexpr int OWN = INTEGER ? 1 : 2;               // tokens of a tile whose results a lane holds
constexpr int PAD = INTEGER ? 8 : 4;               // floats after a token's partial sums: other banks for each t
constexpr float SUBNORMAL = 16777216.f;            // 2^24, what a subnormal float16 counts in
constexpr int STAGES = BITS == 2 ? 1 : 2;
constexpr int TABLE_BYTES = BITS == 3 ? 98304 : 65536;
constexpr int SMEM_START = 1024;  // what the hardware reserves of a block's shared memory; checked at the start
constexpr float LEVELS = INTEGER ? 32512.f : 2048.f;  // of the largest activation; 127 * 256: both bytes stay in int8

struct Arguments {
  const u16* x;             // [tokens, k]
  const u8* codes;          // int16 [n, k/8]
  const u8* residual;       // uint8 or int16 [n, k/8]
  const uint2* codebook;    // int8 [512, 8]
  const float* in_scale;    // [k]
  const float* out_scale;   // [n]
  const float* bias;        // [n] or null
  u16* y;                   // [tokens, n]
  uint4* fragments;         // [chunks, slices, TILES, 8, 32]
  float2* scales;           // [chunks, slices, TOKENS]: scale, sum
  int tokens, n, k;
  int across;               // warps side by side in k; the others share the row tiles
  int slices;               // of 256 columns
  int per_block;            // slices that a block of the cluster owns
  int blocks;               // of 128 rows that a cluster owns
  float norm;               // of both Hadamard transforms
};

extern __shared__ __align__(1024) u8 smem[];

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
__device__ __forceinline__ void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 stream16(const u8* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 stream8(const u8* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
template <bool IS_HALF> __device__ __forceinline__ float2 widen(u32 v) {  // two 16-bit floats
  float2 f;
  if (IS_HALF) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(f.x), "=f"(f.y) : "r"(v));
  } else {
    f.x = __uint_as_float(v << 16);
    f.y = __uint_as_float(v & 0xFFFF0000u);
  }
  return f;
}
template <bool IS_HALF> __device__ __forceinline__ u32 narrow(float a, float b) {
  u32 v;
  if (IS_HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
  return v;
}
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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

// Eight columns of one token a lane: scaled, rotated.
__device__ __forceinline__ void rotate(float (&v)[8], const u16* x, const float (&in_scale)[8], bool inside, int block,
                                       int lane) {
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (inside) raw = *(const uint4*)x;
  const float2 f0 = widen<HALF>(raw.x), f1 = widen<HALF>(raw.y), f2 = widen<HALF>(raw.z), f3 = widen<HALF>(raw.w);
  v[0] = f0.x * in_scale[0], v[1] = f0.y * in_scale[1], v[2] = f1.x * in_scale[2], v[3] = f1.y * in_scale[3];
  v[4] = f2.x * in_scale[4], v[5] = f2.y * in_scale[5], v[6] = f3.x * in_scale[6], v[7] = f3.y * in_scale[7];
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (!(e & o)) pair(v[e], v[e | o]);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, o);
  if (block == 128)
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = butterfly(v[e], lane, 8);
}

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }
// Of the slice, from each lane's own. As integers NaN is the largest of all: it ends in the scale, and so everywhere.
__device__ __forceinline__ float largest_of(u32 top) { return __uint_as_float(__reduce_max_sync(~0u, top)); }
__device__ __forceinline__ float inverse_of(float largest) { return largest > 0.f ? __fdividef(LEVELS, largest) : 0.f; }

// What a lane's group looks like to the products, and for the slice its scale and the sum that the offset of the nibbles
// is multiplied with. int8: {b1 high, b2 high, b1 low, b2 low}.
__device__ __forceinline__ uint4 to_bytes(const float (&v)[8], float2& scale) {
  float b1[4], b2[4], above = 0.f;
  u32 top = 0;
#pragma unroll
  for (int j = 3; j >= 0; j--) {
    b1[j] = (v[4 + j] - above) * 0.0625f;
    b2[j] = above = (v[j] - b1[j]) * 0.0625f;
    top = max(top, max(magnitude(b1[j]), magnitude(b2[j])));
  }
  const float largest = largest_of(top), inverse = inverse_of(largest);
  // Adding 1.5 * 2^23 + 128 leaves q + 128 in the low bits: byte 1 is the high part, byte 0 the low part plus 128.
  const float magic = 12582912.f + 128.f;
  u32 q1[4], q2[4];
  int sum = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    q1[j] = __float_as_uint(fmaf(b1[j], inverse, magic));
    q2[j] = __float_as_uint(fmaf(b2[j], inverse, magic));
    sum += 17 * ((int)q1[j] - 0x4B400080 + (int)q2[j] - 0x4B400080);
  }
  sum -= (int)q2[0] - 0x4B400080;
  scale.x = largest * (1.f / LEVELS);
  scale.y = (float)__reduce_add_sync(~0u, sum);
  uint4 w;
  w.x = prmt(prmt(q1[0], q1[1], 0x5151), prmt(q1[2], q1[3], 0x5151), 0x5410);
  w.y = prmt(prmt(q2[0], q2[1], 0x5151), prmt(q2[2], q2[3], 0x5151), 0x5410);
  w.z = prmt(prmt(q1[0], q1[1], 0x4040), prmt(q1[2], q1[3], 0x4040), 0x5410) ^ 0x80808080u;
  w.w = prmt(prmt(q2[0], q2[1], 0x4040), prmt(q2[2], q2[3], 0x4040), 0x5410) ^ 0x80808080u;
  return w;
}

// float16, in the order of the masks in multiply().
__device__ __forceinline__ uint4 to_halves(const float (&v)[8], float2& scale) {
  u32 top = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) top = max(top, magnitude(v[j]));
  const float largest = largest_of(top), inverse = inverse_of(largest), sixteenth = inverse * 0.0625f;
  uint4 w;
  w.x = narrow<true>(v[0] * inverse, v[2] * inverse);
  w.y = narrow<true>(v[4] * sixteenth, v[6] * sixteenth);
  w.z = narrow<true>(v[1] * inverse, v[3] * inverse);
  w.w = narrow<true>(v[5] * sixteenth, v[7] * sixteenth);
  const float2 a = widen<true>(w.x), b = widen<true>(w.y), c = widen<true>(w.z), d = widen<true>(w.w);
  float sum = (a.x + a.y) + (c.x + c.y) + 16.f * ((b.x + b.y) + (d.x + d.y));
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  scale = make_float2(largest * (1.f / LEVELS), sum);
  return w;
}

__device__ __forceinline__ void load8(float (&to)[8], const float* from, bool inside) {
  float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
  if (inside) a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// A warp a (token, slice): grid (slices, TOKENS / 8, chunks of TOKENS), 8 warps.
extern "C" __global__ void __launch_bounds__(256) e8p_rotate(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % 32, slice = blockIdx.x, b = blockIdx.y * 8 + threadIdx.x / 32, chunk = blockIdx.z;
  const int token = chunk * TOKENS + b, column = slice * SLICE + lane * 8;
  float in_scale[8];
  load8(in_scale, p.in_scale + column, column < p.k);
  let_next_start();
  wait_for_previous();
  if (b >= TOKENS) return;
  float v[8];
  float2 scale;
  const bool inside = column < p.k && token < p.tokens;
  rotate(v, p.x + (size_t)token * p.k + column, in_scale, inside, p.k % 128 ? 64 : 128, lane);
  const size_t at = (size_t)chunk * p.slices + slice;
  p.fragments[((at * TILES + b / 8) * 8 + lane % 8) * 32 + b % 8 * 4 + lane / 8] = to_halves(v, scale);
  if (lane == 0) p.scales[at * TOKENS + b] = scale;
}

__device__ __forceinline__ void build_tables(const uint2* codebook, int warp, int warps, int lane) {
  for (int block = warp; block < TABLE_BYTES / 4096; block += warps) {
    const int q = block * 32 + lane;  // the q-th run of 128 bytes
    u32 word;
    if (q >= 512) {
      const uint2 row = codebook[q - 256];
      word = ((row.x & 0x0F0F0F0Fu) | ((row.y & 0x0F0F0F0Fu) << 4)) ^ 0x88888888u;
    } else if (q & 1) {
      const u32 p = __popc(q >> 1) & 1, s = (q >> 1) ^ p;
      word = ((s & 15) * 0x00204081u & 0x01010101u) * 0x0Eu;
      word |= ((s >> 4) * 0x00204081u & 0x01010101u) * 0xE0u;
      word ^= p * 0x11111111u;
    } else {
      const uint2 row = codebook[q >> 1];
      word = ((row.x >> 1 & 0x0F0F0F0Fu) | ((row.y >> 1 & 0x0F0F0F0Fu) << 4)) ^ 0x88888888u;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 v = __shfl_sync(~0u, word, i * 4 + lane / 8);
      *(uint4*)(smem + block * 4096 + i * 512 + lane * 16) = make_uint4(v, v, v, v);
    }
  }
}

// `bank` holds the high half of the tables' address and the lane's bank; AT, the low half, is an immediate.
template <int AT> __device__ __forceinline__ u32 lookup(u32 address) {
  u32 v;
  asm("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(address), "n"(SMEM_START + AT));
  return v;
}
// The I-th of two codes in a word. The index byte becomes byte 1 of the address.
template <int I> __device__ __forceinline__ u32 decode(u32 codes, u32 bank) {
  return lookup<0>(prmt(codes, bank, I ? 0x7634 : 0x7614)) ^ lookup<128>(prmt(codes, bank, I ? 0x7624 : 0x7604));
}
template <int I> __device__ __forceinline__ u32 decode_e81b(u32 codes, u32 bank) {
  const u32 index = I == 0 ? codes << 7 : I == 1 ? codes >> 1 : I == 2 ? codes >> 9 : codes >> 17;
  return lookup<65536>((index & 0x7F80u) | bank);
}
__device__ __forceinline__ u32 part(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct Codes {
  uint4 first[2];  // rows g and g + 8
  uint4 second[BITS == 4 ? 2 : 1];
  uint2 small[BITS == 3 ? 2 : 1];
};

// The I-th of eight codes of a row, R = 0 for row g and 1 for row g + 8.
template <int I, int R> __device__ __forceinline__ u32 first(const Codes& c, u32 bank) {
  return decode<I % 2>(part(c.first[R], I / 2), bank);
}
template <int I, int R> __device__ __forceinline__ u32 second(const Codes& c, u32 bank) {
  if (BITS == 4) return decode<I % 2>(part(c.second[BITS == 4 ? R : 0], I / 2), bank);
  const uint2 v = c.small[BITS == 3 ? R : 0];
  return decode_e81b<I % 4>(I < 4 ? v.x : v.y, bank);
}

struct Bytes {  // int8: acc in units of the slice's scale, a stage each
  uint2 b[8];
  float2 scale[1][1];
  int acc[STAGES][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < STAGES; s++) acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0;
  }
  template <int I> __device__ __forceinline__ void multiply(const Codes& c, u32 bank) {
    u32 top = first<I, 0>(c, bank), low = first<I, 1>(c, bank);
    mma(acc[0], top, low, top << 4, low << 4, b[I]);
    if (STAGES == 2) {
      top = second<I, 0>(c, bank), low = second<I, 1>(c, bank);
      mma(acc[STAGES - 1], top, low, top << 4, low << 4, b[I]);
    }
  }
  // a = 2 u - 15, e = u - 8. 2 bits: a, 3 bits: a + e, 4 bits: 4 a + b.
  __device__ __forceinline__ float result(int j, int e, int h) const {
    float v[STAGES], q;
#pragma unroll
    for (int s = 0; s < STAGES; s++) v[s] = fmaf(256.f, (float)acc[s][2 * h], (float)acc[s][2 * h + 1]);
    if (BITS == 2) q = 2.f * v[0];
    else if (BITS == 3) q = fmaf(2.f, v[0], v[STAGES - 1]);
    else q = fmaf(8.f, v[0], 2.f * v[STAGES - 1]);
    return fmaf(BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f, scale[0][0].y, q) * scale[0][0].x;
  }
};

struct Halves {  // float16: stages added before the product
  uint4 b[TILES][8];
  float2 scale[TILES][2];
  float acc[TILES][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < TILES; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
  }
  template <int I, int R> __device__ __forceinline__ void operands(u32 (&a)[4], const Codes& c, u32 bank) {
    const u32 v = first<I, R>(c, bank), w = v >> 8;
    a[0] = v & 0x000F000Fu, a[1] = v & 0x00F000F0u, a[2] = w & 0x000F000Fu, a[3] = w & 0x00F000F0u;
    if (STAGES == 2) {
      const u32 r = second<I, R>(c, bank), q = r >> 8;
      const u32 ratio = BITS == 4 ? 4 : 2;
      a[0] = a[0] * ratio + (r & 0x000F000Fu), a[1] = a[1] * ratio + (r & 0x00F000F0u);
      a[2] = a[2] * ratio + (q & 0x000F000Fu), a[3] = a[3] * ratio + (q & 0x00F000F0u);
    }
  }
  template <int I> __device__ __forceinline__ void multiply(const Codes& c, u32 bank) {
    u32 top[4], low[4];
    operands<I, 0>(top, c, bank);
    operands<I, 1>(low, c, bank);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      mma(acc[j], top[0], low[0], top[1], low[1], b[j][I].x, b[j][I].y);
      mma(acc[j], top[2], low[2], top[3], low[3], b[j][I].z, b[j][I].w);
    }
  }
  __device__ __forceinline__ float result(int j, int e, int h) const {
    const float v = acc[j][2 * h + e] * (BITS == 3 ? SUBNORMAL : 2.f * SUBNORMAL);
    return fmaf(BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f, scale[j][e].y, v) * scale[j][e].x;
  }
};
template <bool> struct Choose { typedef Bytes type; };
template <> struct Choose<false> { typedef Halves type; };

// A warp's operands for one slice: rotated here, through 512 bytes of shared memory ...
__device__ __forceinline__ void gather(Bytes& to, const Arguments& p, int slice, int start, int chunk, int tokens,
                                       float (&in_scale)[8], uint4* exchange, int lane) {
  const int column = slice * SLICE + lane * 8, g = lane / 4, t = lane % 4;
  if (slice != start) load8(in_scale, p.in_scale + column, column < p.k);
#pragma unroll
  for (int i = 0; i < 8; i++) to.b[i] = make_uint2(0, 0);
#pragma unroll 1
  for (int token = 0; token < tokens; token++) {
    float v[8];
    float2 scale;
    const u16* x = p.x + (size_t)(chunk * TOKENS + token) * p.k + column;
    rotate(v, x, in_scale, column < p.k, p.k % 128 ? 64 : 128, lane);
    exchange[lane] = to_bytes(v, scale);
    __syncwarp();
    if (g / 2 == token) {
#pragma unroll
      for (int i = 0; i < 8; i++) to.b[i] = *(const uint2*)((const u8*)(exchange + t * 8 + i) + g % 2 * 8);
    }
    if (t == token) to.scale[0][0] = scale;
    __syncwarp();
  }
}
// ... or by e8p_rotate.
__device__ __forceinline__ void gather(Halves& to, const Arguments& p, int slice, int, int chunk, int, float (&)[8],
                                       uint4*, int lane) {
  const size_t at = (size_t)chunk * p.slices + slice;
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int i = 0; i < 8; i++) to.b[j][i] = __ldcg(p.fragments + ((at * TILES + j) * 8 + i) * 32 + lane);
#pragma unroll
    for (int e = 0; e < 2; e++) to.scale[j][e] = __ldcg(p.scales + at * TOKENS + j * 8 + lane % 4 * 2 + e);
  }
}

// Grid (row tiles of p.blocks * 128 * cluster, chunks of TOKENS). Shared memory: tables, partial sums
// [across][tokens][rows + PAD], what the cluster sends [jobs / cluster][cluster][128], where a job is a token's 128 rows,
// and 512 bytes a warp for the rotation.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) e8p_linear(const __grid_constant__ Arguments p) {
  u32 cluster, rank;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(cluster));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warps = blockDim.x / 32, down = warps / p.across, column_warp = warp % p.across, row_warp = warp / p.across;
  const int tile = blockIdx.x / cluster, chunk = blockIdx.y;
  const int tokens = min(TOKENS, p.tokens - chunk * TOKENS);
  const int end = min((int)(rank + 1) * p.per_block, p.slices), start = rank * p.per_block + column_warp;

  // Row tiles are fetched in the order in which they are used, DEPTH ahead.
  Codes codes[DEPTH];
  const u32 row_bytes = (u32)p.k / 4, rest_bytes = (u32)p.k / (BITS == 4 ? 4 : 8);
  const int rows = p.blocks * ROWS, pitch = rows + PAD, tile_row = tile * rows;
  const int row_tiles = min(rows, p.n - tile_row) / 16;
  const int stride = down * DEPTH, padded = (rows / 16 + stride - 1) / stride * stride;  // whole turns through codes[]
  int ahead_slice = start, ahead_tile = row_warp;
  const size_t ahead_row = (size_t)tile_row + row_warp * 16 + g;
  const u8* ahead = p.codes + ahead_row * row_bytes + start * 64 + t * 16;
  const u8* ahead_rest = p.residual + ahead_row * rest_bytes + (start * 64 + t * 16) / (BITS == 4 ? 1 : 2);
  auto fetch = [&](Codes& c) {
    if (ahead_slice < end && ahead_slice * SLICE + t * 64 < p.k && ahead_tile < row_tiles) {
      c.first[0] = stream16(ahead);
      c.first[1] = stream16(ahead + 8 * row_bytes);
      if (BITS == 4) {
        c.second[0] = stream16(ahead_rest);
        c.second[BITS == 4] = stream16(ahead_rest + 8 * row_bytes);
      } else if (BITS == 3) {
        c.small[0] = stream8(ahead_rest);
        c.small[BITS == 3] = stream8(ahead_rest + 8 * rest_bytes);
      }
    }
    ahead_tile += down;
    ahead += down * 16 * row_bytes;
    if (BITS > 2) ahead_rest += down * 16 * rest_bytes;
    if (ahead_tile >= padded) {
      ahead_tile = row_warp, ahead_slice += p.across;
      ahead -= padded * 16 * row_bytes - p.across * 64;
      if (BITS > 2) ahead_rest -= padded * 16 * rest_bytes - p.across * (BITS == 4 ? 64 : 32);
    }
  };
#pragma unroll
  for (int d = 0; d < DEPTH; d++) fetch(codes[d]);
  if (TRIGGER == 0) let_next_start();
  if (cluster > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  build_tables(p.codebook, warp, warps, lane);
  float* partial = (float*)(smem + TABLE_BYTES);
  float* received = partial + p.across * tokens * pitch;
  uint4* exchange = (uint4*)(received + (cluster > 1 ? (tokens * p.blocks + cluster) * ROWS : 0)) + warp * 32;
  float in_scale[8];
  if (INTEGER) load8(in_scale, p.in_scale + start * SLICE + lane * 8, start < end && start * SLICE + lane * 8 < p.k);
  __syncthreads();
  wait_for_previous();

  u32 bank;  // opaque and after the barrier, so that no lookup is moved before it
  const u32 base = (u32)__cvta_generic_to_shared(smem);
  if ((base & 0xFFFFu) != SMEM_START) __trap();
  asm volatile("or.b32 %0, %1, %2;" : "=r"(bank) : "r"(base & 0xFFFF0000u), "r"(lane * 4) : "memory");
  for (int slice = start; slice < end; slice += p.across) {
    Choose<INTEGER>::type product;
    gather(product, p, slice, start, chunk, tokens, in_scale, exchange, lane);
    for (int first_tile = row_warp; first_tile < padded; first_tile += stride) {
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        const int m = first_tile + d * down;
        if (m < row_tiles) {
          product.clear();
          product.template multiply<0>(codes[d], bank);
          product.template multiply<1>(codes[d], bank);
          product.template multiply<2>(codes[d], bank);
          product.template multiply<3>(codes[d], bank);
          product.template multiply<4>(codes[d], bank);
          product.template multiply<5>(codes[d], bank);
          product.template multiply<6>(codes[d], bank);
          product.template multiply<7>(codes[d], bank);
        }
        fetch(codes[d]);  // into the registers that were just read
        if (TRIGGER == 1 && ahead_slice >= end) let_next_start();
        if (m >= row_tiles) continue;
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int e = 0; e < OWN; e++) {
            const int token = INTEGER ? t : j * 8 + t * 2 + e;
            if (token >= tokens) continue;
            float* to = partial + (column_warp * tokens + token) * pitch + m * 16 + g;
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float q = product.result(j, e, h);
              to[8 * h] = slice == start ? q : to[8 * h] + q;
            }
          }
      }
    }
  }
  if (TRIGGER == 2) let_next_start();
  __syncthreads();

  const int used = min(p.across, end - (int)rank * p.per_block);  // columns of warps that had a slice
  const int block = p.n % 128 ? 64 : 128;
  const int jobs = tokens * p.blocks;
  auto finish = [&](int job, float4 v) {
    const int b = job / p.blocks;
    pair(v.x, v.y), pair(v.z, v.w), pair(v.x, v.z), pair(v.y, v.w);
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) across_lanes(v, lane, o);
    if (block == 128) across_lanes(v, lane, 16);
    const int row = tile_row + job % p.blocks * ROWS + lane * 4;
    if (row < p.n) {
      const float4 s = *(const float4*)(p.out_scale + row);
      float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
      if (p.bias) c = *(const float4*)(p.bias + row);
      v.x = fmaf(v.x * p.norm, s.x, c.x), v.y = fmaf(v.y * p.norm, s.y, c.y);
      v.z = fmaf(v.z * p.norm, s.z, c.z), v.w = fmaf(v.w * p.norm, s.w, c.w);
      uint2* to = (uint2*)(p.y + (size_t)(chunk * TOKENS + b) * p.n + row);
      *to = make_uint2(narrow<HALF>(v.x, v.y), narrow<HALF>(v.z, v.w));
    }
  };
  auto total = [&](int job) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int w = 0; w < used; w++) {
      const float4 u = *(const float4*)(partial + (w * tokens + job / p.blocks) * pitch + job % p.blocks * ROWS + lane * 4);
      v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
    }
    return v;
  };
  if (cluster == 1) {
#pragma unroll 1
    for (int job = warp; job < jobs; job += warps) finish(job, total(job));
    return;
  }
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every block has started, its memory can be written
#pragma unroll 1
  for (int job = warp; job < jobs; job += warps) {
    const float4 v = total(job);
    u32 to = (u32)__cvta_generic_to_shared(received + ((job / cluster) * cluster + rank) * ROWS + lane * 4);
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(job % cluster));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};"
                 :: "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll 1
  for (int job = rank + warp * cluster; job < jobs; job += warps * cluster) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int r = 0; r < cluster; r++) {
      const float4 u = *(const float4*)(received + ((job / cluster) * cluster + r) * ROWS + lane * 4);
      v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
    }
    finish(job, v);
  }
}
