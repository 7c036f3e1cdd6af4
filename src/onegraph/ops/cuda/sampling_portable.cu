// From logits to a token without clusters, in two launches: what sampling.cu does, which tells how.
//
// `sample_bounds`: every warp brings its largest key, and the block of a row that comes last sorts them, which gives the
// bound that keys of the list have to reach; a greedy row ends there. `sample_draw`: every block puts its keys into the
// row's list, whose last block sorts, filters and draws. Without filters every block brings the best of its own race.
// Who comes last changes no bit: keys are sorted, masses are integers, of races the best counts.
//
// What the list does not suffice for the last block searches alone, four intervals of keys at a pass over the row: slow, and
// right for every input.

#include "sampling_keys.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;
constexpr int LIST = THREADS;                      // keys that a block sorts: of warps' maxima, of the list
constexpr int AHEAD = 8;                           // loads of a thread under way
constexpr int KEY_BITS = 32 + INDEX_BITS, DIGIT = 2, WAYS = 1 << DIGIT;  // of the search

struct Row {
  u64 top, bound;                                  // the largest key; keys below are not in the list
  u64 mass;                                        // of the row
  u32 listed;
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
  Row* found;               // [rows]
  u64* list;                // [rows, LIST]
  Entry* best;              // [rows, blocks]
  u32* arrived;             // [rows], zero between launches
  int width, part, blocks;  // part: logits of a block; blocks: of a row, at most LIST / WARPS
};

struct Shared {
  u64 list[LIST];
  u64 sums[WARPS], more_sums[WARPS];
  u64 masses[WAYS][WARPS];                         // of the search
  u32 counts[WAYS][WARPS];
  Entry best[WARPS];
  u32 last;
};

// What a row is drawn by.
struct Wish {
  float heat, asked;
  int k;
  __device__ __forceinline__ Wish(const Arguments& p, int row)
      : heat(p.temperature[row]), asked(p.top_p[row]), k(p.top_k[row] <= 0 ? p.width : min(p.top_k[row], p.width)) {}
  __device__ __forceinline__ bool greedy(u64 top) const {
    const float high = logit_of(top);
    return !(heat > 0.f) || !(high < __int_as_float(0x7f800000) && high > -__int_as_float(0x7f800000));
  }
  __device__ __forceinline__ bool filters(const Arguments& p) const { return k < p.width || asked < 1.f; }
  __device__ __forceinline__ double weigh(u64 key, u64 top) const {
    return exp(((double)logit_of(key) - (double)logit_of(top)) / (double)heat);
  }
};
__device__ __forceinline__ u64 stream_of(const Arguments& p, int row) {
  return mix(mix((u64)p.seed[row] + GOLDEN) + (u64)(i64)p.position[row] * GOLDEN);
}
__device__ __forceinline__ u64 units(double weight) { return (u64)(i64)(weight * UNIT); }

// What `use` is to do with every key of the row's logits [begin, begin + count), in any order.
template <int AHEAD, class Use> __device__ __forceinline__ void for_keys(const float* logits, int begin, int count, Use use) {
  for (int base = threadIdx.x; base < count; base += AHEAD * THREADS) {
    float x[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) x[j] = base + j * THREADS < count ? __ldcg(logits + begin + base + j * THREADS) : 0.f;
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      if (base + j * THREADS >= count) break;
      x[j] = x[j] != x[j] ? __int_as_float(0x7f800000) : x[j] + 0.f;  // NaN is above all; -0 and 0 are equal
      use(key_of(x[j], begin + base + j * THREADS));
    }
  }
}

