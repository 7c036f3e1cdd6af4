// Where what top-k and top-p keep ends, in float64, by one block: top_p where sampling_rough.cuh leaves it open.
#pragma once

#include "sampling_rough.cuh"

// A row that is drawn.
struct Task {
  const Arguments& p;
  Shared& s;
  const int row;
  __device__ __forceinline__ const float* logits() const { return p.logits + (size_t)row * p.width; }
  template <class Use> __device__ __forceinline__ void for_row(Use use) const { for_keys<AT_ONCE>(logits(), 0, p.width, use); }
  __device__ __forceinline__ Entry race(u64 key) const {
    return {race_of(s.wish.weigh(key), index_of(key), s.rough.stream), key};
  }
};

// Mass of keys, 2^40 the likeliest's. Of equal logits one after the other only the first is weighed.
struct Masses {
  const Task& t;
  u64 mass = (u64)UNIT;
  u32 logit;
  __device__ __forceinline__ explicit Masses(const Task& t) : t(t), logit(t.s.wish.top >> INDEX_BITS) {}
  __device__ __forceinline__ u64 operator()(u64 key) {
    if ((u32)(key >> INDEX_BITS) != logit) logit = key >> INDEX_BITS, mass = (u64)(i64)(t.s.wish.weigh(key) * UNIT);
    return mass;
  }
};

// The largest number in [low, high] from which on there is enough, of keys up to `high` and not below `least`: so many, or
// so much mass, with `above` of what is above `high`.
__device__ __forceinline__ u64 search(const Task& t, u64 low, u64 high, u64 least, bool by_mass, u64 above, double wanted) {
  Shared& s = t.s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int bits = DIGIT;
  while ((low ^ high) >> bits) bits += DIGIT;
  low = low >> bits << bits;
  for (; bits > 0; bits -= DIGIT) {
    const int left = bits - DIGIT;
    u64 found[WAYS] = {};  // not of the lowest, where it is if it is nowhere else
    Masses mass_of(t);
    t.for_row([&](u64 key) {
      if (key < least || key < low || key > high || key - low >> bits) return;
      const u64 mass = by_mass ? mass_of(key) : 1;
#pragma unroll
      for (int j = 1; j < WAYS; j++) found[j] += key - low >> left == (u64)j ? mass : 0;
    });
    __syncthreads();  // all have read what stood there
#pragma unroll
    for (int j = 1; j < WAYS; j++) {
      found[j] = sum_of_warp(found[j]);
      if (lane == 0) s.ways[j][warp] = found[j];
    }
    __syncthreads();
    int chosen = 0;
#pragma unroll
    for (int j = WAYS - 1; j > 0; j--) {
      const u64 to_here = above + sum_of_warp(s.ways[j][lane]);
      if (chosen || low + ((u64)j << left) > high) continue;
      if ((double)to_here >= wanted) chosen = j;
      else above = to_here;
    }
    low += (u64)chosen << left;
  }
  return low;
}

// The smallest key of bins [from, to].
__device__ __forceinline__ u64 least_of(const Task& t, int from, int to) {
  u64 least = ~0ull;
  t.for_row([&](u64 key) {
    const int bin = t.s.rough.bin(key);
    if (bin >= from && bin <= to) least = min(least, key);
  });
  return of_block(least, t.s, Least());
}

// Sums up what is around the keys in doubt, and lists these, as far as there is room.
__device__ __forceinline__ void look_around(const Task& t, int from, int to) {
  Shared& s = t.s;
  const bool by_mass = t.s.wish.top_p < 1.f;
  Around a{};
  Masses mass_of(t);
  __syncthreads();
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  t.for_row([&](u64 key) {
    const int bin = t.s.rough.bin(key);
    const u64 own = by_mass && (t.s.wish.every || bin <= to) ? mass_of(key) : 0;
    if (bin < from) a.above++, a.above_mass += own;
    else if (bin > to) a.rest += own;
    else {
      a.mass += own;
      const u32 at = atomicAdd(&s.listed, 1u);
      if (at < LIST) s.list[at] = key;
    }
  });
  a.above = of_block(a.above, s, Sum()), a.above_mass = of_block(a.above_mass, s, Sum());
  a.mass = of_block(a.mass, s, Sum()), a.rest = of_block(a.rest, s, Sum());
  if (threadIdx.x == 0) s.around = a;
  __syncthreads();
}

// Of the keys in doubt those that are kept, where the list has all of them: how many, then first in it.
__device__ __forceinline__ int kept_of_list(const Task& t) {
  Shared& s = t.s;
  const Around& a = s.around;
  const int tid = threadIdx.x, listed = s.listed, some = t.s.wish.every ? listed : min(listed, t.s.wish.k - (int)a.above);
  const u64 key = sort(tid < listed ? s.list[tid] : 0, s, listed);
  if (t.s.wish.top_p >= 1.f) return max(some, 0);
  Masses mass_of(t);
  const u64 own = tid < some ? mass_of(key) : 0, to_here = a.above_mass + up_to(own, s, Sum());
  const u64 whole = a.above_mass + (t.s.wish.every ? a.mass + a.rest : of_block(own, s, Sum()));
  const bool first = a.above == 0 && tid == 0, kept = (double)(to_here - own) < (double)t.s.wish.top_p * (double)whole;
  return __syncthreads_count(tid < some && (first || kept));
}

// The smallest key that is kept of those in doubt, in [low, high], which are too many for the list; above `high` if none is.
__device__ __forceinline__ u64 least_of_many(const Task& t, u64 low, u64 high) {
  const Around& a = t.s.around;
  const Wish& wish = t.s.wish;
  if (!wish.every && (int)a.above >= wish.k) return high + 1;
  const u64 least = wish.every ? low : max(search(t, low, high, low, false, a.above, wish.k), low);
  if (wish.top_p >= 1.f) return least;
  u64 mass = 0;
  Masses mass_of(t);
  t.for_row([&](u64 key) {
    if (key >= least && key <= high) mass += mass_of(key);
  });
  mass = a.above_mass + of_block(mass, t.s, Sum()) + (wish.every ? a.rest : 0);
  const double reach = (double)wish.top_p * (double)mass;
  if (a.above && (double)a.above_mass >= reach) return high + 1;
  return max(search(t, low, high, least, true, a.above_mass, reach), least);
}

// A number that the keys which are kept reach, and no others. All of the bins before `from` is kept, nothing of those after
// `to`, and the last that top-k leaves is not after `to`.
__device__ __forceinline__ u64 least_kept(const Task& t, int from, int to) {
  look_around(t, from, to);
  if (t.s.listed > LIST) {
    u64 high = 0;
    t.for_row([&](u64 key) {
      if (t.s.rough.bin(key) >= from) high = max(high, key);
    });
    return least_of_many(t, least_of(t, from, to), of_block(high, t.s, Most()));
  }
  const int kept = kept_of_list(t);
  return kept ? t.s.list[kept - 1] : least_of(t, 0, from - 1);
}
