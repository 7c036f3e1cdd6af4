// What the NVFP4 kernels need of PTX. Everything else in them is plain C++ over lanes, and runs on a CPU with other
// functions of these names (tests/nvfp4_on_cpu).

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;

extern __shared__ __align__(16) u8 shared[];

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {  // two 16-bit floats at a time
  u32 d;
#if HALF
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  return d;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u16 narrow(float v) {
  u16 d;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
#endif
  return d;
}
__device__ __forceinline__ u32 e4m3_to_half(u32 two) {  // two E4M3 in the low half -> two float16
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)two));
  return v;
}
__device__ __forceinline__ uint4 stream(const u8* p) {  // read once: past the L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Asynchronous copies global -> shared; zeros where not `inside`, without a read.
__device__ __forceinline__ void copy16(u8* to, const u8* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u8* to, const u8* from, bool inside) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" :: "l"(p)); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
