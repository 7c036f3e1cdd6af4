// A row of logits in the kernels of sampling_portable.cu: what they are given, what a block does together.
#pragma once

#include "sampling_keys.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;
constexpr int LIST = THREADS;                      // keys that a block sorts: of lists
constexpr int BINS = THREADS;                      // of a row's histogram
constexpr int COUNT_AT = 38;                       // of a bin in the row's workspace: the count, above the mass
constexpr int AT_ONCE = 4;                         // loads of a thread under way, where one block passes over a row
constexpr int DIGIT = 2, WAYS = 1 << DIGIT;        // of the search
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

struct Row {
  u64 top, bound;                                  // the largest key; keys below are not in the list
  float low;                                       // the smallest finite logit, or less
  u32 listed, racers;
};

struct Arguments {
  const float* logits;      // [rows, width]
  const float* temperature; // [rows] this and the next four
  const int* top_k;
  const float* top_p;
  const i64* seed;
  const int* position;
  i64* out;                 // [rows]
  u64* maxima;              // [rows, blocks, WARPS]
  u32* minima;              // [rows, blocks, WARPS]
  Row* found;               // [rows]
  u64* list;                // [rows, LIST]
  u64* racers;              // [rows, LIST]
  u64* bins;                // [rows, BINS]
  u32* arrived;             // [rows], zero between launches
  int width, part, blocks;  // part: logits of a block; blocks: of a row, at most LIST / WARPS
};

// What a row is drawn by.
struct Wish {
  u64 top;                                         // the largest key
  float temperature, top_p;
  int k;
  bool every;                                      // top-k leaves every key
  __device__ __forceinline__ bool greedy() const {
    const float high = logit_of(top);
    return !(temperature > 0.f) || !(high < infinity() && high > -infinity());
  }
  __device__ __forceinline__ bool filters() const { return !every || top_p < 1.f; }
  __device__ __forceinline__ double weigh(u64 key) const {
    return exp(((double)logit_of(key) - (double)logit_of(top)) / (double)temperature);
  }
};
// Weights and races in float32: sampling_rough.cuh.
struct Rough {
  u64 stream;
  float half, high, by, fall;                      // by: bins a unit of logit; fall: log2 of what a weight loses in a bin
  __device__ __forceinline__ float place(float x) const { return (high - x * half) * by; }
  __device__ __forceinline__ int bin(float x) const { return (int)min(place(x), BINS - 1.f); }
  __device__ __forceinline__ int bin(u64 key) const { return bin(logit_of(key)); }
  __device__ __forceinline__ float weight(float place) const { return exp2_fast(-place * fall); }
  __device__ __forceinline__ float race(float x, int index) const;
  __device__ __forceinline__ float race(u64 key) const { return race(logit_of(key), index_of(key)); }
};

struct Around {  // keys and mass of the bins before those in doubt, mass of these and of those behind them
  u32 above;
  u64 above_mass, mass, rest;
};

struct Shared {
  u64 list[LIST];
  u32 counts[BINS], masses[BINS];                  // masses: in units of the bin's
  u32 best[BINS];                                  // of the rough races, float bits
  float ahead[BINS];                               // the best up to a bin
  u64 each[WARPS];                                 // what a warp brings
  u64 ways[WAYS][WARPS];                           // of the search
  Entry entries[WARPS];
  Wish wish;
  Rough rough;
  Around around;
  float whole;                                     // weight of what top-k leaves
  int from, to, until;                             // bins in doubt, which `open_bins` tells
  u32 listed, last;
};

