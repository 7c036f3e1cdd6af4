// Nearest E8P codes of the columns of a matrix: a thread a candidate, CANDIDATES (2 or 8) neighbouring ones a column.
//
// Set when compiled: BITS (2, 3 or 4), CANDIDATES.

#include "e8p_nearest.cuh"
#include "ptx.cuh"

constexpr int THREADS = 128;

struct Arguments {
  const int* index;     // as in Tables
  const int* odd;
  const float* absolute;
  const int* halves;
  const int* half_row;
  const float* e81b;
  const float* x;       // [8, count]
  const float* metric;  // transposed factors [parts, 8, 8], each of `part` columns
  int* codes;           // [count]
  int* residual;        // [count]
  float* value;         // [8, count]
  int count;
  int part;
};

extern "C" __global__ void __launch_bounds__(THREADS) e8p_encode(const __grid_constant__ Arguments p) {
  const int thread = blockIdx.x * THREADS + threadIdx.x, k = thread % CANDIDATES, wanted = thread / CANDIDATES;
  const int column = min(wanted, p.count - 1);  // those behind the end stay for the shuffles
  pdl_wait();
  const Tables tables = {p.index, p.odd, p.absolute, p.halves, p.half_row, p.e81b};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = p.x[(size_t)i * p.count + column];
  const int shift = k & 1;
  Point first;
  Rounding rounded_x;
  if (k >= 2) rounding(&rounded_x, x, shift);
  if (k < 2 || !neighbour(&first, &rounded_x, (k >> 1) - 1, &tables)) nearest(&first, x, shift, &tables);
  Candidate own;
  candidate(&own, &first, x, shift, p.metric + 64 * (column / p.part), &tables);
  float far = own.far;
  int best = k;
#pragma unroll
  for (int half = CANDIDATES / 2; half; half /= 2) {  // halves against halves: equals are told apart as torch's form does
    const float other = __shfl_down_sync(~0u, far, half, CANDIDATES);
    const int whose = __shfl_down_sync(~0u, best, half, CANDIDATES);
    if (other < far) far = other, best = whose;
  }
  best = __shfl_sync(~0u, best, 0, CANDIDATES);
  if (k != best || wanted >= p.count) return;
  p.codes[column] = own.code, p.residual[column] = own.rest;
#pragma unroll
  for (int i = 0; i < 8; i++) p.value[(size_t)i * p.count + column] = own.value[i];
}
