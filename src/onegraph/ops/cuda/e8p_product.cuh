// The two products of e8p.cu, which tells how they decode: what activations look like to them (to_bytes, to_halves),
// and a row tile of codes times a slice of them (Bytes up to 4 tokens, Halves up to 16). Included by e8p.cu alone.

#include "e8p_bytes.cuh"

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Of the slice, from each lane's own. As integers NaN is the largest of all: it ends in the scale, and so everywhere.
__device__ __forceinline__ float largest_of(u32 top) { return __uint_as_float(__reduce_max_sync(~0u, top)); }

// What a lane's group looks like to the products, and for the slice its scale and the sum of `to_integers`.
__device__ __forceinline__ uint4 to_bytes(const float (&v)[8], float2& scale) {
  float b1[4], b2[4];
  int sum;
  const float largest = largest_of(solve(v, b1, b2));
  const uint4 w = to_integers(b1, b2, inverse_of(largest), sum);
  scale = make_float2(largest * (1.f / LEVELS), (float)__reduce_add_sync(~0u, sum));
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

// The I-th of eight codes of a row, R = 0 for row g and 1 for row g + 8.
template <int I, int R> __device__ __forceinline__ u32 first(const Codes& c, u32 bank) {
  return decode<I % 2>(part(c.first[R], I / 2), bank);
}
template <int I, int R> __device__ __forceinline__ u32 second(const Codes& c, u32 bank) {
  if (BITS == 4) return decode<I % 2>(part(c.second[BITS == 4 ? R : 0], I / 2), bank);
  const uint2 v = c.small[BITS == 3 ? R : 0];
  return decode_e81b<I % 4>(I < 4 ? v.x : v.y, bank);
}

struct Bytes {  // int8: acc in units of the slice's scale, a stage each; chains break the products' latency
  uint2 b[8];
  float2 scale[1][1];
  float offset;
  float square;  // of the lane's token, over the warp's columns
  typedef int Sums[2][4];
  static __device__ __forceinline__ void clear(Sums& acc) {
#pragma unroll
    for (int s = 0; s < 2; s++) acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0;
  }
  template <int I> __device__ __forceinline__ void multiply(Sums& acc, const Codes& c, u32 bank) const {
    u32 top = first<I, 0>(c, bank), low = first<I, 1>(c, bank);
    mma(acc[STAGES == 2 ? 0 : I % 2], top, low, top << 4, low << 4, b[I]);
    if (STAGES == 2) {
      top = second<I, 0>(c, bank), low = second<I, 1>(c, bank);
      mma(acc[1], top, low, top << 4, low << 4, b[I]);
    }
  }
  // a = 2 u - 15, e = u - 8. 2 bits: a, 3 bits: a + e, 4 bits: 4 a + b. Sums stay below 2^31: 256 * 256 * 255 * 127.
  __device__ __forceinline__ float result(const Sums& acc, int j, int e, int h) const {
    float q;
    if (BITS == 2) {
      q = (float)((acc[0][2 * h] + acc[1][2 * h]) * 256 + acc[0][2 * h + 1] + acc[1][2 * h + 1]);
    } else {
      const float v = (float)(acc[0][2 * h] * 256 + acc[0][2 * h + 1]);
      const float w = (float)(acc[1][2 * h] * 256 + acc[1][2 * h + 1]);
      q = fmaf(BITS == 3 ? 2.f : 4.f, v, w);
    }
    return fmaf(q, scale[0][0].x, offset);
  }
};

struct Halves {  // float16: stages added before the product
  uint4 b[TILES][8];
  float2 scale[TILES][2];
  typedef float Sums[TILES][4];
  static __device__ __forceinline__ void clear(Sums& acc) {
#pragma unroll
    for (int j = 0; j < TILES; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
  }
  template <int I, int R> __device__ __forceinline__ void operands(u32 (&a)[4], const Codes& c, u32 bank) const {
    const u32 v = first<I, R>(c, bank), w = v >> 8;
    a[0] = v & 0x000F000Fu, a[1] = v & 0x00F000F0u, a[2] = w & 0x000F000Fu, a[3] = w & 0x00F000F0u;
    if (STAGES == 2) {
      const u32 r = second<I, R>(c, bank), q = r >> 8;
      const u32 ratio = BITS == 4 ? 4 : 2;
      a[0] = a[0] * ratio + (r & 0x000F000Fu), a[1] = a[1] * ratio + (r & 0x00F000F0u);
      a[2] = a[2] * ratio + (q & 0x000F000Fu), a[3] = a[3] * ratio + (q & 0x00F000F0u);
    }
  }
  template <int I> __device__ __forceinline__ void multiply(Sums& acc, const Codes& c, u32 bank) const {
    u32 top[4], low[4];
    operands<I, 0>(top, c, bank);
    operands<I, 1>(low, c, bank);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      mma(acc[j], top[0], low[0], top[1], low[1], b[j][I].x, b[j][I].y);
      mma(acc[j], top[2], low[2], top[3], low[3], b[j][I].z, b[j][I].w);
    }
  }
  __device__ __forceinline__ float result(const Sums& acc, int j, int e, int h) const {
    const float v = acc[j][2 * h + e] * (BITS == 3 ? SUBNORMAL : 2.f * SUBNORMAL);
    return fmaf(BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f, scale[j][e].y, v) * scale[j][e].x;
  }
};
template <bool> struct Choose { typedef Bytes type; };
template <> struct Choose<false> { typedef Halves type; };
