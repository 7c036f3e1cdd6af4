// From logits to a token without clusters, in two launches: what sampling.cu does, which tells how.
//
// `sample_bounds`: every warp brings its largest key, and the block of a row that comes last finds a bound that so many of
// them reach, which keys of the list have to reach too; a greedy row ends there. `sample_draw`: every block lists those keys; where they
// need not suffice it also brings the row's histogram, and its racers. Its last block draws.
//
// Racers: what top-k and top-p keep are the keys from one on, wherever that is. So a key whose race is behind that of a larger
// key is not drawn, and of n keys in a random order some log(n) remain, found before it is known what is kept. All this is
// told by float32 (sampling_rough.cuh); float64 decides between racers too close to each other, and where the likeliest of
// them lies where the histogram, or the sum along the list, leaves open what is kept (sampling_exact.cuh).
//
// Who comes last changes no bit: float32 decides nothing that float64 would decide otherwise.

#include "sampling_exact.cuh"

constexpr int AHEAD = 8, BATCH = 4;                // loads of a thread under way, in the first launch and in the second

// A bound that so many of the threads' keys reach and hardly more, or 0: a sixteenth more at most, but for equal ones.
__device__ __forceinline__ u64 bound_of(u64 key, u64 top, int wanted) {
  const u32 own = key >> INDEX_BITS;
  u64 low = 0, high = (top >> INDEX_BITS) + 1;
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    const int reached = __syncthreads_count(own >= middle);
    (reached >= wanted ? low : high) = middle;
    if (reached >= wanted && reached <= wanted + wanted / 16) break;
  }
  return low << INDEX_BITS;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_bounds(const __grid_constant__ Arguments p) {
  __shared__ Shared s;
  const int tid = threadIdx.x, row = blockIdx.x / p.blocks, rank = blockIdx.x % p.blocks;
  const int begin = rank * p.part, count = max(min(p.width - begin, p.part), 0), maxima = p.blocks * WARPS;
  pdl_trigger();
  pdl_wait();
  u64 most = 0;
  u32 low = ~0u;                                   // as in keys
  constexpr u32 NOTHING = 0x007FFFFF;              // -inf, which is masked and has no part in the row's width
  for_keys<AHEAD>(p.logits + (size_t)row * p.width, begin, count, [&](u64 key) {
    most = max(most, key);
    if (key >> INDEX_BITS > NOTHING) low = min(low, (u32)(key >> INDEX_BITS));
  });
  most = most_of_warp(most), low = __reduce_min_sync(~0u, low);
  const size_t own = (size_t)row * maxima + rank * WARPS + tid / 32;
  if (tid % 32 == 0) __stcg(p.maxima + own, most), __stcg(p.minima + own, low);
  if (rank == 0) p.bins[(size_t)row * BINS + tid] = 0;
  if (!last_of_row(p, s, row)) return;
  Wish wish = wish_of(p, row, 0);
  const bool bounds = wish.temperature > 0.f && wish.filters();
  most = tid < maxima ? __ldcg(p.maxima + (size_t)row * maxima + tid) : 0;
  low = tid < maxima ? __ldcg(p.minima + (size_t)row * maxima + tid) : ~0u;
  const u64 top = of_block(most, s, Most());
  u64 bound = 0;
  if (bounds) bound = bound_of(most, top, min(wish.k, ranked_of(p))), low = of_block(low, s, Least());
  if (tid) return;
  p.found[row] = {top, bound, bounds ? logit_of((u64)low << INDEX_BITS) : -3e38f, 0, 0};
  wish.top = top;
  if (wish.greedy()) p.out[row] = index_of(top);
}

// What a block of the row is to bring.
struct Part {
  u64 bound;                                       // of the list
  bool filters, lists, races;
};

