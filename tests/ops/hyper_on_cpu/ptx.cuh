// What ops/cuda/ptx.cuh gives deepseek_hyper_ranks.cu, for a CPU: a block is a thread of this machine, a thread of it a
// fiber that runs until it must meet others. What a block shares is its thread's own, at the same distance from `base`
// in each.
#pragma once

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __expf expf
#define __fdividef(a, b) ((a) / (b))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int min(int a, int b) { return a < b ? a : b; }
template <class T> static T __ldg(const T* p) { return *p; }
static float2 load_now(const float* p) { return {p[0], p[1]}; }
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 __float_as_uint(float v) { u32 f; memcpy(&f, &v, 4); return f; }
static float half_to_float(u16 v) { _Float16 h; memcpy(&h, &v, 2); return h; }
static u16 float_to_half(float v) { const _Float16 h = v; u16 u; memcpy(&u, &h, 2); return u; }
static u16 float_to_bf16(float v) { const u32 x = __float_as_uint(v); return x + 0x7FFF + (x >> 16 & 1) >> 16; }
static void pdl_wait() {}
static void pdl_trigger() {}

constexpr int CLUSTER = 16;
struct Cluster {
  char* base[CLUSTER];            // of each of its blocks
  std::atomic<int> begun{0};      // threads
};
struct Place {  // where a fiber, or the scheduler, goes on
  ucontext_t begin;
  jmp_buf at;
  bool begun = false;
};
static void __attribute__((noinline)) go(Place& from, Place& to) {
  from.begun = true;
  if (_setjmp(from.at)) return;
  if (to.begun) _longjmp(to.at, 1);
  setcontext(&to.begin);
}
struct Block {
  Cluster* cluster;
  int threads;
  std::vector<Place> fibers;
  std::vector<u32> lanes;                 // what a shuffle hands over
  std::vector<int> met, turn;             // of each warp, then of the block
  Place scheduler;
};
static thread_local Block* block;
static thread_local int current;
static thread_local char base;
struct Index { int x; };
static thread_local Index blockIdx;
static struct { struct { operator int() const { return current; } } x; } threadIdx;

static void yield() { go(block->fibers[current], block->scheduler); }
static void meet(int which, int count) {
  const int turn = block->turn[which];
  if (++block->met[which] == count) {
    block->met[which] = 0, ++block->turn[which];
    return;
  }
  while (block->turn[which] == turn) yield();
}
static void __syncwarp() { meet(current / 32, 32); }
static void __syncthreads() { meet(block->threads / 32, block->threads); }
template <class T> static T __shfl_sync(u32, T v, int lane) {
  memcpy(&block->lanes[current], &v, 4);
  __syncwarp();
  memcpy(&v, &block->lanes[current / 32 * 32 + lane], 4);
  __syncwarp();
  return v;
}
template <class T> static T __shfl_xor_sync(u32 all, T v, int mask) { return __shfl_sync(all, v, current % 32 ^ mask); }

static char* address(const void* p) { return (char*)p; }
static char* at_rank(const void* p, u32 rank) { return (char*)p - &base + block->cluster->base[rank]; }
static std::atomic<long>& bytes(char* barrier) { return *(std::atomic<long>*)barrier; }
static void make_barrier(char* barrier, int) { bytes(barrier) = 0; }
static void expect(char* barrier, int many) { bytes(barrier) += many; }
static void barriers_visible() {}
static void send(char* to, const float4& v, char* barrier) {
  memcpy(to, &v, sizeof v);
  bytes(barrier) -= sizeof v;
}
static void receive(char* barrier) {
  while (bytes(barrier)) yield();
}
static void cluster_begun() { ++block->cluster->begun; }
static void all_begun() {
  while (block->cluster->begun != CLUSTER * block->threads) yield();
}
