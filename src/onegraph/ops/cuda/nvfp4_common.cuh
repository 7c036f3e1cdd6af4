// What the NVFP4 kernels need of PTX. Everything else in them is plain C++ over lanes, and runs on a CPU with other
// functions of these names (tests/ops/nvfp4_on_cpu).

#include "ptx.cuh"

extern __shared__ __align__(1024) u8 shared[];

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {  // two 16-bit floats at a time
  return HALF ? multiply_f16(a, b) : multiply_bf16(a, b);
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HALF) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}
__device__ __forceinline__ bool any(bool v) { return __any_sync(~0u, v); }
__device__ __forceinline__ u16 narrow(float v) { return HALF ? float_to_half(v) : float_to_bf16(v); }
template <bool WIDE> __device__ __forceinline__ void write(u16* y, long long at, float v) {  // WIDE: y is float32
  if (WIDE) ((float*)y)[at] = v;
  else y[at] = narrow(v);
}
__device__ __forceinline__ u32 load_pair(const u8* p) { return __ldg((const u16*)p); }  // two bytes, at an even address
// Asynchronous copies global -> shared; zeros where not `inside`, without a read.
__device__ __forceinline__ void copy16(u8* to, const u8* from, bool inside) { copy16<TWO_LINES>(address(to), from, inside); }
__device__ __forceinline__ void copy4(u8* to, const u8* from, bool inside) { copy_few<4>(address(to), from, inside); }
__device__ __forceinline__ u32 as_bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ float as_float(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ float widen(u32 v) {  // of the low half
  return HALF ? half_to_float((u16)v) : __uint_as_float(v << 16);
}
__device__ __forceinline__ u32 warp_max(u32 v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
__device__ __forceinline__ void e4m3_to_float(u32 four, float (&to)[4]) {
  const u32 two[2] = {e4m3_to_half(four), e4m3_to_half(four >> 16)};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = half_to_float((u16)(i % 2 ? two[i / 2] >> 16 : two[i / 2]));
}
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {  // of signed bytes
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// The copy engine: boxes of a tensor of bytes into shared memory, counted by a barrier that waits for so many bytes.
typedef u64 Barrier;
__device__ __forceinline__ void make_barrier(Barrier* b, u32 arrivals) { make_barrier(address(b), arrivals); }
__device__ __forceinline__ void arrive(Barrier* b) { arrive(address(b)); }
__device__ __forceinline__ void expect(Barrier* b, u32 bytes) { expect(address(b), bytes); }
__device__ __forceinline__ void wait_barrier(Barrier* b, u32 parity) { wait_barrier(address(b), parity); }
__device__ __forceinline__ void copy_box(u8* to, const TensorMap& map, int row, int slice, Barrier* barrier, int column = 0) {
  slices_once(address(to), map, row, slice, address(barrier), column);
}
__device__ __forceinline__ void pause(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" :: "r"(nanoseconds)); }
