// For each query the entries with the `top_k` largest scores, in the sequence's order, as places in the pool.
//
// Scores are compared as int32 of the same order. The k-th largest is found two bits at a time from above, by counting
// how many reach each of the three larger values that the bits may have. A thread holds EACH neighbours, in registers
// where all of a query's scores fit.
//
// Set when compiled: PER_PAGE, entries of a page.

#include "ptx.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 8, CHUNK = THREADS * EACH;
constexpr int LEAST = -2147483647 - 1;  // of no entry's score, and what no search asks for

struct Arguments {
  const float* scores;    // [queries, capacity]
  const int* positions;   // [rows]
  const int* counts;      // [rows]
  const int* table;       // [rows, table_stride]
  int* selected;          // [queries, top_k]
  int length, table_stride, capacity, pages, ratio, top_k;
};

__device__ __forceinline__ void load(int (&key)[EACH], const float* scores, int first, int ready) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int bits = first + i < ready ? __float_as_int(scores[first + i]) : LEAST;
    key[i] = first + i < ready ? bits ^ (bits >> 31 & 0x7fffffff) : LEAST;
  }
}

__device__ __forceinline__ void locate(int (&place)[EACH], const int* table, int first, int capacity, int pages) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int page = first + i < capacity ? __ldg(table + (first + i) / PER_PAGE) : 0;
    place[i] = min(max(page, 0), pages - 1) * PER_PAGE + (first + i) % PER_PAGE;  // never past the pool
  }
}

// Each warp's sums, the same in all its lanes, added up over the block. `slots` may not be those of the call before.
template <int N> __device__ __forceinline__ void add_up(int (&sum)[N], int (&slots)[N][WARPS]) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) slots[n][warp] = sum[n];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) sum[n] = __reduce_add_sync(~0u, lane < WARPS ? slots[n][lane] : 0);
}

template <bool FITS> __device__ void select(const Arguments& a, int (&key)[EACH], int (&place)[EACH], int ready) {
  __shared__ int slots[2][3][WARPS], last[1][WARPS], warps[WARPS];
  const float* scores = a.scores + (size_t)blockIdx.x * a.capacity;
  const int* table = a.table + (size_t)(blockIdx.x / a.length) * a.table_stride;
  int* selected = a.selected + (size_t)blockIdx.x * a.top_k;
  const int mine = threadIdx.x * EACH;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int found = LEAST;
  if (ready > a.top_k) {
    for (int turn = 0; turn < 16; ++turn) {
      const int unit = 1 << (30 - 2 * turn), low = found + unit, middle = low + unit, high = middle + unit;
      int reach[3] = {};
      for (int start = 0; start < ready; start += CHUNK) {
        if (!FITS) load(key, scores, start + mine, ready);
        if (start + (mine & -32 * EACH) >= ready) continue;  // the whole warp is beyond the end
        int three = 0;  // a warp has at most 256 of each
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          three += (key[i] >= low) + ((key[i] >= middle) << 10) + ((key[i] >= high) << 20);
        three = __reduce_add_sync(~0u, three);
        reach[0] += three & 1023, reach[1] += three >> 10 & 1023, reach[2] += three >> 20;
      }
      add_up(reach, slots[turn % 2]);
      const int exact = reach[2] == a.top_k ? high : reach[1] == a.top_k ? middle : low;
      if (reach[2] == a.top_k || reach[1] == a.top_k || reach[0] == a.top_k) {
        found = exact - 1;  // so many are above it, and none of those equal to it are taken
        break;
      }
      found = reach[2] > a.top_k ? high : reach[1] > a.top_k ? middle : reach[0] > a.top_k ? low : found;
    }
  }
  // All above it, and of those equal to it the first.
  int above[1] = {};
  for (int start = 0; start < ready; start += CHUNK) {
    if (!FITS) load(key, scores, start + mine, ready);
#pragma unroll
    for (int i = 0; i < EACH; ++i) above[0] += key[i] > found;
  }
  above[0] = __reduce_add_sync(~0u, above[0]);
  add_up(above, last);
  const int need = a.top_k - above[0];
  int larger = 0, equal = 0;  // of the chunks before
  for (int start = 0; start < ready; start += CHUNK) {
    if (!FITS) load(key, scores, start + mine, ready), locate(place, table, start + mine, a.capacity, a.pages);
    int own = 0;  // larger ones, and equal ones times 2^16
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (start + mine + i < ready) own += (key[i] > found) + ((key[i] == found) << 16);
    int ahead = own;
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
      const int other = __shfl_up_sync(~0u, ahead, n);
      if (lane >= n) ahead += other;
    }
    if (!FITS) __syncthreads();  // `warps` of the chunk before are read
    if (lane == 31) warps[warp] = ahead;
    __syncthreads();
    const int each = lane < WARPS ? warps[lane] : 0;
    ahead += __reduce_add_sync(~0u, lane < warp ? each : 0) - own;
    int at = larger + (ahead & 0xffff), ties = equal + (ahead >> 16);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (start + mine + i >= ready) continue;
      if (key[i] > found) selected[at++ + min(ties, need)] = place[i];
      if (key[i] == found) {
        if (ties < need) selected[at + ties] = place[i];
        ++ties;
      }
    }
    const int total = __reduce_add_sync(~0u, each);
    larger += total & 0xffff, equal += total >> 16;
  }
  for (int i = min(ready, a.top_k) + threadIdx.x; i < a.top_k; i += THREADS) selected[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) select_places(const __grid_constant__ Arguments a) {
  pdl_trigger();
  const int row = blockIdx.x / a.length, step = blockIdx.x % a.length, mine = threadIdx.x * EACH;
  int key[EACH], place[EACH];
  // Positions and the block table change between steps only, so they may be read before the wait.
  const int token = *(const volatile int*)(a.positions + row) + step;
  locate(place, a.table + (size_t)row * a.table_stride, mine, a.capacity, a.pages);
  pdl_wait();
  const int ready = step < a.counts[row] ? min((token + 1) / a.ratio, a.capacity) : 0;
  if (ready <= CHUNK) {
    load(key, a.scores + (size_t)blockIdx.x * a.capacity, mine, ready);
    select<true>(a, key, place, ready);
  } else {
    select<false>(a, key, place, ready);
  }
}
