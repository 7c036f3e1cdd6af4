// What the NVFP4 kernels need of PTX. Everything else in them is plain C++ over lanes, and runs on a CPU with other
// functions of these names (tests/nvfp4_on_cpu).

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;

extern __shared__ __align__(1024) u8 shared[];

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
__device__ __forceinline__ u32 as_bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ float as_float(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ float widen(u32 v) {  // of the low half
#if HALF
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)v));
  return f;
#else
  return __uint_as_float(v << 16);
#endif
}
__device__ __forceinline__ u32 warp_max(u32 v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ float shuffle_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
__device__ __forceinline__ void e4m3_to_float(u32 four, float (&to)[4]) {
  const u32 two[2] = {e4m3_to_half(four), e4m3_to_half(four >> 16)};
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("cvt.f32.f16 %0, %1;" : "=f"(to[i]) : "h"((u16)(i % 2 ? two[i / 2] >> 16 : two[i / 2])));
}
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {  // of signed bytes
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// The copy engine: boxes of a tensor of bytes into shared memory, counted by a barrier that waits for so many bytes.
struct __align__(64) TensorMap { u8 bytes[128]; };
typedef unsigned long long Barrier;
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void make_barrier(Barrier* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_are_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(b)) : "memory");
}
__device__ __forceinline__ void arrive_with_bytes(Barrier* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(Barrier* b, u32 parity) {
  asm volatile(
      "{.reg .pred p; again%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again%=;}"
      :: "r"(address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_box(u8* to, const TensorMap& map, int row, int slice, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;"
      :: "r"(address(to)), "l"(&map), "r"(0), "r"(row), "r"(slice), "r"(address(barrier)), "l"(0x12F0000000000000ull)
      : "memory");  // read once: first to be evicted
}
__device__ __forceinline__ void sync_threads(u32 count) { asm volatile("bar.sync 1, %0;" :: "r"(count) : "memory"); }
__device__ __forceinline__ void pause(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" :: "r"(nanoseconds)); }
