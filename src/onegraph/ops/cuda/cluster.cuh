// What the blocks of a cluster tell each other: stores into another's shared memory, whose bytes a barrier there counts.
// A barrier of the whole cluster would wait for memory as well: its release is a MEMBAR.ALL.GPU of every thread.

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Only that every block has begun, and made its barriers: before that its shared memory must not be written.
__device__ __forceinline__ void cluster_begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void all_begun() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ unsigned at_rank(const void* local, unsigned rank) {  // the same variable of another block
  unsigned at = (unsigned)__cvta_generic_to_shared(local);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  return at;
}
// `to` and `barrier`: of the receiver, by at_rank.
#define SEND(type, values, ...) \
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes" type " [%0], " values ", [%1];" \
               :: "r"(to), "r"(barrier), __VA_ARGS__ : "memory")
__device__ __forceinline__ void send(unsigned to, float v, unsigned barrier) { SEND(".f32", "%2", "f"(v)); }
__device__ __forceinline__ void send(unsigned to, const float2& v, unsigned barrier) {
  SEND(".v2.f32", "{%2,%3}", "f"(v.x), "f"(v.y));
}
__device__ __forceinline__ void send(unsigned to, const float4& v, unsigned barrier) {
  SEND(".v4.f32", "{%2,%3,%4,%5}", "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
#undef SEND
__device__ __forceinline__ void receive(unsigned barrier) {  // all bytes that it was told to expect, the first time
  asm volatile(
      "{\n.reg .pred P;\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], 0;\n@P bra DONE;\n"
      "bra AGAIN;\nDONE:\n}" :: "r"(barrier) : "memory");
}
