// The trellis path nearest to each tile of a matrix: Viterbi's algorithm over all 65,536 states, a block a tile at a time.
// formats/trellis.py tells the code, ops/cpu/trellis_encode.c the same on a CPU.
//
// A state is (c, mid, h): the BITS newest bits, 16 - 2 BITS bits, and the BITS oldest; a step takes for each overlap (c, mid)
//
//     new[(c, mid)] = min over h of old[(mid, h)] + weight (value[(c, mid, h)] - x)^2
//
// A thread has 128 states, whose values stay in its registers as float16 pairs (integers, exact), and all h of each of its
// overlaps. Costs lie in shared memory. They are positive floats, which compare as the integers that their bits are; the lowest
// BITS bits of each carry its h, so that a minimum says where it comes from. What each step came from goes to global memory,
// a word or two a thread, and comes back through shared memory, some steps at a time, for one thread to walk.
//
// The string is a ring: what a first pass over the weights around its ends has in common there, the second begins and ends
// with.
//
// Set when compiled: BITS.

#include "ptx.cuh"

constexpr int THREADS = 512, WEIGHTS = 256, C = 1 << BITS, ALL = 65536 / C, MIDS = ALL / C;
constexpr int ROUNDS = MIDS > THREADS ? MIDS / THREADS : 1;   // mids of a thread
constexpr int GROUPS = MIDS < THREADS ? THREADS / MIDS : 1;   // of threads with the same mids
constexpr int SPLIT = GROUPS > C ? GROUPS / C : 1;            // neighbours that share the h of an overlap
constexpr int OWN = C / (GROUPS / SPLIT), OLDEST = C / SPLIT;  // c and h of a thread
constexpr int KEPT = BITS < 3 ? BITS : BITS < 5 ? 4 : 8;      // bits that an h is kept in
constexpr int WORDS = (ROUNDS * OWN * KEPT + 31) / 32;        // of a thread and step
constexpr int PITCH = MIDS + (BITS < 6 ? 32 / C : 1);         // costs lie as [h][mid]: other banks for each h
constexpr int COSTS = C * PITCH * 4, STEP_BYTES = THREADS * WORDS * 4;
constexpr int SCRATCH = COSTS > 32768 ? COSTS : 32768;        // bytes: costs, or steps on their way back
constexpr int AT_ONCE = SCRATCH / STEP_BYTES;                 // such steps
static_assert(ROUNDS * OWN * OLDEST == 128, "a thread has 128 states");
#ifndef HELD
#define HELD (__CUDA_ARCH__ >= 900 ? 64 : 56)  // pairs of values in registers; before 9.0 more would spill: others are computed
#endif

struct Arguments {
  const float* x;        // [16, stride], each 16 columns a tile
  const float* weights;  // [parts, 16]: of squared errors, by input, of `part` tiles each
  const float* outer;    // likewise by output, or null
  u32* steps;            // [blocks, 256, WORDS, THREADS]
  int* codes;            // [BITS, stride]: word i of a tile at [i / 16, i % 16] of its columns
  float* value;          // [16, stride]
  float unit;            // integers of a weight of 1
  int tiles;
  int part;
  int around;            // weights on either side of the ends in the first pass
};

struct Shared {
  float goal[WEIGHTS], root[WEIGHTS];
  u64 best[THREADS];
  u16 state[WEIGHTS];
  int overlap;
};

extern __shared__ __align__(16) u8 smem[];  // SCRATCH, Shared

__device__ __forceinline__ u32 level(u32 state) {  // 0 to 1020
  const u32 v = state * 0x83DCD12Du;
  return (v & 255) + (v >> 8 & 255) + (v >> 16 & 255) + (v >> 24);
}
__device__ __forceinline__ float integer(u32 state) { return (float)(int)level(state) - 510.f; }
__device__ __forceinline__ int place(int overlap) { return overlap % C * PITCH + overlap / C; }  // as old: (mid, h)
__device__ __forceinline__ int output_of(int p) { return p / 32 + p % 8 / 4 * 8; }
__device__ __forceinline__ int input_of(int p) { return p / 8 % 4 * 4 + p % 4; }

