// Three tokens and more: a slice of activations on its way to the products of e8p_decode.cu. Included there alone, behind its
// `Arguments`.
//
// A warp rotates four tokens at a time. H_128 is H_16 across groups of eight columns times H_8 inside of them. H_16 is
// m16n8k16 with a first operand of 1 and -1, one product for each place in a group; its columns are the two halves of the
// slice of each token. H_8 remains to a lane, which has whole groups of one token. in_scale * x goes in as two bfloat16, of
// which the second is what the first leaves: 2^-17 of a number is lost. Shuffles take 280 instructions a token, this 110.
//
// The bytes go through shared memory to all warps of the slice: by token 8 runs of 64 bytes, which four lanes of a product
// take for high and low byte, 16 bytes swizzled so that neither side meets in a bank; the token's scale behind them.

constexpr int FOURS = (TOKENS + 3) / 4;
constexpr int TURNED = 544;  // bytes of a token: other banks for each
constexpr bool EXACT = !HALF && !Shape::silu;  // a column of x is one bfloat16

// What a lane asks for: of token g / 2 and half g % 2 of the slice, groups t, t + 4, t + 8 and t + 12.
__device__ __forceinline__ int turned_column(int slice, int lane) {
  return slice * SLICE + lane / 4 % 2 * 128 + lane % 4 * 8;
}
// Of no token: the last one's again, which nobody takes.
__device__ __forceinline__ void ask_groups(Raw (&to)[4], const Arguments& p, int token, int tokens, int column, bool inside) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    to[i] = ask_x(p, p.silu, min(token, tokens - 1), column + i * 32, inside && (p.k % SLICE == 0 || column + i * 32 < p.k));
}

// A sixteenth of in_scale in shared memory, as the products want it: by two groups (t and t + 4, or t + 8 and t + 12) and
// place two words, beside each other for all lanes that differ in what they read. A word has both groups' numbers in
// bfloat16, in two parts; or, not EXACT, one group's.
constexpr int WEIGHTS = 1024;  // bytes
__device__ __forceinline__ void two_parts(float a, float b, u32& high, u32& low) {
  high = floats_to_bf16s(a, b);
  low = floats_to_bf16s(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xFFFF0000u));
}
__device__ __forceinline__ void keep_weights(u8* to, const float (&in_scale)[8], int lane) {  // of the group `lane`
  const bool second = lane & 4;  // of its two: it has places 4 to 7 of both
  u32 w[4][2];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float given = (second ? in_scale[e] : in_scale[e + 4]) * 0.0625f;
    const float other = __shfl_xor_sync(~0u, given, 4), own = (second ? in_scale[e + 4] : in_scale[e]) * 0.0625f;
    const float a = second ? other : own, b = second ? own : other;
    if (EXACT) two_parts(a, b, w[e][0], w[e][1]);
    else w[e][0] = __float_as_uint(a), w[e][1] = __float_as_uint(b);
  }
  to += (lane / 8 % 2 * 4 + (second ? 2 : 0)) * 128 + (lane / 16 * 4 + lane % 4) * 16;
  *(uint4*)to = make_uint4(w[0][0], w[0][1], w[1][0], w[1][1]);
  *(uint4*)(to + 128) = make_uint4(w[2][0], w[2][1], w[3][0], w[3][1]);
}

// Four numbers as integers of 16 bits, in steps of 1 / inverse: their high bytes, and their low bytes.
__device__ __forceinline__ void bytes_of(float a, float b, float c, float d, float inverse, u32& high, u32& low) {
  const float magic = 12582912.f + 128.f;  // as in `to_integers`
  const u32 q0 = __float_as_uint(fmaf(a, inverse, magic)), q1 = __float_as_uint(fmaf(b, inverse, magic));
  const u32 q2 = __float_as_uint(fmaf(c, inverse, magic)), q3 = __float_as_uint(fmaf(d, inverse, magic));
  const u32 front = prmt(q0, q1, 0x5410), back = prmt(q2, q3, 0x5410);
  high = prmt(front, back, 0x7531);
  low = prmt(front, back, 0x6420) ^ 0x80808080u;
}

