// E4M3 to float16 on cards that have no instruction for it, which are those before compute capability 8.9.
#pragma once

// Two codes in the low half -> two float16. Bits at their places are the value times 2^-8, subnormals included; 0x7F is not a
// number.
__device__ __forceinline__ u32 e4m3_to_half(u32 two) {
  const u32 apart = prmt(two, 0, 0x1404), size = apart >> 1 & 0x3F803F80u;
  const u32 nan = (size + 0x00800080u) >> 14 & 0x00010001u;
  return multiply_f16(size | (apart & 0x80008000u), 0x5C005C00u) | nan * 0x7E00u;
}