// The first `count` places of the list in descending order; keys beyond them count as 0.
__device__ __forceinline__ void sort(u64 (&list)[LIST], int count) {
  int size = 32;
  while (size < count) size *= 2;
  for (int run = 2; run <= size; run *= 2)
    for (int apart = run / 2; apart; apart /= 2) {
      __syncthreads();
      const int i = threadIdx.x, other = i ^ apart;
      if (i < size && other > i) {
        const u64 a = list[i], b = list[other];
        if ((a < b) == ((i & run) == 0)) list[i] = b, list[other] = a;
      }
    }
  __syncthreads();
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

__device__ __forceinline__ Entry best_of_block(Entry e, Shared& s) {  // for the first warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  e = best_of_warp(e);
  if (lane == 0) s.best[warp] = e;
  __syncthreads();
  return best_of_warp(s.best[lane]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_bounds(const __grid_constant__ Arguments p) {
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x / p.blocks, rank = blockIdx.x % p.blocks;
  const int begin = rank * p.part, count = max(min(p.width - begin, p.part), 0), maxima = p.blocks * WARPS;
  let_next_start();
  wait_for_previous();
  u64 most = 0;
  for_keys<AHEAD>(p.logits + (size_t)row * p.width, begin, count, [&](u64 key) { most = max(most, key); });
  most = most_of_warp(most);
  if (lane == 0) __stcg(p.maxima + (size_t)row * maxima + rank * WARPS + warp, most);
  if (!last_of_row(p, s, row)) return;
  s.list[threadIdx.x] = threadIdx.x < maxima ? __ldcg(p.maxima + (size_t)row * maxima + threadIdx.x) : 0;
  sort(s.list, maxima);
  if (threadIdx.x) return;
  const Wish wish(p, row);
  p.found[row] = {s.list[0], s.list[min(wish.k, maxima * 3 / 4) - 1], 0, 0};  // 1.4 times as many keys reach it
  if (wish.greedy(s.list[0])) p.out[row] = index_of(s.list[0]);
}

// The largest number from which on there is enough of the keys that `least` leaves: so many, or that share of their mass.
__device__ __forceinline__ u64 search(const Arguments& p, Shared& s, const Wish& wish, int row, u64 top, u64 least,
                                      bool by_mass, double wanted) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u64 low = 0, above = 0;
  for (int bits = KEY_BITS; bits > 0;) {
    const int left = max(bits - DIGIT, 0);
    u64 masses[WAYS] = {};
    u32 counts[WAYS] = {};
    for_keys<1>(p.logits + (size_t)row * p.width, 0, p.width, [&](u64 key) {
      if (key < least || key < low || key - low >> bits) return;
      const int way = (int)(key - low >> left);
      const u64 mass = by_mass ? units(wish.weigh(key, top)) : 1;
#pragma unroll
      for (int j = 0; j < WAYS; j++)
        if (way == j) masses[j] += mass, counts[j]++;
    });
#pragma unroll
    for (int j = 0; j < WAYS; j++) {
      const u64 mass = sum_of_warp(masses[j]);
      const u32 count = __reduce_add_sync(~0u, counts[j]);
      if (lane == 0) s.masses[j][warp] = mass, s.counts[j][warp] = count;
    }
    __syncthreads();
    u64 whole = 0;
#pragma unroll
    for (int j = 0; j < WAYS; j++)
      masses[j] = sum_of_warp(s.masses[j][lane]), counts[j] = __reduce_add_sync(~0u, s.counts[j][lane]), whole += masses[j];
    __syncthreads();  // all have read
    if (by_mass && bits == KEY_BITS) wanted *= (double)whole;
    int chosen = 0;
    u32 inside = counts[0];
    u64 before = whole - masses[0];  // of the ways above
#pragma unroll
    for (int j = WAYS - 1, enough = 0; j > 0; j--) {
      if (enough || low + ((u64)j << left) > top) continue;
      u64 to = above;
#pragma unroll
      for (int i = WAYS - 1; i >= j; i--) to += masses[i];
      if ((double)to >= wanted) enough = 1, chosen = j, inside = counts[j], before = to - above - masses[j];
    }
    low += (u64)chosen << left, above += before, bits = left;
    if (inside <= 1) break;
  }
  return max(low, least);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_draw(const __grid_constant__ Arguments p) {
  __shared__ Shared s;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, row = blockIdx.x / p.blocks, rank = blockIdx.x % p.blocks;
  const int begin = rank * p.part, count = max(min(p.width - begin, p.part), 0), ranked = p.blocks * WARPS * 3 / 4;
  const float* const logits = p.logits + (size_t)row * p.width;
  let_next_start();
  wait_for_previous();
  Row& found = p.found[row];
  const u64 top = __ldcg(&found.top), bound = __ldcg(&found.bound);
  const Wish wish(p, row);
  if (wish.greedy(top)) return;
  const bool every = wish.k == p.width;
  auto race = [&](u64 key, u64 stream) { return Entry{race_of(wish.weigh(key, top), index_of(key), stream), key}; };

  if (!wish.filters(p)) {
    Entry e{0, 0};
    const u64 stream = stream_of(p, row);
    for_keys<1>(logits, begin, count, [&](u64 key) { e = better(e, race(key, stream)); });
    e = best_of_block(e, s);
    Entry* const best = p.best + (size_t)row * p.blocks;
    if (tid == 0) __stcg(&best[rank].race, e.race), __stcg(&best[rank].key, e.key);
    if (!last_of_row(p, s, row) || warp) return;
    e = best_of_warp(lane < p.blocks ? Entry{__ldcg(&best[lane].race), __ldcg(&best[lane].key)} : Entry{0, 0});
    if (lane == 0) p.out[row] = index_of(e.key);
    return;
  }

  u64* const list = p.list + (size_t)row * LIST;
  u64 mass = 0;
  for_keys<1>(logits, begin, count, [&](u64 key) {
    if (key >= bound) {
      const u32 at = atomicAdd(&found.listed, 1u);
      if (at < LIST) __stcg(list + at, key);
    }
    if (every) mass += units(wish.weigh(key, top));
  });
  if (every) {
    mass = sum_of_warp(mass);
    if (lane == 0) atomicAdd(&found.mass, mass);
  }
  if (!last_of_row(p, s, row)) return;

  const int listed = __ldcg(&found.listed);
  if (listed <= LIST && (wish.k <= ranked || every || bound == 0)) {
    s.list[tid] = tid < listed ? __ldcg(list + tid) : 0;
    sort(s.list, listed);
    const int some = min(listed, wish.k);
    const u64 key = s.list[tid];
    const u64 own = tid < some ? units(wish.weigh(key, top)) : 0;
    u64 to = own;                                                  // the mass up to here
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const u64 left = __shfl_up_sync(~0u, to, o);
      if (lane >= o) to += left;
    }
    if (lane == 31) s.sums[warp] = to;
    __syncthreads();
    const u64 sum = s.sums[lane], whole = sum_of_warp(sum);
    to += sum_of_warp(lane < warp ? sum : 0);
    const double reach = (double)wish.asked * (double)(every ? __ldcg(&found.mass) : whole);
    if (wish.k <= ranked || bound == 0 || !((double)whole < reach)) {
      const bool kept = tid < some && (wish.asked >= 1.f || tid == 0 || (double)(to - own) < reach);
      const Entry e = best_of_block(kept ? race(key, stream_of(p, row)) : Entry{0, 0}, s);
      if (tid == 0) p.out[row] = index_of(e.key);
      return;
    }
  }
  u64 least = every ? 0 : search(p, s, wish, row, top, 0, false, wish.k);
  if (wish.asked < 1.f) least = search(p, s, wish, row, top, least, true, wish.asked);
  Entry e{0, 0};
  const u64 stream = stream_of(p, row);
  for_keys<1>(logits, 0, p.width, [&](u64 key) {
    if (key >= least) e = better(e, race(key, stream));
  });
  e = best_of_block(e, s);
  if (tid == 0) p.out[row] = index_of(e.key);
}
