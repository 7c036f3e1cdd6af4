// Sums of what ranks have, and the parts of a row side by side: exchange.cuh says how words cross.
//
// A block has whole chunks, so blockDim.x is a multiple of CHUNK. Every thread sends all that it has before it waits.

#include "exchange.cuh"

#ifndef WORLD
#define WORLD 2
#define ITEM 1
#endif
static_assert(ITEM >= 0 && ITEM <= 2, "0: float32, 1: bfloat16, 2: float16");

struct Arguments {
  const u32* x;       // this rank's words
  const void* add;    // of x's type and size, or null
  void* out;
  u64* state;
  u64* alarm;
  u64 *inbox0, *inbox1, *inbox2, *inbox3, *inbox4, *inbox5, *inbox6, *inbox7;
  int room;
  int rank;
  int words;          // all_reduce: of a rank; all_gather: of a row
  int rows, part;     // all_gather: words of a row that a rank has; the last one has what is left
};
typedef Exchange<Arguments, WORLD> Peers;

__device__ __forceinline__ float2 numbers(u32 word) {
  if (ITEM == 0) return make_float2(__uint_as_float(word), 0.f);
  if (ITEM == 1) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  return halves_to_floats(word);
}
__device__ __forceinline__ u32 word_of(float2 v) {
  return ITEM == 0 ? __float_as_uint(v.x) : ITEM == 1 ? floats_to_bf16s(v.x, v.y) : floats_to_halves(v.x, v.y);
}

// All words of the round, `words` of the rank that has most, are there: its chunks begin their next one.
__device__ __forceinline__ void end(const Peers& peers, int first, int step, int words) {
  __syncthreads();
  if (threadIdx.x % CHUNK) return;
  for (int i = first; i < words; i += step) peers.next(i / CHUNK, peers.number(i / CHUNK));
}

// out = sum over ranks of x, + add.
extern "C" __global__ void all_reduce(const __grid_constant__ Arguments a) {
  pdl_wait();
  Peers peers(a);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (peers.armed)
    for (int i = first; i < a.words; i += step) peers.send(peers.number(i / CHUNK), i, a.x[i]);
  pdl_trigger();  // every block runs by then: what follows may fetch its weights meanwhile
  const u64* const own = peers.own();
  for (int i = first; i < a.words; i += step) {
    const u64 number = peers.number(i / CHUNK);
    u32 words[WORLD];
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) words[peer] = a.x[i];
    peers.receive(own, number, i, words);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) {
      const float2 v = numbers(words[peer]);
      sum.x += v.x, sum.y += v.y;
    }
    if (a.add) {
      const float2 v = numbers(((const u32*)a.add)[i]);
      sum.x += v.x, sum.y += v.y;
    }
    ((u32*)a.out)[i] = word_of(sum);
  }
  end(peers, first, step, a.words);
}

// out [rows, words] = the ranks' parts [rows, part] side by side.
extern "C" __global__ void all_gather(const __grid_constant__ Arguments a) {
  pdl_wait();
  Peers peers(a);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const int before = a.rank * a.part, width = min(a.part, a.words - before);
  u32* const out = (u32*)a.out;
  for (int i = first; i < a.rows * width; i += step) {
    if (peers.armed) peers.send(peers.number(i / CHUNK), i, a.x[i]);
    out[(size_t)(i / width) * a.words + before + i % width] = a.x[i];
  }
  pdl_trigger();
  const u64* const own = peers.own();
#pragma unroll
  for (int peer = 0; peer < WORLD; ++peer) {
    if (peer == a.rank) continue;
    const int start = peer * a.part, size = min(a.part, a.words - start);
    for (int i = first; i < a.rows * size; i += step)
      out[(size_t)(i / size) * a.words + start + i % size] = peers.receive(own, peers.number(i / CHUNK), peer, i);
  }
  end(peers, first, step, a.rows * a.part);
}
