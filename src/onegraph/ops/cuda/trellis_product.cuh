// A trellis-coded matrix times up to 16 tokens on every card from compute capability 8.0 on, as `rotated_portable.cuh` cuts it.
// formats/trellis.py tells the code.
//
// A lane has eight weights of each tile of 16 x 16, whose states are windows of 16 bits in one, two or three words of the tile's
// string: the first words come from memory, the last one from the lane that has it in front, since the string is a ring. A state
// is multiplied by the constant, and a dot product of bytes with ones adds the four bytes of that to the bits of 1024 in float16:
// sums below 1024 end in its mantissa. Two such numbers are a register of m16n8k16's first operand: exact integers, each 1534 too
// large, for which 1534 times the sum of a slice's activations is subtracted from what the slice brings. Activations are float16
// on a scale of each slice's own: 11 bits of each.
//
// Up to four tokens (AS_BYTES) need no sums of bytes: the four bytes of a weight are operands of m16n8k32 themselves, each multiplied
// with the weight's activation. That has 16 bits, whose two bytes are columns of their own. Sums are exact integers.
//
// exllamav3's codes give float16 numbers without an offset, for the inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a lane.
//
// Set when compiled: BITS (1 to 8), CODE (0 to 3), AS_BYTES, and what `rotated_portable.cuh` says.
// Set before: KERNEL and TURN, and with EXPERTS what `rotated_portable.cuh` says.
#pragma once

#include "rotated_common.cuh"
#include "trellis_decode.cuh"

#define CODE_FIELDS const u8* codes;  /* int16 [n / 16, k BITS] */

#define BYTEWISE (AS_BYTES && CODE == 0)

constexpr int TABLE_BYTES = 0;
constexpr int KEPT = 544;             // bytes of a slice of a token: 256 float16, or high bytes and low bytes; other banks for each token
constexpr int IN_SLICE = SLICE / 16;  // tiles

struct Tables {
  template <class A> __device__ __forceinline__ Tables(const A&, int, int, int) {}
  template <class A> __device__ __forceinline__ void build(const A&, int, int, int) const {}
  __device__ __forceinline__ u32 bank(int lane) const { return lane; }
};

// ------------------------------------------------------------------------------------------------------------- activations

__device__ __forceinline__ float largest_of(const float (&v)[8]) {  // of a slice; NaN is the largest of all, as integers are
  u32 top = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) top = max(top, __float_as_uint(v[e]) & 0x7FFFFFFFu);
  return __uint_as_float(__reduce_max_sync(~0u, top));
}
#if BYTEWISE
constexpr int GROUP_TOKENS = 4, LANE_TOKENS = 1;
constexpr float LARGEST = 32512.f;  // of the activations of a slice: 127 * 256, so that both bytes stay in int8
constexpr int LOW = 272;            // where low bytes begin: other banks

// A lane's eight columns: high bytes, low bytes; and the slice's scale.
__device__ __forceinline__ uint4 to_bytes(const float (&v)[8], float2& scale) {
  const float largest = largest_of(v), inverse = largest > 0.f ? __fdividef(LARGEST, largest) : 0.f;
  scale = make_float2(largest * (1.f / LARGEST), 0.f);
  u32 q[8];  // byte 1 is the high one, byte 0 the low one plus 128
#pragma unroll
  for (int e = 0; e < 8; e++) q[e] = __float_as_uint(fmaf(v[e], inverse, 12582912.f + 128.f));
  return make_uint4(prmt(prmt(q[0], q[1], 0x5151), prmt(q[2], q[3], 0x5151), 0x5410),
                    prmt(prmt(q[4], q[5], 0x5151), prmt(q[6], q[7], 0x5151), 0x5410),
                    prmt(prmt(q[0], q[1], 0x4040), prmt(q[2], q[3], 0x4040), 0x5410) ^ 0x80808080u,
                    prmt(prmt(q[4], q[5], 0x4040), prmt(q[6], q[7], 0x4040), 0x5410) ^ 0x80808080u);
}
__device__ __forceinline__ void keep(u8* at, const uint4& w, int lane) {
  *(uint2*)(at + lane * 8) = make_uint2(w.x, w.y), *(uint2*)(at + LOW + lane * 8) = make_uint2(w.z, w.w);
}

struct Product {
  uint2 b[IN_SLICE][2];  // of column g, a byte of token g / 2: a lane's four inputs of each tile, four times each
  float scale;           // of token t
  int offset[2];         // of its high bytes' sum, its low bytes'
  typedef int Sums[4];
};

template <class There, class At, class Scale>
__device__ __forceinline__ void take(Product& to, int first, int g, int t, There there, At at, Scale scale) {
  const int token = first + g / 2;
  const bool real = there(token);
  const u8* const from = at(token, real) + g % 2 * LOW + t * 4;
  Product::Sums sums = {0, 0, 0, 0};  // of activations, four times each: products by 1
#pragma unroll
  for (int i = 0; i < IN_SLICE; i++) {
    const u32 four = real ? *(const u32*)(from + i * 16) : 0;
    to.b[i][0] = make_uint2(prmt(four, 0, 0x0000), prmt(four, 0, 0x1111));
    to.b[i][1] = make_uint2(prmt(four, 0, 0x2222), prmt(four, 0, 0x3333));
#pragma unroll
    for (int h = 0; h < 2; h++) mma_u8s8(sums, 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u, to.b[i][h]);
  }
  to.scale = scale(first + t).x;
#pragma unroll
  for (int e = 0; e < 2; e++) to.offset[e] = sums[e] / 2 * 255;  // a weight is 510 less than its bytes' sum
}
__device__ __forceinline__ float result(const Product& p, const Product::Sums& acc, int h, int) {
  return fmaf((float)(acc[2 * h] - p.offset[0]), 256.f, (float)(acc[2 * h + 1] - p.offset[1])) * p.scale;
}
#else
constexpr int GROUP_TOKENS = 8, LANE_TOKENS = 2;
constexpr float LARGEST = 16384.f;  // of the activations of a slice

