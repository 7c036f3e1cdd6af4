// exchange.cu on a CPU: every thread of every block of every rank is a thread of this machine, and memory that GPUs share
// is memory that threads share. `run` does one round of all ranks.

#include <barrier>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { int x; };
static thread_local Index threadIdx, blockIdx, gridDim, blockDim;
static thread_local std::barrier<>* block;
static void __syncthreads() { block->arrive_and_wait(); }
static int min(int a, int b) { return a < b ? a : b; }
static float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 __float_as_uint(float v) { u32 f; memcpy(&f, &v, 4); return f; }
static void pdl_wait() {}
static void pdl_trigger() {}
static u32 bf16(float v) { const u32 x = __float_as_uint(v); return x + 0x7FFF + (x >> 16 & 1) >> 16; }
static u32 floats_to_bf16s(float a, float b) { return bf16(a) | bf16(b) << 16; }
static float2 halves_to_floats(u32 v) {
  _Float16 h[2];
  memcpy(h, &v, 4);
  return {(float)h[0], (float)h[1]};
}
static u32 floats_to_halves(float a, float b) {
  const _Float16 h[2] = {(_Float16)a, (_Float16)b};
  u32 v;
  memcpy(&v, h, 4);
  return v;
}
#include "exchange.cu"

// function: 0 all_reduce, 1 all_gather. present: of each rank whether it takes part.
extern "C" void run(const Arguments* ranks, const int* present, int function, int blocks, int threads) {
  std::vector<std::thread> all;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  for (int rank = 0; rank < WORLD; ++rank) {
    if (!present[rank]) continue;
    for (int b = 0; b < blocks; ++b) {
      barriers.push_back(std::make_unique<std::barrier<>>(threads));
      for (int t = 0; t < threads; ++t)
        all.emplace_back([=, meet = barriers.back().get()] {
          block = meet, threadIdx.x = t, blockIdx.x = b, gridDim.x = blocks, blockDim.x = threads;
          if (function) all_gather(ranks[rank]);
          else all_reduce(ranks[rank]);
        });
    }
  }
  for (std::thread& each : all) each.join();
}
