// FP4 codes and their scales to 16-bit floats, in registers: NVFP4 (GROUP: 16) and MXFP4 (32).
//
// Codes p and p + 4 of a word come out as a pair in one register: sign to bit 15, the three other bits to where
// exponent and mantissa of a 16-bit float meet. That is the code's value times a power of two, its subnormal included, so
// that there is no table. Times the group's scale it has six bits of mantissa, exact in both types. The integer units are
// the bottleneck of decoding (half a warp a cycle), so shifts are multiplications, which other units do. The order of k
// that pairs come in is given to the activations too, by byte permutes.
//
// Powers of two: bfloat16 holds code * 2^-126 and scale * 2^119, float16 code * 2^-14 and scale * 2^7; the product is
// code * scale * 2^-7 either way, undone with the row's global scale in float32.

// Codes of a word as four pairs (p, p + 4), times a power of two.
template <int P> __device__ __forceinline__ u32 pair(u32 w) {
#if HALF
  constexpr int LEFT = 9 - 4 * P;
  return ((w << (12 - 4 * P)) & 0x80008000u) | ((LEFT >= 0 ? w << (LEFT & 31) : w >> (-LEFT & 31)) & 0x0E000E00u);
#else
  u32 v = P < 2 ? w : w >> 8;  // both shifts of a nibble in one product: no bits meet, none leaves its half
  return (P % 2 ? (v & 0x00F000F0u) * 0x0104u : (v & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
#endif
}

#if GROUP == 32
// MXFP4. The factor of a byte e of E8M0 brings the power of two from above to 2^(e - 127), exact for e up to 128, subnormal
// numbers included; what is left of larger ones is a second factor, which a warp multiplies by where it meets such a byte.
// In bfloat16 that is W to the bit, infinite where float32 is. float16 holds fewer: see formats/mxfp4.py.
constexpr u32 LARGE = 128;
__device__ __forceinline__ u32 factor(u32 byte) {
#if HALF
  return (max(min(byte, LARGE), 98u) - 98u) * 0x04000400u;
#else
  return (min(byte, LARGE) + 126u) * 0x00800080u;
#endif
}
__device__ __forceinline__ u32 excess(u32 byte) {
#if HALF
  return (min(max(byte, LARGE) - LARGE, 15u) + 15u) * 0x04000400u;
#else
  return (max(byte, LARGE) - 1u) * 0x00800080u;
#endif
}
#else
// Scales 2 I and 2 I + 1 of a word -> both halves of `low` and of `high` hold one of them, times a power of two.
template <int I> __device__ __forceinline__ void widen(u32 scales, u32& low, u32& high) {
#if HALF
  u32 v = multiply(e4m3_to_half(I ? scales >> 16 : scales), 0x58005800u);  // 2^7
#else
  u32 v = prmt(scales, 0, I ? 0x4342 : 0x4140) << 4;
  v = multiply(multiply(v, 0x7F007F00u), 0x77807780u);  // 2^127, 2^112
#endif
  low = prmt(v, v, 0x1010);
  high = prmt(v, v, 0x3232);
}
#endif