// A block's share of the list, the histogram and the racers.
__device__ __forceinline__ void bring(const Task& t, const Part& part, int begin, int count) {
  const Arguments& p = t.p;
  Shared& s = t.s;
  Row& found = p.found[t.row];
  const int tid = threadIdx.x;
  const bool by_mass = s.wish.top_p < 1.f;
  const float unit = (float)(1u << mass_bits(p));
  s.best[tid] = s.counts[tid] = s.masses[tid] = 0;
  if (tid == 0) s.listed = 0;
  const int end = begin + count;
  for (int first = begin + tid; first - tid < end; first += BATCH * THREADS) {
    float x[BATCH], races[BATCH];
    u32 most = 0;
#pragma unroll
    for (int j = 0, i = first; j < BATCH; j++, i += THREADS) x[j] = i < end ? ordered(__ldcg(t.logits() + i)) : 0.f;
    __syncthreads();  // nobody asks for the best of the batch before
#pragma unroll
    for (int j = 0, i = first; j < BATCH; j++, i += THREADS) {
      races[j] = 0.f;
      if (i >= end) continue;
      if (part.lists && key_of(x[j], i) >= part.bound) {
        const u32 at = atomicAdd(&found.listed, 1u);
        if (at < LIST) __stcg(p.list + (size_t)t.row * LIST + at, key_of(x[j], i));
      }
      if (!part.races) continue;
      races[j] = s.rough.race(x[j], i);
      const u32 race = __float_as_uint(races[j]);
      most = max(most, race);
      if (!part.filters) continue;
      const int bin = s.rough.bin(x[j]);
      if (race > s.best[bin]) atomicMax(&s.best[bin], race);
      if (!s.wish.every) atomicAdd(&s.counts[bin], 1u);
      if (by_mass) atomicAdd(&s.masses[bin], (u32)(s.rough.weight(s.rough.place(x[j]) - (float)bin) * unit));
    }
    if (!part.races) continue;
    if (!part.filters) {
      most = __reduce_max_sync(~0u, most);
      if (tid % 32 == 0) atomicMax(&s.best[0], most);
    }
    __syncthreads();
    s.ahead[tid] = up_to(__uint_as_float(s.best[tid]), s, Most());
    __syncthreads();
#pragma unroll
    for (int j = 0, i = first; j < BATCH; j++, i += THREADS) {
      if (!(races[j] > 0.f)) continue;
      const int bin = part.filters ? s.rough.bin(x[j]) : 1;
      const float ahead = bin ? s.ahead[bin - 1] : 0.f;  // of larger keys; without filters of all
      if (races[j] < ahead - MARGIN) continue;
      const u32 at = atomicAdd(&s.listed, 1u);
      if (at < LIST) s.list[at] = key_of(x[j], i);
    }
  }
  if (!part.races) return;
  __syncthreads();
  const u32 racers = s.listed;
  if (tid == 0) s.from = (int)atomicAdd(&found.racers, racers);
  if (part.filters && (s.counts[tid] || s.masses[tid]))
    atomicAdd(p.bins + (size_t)t.row * BINS + tid, (u64)s.counts[tid] << COUNT_AT | s.masses[tid]);
  __syncthreads();
  const u32 at = s.from + tid;
  if (tid < racers && at < LIST) __stcg(p.racers + (size_t)t.row * LIST + at, s.list[tid]);
}

// Leaves the first bin of which not all need be kept, the last of which anything may be, the last that matters to that, and
// the weight that top-k leaves.
__device__ __forceinline__ void open_bins(const Task& t) {
  const Arguments& p = t.p;
  Shared& s = t.s;
  const int tid = threadIdx.x;
  const Wish& wish = s.wish;
  const u64 bin = __ldcg(p.bins + (size_t)t.row * BINS + tid);
  const u32 count = bin >> COUNT_AT, counts = up_to(count, s, Sum());
  const float units = (float)(bin & ((1ull << COUNT_AT) - 1)) / (float)(1u << mass_bits(p));
  const float weight = units * s.rough.weight((float)tid), weights = up_to(weight, s, Sum());
  const bool in_k = wish.every || (int)(counts - count) < wish.k, all_in_k = wish.every || (int)counts <= wish.k;
  const float most = of_block(in_k ? weights : 0.f, s, Most()), least = of_block(all_in_k ? weights : 0.f, s, Most());
  const float open = doubt(p, most);
  const bool kept = all_in_k && (wish.top_p >= 1.f || weights < wish.top_p * least - open);
  const bool may = in_k && (wish.top_p >= 1.f || tid == 0 || weights - weight < wish.top_p * most + open);
  const int from = of_block(kept ? BINS : tid, s, Least()), to = of_block(may ? tid : 0, s, Most());
  const int last = of_block(in_k && count ? tid : 0, s, Most());
  if (tid == 0) s.from = from, s.to = to, s.until = wish.every ? to : max(to, last), s.whole = most;
  __syncthreads();
}

// A thread's key, that may be drawn: kept surely, or maybe.
struct Claim {
  u64 key;
  bool sure, maybe;
};

