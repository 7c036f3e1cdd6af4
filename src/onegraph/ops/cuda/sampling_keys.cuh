// What sampling orders and races logits by: keys, weights in integers, a hash for the random numbers. Weights and races are
// float64, as in ops/sampling.py.
#pragma once

#include "ptx.cuh"

using i64 = long long;
constexpr int INDEX_BITS = 24;
constexpr u64 GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;  // SplitMix64
constexpr double UNIT = 1099511627776.;            // of a mass: the likeliest token's weight in these, 2^40

struct Entry { u64 race, key; };                   // race: the bits of a float64 that is 0 or more

// Larger for what comes first in descending order, of equal logits the one with the lower index. 0 is nobody's.
__device__ __forceinline__ u64 key_of(float x, int index) {
  const u32 bits = __float_as_uint(x);
  return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << INDEX_BITS | ((1 << INDEX_BITS) - 1 - index);
}
__device__ __forceinline__ float logit_of(u64 key) {
  const u32 bits = (u32)(key >> INDEX_BITS);
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}
__device__ __forceinline__ int index_of(u64 key) { return (1 << INDEX_BITS) - 1 - (int)(key & ((1 << INDEX_BITS) - 1)); }

__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ z >> 30) * MIX_1;
  z = (z ^ z >> 27) * MIX_2;
  return z ^ z >> 31;
}
__device__ __forceinline__ u64 number_of(int index, u64 stream) { return mix(stream + (u64)(index + 1) * GOLDEN); }
// weight / Exp(1), the latter a function of the row's stream and the index: who has the largest is drawn.
__device__ __forceinline__ u64 race_of(double weight, int index, u64 stream) {
  const double uniform = ((double)(number_of(index, stream) >> 12) + .5) * 0x1p-52;
  return (u64)__double_as_longlong(weight / -log(uniform));
}

__device__ __forceinline__ u64 most_of_warp(u64 v) {
#pragma unroll
  for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
__device__ __forceinline__ u64 sum_of_warp(u64 v) {
#pragma unroll
  for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ Entry better(Entry a, Entry b) {
  return a.race > b.race || (a.race == b.race && a.key > b.key) ? a : b;
}
__device__ __forceinline__ Entry best_of_warp(Entry e) {
#pragma unroll
  for (int o = 16; o; o /= 2) e = better(e, Entry{__shfl_xor_sync(~0u, e.race, o), __shfl_xor_sync(~0u, e.key, o)});
  return e;
}
