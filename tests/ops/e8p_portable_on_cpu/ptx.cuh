// What ops/cuda/ptx.cuh gives e8p_portable.cu, for a CPU (experts.cuh: e8p_experts_on_cpu/ptx.cuh, with what that includes).
//
// Blocks run one after the other, so the last of them ends what all brought; `run` is told in which order.

#pragma push_macro("WIDE")
#undef WIDE
#include "experts.cuh"
#pragma pop_macro("WIDE")

constexpr bool OVERLAPS = FOLLOWS;  // both ways of asking for x

template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, const T& v) { *p = v; }
static void __threadfence() {}
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static u32 atomicAdd(u32* to, u32 v) { return (*to += v) - v; }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static u32 __ballot_sync(u32, bool v) {
  return of_lanes<int>(v, [](int warp) {
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= (u32)of_lane<int>(warp + i) << i;
    return (int)all;
  });
}
