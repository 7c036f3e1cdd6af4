// What the kernels of TurboQuant share: instructions, and numbers in DTYPE.

#include "ptx.cuh"

#define INF __int_as_float(0x7F800000)
constexpr float NONE = -1e30f;                           // reference of a query that has seen no key

__device__ __forceinline__ void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm("{.reg .b32 x, y; mov.b64 {x, y}, %8;"  // one operand: the registers of a pair stay side by side
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {x,y}, {%0,%1,%2,%3};}"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void mma_signed(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm("{.reg .b32 x, y; mov.b64 {x, y}, %8;"
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {x,y}, {%0,%1,%2,%3};}"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void load_four(float (&v)[4], const void* p, size_t i) {
  if (DTYPE == 2) {
    const float4 x = *(const float4*)((const float*)p + i);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  } else {
    const uint2 x = *(const uint2*)((const u16*)p + i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const u32 word = e < 2 ? x.x : x.y, h = e % 2 ? word >> 16 : word & 0xFFFF;
      v[e] = DTYPE == 1 ? lower_half_to_float(h) : __uint_as_float(h << 16);
    }
  }
}
__device__ __forceinline__ void store(void* p, size_t i, float v) {
  if (DTYPE == 2) ((float*)p)[i] = v;
  else ((u16*)p)[i] = (u16)(DTYPE == 1 ? float_to_half(v) : float_to_bf16(v));
}
