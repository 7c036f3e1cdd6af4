// Rotated vectors to codes in a block of 16 tokens, a warp a vector; see formats/turboquant_layout.py for where bits stand.
// SCALE (0 norm, 1 matched, 2 unbiased) is set when compiled.

constexpr int QUADS = (DIM + 127) / 128;                 // of neighbouring dimensions, of a lane

__device__ __forceinline__ float widen(u32 v) {
  return DTYPE == 1 ? lower_half_to_float(v & 0xFFFF) : __uint_as_float(v << 16);
}
__device__ __forceinline__ u32 narrow(float v) { return DTYPE == 1 ? float_to_half(v) : float_to_bf16(v); }
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// Codes of WIDTH bits of four dimensions into the plane of `row` bytes a token at `plane`. All lanes.
template <int WIDTH, bool PAIRED> __device__ __forceinline__ void put(u8* plane, int token, int quad, const int (&code)[4], bool real) {
  constexpr int ROW = DIM * WIDTH / 8;
  u8* to = plane + (PAIRED ? token / 2 * 2 * ROW + token % 2 : token * ROW);
  constexpr int STEP = PAIRED ? 2 : 1;
  if (WIDTH == 4) {
    if (!real) return;
    to[STEP * 2 * quad] = (u8)(code[0] | code[1] << 4), to[STEP * (2 * quad + 1)] = (u8)(code[2] | code[3] << 4);
  } else if (WIDTH == 2) {
    if (real) to[STEP * quad] = (u8)(code[0] | code[1] << 4 | code[2] << 2 | code[3] << 6);
  } else {  // two quads, two apart, share a byte
    int bits = (code[0] | code[1] << 4 | code[2] << 1 | code[3] << 5) << quad % 4 / 2 * 2;
    bits |= __shfl_xor_sync(~0u, bits, 2);
    if (real && quad % 4 < 2) to[STEP * (quad / 4 * 2 + quad % 4)] = (u8)bits;
  }
}

template <int BITS, bool PAIRED> __device__ __forceinline__ void quantize(
    const float (&y)[QUADS][4], const float (&magnitude)[1 << (BITS - 1)], u8* plane, u8* norms, int token, int lane, bool real) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < QUADS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) squares = fmaf(y[i][e], y[i][e], squares);
  const float norm = sqrtf(sum_of_warp(squares));
  const float unit = fmaxf(norm, 1e-30f);
  float seen = 0.f;
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const int quad = i * 32 + lane;
    const bool there = quad < DIM / 4;
    int code[4], low[4], high[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float x = y[i][e] / unit, size = fabsf(x);
      float level = magnitude[0];
      int rank = 0;
#pragma unroll
      for (int k = 1; k < 1 << (BITS - 1); k++) {
        const bool beyond = size > (magnitude[k] + magnitude[k - 1]) * 0.5f;
        rank += beyond;
        level = beyond ? magnitude[k] : level;
      }
      code[e] = 2 * rank + (x < 0.f);
      low[e] = code[e] & 3, high[e] = code[e] >> 2;
      if (there) seen = fmaf(SCALE == 2 ? size : level, level, seen);
    }
    if (BITS == 3) {
      put<2, PAIRED>(plane, token, quad, low, real && there);
      put<1, PAIRED>(plane + 4 * DIM, token, quad, high, real && there);
    } else {
      put<BITS == 3 ? 2 : BITS, PAIRED>(plane, token, quad, code, real && there);
    }
  }
  seen = sum_of_warp(seen);
  const float scale = SCALE == 0 ? norm : SCALE == 1 ? norm / sqrtf(seen) : norm / fmaxf(seen, 1e-3f);
  if (real && lane == 0) *(u16*)(norms + 2 * token) = (u16)float_to_half(fminf(scale, 65504.f));
}
