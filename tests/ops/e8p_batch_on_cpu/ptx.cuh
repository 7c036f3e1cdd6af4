// What ops/cuda/ptx.cuh gives e8p_batch.cu, for a CPU: a block is a thread of this machine, a thread of it a fiber that
// runs until it must meet others. Blocks of a cluster run at once. Copies arrive at once, as products are made.
#pragma once

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __fdividef(a, b) ((a) / (b))

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, const T& v) { *p = v; }
static int __popc(u32 v) { return __builtin_popcount(v); }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float exp2_fast(float v) { return exp2f(v); }
static float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 __float_as_uint(float v) { u32 u; memcpy(&u, &v, 4); return u; }
static float half(u32 v) { const u16 u = v; _Float16 h; memcpy(&h, &u, 2); return h; }
static u32 to_half(float v) { const _Float16 h = v; u16 u; memcpy(&u, &h, 2); return u; }
static u32 to_bf16(float v) { const u32 x = __float_as_uint(v); return x + 0x7FFF + (x >> 16 & 1) >> 16; }
static float2 halves_to_floats(u32 v) { return {half(v & 0xFFFF), half(v >> 16)}; }
static u32 floats_to_halves(float lower, float upper) { return to_half(lower) | to_half(upper) << 16; }
static u32 floats_to_bf16s(float lower, float upper) { return to_bf16(lower) | to_bf16(upper) << 16; }
static u32 hidden_zero() { return 0; }
static u32 hidden_or(u32 a, u32 b) { return a | b; }
static u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

static void fail(const char* why) {
  fprintf(stderr, "%s\n", why);
  abort();
}
static void __trap() { fail("a trap"); }
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
struct Cluster {
  std::vector<u8*> memory;                // of each of its blocks
  std::atomic<int> begun{0}, met{0}, turn{0};
};
struct Meeting { int met = 0, turn = 0; };
struct Barrier { int all, missing, bytes, opened; };
struct Block {
  Cluster* cluster;
  int threads, rank, left;
  std::vector<Place> fibers;
  std::vector<u32> lanes;                 // what a shuffle hands over
  std::vector<int> cluster_turn;          // of the cluster's meeting, where a thread arrived
  std::map<int, Meeting> meetings;        // of warps, then of the block, then of some of it
  std::map<u32, Barrier> barriers;
  Place scheduler;
};
static thread_local Block* block;
static thread_local int current, idle;
struct Index3 { int x; };
static thread_local Index3 blockIdx;
static Index3 gridDim;
static struct { struct { operator int() const { return current; } } x; } threadIdx;

static void yield() {
  if (++idle > 200000000) fail("threads that never meet");
  go(block->fibers[current], block->scheduler);
}
static void meet(int which, int count) {
  Meeting& at = block->meetings[which];
  const int turn = at.turn;
  if (++at.met == count) {
    at.met = 0, ++at.turn, idle = 0;
    return;
  }
  while (at.turn == turn) yield();
}
static void __syncwarp() { meet(current / 32, 32); }
static void __syncthreads() { meet(1000, block->threads); }
static void some_meet(int barrier, int threads) { meet(1000 + barrier, threads); }
template <class T, class F> static T of_lanes(T v, F result) {
  static_assert(sizeof(T) == 4);
  memcpy(&block->lanes[current], &v, 4);
  __syncwarp();
  T all[32];
  memcpy(all, &block->lanes[current / 32 * 32], 128);
  __syncwarp();
  return result(all);
}
template <class T> static T __shfl_sync(u32, T v, int lane) { return of_lanes(v, [=](T* all) { return all[lane]; }); }
template <class T> static T __shfl_xor_sync(u32, T v, int mask) {
  const int lane = current % 32 ^ mask;
  return of_lanes(v, [=](T* all) { return all[lane]; });
}
static u32 __reduce_max_sync(u32, u32 v) {
  return of_lanes(v, [](u32* all) { return *std::max_element(all, all + 32); });
}
static u32 __ballot_sync(u32, bool v) {
  return of_lanes((u32)v, [](u32* all) {
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= all[i] << i;
    return bits;
  });
}

// Shared memory begins at address 1024, as the hardware has it; that of another block has its rank above bit 20.
constexpr int MEMORY = 232448;
extern thread_local __align__(1024) u8 smem[];
static u32 address(const void* p) { return (const u8*)p - smem + 1024; }
static u8* memory_of(u8* memory, u32 at, int bytes) {
  if (at < 1024 || at - 1024 + bytes > MEMORY || at % bytes) fail("a bad address in shared memory");
  return memory + at - 1024;
}
static u8* shared_at(u32 at, int bytes) { return memory_of(smem, at, bytes); }
template <int AT> static u32 load_shared(u32 address) { return *(u32*)shared_at(address + AT, 4); }
static u32 cluster_rank() { return block->rank; }
static u32 at_rank(u32 local, u32 rank) { return local | rank << 20; }
static float4 pull(u32 from) { return *(float4*)memory_of(block->cluster->memory[from >> 20], from & 0xFFFFF, 16); }
static void cluster_begun() {
  Cluster& all = *block->cluster;
  block->cluster_turn[current] = all.turn;
  if (++all.met == CLUSTER * WARPS_THAT_MULTIPLY * 32) all.met = 0, ++all.turn;
}
static void all_begun() {
  while (block->cluster->turn == block->cluster_turn[current]) yield();
  idle = 0;
}
static void cluster_sync() { cluster_begun(), all_begun(); }
static u32 count_in(u32* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); }

static void pdl_wait() {}
static void pdl_trigger() {}
static void prefetch(const void*) {}

// The copy engine and its barriers. TensorMap: as host.py writes it.
struct alignas(64) TensorMap { const u8* from; long long rows, row_bytes, box_bytes, box_rows, unused[11]; };
static void make_barrier(u32 barrier, int count) { block->barriers[barrier] = {count, count, 0, 0}; }
static void barriers_visible() {}
static void barriers_made() {}
static void advance(u32 barrier, int arrivals, int bytes) {
  Barrier& at = block->barriers.at(barrier);
  at.missing -= arrivals, at.bytes += bytes;
  if (at.missing < 0) fail("one arrival too many");
  if (!at.missing && !at.bytes) at.missing = at.all, ++at.opened;
}
static void arrive(u32 barrier) { advance(barrier, 1, 0); }
static void expect(u32 barrier, int bytes) { advance(barrier, 1, bytes); }
static void wait_barrier(u32 barrier, u32 parity) {
  while (block->barriers.at(barrier).opened % 2 == parity) yield();
  idle = 0;
}
static void copy(u32 to, const u8* from, int bytes, u32 barrier) {
  memcpy(shared_at(to, 16), from, bytes);
  advance(barrier, 0, -bytes);
}
static void box(u32 to, const TensorMap& m, int column, int row, u32 barrier) {
  for (int r = 0; r < m.box_rows; ++r)
    for (int i = 0; i < m.box_bytes; ++i) {
      const bool inside = row + r < m.rows && column + i < m.row_bytes;
      *shared_at(to + r * m.box_bytes + i, 1) = inside ? m.from[(row + r) * m.row_bytes + column + i] : 0;
    }
  advance(barrier, 0, -m.box_rows * m.box_bytes);
}

static void wgmma_fence() {}
static void wgmma_commit() {}
template <int> static void wgmma_wait() {}
