// From logits to a token, in one launch: temperature, top-k, top-p, and an exponential race among what they keep.
//
// A cluster of blocks owns a row and keeps it in shared memory. Each logit has a key of its own, in the order that the
// filters know (value, then the lower index), so what they keep is the set of keys from some key on. Top-k of few: the
// k-th largest of the warps' maxima bounds the k-th largest of all from below, and hardly more than k logits reach it.
// They go into a list in the first block, which ranks, filters and draws. Top-p alone does the same with as many maxima
// as the list has room for, which is right if what reaches the bound holds the mass p. What neither bounds is searched
// for by bisection of keys, with the count or the mass of the row at each step: slow, and right for every input.
//
// Masses are integers, so that no sum depends on its order. Keys, weights and races: sampling_keys.cuh.

#include "sampling_keys.cuh"

constexpr int WARPS = 32;
constexpr int THREADS = 32 * WARPS;
constexpr int LIST = THREADS;                      // logits that the first block ranks
constexpr int MAX_CLUSTER = 16;
constexpr int AHEAD = 8;                           // loads of a thread under way

struct Arguments {
  const float* logits;      // [rows, width]
  const float* temperature; // [rows] this and the next four
  const int* top_k;
  const float* top_p;
  const i64* seed;
  const int* position;
  i64* out;                 // [rows]
  int width, part;          // part: logits of a block
};

struct Shared {
  u64 maxima[MAX_CLUSTER * WARPS];                  // of every warp of the cluster
  u64 bound;                                        // keys below are not in the list
  u64 mass;                                         // of the row; in the first block, as the next two
  u64 list[LIST];
  u32 listed;
  u32 drawn;                                        // whether the list sufficed
  u64 ordered[LIST];
  u64 counts[2][MAX_CLUSTER], masses[2][MAX_CLUSTER];  // of each block, one step of the bisection after the other
  u64 sums[WARPS], more_sums[WARPS];
  Entry best[WARPS], block_best[MAX_CLUSTER];
};

