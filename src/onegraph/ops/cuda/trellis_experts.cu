// Routed experts in trellis codes for few tokens: each matrix by `trellis_product.cuh`, of which a block has a strip of one
// expert's rows (blockIdx.x) and a chunk of pairs of a token and that expert (blockIdx.y / HALVES). One token: a chunk is one pair.
// More: every block finds the chunks for itself (`routes.cuh`), of up to TOKENS pairs each; blocks without a chunk end.
//
//   trellis_experts          y = out_scale * H_n(sum) + bias, float, a pair a row
//   trellis_experts_combine  the weighted sum of each token's pairs
//
// Set when compiled: SOURCE (0: x is [tokens, K] of 16 bits; 1: float gate | up of pairs [pairs, 2 K], which SwiGLU ends; 2: float
// [pairs, K], whose relu is squared), HALVES (2: gate and up each have in_scale, and are matrices of N outputs, blockIdx.y % 2;
// else 1), GELU, and what `trellis_product.cuh` says.

#include "experts_common.cuh"

#define EXPERTS 1
#define KERNEL trellis_experts
#define EXPERT_FIELDS                                                     \
  const int* experts;   /* [tokens, top_k] */                             \
  const float* weights; /* [tokens, top_k] */                             \
  float limit, alpha, shift;
#define EXPERT_COUNTS int top_k, matrices;

#define COLUMNS TOKENS
#define TOGETHER 1
#define WEIGHED 0
#if TOKENS > 1
#include "routes.cuh"
__device__ __forceinline__ int pair_of(int token) { return routes.chosen[blockIdx.y / HALVES][token]; }
#else
__device__ __forceinline__ int pair_of(int) { return blockIdx.y / HALVES; }
#endif
__device__ __forceinline__ int half_of(int of) { return of * HALVES + blockIdx.y % HALVES; }
__device__ __forceinline__ int row_of(int token) { return half_of(pair_of(token)); }

// Eight columns of a pair.
struct Asked {
  float4 v[SOURCE == 1 ? 4 : 2];
  uint4 x;
};
template <class A> __device__ __forceinline__ Asked ask(const A& p, int token, int column, bool inside) {
  Asked asked = {};
  if (!inside) return asked;
  const int pair = pair_of(token);
  if (SOURCE == 0) {
    asked.x = *(const uint4*)(p.x + (size_t)(pair / p.top_k) * K + column);
    return asked;
  }
#pragma unroll
  for (int part = 0; part < (SOURCE == 1 ? 2 : 1); part++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      asked.v[part * 2 + i] = ((const float4*)((const float*)p.x + ((size_t)pair * (SOURCE == 1 ? 2 : 1) + part) * K + column))[i];
  return asked;
}
template <class A> __device__ __forceinline__ void take_asked(float (&v)[8], const Asked& asked, const A& p) {
  if (SOURCE == 0) return unpack8(v, asked.x);
  set8(v, asked.v[0], asked.v[1]);
  float up[8];
  if (SOURCE == 1) set8(up, asked.v[SOURCE == 1 ? 2 : 0], asked.v[SOURCE == 1 ? 3 : 1]);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float positive = v[e] > 0.f ? v[e] : v[e] * 0.f;  // NaN stays
    v[e] = SOURCE == 1 ? swiglu(v[e], up[e], p) : positive * positive;
  }
}

// Whether there is a chunk for this block; then its matrix and its places. What chose experts is behind the launch in front of
// gate-up; the launch in front of down has waited for it.
template <class A> __device__ __forceinline__ bool enter(A& p) {
  const int chunk = blockIdx.y / HALVES;
  if (SOURCE == 0) pdl_wait();
#if TOKENS > 1
  find_routes(p.experts, p.weights, p.tokens, p.top_k, p.matrices);
  if (chunk >= routes.slots) return false;
  const int expert = routes.expert[chunk];
  for (p.tokens = 1; p.tokens < TOKENS && routes.chosen[chunk][p.tokens] != NOBODY;) p.tokens++;
#else
  const int expert = min(max(p.experts[chunk], 0), p.matrices - 1);
#endif
  const size_t matrix = half_of(expert);
  p.codes += matrix * N / 8 * K * BITS;
  p.in_scale += matrix * K, p.out_scale += matrix * N;
  if (BIASED) p.bias += matrix * N;
  p.sums += (size_t)blockIdx.y * PARTS * TOKENS * N, p.arrived += blockIdx.y * ((N + ROWS - 1) / ROWS);
  return true;
}

#include "trellis_product.cuh"

extern "C" __global__ void trellis_experts_combine(const __grid_constant__ Arguments a) {
  combine(a, [](size_t) { return make_float4(0.f, 0.f, 0.f, 0.f); });
}
