// What kernels of routed experts in rotated formats share: what stands between both products, and the weighted sum behind.
// Set before: HALF, N (outputs of what is summed).
#pragma once

#include "rotated_common.cuh"

#ifndef GELU  // 1: gelu by tanh in place of gate * sigmoid(alpha * gate)
#define GELU 0
#endif
template <class A> __device__ __forceinline__ float swiglu(float gate, float up, const A& a) {
  gate = fminf(gate, a.limit), up = fminf(fmaxf(up, -a.limit), a.limit);
  if (GELU) return gate / (1.f + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate))) * (up + a.shift);
  return gate / (1.f + __expf(-a.alpha * gate)) * (up + a.shift);
}

// a.y [tokens, N] of 16 bits: a.weights times the rows of pairs in a.x, float [tokens, top_k, N], and what `added` gives
// at a number. Four columns of token blockIdx.y a thread.
template <class A, class F> __device__ __forceinline__ void combine(const A& a, F added) {
  const int column = (blockIdx.x * 256 + threadIdx.x) * 4, token = blockIdx.y;
  pdl_wait();
  pdl_trigger();
  if (column >= N) return;
  const float4 rest = added((size_t)token * N + column);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int slot = 0; slot < a.top_k; slot++) {
    const int pair = token * a.top_k + slot;
    const float4 v = *(const float4*)((const float*)a.x + (size_t)pair * N + column);
    const float weight = a.weights[pair];
    sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
    sum.z = fmaf(weight, v.z, sum.z), sum.w = fmaf(weight, v.w, sum.w);
  }
  add_to(sum, rest);
  *(uint2*)((u16*)a.y + (size_t)token * N + column) = make_uint2(narrow<HALF>(sum.x, sum.y), narrow<HALF>(sum.z, sum.w));
}