// So many of the warps' maxima bound the list at most: some 1.4 to 1.6 times as many keys reach it, which fit it.
__device__ __forceinline__ int ranked_of(const Arguments& p) { return min(p.blocks * WARPS * 3 / 4, LIST * 9 / 16); }
__device__ __forceinline__ Wish wish_of(const Arguments& p, int row, u64 top) {
  const int k = p.top_k[row] <= 0 ? p.width : min(p.top_k[row], p.width);
  return {top, p.temperature[row], p.top_p[row], k, k == p.width};
}
__device__ __forceinline__ u64 stream_of(const Arguments& p, int row) {
  return mix(mix((u64)p.seed[row] + GOLDEN) + (u64)(i64)p.position[row] * GOLDEN);
}

// NaN is above all; -0 and 0 are equal.
__device__ __forceinline__ float ordered(float x) { return x != x ? infinity() : x + 0.f; }

// What `use` is to do with every key of the row's logits [begin, begin + count), in any order.
template <int AHEAD, class Use> __device__ __forceinline__ void for_keys(const float* logits, int begin, int count, Use use) {
  for (int base = threadIdx.x; base < count; base += AHEAD * THREADS) {
    float x[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) x[j] = base + j * THREADS < count ? __ldcg(logits + begin + base + j * THREADS) : 0.f;
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      if (base + j * THREADS >= count) break;
      use(key_of(ordered(x[j]), begin + base + j * THREADS));
    }
  }
}

// What all threads of the block bring, joined; the same for each of them.
template <class T, class Join> __device__ __forceinline__ T of_warp(T v, Join join) {
#pragma unroll
  for (int o = 16; o; o /= 2) v = join(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
template <class T, class Join> __device__ __forceinline__ T of_block(T v, Shared& s, Join join) {
  T* const each = (T*)s.each;
  v = of_warp(v, join);
  __syncthreads();  // all have read what stood there
  if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = v;
  __syncthreads();
  return of_warp(each[threadIdx.x % 32], join);
}
// What the threads up to this one bring.
template <class T, class Join> __device__ __forceinline__ T up_to(T v, Shared& s, Join join) {
  T* const each = (T*)s.each;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto along = [&](T v) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const T left = __shfl_up_sync(~0u, v, o);
      if (lane >= o) v = join(left, v);
    }
    return v;
  };
  v = along(v);
  __syncthreads();
  if (lane == 31) each[warp] = v;
  __syncthreads();
  const T before = __shfl_sync(~0u, along(each[lane]), max(warp - 1, 0));
  return warp ? join(before, v) : v;
}
struct Sum { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; } };
struct Most { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return max(a, b); } };
struct Least { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return min(a, b); } };

__device__ __forceinline__ Entry best_of_block(Entry e, Shared& s) {  // for the first warp
  e = best_of_warp(e);
  if (threadIdx.x % 32 == 0) s.entries[threadIdx.x / 32] = e;
  __syncthreads();
  return best_of_warp(s.entries[threadIdx.x % 32]);
}

// The threads' keys in descending order, a thread's own and all in the list; only the first `count` are not 0.
__device__ __forceinline__ u64 sort(u64 key, Shared& s, int count) {
  const int i = threadIdx.x;
  int size = 32;
  while (size < count) size *= 2;
  for (int run = 2; run <= size; run *= 2)
    for (int apart = run / 2; apart; apart /= 2) {
      u64 other;
      if (apart < 32) {
        other = __shfl_xor_sync(~0u, key, apart);
      } else {
        __syncthreads();
        s.list[i] = key;
        __syncthreads();
        other = s.list[i ^ apart];
      }
      key = ((i & apart) == 0) == ((i & run) == 0) ? max(key, other) : min(key, other);
    }
  __syncthreads();
  s.list[i] = key;
  __syncthreads();
  return key;
}

// Whether the block is the last of its row, which sees what the others brought.
__device__ __forceinline__ bool last_of_row(const Arguments& p, Shared& s, int row) {
  __threadfence();  // what was brought before the count
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last = atomicAdd(p.arrived + row, 1u) + 1 == p.blocks;
    if (s.last) p.arrived[row] = 0;
    __threadfence();  // the count before what was brought
  }
  __syncthreads();
  return s.last;
}
