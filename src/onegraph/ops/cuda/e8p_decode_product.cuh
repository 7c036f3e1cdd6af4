// The product of e8p_decode.cu, which tells how it decodes: what activations look like to it (`to_bytes`), and a row tile
// of codes times a slice of them (`Product`). e8p_experts.cu has it too.

#include "e8p_activations.cuh"

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

// The I-th of eight codes of a row, R = 0 for row g and 1 for row g + 8.
template <int I, int R> __device__ __forceinline__ u32 first(const Codes& c, u32 bank) {
  return decode<I % 2>(part(c.first[R], I / 2), bank);
}
template <int I, int R> __device__ __forceinline__ u32 second(const Codes& c, u32 bank) {
  if (BITS == 4) return decode<I % 2>(part(c.second[BITS == 4 ? R : 0], I / 2), bank);
  const uint2 v = c.small[BITS == 3 ? R : 0];
  return decode_e81b<I % 4>(I < 4 ? v.x : v.y, bank);
}

struct Product {  // int8: acc in units of the slice's scale, a stage each; chains break the products' latency
  uint2 b[8];
  float scale;
  float offset;
  typedef int Sums[2][4];
  static __device__ __forceinline__ void clear(Sums& acc) {
#pragma unroll
    for (int s = 0; s < 2; s++) acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0;
  }
  // a = 2 u - 15, e = u - 8. 2 bits: a, 3 bits: a + e, 4 bits: 4 a + b. Sums stay below 2^31: 256 * 256 * 255 * 127.
  __device__ __forceinline__ float result(const Sums& acc, int h) const {
    float q;
    if (BITS == 2) {
      q = (float)((acc[0][2 * h] + acc[1][2 * h]) * 256 + acc[0][2 * h + 1] + acc[1][2 * h + 1]);
    } else {
      const float v = (float)(acc[0][2 * h] * 256 + acc[0][2 * h + 1]);
      const float w = (float)(acc[1][2 * h] * 256 + acc[1][2 * h + 1]);
      q = fmaf(BITS == 3 ? 2.f : 4.f, v, w);
    }
    return fmaf(q, scale, offset);
  }
};


constexpr float OFFSET = BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f;
__device__ __forceinline__ void set_scale(Product& to, float2 scale) {  // as to_bytes gives it
  to.offset = OFFSET * scale.y * scale.x;
  to.scale = scale.x * (BITS == 3 ? 1.f : 2.f);
}

// A slice of a token as it is kept for other warps: what to_bytes gives of 32 groups, by four lanes of a product and byte.
constexpr int KEPT = 512;
__device__ __forceinline__ void keep(u8* at, const uint4& w, int lane) {
  uint2* const to = (uint2*)at + lane / 8 * 16 + lane % 8;
  to[0] = make_uint2(w.x, w.y), to[8] = make_uint2(w.z, w.w);
}
// Column g of the product: zeros where there is no token.
__device__ __forceinline__ void load_kept(Product& to, const u8* at, bool there, int g, int t) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 v = there ? ((const uint4*)at)[(t * 2 + g % 2) * 4 + i] : make_uint4(0, 0, 0, 0);
    to.b[2 * i] = make_uint2(v.x, v.y), to.b[2 * i + 1] = make_uint2(v.z, v.w);
  }
}

// Groups of four tokens share what is decoded.
template <int I, int COUNT>
__device__ __forceinline__ void multiply(Product::Sums (&acc)[COUNT], const Product (&p)[COUNT], const Codes& c, u32 bank) {
  u32 top = first<I, 0>(c, bank), low = first<I, 1>(c, bank);
#pragma unroll
  for (int j = 0; j < COUNT; j++) mma_u8s8(acc[j][STAGES == 2 ? 0 : I % 2], top, low, top << 4, low << 4, p[j].b[I]);
  if (STAGES == 2) {
    top = second<I, 0>(c, bank), low = second<I, 1>(c, bank);
#pragma unroll
    for (int j = 0; j < COUNT; j++) mma_u8s8(acc[j][1], top, low, top << 4, low << 4, p[j].b[I]);
  }
}
template <int COUNT>
__device__ __forceinline__ void multiply_all(Product::Sums (&acc)[COUNT], const Product (&p)[COUNT], const Codes& c,
                                             u32 bank) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) Product::clear(acc[j]);
  multiply<0>(acc, p, c, bank), multiply<1>(acc, p, c, bank), multiply<2>(acc, p, c, bank), multiply<3>(acc, p, c, bank);
  multiply<4>(acc, p, c, bank), multiply<5>(acc, p, c, bank), multiply<6>(acc, p, c, bank), multiply<7>(acc, p, c, bank);
}