// Of the list, which holds all that may be kept.
__device__ __forceinline__ Claim claim_of_list(const Task& t, int listed) {
  Shared& s = t.s;
  const Wish& wish = s.wish;
  const int tid = threadIdx.x, some = min(listed, wish.k);
  const u64 key = sort(tid < listed ? __ldcg(t.p.list + (size_t)t.row * LIST + tid) : 0, s, listed);
  const bool in_k = tid < some;
  if (wish.top_p >= 1.f) return {key, in_k, in_k};
  const float weight = in_k ? s.rough.weight(s.rough.place(logit_of(key))) : 0.f, to_here = up_to(weight, s, Sum());
  const float sum = of_block(to_here, s, Most()), whole = wish.every && listed < t.p.width ? s.whole : sum;
  const float reach = wish.top_p * whole, open = doubt(t.p, whole), before = to_here - weight;
  if (!wish.every && tid == some - 1) s.from = 0, s.until = s.rough.bin(key);
  return {key, in_k && (tid == 0 || before < reach - open), in_k && (tid == 0 || before < reach + open)};
}

// Draws of the block's claims: the one that is ahead, in float64 where others are near. False where it may not be kept.
__device__ __forceinline__ bool drawn(const Task& t, const Claim& c) {
  const float race = c.maybe ? t.s.rough.race(c.key) : 0.f, best = of_block(race, t.s, Most());
  const bool near = race > 0.f && race >= best - MARGIN;
  if (__syncthreads_or(near && !c.sure)) return false;
  if (__syncthreads_count(near) == 1) {
    if (near) t.p.out[t.row] = index_of(c.key);
    return true;
  }
  const Entry e = best_of_block(near ? t.race(c.key) : Entry{0, 0}, t.s);
  if (threadIdx.x == 0) t.p.out[t.row] = index_of(e.key);
  return true;
}

// Draws of the whole row, by one block: where there are more racers than places for them.
__device__ __forceinline__ void draw_of_row(const Task& t, u64 least) {
  float best = 0.f;
  t.for_row([&](u64 key) {
    if (key >= least) best = max(best, t.s.rough.race(key));
  });
  best = of_block(best, t.s, Most());
  Entry e{0, 0};
  t.for_row([&](u64 key) {
    if (key >= least && t.s.rough.race(key) >= best - MARGIN) e = better(e, t.race(key));
  });
  e = best_of_block(e, t.s);
  if (threadIdx.x == 0) t.p.out[t.row] = index_of(e.key);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_draw(const __grid_constant__ Arguments p) {
  __shared__ Shared s;
  const int tid = threadIdx.x, row = blockIdx.x / p.blocks, rank = blockIdx.x % p.blocks;
  const int begin = rank * p.part, count = max(min(p.width - begin, p.part), 0);
  pdl_trigger();
  pdl_wait();
  const Row& found = p.found[row];
  const u64 bound = __ldcg(&found.bound);
  if (tid == 0) s.wish = wish_of(p, row, __ldcg(&found.top)), s.rough = rough_of(s.wish, __ldcg(&found.low), stream_of(p, row));
  __syncthreads();
  const Wish& wish = s.wish;
  if (wish.greedy()) return;
  const Task t{p, s, row};
  const bool filters = wish.filters(), few = wish.k <= ranked_of(p) && bound;
  const Part part{bound, filters, filters && (few || wish.every || !bound), !few || !filters};
  bring(t, part, begin, count);
  if (!last_of_row(p, s, row)) return;

  const int listed = __ldcg(&found.listed), racers = __ldcg(&found.racers);
  if (tid == 0) s.from = 0, s.to = s.until = BINS - 1;
  __syncthreads();
  if (filters && part.races) open_bins(t);
  const bool within = few || !bound || wish.top_p >= 1.f || s.to < s.rough.bin(bound);
  Claim c{0, false, false};
  const bool by_list = part.lists && listed <= LIST && within, claims = by_list || (part.races && racers <= LIST);
  if (by_list) {
    c = claim_of_list(t, listed);
  } else if (claims && tid < racers) {
    const u64 key = __ldcg(p.racers + (size_t)row * LIST + tid);
    const int bin = s.rough.bin(key);
    c = {key, !filters || key == wish.top || bin < s.from, !filters || bin <= s.to};
  }
  if (claims && drawn(t, c)) return;
  const u64 least = filters ? least_kept(t, s.from, s.until) : 0;
  if (!claims) return draw_of_row(t, least);
  c.sure = c.maybe = c.key && c.key >= least;
  drawn(t, c);
}