// One weight: costs of all overlaps anew, and what they came from to `to`, [WORDS, THREADS].
__device__ __forceinline__ void step(u32 (&values)[HELD], u32* costs, u32* to, float goal, float root, int thread) {
  const int first = thread % (MIDS < THREADS ? MIDS : THREADS), group = thread / (MIDS < THREADS ? MIDS : THREADS);
  const int begin = group % SPLIT * OLDEST, c = group / SPLIT * OWN;
  u32 best[ROUNDS][OWN];
#pragma unroll
  for (int i = 0; i < HELD; i++) unknown(values[i]);  // or all would be made floats in front of the loop
#pragma unroll
  for (int m = 0; m < ROUNDS; m++) {
#pragma unroll
    for (int j = 0; j < OWN; j++) best[m][j] = 0x7F800000u;
#pragma unroll
    for (int h = 0; h < OLDEST; h++) {
      const float old = __uint_as_float(costs[(begin + h) * PITCH + first + m * THREADS]);
#pragma unroll
      for (int j = 0; j < OWN; j++) {
        const int i = (m * OWN + j) * OLDEST + h;
        float v;
        if (i / 2 < HELD) {
          const float2 two = halves_to_floats(values[i / 2 < HELD ? i / 2 : 0]);
          v = i % 2 ? two.y : two.x;
        } else {
          u32 state = (c + j) * ALL + (first + m * THREADS) * C + begin + h;
          unknown(state);
          v = integer(state);
        }
        const float d = fmaf(v, root, -goal);
        best[m][j] = min(best[m][j], (__float_as_uint(fmaf(d, d, old)) & ~(C - 1u)) | (begin + h));
      }
    }
  }
  if (SPLIT > 1)
#pragma unroll
    for (int j = 0; j < OWN; j++) best[0][j] = min(best[0][j], __shfl_xor_sync(~0u, best[0][j], 1));
  u32 kept[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; w++) kept[w] = 0;
#pragma unroll
  for (int i = 0; i < ROUNDS * OWN; i++) kept[i * KEPT / 32] |= (best[i / OWN][i % OWN] & (C - 1u)) << i * KEPT % 32;
#pragma unroll
  for (int w = 0; w < WORDS; w++) to[w * THREADS + thread] = kept[w];
  __syncthreads();  // old costs were read
#pragma unroll
  for (int m = 0; m < ROUNDS; m++)
#pragma unroll
    for (int j = 0; j < OWN; j++)
      if (SPLIT == 1 || group % SPLIT == 0) costs[place((c + j) * MIDS + first + m * THREADS)] = best[m][j];
  __syncthreads();
}

// The h that an overlap came from, in a step as `step` left it.
__device__ __forceinline__ u32 came_from(const u32* step, int overlap) {
  const int c = overlap / MIDS, mid = overlap % MIDS;
  const int thread = MIDS < THREADS ? c / OWN * SPLIT * MIDS + mid : mid % THREADS;
  const int i = (MIDS < THREADS ? 0 : mid / THREADS * OWN) + c % OWN;
  return step[i * KEPT / 32 * THREADS + thread] >> i * KEPT % 32 & (C - 1u);
}

