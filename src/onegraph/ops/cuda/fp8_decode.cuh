// E4M3 codes to 16-bit floats, in registers, exact: four codes of a word as two pairs. Activations come in the same order.
//
// float16: an instruction converts two codes. bfloat16 has none: sign, exponent and mantissa are moved to their places,
// which gives the value times 2^-120, subnormals included, and one product for two codes undoes it. The code 0x7F is
// not a number in E4M3; no weight has it, and of bfloat16 it comes out as 480.
#pragma once

__device__ __forceinline__ void decode(u32 word, u32& first, u32& second) {
#if HALF
  first = e4m3_to_half(word);  // codes 0 and 1, 2 and 3
  second = e4m3_to_half(word >> 16);
#else
  const u32 even = word << 8;  // codes 0 and 2, 1 and 3
  first = multiply((even & 0x80008000u) | (even >> 4 & 0x07F007F0u), 0x7B807B80u);  // 2^120
  second = multiply((word & 0x80008000u) | (word >> 4 & 0x07F007F0u), 0x7B807B80u);
#endif
}

// Four activations, in the order of `decode`'s pairs.
__device__ __forceinline__ void in_order(u32 x01, u32 x23, u32& first, u32& second) {
#if HALF
  first = x01, second = x23;
#else
  first = prmt(x01, x23, 0x5410), second = prmt(x01, x23, 0x7632);
#endif
}