// Four tokens' slice, `x` as asked for, into `to`; `next` is called when x and weights have been read. `there`: token t is one. Adds to
// `square`, in the lanes of token t that have g = 2 t.
template <class Next>
__device__ __forceinline__ void turn(const Arguments& p, Raw (&x)[4], const u8* weights, float& square, u8* to,
                                     bool there, int lane, Next next) {
  const int g = lane / 4, t = lane % 4;
  // Row g and group t, row g and group 4 + t; rows and groups 8 further on.
  const u32 signs = 0x3F803F80u ^ (__popc(g & t) & 1) << 15 ^ (__popc(g & (4 + t)) & 1) << 31;
  const bool whole = p.k % 128 == 0;
  const u32 beside = whole ? signs : 0, behind = whole ? signs ^ 0x80008000u : signs;
  float v[8][4];  // place; rows g and g + 8 of either half
  weights += (g % 2 * 4 + t) * 16;
  float squares[4] = {0.f, 0.f, 0.f, 0.f};
  float of_x[4][8];
  if (!EXACT) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      take_x(of_x[i], x[i], p.silu);
      if (p.normed) squares[0] += squares_of(of_x[i]);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) {
    u32 high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 both = *(const uint4*)(weights + (i * 4 + e / 2) * 128);  // of places e and e ^ 1
      const u32 w[2] = {e % 2 ? both.z : both.x, e % 2 ? both.w : both.y};
      if (EXACT) {
        const u32 two = prmt(part(x[2 * i].x, e / 2), part(x[2 * i + 1].x, e / 2), e % 2 ? 0x7632 : 0x5410);
        high[i] = multiply_bf16(two, w[0]);
        low[i] = fma_bf16(two, w[1], rest_bf16(two, w[0], high[i]));
        if (i == 1 && p.normed) {
          const u32 first = prmt(part(x[0].x, e / 2), part(x[1].x, e / 2), e % 2 ? 0x7632 : 0x5410);
          mma_bf16(squares, first, 0, two, 0, first, two);  // each with each: a token's half with itself is row g, column g
        }
      } else {
        two_parts(of_x[2 * i][e] * __uint_as_float(w[0]), of_x[2 * i + 1][e] * __uint_as_float(w[1]), high[i], low[i]);
      }
    }
    v[e][0] = v[e][1] = v[e][2] = v[e][3] = 0.f;
    mma_bf16(v[e], signs, beside, beside, behind, high[0], high[1]);
    mma_bf16(v[e], signs, beside, beside, behind, low[0], low[1]);
  }
  next();
  if (p.normed) {
    float own = g % 2 ? squares[1] : squares[0];
    if (!EXACT) own = squares[0] + __shfl_xor_sync(~0u, squares[0], 1), own += __shfl_xor_sync(~0u, own, 2);
    square += own + __shfl_xor_sync(~0u, own, 4);  // both halves
  }
  float largest = 0.f;
#pragma unroll
  for (int c = 0; c < 4; c++) {
#pragma unroll
    for (int o = 1; o < 8; o <<= 1)
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (!(e & o)) pair(v[e][c], v[e | o][c]);
    float above = 0.f;  // as `solve`, of numbers that are a sixteenth
#pragma unroll
    for (int j = 3; j >= 0; j--) {
      v[4 + j][c] = fmaf(above, -0.0625f, v[4 + j][c]);              // b1
      v[j][c] = above = fmaf(v[4 + j][c], -0.0625f, v[j][c]);  // b2
      largest = larger(largest, larger(fabsf(v[j][c]), fabsf(v[4 + j][c])));
    }
  }
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) largest = larger(largest, __shfl_xor_sync(~0u, largest, o));
  const float inverse = inverse_of(largest);
  to += t * TURNED;
  if (g == 0 && there) *(float*)(to + 512) = largest * (1.f / LEVELS);
  to += g % 2 * 8;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int run = c % 2 * 2 + c / 2;  // of eight groups of the slice
    uint2 high, low;
    bytes_of(v[4][c], v[5][c], v[6][c], v[7][c], inverse, high.x, low.x);
    bytes_of(v[0][c], v[1][c], v[2][c], v[3][c], inverse, high.y, low.y);
    u8* const at = to + run * 128 + (g / 2 ^ run) * 16;
    if (there) *(uint2*)at = high, *(uint2*)(at + 64) = low;
  }
}

// Of four tokens from `first` on the products' operand, column g, and what results of token t are scaled with; of no token
// the last one's.
__device__ __forceinline__ void take_turned(Product& to, const u8* from, int first, int tokens, int lane) {
  const int g = lane / 4, t = lane % 4;
  const u8* const runs = from + min(first + g / 2, tokens - 1) * TURNED + t * 128 + g % 2 * 64;
  int sums[4] = {0, 0, 0, 0};  // what the offset of the nibbles is multiplied with: the products of nibbles that are 1
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 v = *(const uint4*)(runs + (i ^ t) * 16);
    to.b[2 * i] = make_uint2(v.x, v.y), to.b[2 * i + 1] = make_uint2(v.z, v.w);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) mma_u8s8(sums, 0x11111111u, 0x11111111u, 0x11111110u, 0x11111110u, to.b[i]);
  const float scale = *(const float*)(from + min(first + t, tokens - 1) * TURNED + 512);
  set_scale(to, make_float2(scale, (float)(sums[0] * 256 + sums[1])));
}