__device__ __forceinline__ Entry best_of_block(Entry e, Shared& s, int warp, int lane) {  // for the first warp
  e = best_of_warp(e);
  if (lane == 0) s.best[warp] = e;
  __syncthreads();
  return best_of_warp(lane < WARPS ? s.best[lane] : Entry{0, 0});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sample(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  float* mine = (float*)(&s + 1);                                  // [part]
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const u32 rank = cluster_rank(), size = cluster_size();
  const int row = blockIdx.x / size, begin = rank * p.part, count = max(min(p.width - begin, p.part), 0);
  pdl_trigger();
  if (tid == 0) s.bound = 0, s.mass = 0, s.listed = 0;
  cluster_arrive();
  pdl_wait();

  const float* logits = p.logits + (size_t)row * p.width + begin;
  const float temperature = p.temperature[row], top_p = p.top_p[row];
  const int k = p.top_k[row] <= 0 ? p.width : min(p.top_k[row], p.width);
  const u64 stream = mix(mix((u64)p.seed[row] + GOLDEN) + (u64)(i64)p.position[row] * GOLDEN);
  u64 most = 0;                                                    // of the warp
  for (int base = tid; base < count; base += AHEAD * THREADS) {
    float x[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) x[j] = base + j * THREADS < count ? __ldcg(logits + base + j * THREADS) : 0.f;
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int i = base + j * THREADS;
      x[j] = x[j] != x[j] ? __int_as_float(0x7f800000) : x[j] + 0.f;  // NaN is above all; -0 and 0 are equal
      if (i < count) mine[i] = x[j], most = max(most, key_of(x[j], begin + i));
    }
  }
  most = most_of_warp(most);
  cluster_wait();                                                  // every block has started, its memory can be written
  if (lane < size) push(at_rank(&s.maxima[rank * WARPS + warp], lane), most);
  cluster_sync();
  u64 top = 0;
  int above = 0;
  for (int i = lane; i < (int)size * WARPS; i += 32) top = max(top, s.maxima[i]), above += s.maxima[i] > most;
  top = most_of_warp(top);
  const double high = logit_of(top);
  const bool finite = high < __int_as_float(0x7f800000) && high > -__int_as_float(0x7f800000);
  if (!(temperature > 0.f) || !finite) {                                  // greedy
    if (rank == 0 && tid == 0) p.out[row] = index_of(top);
    return;
  }
  auto weigh = [&](float x) { return exp(((double)x - high) / (double)temperature); };
  auto units = [&](double weight) { return (u64)(i64)(weight * UNIT); };

  u64 least = 0;                                                   // the smallest key that is kept
  if (k < p.width || top_p < 1.f) {
    above = (int)sum_of_warp(above);
    const int ranked = size * WARPS * 3 / 4;                       // of the maxima; 1.4 times as many logits reach it
    if (above == min(k, ranked) - 1 && lane < size) push(at_rank(&s.bound, lane), most);
    cluster_sync();
    const u64 bound = s.bound;
    u64 mass = 0;
    for (int i = tid; i < count; i += THREADS) {
      const u64 key = key_of(mine[i], begin + i);
      if (key >= bound) {
        const u32 at = draw_ticket(at_rank(&s.listed, 0));
        if (at < LIST) push(at_rank(&s.list[at], 0), key);
      }
      if (k == p.width) mass += units(weigh(mine[i]));
    }
    if (k == p.width) {
      mass = sum_of_warp(mass);
      if (lane == 0) add(at_rank(&s.mass, 0), mass);
    }
    cluster_sync();
    if (rank == 0) {
      const int listed = s.listed;
      bool suffices = listed <= LIST && (k <= ranked || k == p.width || bound == 0);
      if (suffices) {
        const u64 key = tid < listed ? s.list[tid] : 0;
        int before = 0;
        if (tid < listed) {
          for (int i = 0; i < listed; i++) before += s.list[i] > key;
          s.ordered[before] = key;
        }
        __syncthreads();
        const u64 next = tid < listed ? s.ordered[tid] : 0;
        const double weight = tid < min(listed, k) ? weigh(logit_of(next)) : 0.;
        const u64 own = units(weight);
        u64 to = own;                                              // the mass up to here
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
          const u64 left = __shfl_up_sync(~0u, to, o);
          if (lane >= o) to += left;
        }
        if (lane == 31) s.sums[warp] = to;
        __syncthreads();
        const u64 sum = lane < WARPS ? s.sums[lane] : 0, whole = sum_of_warp(sum);
        to += sum_of_warp(lane < warp ? sum : 0);
        const double reach = (double)top_p * (double)(k == p.width ? s.mass : whole);
        suffices = k <= ranked || bound == 0 || !((double)whole < reach);
        const bool kept = tid < min(listed, k) && (top_p >= 1.f || tid == 0 || (double)(to - own) < reach);
        const Entry own_race{race_of(weight, index_of(next), stream), next};
        const Entry e = best_of_block(kept ? own_race : Entry{0, 0}, s, warp, lane);
        if (tid == 0 && suffices) p.out[row] = index_of(e.key);
      }
      if (warp == 0 && lane < size) push(at_rank(&s.drawn, lane), (u32)suffices);
    }
    cluster_sync();
    if (s.drawn) return;

    int step = 0;
    u64 inside, inside_mass;                                       // of the last keys that `measure` was top_p for
    auto measure = [&](u64 from, u64 to) {
      u64 number = 0, mass = 0;
      for (int i = tid; i < count; i += THREADS) {
        const u64 key = key_of(mine[i], begin + i);
        if (key >= from && key < to) number++, mass += units(weigh(mine[i]));
      }
      number = sum_of_warp(number), mass = sum_of_warp(mass);
      if (lane == 0) s.sums[warp] = number, s.more_sums[warp] = mass;
      __syncthreads();
      number = sum_of_warp(lane < WARPS ? s.sums[lane] : 0), mass = sum_of_warp(lane < WARPS ? s.more_sums[lane] : 0);
      if (warp == 0 && lane < size) push(at_rank(&s.counts[step][rank], lane), number), push(at_rank(&s.masses[step][rank], lane), mass);
      cluster_sync();
      inside = sum_of_warp(lane < size ? s.counts[step][lane] : 0);
      inside_mass = sum_of_warp(lane < size ? s.masses[step][lane] : 0);
      step = 1 - step;
    };
    // The keys from which on there is enough, as few as can be: the count, or the mass, that is wanted.
    auto bisect = [&](u64 low, u64 keys, bool masses, double wanted) {
      u64 high = top + 1, above_high = 0;                          // what is wanted lies in [low, high), one of `keys`
      while (keys > 1 && high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        measure(middle, high);
        const u64 total = above_high + (masses ? inside_mass : inside);
        if ((double)total >= wanted) low = middle, keys = inside;
        else high = middle, above_high = total, keys -= inside;
      }
      return low;
    };
    if (k < p.width) least = bisect(0, p.width, false, k);
    if (top_p < 1.f) {
      measure(least, top + 1);
      least = bisect(least, inside, true, (double)top_p * (double)inside_mass);
    }
  }

  Entry e{0, 0};
  for (int i = tid; i < count; i += THREADS) {
    const u64 key = key_of(mine[i], begin + i);
    if (key >= least) e = better(e, Entry{race_of(weigh(mine[i]), begin + i, stream), key});
  }
  e = best_of_block(e, s, warp, lane);
  if (tid == 0) push(at_rank(&s.block_best[rank].race, 0), e.race), push(at_rank(&s.block_best[rank].key, 0), e.key);
  cluster_sync();
  if (rank == 0 && warp == 0) {
    e = best_of_warp(lane < size ? s.block_best[lane] : Entry{0, 0});
    if (lane == 0) p.out[row] = index_of(e.key);
  }
}