// A lane's eight columns as float16, and the slice's scale.
__device__ __forceinline__ uint4 to_bytes(const float (&v)[8], float2& scale) {
  const float largest = largest_of(v), inverse = largest > 0.f ? __fdividef(LARGEST, largest) : 0.f;
  scale = make_float2(largest * (1.f / LARGEST), 0.f);
  return make_uint4(floats_to_halves(v[0] * inverse, v[1] * inverse), floats_to_halves(v[2] * inverse, v[3] * inverse),
                    floats_to_halves(v[4] * inverse, v[5] * inverse), floats_to_halves(v[6] * inverse, v[7] * inverse));
}
__device__ __forceinline__ void keep(u8* at, const uint4& w, int lane) { ((uint4*)at)[lane] = w; }

struct Product {
  uint2 b[IN_SLICE];  // of column g, a lane's inputs of each tile
  float scale[2];     // of tokens 2 t and 2 t + 1
  float offset[2];    // likewise, of results
  typedef float Sums[4];
};

template <class There, class At, class Scale>
__device__ __forceinline__ void take(Product& to, int first, int g, int t, There there, At at, Scale scale) {
  const bool real = there(first + g);
  const u8* const from = at(first + g, real) + t * IN * 2;
#pragma unroll
  for (int i = 0; i < IN_SLICE; i++) {
    const u8* const tile = from + i * 32;
    to.b[i] = !real         ? make_uint2(0, 0)
              : NEXT == 2 ? *(const uint2*)tile
                            : make_uint2(*(const u32*)tile, *(const u32*)(tile + NEXT * 2));
  }
  Product::Sums sums = {0.f, 0.f, 0.f, 0.f};  // of activations: products by 1
#pragma unroll
  for (int i = 0; i < (OFFSET ? IN_SLICE : 0); i++) mma_f16(sums, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u, to.b[i].x, to.b[i].y);
#pragma unroll
  for (int e = 0; e < 2; e++) to.scale[e] = scale(first + 2 * t + e).x, to.offset[e] = -OFFSET * sums[e] * to.scale[e];
}
__device__ __forceinline__ float result(const Product& p, const Product::Sums& acc, int h, int e) {
  return fmaf(acc[2 * h + e], p.scale[e], p.offset[e]);
}
#endif

// ------------------------------------------------------------------------------------------------------------------- codes

struct Codes {
  u32 word[IN_SLICE][FIRST];
};

// What a warp reads: a lane's words of its slice in every DOWN-th row tile. Beyond k it reads the first tile instead, which
// zeros are multiplied with.
struct Reader {
  const u8* codes;
  int left;   // row tiles
  int tiles;  // of the slice
  template <class A> __device__ __forceinline__ Reader(const A& p, int slice, int tile, int end, int g, int t)
      : left(tile < end ? (end - tile + DOWN - 1) / DOWN : 0), tiles(min(IN_SLICE, K / 16 - slice * IN_SLICE)) {
    const int first = slice * IN_SLICE < K / 16 ? slice * IN_SLICE : 0;
    codes = p.codes + ((size_t)min(tile, N / 16 - 1) * (K / 16) + first) * TILE_BYTES + lane_bytes(g * 4 + t);
  }
  __device__ __forceinline__ void next(Codes& to) {
    if (left-- <= 0) return;
#pragma unroll
    for (int i = 0; i < IN_SLICE; i++) {
      const u8* const at = codes + (K % SLICE == 0 || i < tiles ? i * TILE_BYTES : 0);
#pragma unroll
      for (int w = 0; w < FIRST; w++) to.word[i][w] = stream4(at + w * 4);
    }
    codes += (size_t)DOWN * (K / 16) * TILE_BYTES;
  }
};

template <int COUNT>
__device__ __forceinline__ void multiply_all(Product::Sums (&acc)[COUNT], const Product (&p)[COUNT], const Codes& c, u32 lane) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;
#pragma unroll
  for (int i = 0; i < IN_SLICE; i++) {
#if BYTEWISE
    static_assert(COUNT == 1, "up to four tokens");
    const Bits bits(c.word[i], lane);
    mma_u8s8(acc[0], bits.bytes<0>(), bits.bytes<4>(), bits.bytes<1>(), bits.bytes<5>(), p[0].b[i][0]);
    mma_u8s8(acc[0], bits.bytes<2>(), bits.bytes<6>(), bits.bytes<3>(), bits.bytes<7>(), p[0].b[i][1]);
#else
    const uint4 a = decode(c.word[i], lane);
#pragma unroll
    for (int j = 0; j < COUNT; j++) mma_f16(acc[j], a.x, a.y, a.z, a.w, p[j].b[i].x, p[j].b[i].y);
#endif
  }
}

#include "rotated_portable.cuh"
