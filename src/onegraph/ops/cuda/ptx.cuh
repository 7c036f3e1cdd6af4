// PTX that C++ has no words for, each instruction in one place. Every kernel includes it, most through the header of its
// family. Addresses in shared memory are 32 bits wide: `address` of a pointer.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
struct __align__(64) TensorMap { u64 words[16]; };  // what the copy engine knows of a matrix

#define PTX __device__ __forceinline__

// One launch after the other: what stands before the wait runs while the launch before it ends. Cards before compute
// capability 9.0 have none of it: there a launch begins when the one before has ended.
#if __CUDA_ARCH__ >= 900
constexpr bool OVERLAPS = true;
PTX void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
PTX void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
PTX void fetch_to_l2(const void* p, u32 bytes) {  // both multiples of 16; by the copy engine
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory");
}
#else
constexpr bool OVERLAPS = false;
PTX void pdl_wait() {}
PTX void pdl_trigger() {}
PTX void fetch_to_l2(const void*, u32) {}
#endif

PTX u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Numbers.
PTX u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
PTX u32 hidden_zero() {  // the compiler is not to know
  u32 d;
  asm("mov.u32 %0, 0;" : "=r"(d));
  return d;
}
PTX u32 hidden_or(u32 a, u32 b) {  // no use of it is moved before it
  u32 d;
  asm volatile("or.b32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b) : "memory");
  return d;
}
PTX void unknown(u32& v) { asm volatile("" : "+r"(v)); }  // to the compiler: what follows from it stays behind
template <int AT> PTX u32 load_shared(u32 address) {  // AT, added to it, is an immediate
  u32 v;
  asm("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(address), "n"(AT));
  return v;
}
PTX float larger(float a, float b) {  // NaN is the largest of all
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
PTX float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PTX float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PTX float half_to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
PTX float lower_half_to_float(u32 v) {
  float f;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(v));
  return f;
}
PTX float2 halves_to_floats(u32 v) {
  float2 f;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(f.x), "=f"(f.y) : "r"(v));
  return f;
}
PTX u16 float_to_half(float v) {
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return d;
}
PTX u16 float_to_bf16(float v) {
  u16 d;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
  return d;
}
PTX u32 floats_to_halves(float lower, float upper) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(upper), "f"(lower));
  return v;
}
PTX u32 floats_to_bf16s(float lower, float upper) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(upper), "f"(lower));
  return v;
}
PTX u32 subtract_f16(u32 a, u32 b) {  // two at a time
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
PTX u32 multiply_f16(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
PTX u32 fma_f16(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
PTX u32 fma_bf16(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
PTX u32 rest_bf16(u32 a, u32 b, u32 c) {  // a b - c
  u32 d;
  asm("{.reg .b32 n; neg.bf16x2 n, %3; fma.rn.bf16x2 %0, %1, %2, n;}" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
#if __CUDA_ARCH__ >= 900
PTX u32 subtract_bf16(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
PTX u32 multiply_bf16(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
#else  // the same numbers: rounded once, and -0 added changes none
PTX u32 subtract_bf16(u32 a, u32 b) { return fma_bf16(b, 0xBF80BF80u, a); }
PTX u32 multiply_bf16(u32 a, u32 b) { return fma_bf16(a, b, 0x80008000u); }
#endif
#if __CUDA_ARCH__ >= 890
PTX u32 e4m3_to_half(u32 two) {  // two E4M3 in the low half -> two float16
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)two));
  return v;
}
#else
#include "e4m3.cuh"
#endif

// Tensor cores: c [16, 8] += a [16, 16] b [16, 8], of bytes [16, 32] and [32, 8].
PTX void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
PTX void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
PTX void mma_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
PTX u32 transpose(u32 x) {  // 8 x 8 halves, one row in four lanes
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
PTX uint4 load_transposed(const uint4* row) {  // four matrices, a row's address in each lane
  uint4 y;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "r"(address(row)) : "memory");
  return y;
}
PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> PTX void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// What is read once: past the L1, with 256 bytes around it to the L2.
PTX uint4 stream(const u8* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
PTX uint2 stream8(const u8* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
PTX u32 stream4(const u8* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
PTX float2 load_now(const float* p) {  // not moved behind a wait, as the compiler would
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
// Words that blocks of a launch tell each other, each whole or not there; they order nothing else.
PTX void publish(u32* to, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(v) : "memory"); }
PTX u32 look_one(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
PTX uint4 look(const u32* from) {  // four side by side, at 16 bytes
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
PTX u32 count_in(u32* counter) {  // what it was; what was stored before, here and where it was counted up, is there
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory");
  return old;
}

// Copies from memory that a lane asks for itself. With `there`: zeros where it is false, without a read.
enum Fetch { ALONE, LINE, TWO_LINES };  // what comes to the L2 with it: 128 bytes, 256 bytes
template <Fetch WITH = LINE> PTX void copy16(u32 to, const void* from) {
  if (WITH == ALONE) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
  if (WITH == LINE) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
  if (WITH == TWO_LINES)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
template <Fetch WITH = LINE> PTX void copy16(u32 to, const void* from, bool there) {
#define COPY16(line) \
  asm volatile("cp.async.cg.shared.global" line " [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory")
  if (WITH == ALONE) COPY16("");
  if (WITH == LINE) COPY16(".L2::128B");
  if (WITH == TWO_LINES) COPY16(".L2::256B");
#undef COPY16
}
template <int BYTES> PTX void copy_few(u32 to, const void* from) {  // 4 or 8
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(BYTES) : "memory");
}
template <int BYTES> PTX void copy_few(u32 to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %3, %2;"
               :: "r"(to), "l"(from), "r"(there ? BYTES : 0), "n"(BYTES) : "memory");
}
PTX void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> PTX void wait_but() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
PTX void copies_there() { asm volatile("cp.async.wait_all;" ::: "memory"); }
PTX void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
PTX void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" :: "l"(p)); }

// Barriers of a block in shared memory, and of the copy engine, which counts bytes on them.
PTX void make_barrier(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
PTX void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX void copies_ordered() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // engine's after threads' own
PTX void barriers_made() { barriers_visible(), copies_ordered(); }  // behind it the copy engine may use them
PTX void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory"); }
PTX void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
PTX void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred P;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra AGAIN;\nDONE:\n}"
      :: "r"(barrier), "r"(parity) : "memory");
}
PTX void copy(u32 to, const u8* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
PTX void box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
PTX void slices(u32 to, const TensorMap& map, int row, int slice, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :: "r"(to), "l"(&map), "r"(0), "r"(row), "r"(slice), "r"(barrier) : "memory");
}
PTX void slices_once(u32 to, const TensorMap& map, int row, int slice, u32 barrier, int column = 0) {  // first to be evicted from the L2
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;"
      :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(slice), "r"(barrier), "l"(0x12F0000000000000ull) : "memory");
}
PTX void some_meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }
PTX void all_meet() { asm volatile("bar.sync 0;" ::: "memory"); }  // __syncthreads() from wherever in the code

// Clusters. A barrier of the whole cluster that orders memory waits for it: its release is a MEMBAR.ALL.GPU of every
// thread. So blocks tell each other by stores into another's shared memory, whose bytes a barrier there counts.
PTX u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PTX u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// Only that every block has begun, and made its barriers: before that its shared memory must not be written.
PTX void cluster_begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
PTX void all_begun() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// What the cluster wrote before, also to memory, is there.
PTX void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
PTX void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
PTX void cluster_sync() { cluster_arrive(), cluster_wait(); }
PTX u32 at_rank(u32 local, u32 rank) {  // the same variable of another block
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(local) : "r"(rank));
  return local;
}
PTX u32 at_rank(const void* local, u32 rank) { return at_rank(address(local), rank); }
// `to` and `barrier`: of the receiver, by at_rank.
PTX void copy_across(u32 to, u32 from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
#define SEND(type, values, ...) \
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes" type " [%0], " values ", [%1];" \
               :: "r"(to), "r"(barrier), __VA_ARGS__ : "memory")
PTX void send(u32 to, float v, u32 barrier) { SEND(".f32", "%2", "f"(v)); }
PTX void send(u32 to, const float2& v, u32 barrier) { SEND(".v2.f32", "{%2,%3}", "f"(v.x), "f"(v.y)); }
PTX void send(u32 to, const float4& v, u32 barrier) {
  SEND(".v4.f32", "{%2,%3,%4,%5}", "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
#undef SEND
PTX void receive(u32 barrier) {  // all bytes that it was told to expect, the first time
  asm volatile(
      "{\n.reg .pred P;\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], 0;\n@P bra DONE;\n"
      "bra AGAIN;\nDONE:\n}" :: "r"(barrier) : "memory");
}
// The same without a barrier: to be ordered by one of the cluster.
PTX void push(u32 to, u32 v) { asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to), "r"(v) : "memory"); }
PTX void push(u32 to, u64 v) { asm volatile("st.shared::cluster.u64 [%0], %1;" :: "r"(to), "l"(v) : "memory"); }
PTX void push(u32 to, const float2& v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(v.x), "f"(v.y) : "memory");
}
PTX void push(u32 to, const float4& v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
PTX float4 pull(u32 from) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
  return v;
}
PTX u32 draw_ticket(u32 from) {
  u32 old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(from) : "memory");
  return old;
}
PTX void add(u32 to, u64 v) { asm volatile("red.shared::cluster.add.u64 [%0], %1;" :: "r"(to), "l"(v) : "memory"); }

#undef PTX
