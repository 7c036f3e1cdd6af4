// Up to 4 tokens: what activations look like beside nibbles that are not unpacked. e8p_decode.cu tells why.

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }
__device__ __forceinline__ float inverse_of(float largest) { return largest > 0.f ? __fdividef(LEVELS, largest) : 0.f; }

// A lane's group as b1 and b2; the largest magnitude of both, as bits.
__device__ __forceinline__ u32 solve(const float (&v)[8], float (&b1)[4], float (&b2)[4]) {
  float above = 0.f;
  u32 top = 0;
#pragma unroll
  for (int j = 3; j >= 0; j--) {
    b1[j] = (v[4 + j] - above) * 0.0625f;
    b2[j] = above = (v[j] - b1[j]) * 0.0625f;
    top = max(top, max(magnitude(b1[j]), magnitude(b2[j])));
  }
  return top;
}
// As integers of 16 bits, in steps of 1 / inverse: {b1 high, b2 high, b1 low, b2 low}, and the sum that the offset of
// the nibbles is multiplied with.
__device__ __forceinline__ uint4 to_integers(const float (&b1)[4], const float (&b2)[4], float inverse, int& sum) {
  // Adding 1.5 * 2^23 + 128 leaves q + 128 in the low bits: byte 1 is the high part, byte 0 the low part plus 128.
  const float magic = 12582912.f + 128.f;
  u32 q1[4], q2[4];
  sum = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    q1[j] = __float_as_uint(fmaf(b1[j], inverse, magic));
    q2[j] = __float_as_uint(fmaf(b2[j], inverse, magic));
    sum += 17 * ((int)q1[j] - 0x4B400080 + (int)q2[j] - 0x4B400080);
  }
  sum -= (int)q2[0] - 0x4B400080;
  uint4 w;
  w.x = prmt(prmt(q1[0], q1[1], 0x5151), prmt(q1[2], q1[3], 0x5151), 0x5410);
  w.y = prmt(prmt(q2[0], q2[1], 0x5151), prmt(q2[2], q2[3], 0x5151), 0x5410);
  w.z = prmt(prmt(q1[0], q1[1], 0x4040), prmt(q1[2], q1[3], 0x4040), 0x5410) ^ 0x80808080u;
  w.w = prmt(prmt(q2[0], q2[1], 0x4040), prmt(q2[2], q2[3], 0x4040), 0x5410) ^ 0x80808080u;
  return w;
}