// From `beside.overlap` behind step `last` - 1 back to step `first`: the states, if wanted, and the overlap in front.
__device__ __forceinline__ void walk(u32* scratch, const u32* steps, int first, int last, bool keep, Shared& beside, int thread) {
  for (int end = last; end > first; end -= AT_ONCE) {
    const int begin = max(first, end - AT_ONCE), words = (end - begin) * WORDS * THREADS;
    __syncthreads();
    for (int i = thread * 4; i < words; i += THREADS * 4)
      *(uint4*)(scratch + i) = *(const uint4*)(steps + (size_t)begin * WORDS * THREADS + i);
    __syncthreads();
    if (thread == 0) {
      int overlap = beside.overlap;
      for (int i = end - 1; i >= begin; i--) {
        const int state = overlap * C + came_from(scratch + (i - begin) * WORDS * THREADS, overlap);
        if (keep) beside.state[i] = state;
        overlap = state % ALL;
      }
      beside.overlap = overlap;
    }
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) trellis_encode(const __grid_constant__ Arguments p) {
  const int thread = threadIdx.x;
  u32* const costs = (u32*)smem;
  Shared& beside = *(Shared*)(smem + SCRATCH);
  u32* const steps = p.steps + (size_t)blockIdx.x * WEIGHTS * WORDS * THREADS;
  const int first = thread % (MIDS < THREADS ? MIDS : THREADS), group = thread / (MIDS < THREADS ? MIDS : THREADS);
  u32 values[HELD];
#pragma unroll
  for (int i = 0; i < 2 * HELD; i += 2) {
    const int h = group % SPLIT * OLDEST + i % OLDEST, j = i / OLDEST % OWN, m = i / OLDEST / OWN;
    const u32 state = (group / SPLIT * OWN + j) * ALL + (first + m * THREADS) * C + h;
    values[i / 2] = floats_to_halves(integer(state), integer(state + 1));
  }
  wait_for_previous();
  let_next_start();

  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const size_t stride = (size_t)p.tiles * 16;
    __syncthreads();
    if (thread < WEIGHTS) {
      const int input = input_of(thread), output = output_of(thread);
      float weight = p.weights[tile / p.part * 16 + input];
      if (p.outer) weight *= p.outer[tile / p.part * 16 + output];
      const float root = sqrtf(weight);
      beside.goal[thread] = root * p.x[input * stride + tile * 16 + output];
      beside.root[thread] = root / p.unit;
    }
    for (int i = thread; i < ALL; i += THREADS) costs[place(i)] = 0;
    __syncthreads();
    for (int i = 0; i < 2 * p.around; i++) {
      const int at = (WEIGHTS - p.around + i) % WEIGHTS;
      step(values, costs, steps + (size_t)i * WORDS * THREADS, beside.goal[at], beside.root[at], thread);
    }
    u64 best = ~0ull;
    for (int i = thread; i < ALL; i += THREADS) best = min(best, (u64)costs[place(i)] << 32 | (u32)i);
    beside.best[thread] = best;
    for (int half = THREADS / 2; half; half /= 2) {
      __syncthreads();
      if (thread < half) beside.best[thread] = min(beside.best[thread], beside.best[thread + half]);
    }
    if (thread == 0) beside.overlap = (int)(u32)beside.best[0];
    walk(costs, steps, p.around, 2 * p.around, false, beside, thread);
    const int overlap = beside.overlap;
    for (int i = thread; i < ALL; i += THREADS) costs[place(i)] = i == overlap ? 0 : 0x71000000u;  // 6e29: out of reach
    __syncthreads();
    for (int i = 0; i < WEIGHTS; i++)
      step(values, costs, steps + (size_t)i * WORDS * THREADS, beside.goal[i], beside.root[i], thread);
    walk(costs, steps, 0, WEIGHTS, true, beside, thread);
    if (thread < WEIGHTS)
      p.value[input_of(thread) * stride + tile * 16 + output_of(thread)] =
          integer(beside.state[thread]) / p.unit;
    for (int word = thread; word < 16 * BITS; word += THREADS) {
      u32 bits = 0;
#pragma unroll 1
      for (int b = 0; b < 16; b++) {
        const int at = word * 16 + b;
        bits |= (beside.state[at / BITS] >> at % BITS & 1u) << b;
      }
      p.codes[word / 16 * stride + tile * 16 + word % 16] = (int)bits;
    }
  }
}
