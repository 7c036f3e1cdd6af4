// What ops/cuda/nvfp4_common.cuh gives, for a CPU: a thread of the kernel is a fiber that runs until it must meet others.
// Asynchronous copies arrive where the kernel waits for them or at once (`apart`), and every address that it reads is checked.

#include "standard.h"

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float4 { float x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads, blocks)
#define __grid_constant__
#define __maxnreg__(registers)
#define __expf expf

struct Index { int x = 0, y = 0, z = 0; };
static Index blockIdx, blockDim, gridDim;
static u8 shared[232448] __attribute__((aligned(1024)));

enum Wait { NONE, WARP, POLL, BLOCK, SOME };  // POLL: others' work; SOME: all threads but those of the last warp
struct Place {  // where a fiber, or the scheduler, goes on; a ucontext begins it, since each switch of one is a system call
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
struct Copy {
  u8* to;
  const u8* from;
  size_t bytes;
  bool inside;
  int group;  // how many there are before its own
  void arrive() const { inside ? memcpy(to, from, bytes) : memset(to, 0, bytes); }
};
struct Fiber {
  Place place;
  bool done;
  Wait wait;
  List<Copy> copies;      // from the `arrived`-th on not arrived
  int arrived, committed; // copies; groups
  u32 fragments[6];
};
static Fiber fibers[1024];
static int fibers_now;
static char stacks[1024][32768];
static Place scheduler;
static int current;
static struct { struct { operator int() const { return current; } } x; } threadIdx;

static void fail(const char* why) {
  printf("%s, thread %d of block %d %d %d\n", why, current, blockIdx.x, blockIdx.y, blockIdx.z);
  exit(1);
}
struct Readable { const u8* start; size_t size; };
static List<Readable> readable;
static void check_read(const void* p, size_t bytes) {
  for (auto& [start, size] : readable)
    if ((const u8*)p >= start && (const u8*)p + bytes <= start + size) return;
  fail("reads past a tensor");
}

// Some blocks, drawn anew in every launch, have all in an order that is likely to show what does not wait: each warp goes as
// far as it comes without the others, the last one first or the first; copies arrive at once; shared memory is zeros. In the
// others warps go side by side, copies arrive as late as they may, and shared memory is NaN.
static bool apart, backwards;
static u8 blank;  // what shared memory is filled with

static void meet(Wait wait) {
  fibers[current].wait = wait;
  go(fibers[current].place, scheduler);
}
static void __syncwarp() { meet(WARP); }
static void __syncthreads() { meet(BLOCK); }
static void pdl_wait() {}
static void pdl_trigger() {}
static void pause(u32 nanoseconds) {}
static void prefetch_l1(const void* p) { check_read(p, 128); }

static uint4 stream(const u8* p) {
  check_read(p, 16);
  return *(const uint4*)p;
}

static u32 load_pair(const u8* p) {
  if ((uintptr_t)p % 2) fail("a load that is not aligned");
  check_read(p, 2);
  return *(const u16*)p;
}
static void copy(u8* to, const u8* from, size_t bytes, bool inside) {
  if ((uintptr_t)to % bytes || (inside && (uintptr_t)from % bytes)) fail("a copy that is not aligned");
  if (inside) check_read(from, bytes);
  Fiber& own = fibers[current];
  const Copy made = {to, from, bytes, inside, own.committed};
  if (apart) made.arrive();
  else own.copies.push_back(made);
}
static void copy16(u8* to, const u8* from, bool inside) { copy(to, from, 16, inside); }
static void copy4(u8* to, const u8* from, bool inside) { copy(to, from, 4, inside); }
static void commit() { ++fibers[current].committed; }
template <int N> static void wait_but() {
  Fiber& own = fibers[current];
  List<Copy>& copies = own.copies;
  for (; own.arrived < copies.size() && copies.items[own.arrived].group < own.committed - N; ++own.arrived)
    copies.items[own.arrived].arrive();
  if (own.arrived == copies.size()) copies.clear(), own.arrived = 0;
}

static u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const int pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
    out |= (u32)(pick < 8 ? byte : byte < 128 ? 0 : 255) << 8 * i;
  }
  return out;
}
static float as_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static u32 as_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}
#if HALF
static float wide(u32 v) {
  const int e = v >> 10 & 31, m = v & 1023;
  const float f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return v >> 15 & 1 ? -f : f;
}
static u16 narrow(float f) {
  const _Float16 h = (_Float16)f;
  u16 v;
  memcpy(&v, &h, 2);
  return v;
}
#else
static float wide(u32 v) { return as_float(v << 16); }
static u16 narrow(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  if ((v & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return v + 0x7FFF + (v >> 16 & 1) >> 16;
}
#endif
static u32 multiply(u32 a, u32 b) {
  return narrow(wide(a & 0xFFFF) * wide(b & 0xFFFF)) | (u32)narrow(wide(a >> 16) * wide(b >> 16)) << 16;
}
static float e4m3(u32 v) {
  const float f = v >> 3 & 15 ? ldexpf(8 + (v & 7), (int)(v >> 3 & 15) - 10) : ldexpf(v & 7, -9);
  return v >> 7 & 1 ? -f : f;
}
static u32 e4m3_to_half(u32 two) { return narrow(e4m3(two & 255)) | (u32)narrow(e4m3(two >> 8 & 255)) << 16; }
static void e4m3_to_float(u32 four, float (&to)[4]) {
  for (int i = 0; i < 4; ++i) to[i] = e4m3(four >> 8 * i & 255);
}
static float widen(u32 v) { return wide(v & 0xFFFF); }
template <bool WIDE> static void write(u16* y, long long at, float v) {
  if (WIDE) ((float*)y)[at] = v;
  else y[at] = narrow(v);
}

template <class T, class Result> static T of_lanes(T own, const Result& result) {
  static_assert(sizeof(T) == 4);
  memcpy(fibers[current].fragments, &own, 4);
  meet(WARP);
  const T v = result(current / 32 * 32);
  meet(WARP);
  return v;
}
template <class T> static T of_lane(int thread) {
  T v;
  memcpy(&v, fibers[thread].fragments, 4);
  return v;
}
static u32 warp_max(u32 own) {
  return of_lanes<u32>(own, [](int warp) {
    u32 most = 0;
    for (int i = 0; i < 32; ++i) most = max(most, of_lane<u32>(warp + i));
    return most;
  });
}
static bool any(bool own) { return warp_max(own); }
static float shuffle_xor(float own, int mask) {
  return of_lanes<float>(own, [=](int) { return of_lane<float>(current ^ mask); });
}

// The copy engine. Boxes arrive only where somebody waits for a barrier that nothing else keeps from opening.
struct TensorMap { const u8* start; int rows, row_bytes, box_rows, box_bytes, box_slices; };
struct alignas(8) Barrier { u8 bytes[8]; };
struct Box {
  u8* to;
  TensorMap map;
  int row, slice, column;
  void arrive() const;
};
struct Phase { int all, missing, opened, expected, asked; List<Box> boxes; };
static Map<Barrier*, Phase> phases;
static void make_barrier(Barrier* b, u32 arrivals) { phases[b] = {(int)arrivals, (int)arrivals, 0, 0, 0, {}}; }
static void barriers_made() {}
static void arrive(Barrier* b) {
  if (--phases[b].missing < 0) fail("one arrival too many");
}
static void expect(Barrier* b, u32 bytes) {
  phases[b].expected += bytes;
  arrive(b);
}
static void wait_barrier(Barrier* b, u32 parity) {
  for (int turn = 0; phases[b].opened % 2 == (int)parity; ++turn) {
    Phase& p = phases[b];
    if (p.asked > p.expected && !p.missing) fail("a barrier that gets more bytes than it waits for");
    if (!p.missing && p.asked == p.expected) {
      for (const Box& one : p.boxes) one.arrive();
      p.missing = p.all, ++p.opened, p.expected = p.asked = 0;
      p.boxes.clear();
    } else {
      if (turn > 100000) fail("a barrier that never opens");
      meet(POLL);
    }
  }
  meet(WARP);
}
static void copy_box(u8* to, const TensorMap& m, int row, int slice, Barrier* b, int column = 0) {
  if ((uintptr_t)to % 128) fail("a box that is not aligned");
  phases[b].asked += m.box_slices * m.box_rows * m.box_bytes;
  phases[b].boxes.push_back({to, m, row, slice, column});
}
void Box::arrive() const {
  const int bytes = map.box_bytes;
  for (int i = 0; i < map.box_slices * map.box_rows * bytes; ++i) {
    const int r = row + i / bytes % map.box_rows, s = slice + i / (bytes * map.box_rows), byte = i % bytes;
    uintptr_t at = (uintptr_t)to + i;
    if (bytes == 128) at ^= (at >> 7 & 7) << 4;  // swizzled
    const int in_row = s * bytes + column + byte;
    *(u8*)at = r < map.rows && in_row < map.row_bytes ? map.start[(size_t)r * map.row_bytes + in_row] : 0;
  }
}
static void some_meet(int barrier, int threads) { meet(SOME); }
static void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  auto element = [&](int lane, int reg, int k) { return (int)(signed char)(fibers[warp + lane].fragments[reg] >> 8 * (k % 4)); };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    u32 sum = c[i];
    for (int k = 0; k < 32; ++k) {
      const int lane = k % 16 / 4, upper = k >= 16;
      sum += element(row % 8 * 4 + lane, row / 8 + 2 * upper, k) * element(column * 4 + lane, 4 + upper, k);
    }
    d[i] = sum;
  }
  meet(WARP);
}
static void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  auto element = [&](int lane, int reg, int k) {
    const u32 v = fibers[warp + lane].fragments[reg];
    return wide(k % 2 ? v >> 16 : v & 0xFFFF);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, upper = k >= 8;
      sum += (double)element(row % 8 * 4 + lane, row / 8 + 2 * upper, k) * element(column * 4 + lane, 4 + upper, k);
    }
    c[i] = sum;
  }
  meet(WARP);
}

static void thread();  // the kernel, and what comes behind it

static void run_block(int threads) {
  static u32 drawn;
  apart = drawn >> 31, backwards = drawn >> 30 & 1, blank = apart ? 0 : 0xFF;
  drawn = drawn * 1664525 + 1013904223;
  memset(shared, blank, sizeof shared);
  if ((fibers_now = threads) > 1024) fail("more threads than a block has");
  for (int i = 0; i < threads; ++i) {
    Fiber& own = fibers[i];
    own.place.begun = own.done = false, own.wait = NONE;
    own.copies.clear(), own.arrived = own.committed = 0;
    ucontext_t& begin = own.place.begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = stacks[i];
    begin.uc_stack.ss_size = sizeof stacks[i];
    makecontext(&begin, thread, 0);
  }
  for (int left = threads; left;) {
    bool moved = false;
    for (int w = 0; w < threads; w += 32) {
      const int warp = backwards ? threads - 32 - w : w;
      const Fiber& first = fibers[warp];
      for (bool again = true; again;) {
        int at[6] = {};
        for (int i = warp; i < warp + 32; ++i) ++at[fibers[i].done ? 5 : fibers[i].wait];
        if (at[BLOCK] || at[SOME] || at[5] == 32) break;
        moved = true;
        for (int i = 0; i < 32; ++i) {  // lanes in an order of the warp's own
          current = warp + (i * 7 + warp / 32) % 32;
          fibers[current].wait = NONE;
          go(scheduler, fibers[current].place);
          left -= fibers[current].done;
        }
        for (int i = warp; i < warp + 32; ++i)
          if (fibers[i].done != first.done || fibers[i].wait != first.wait) fail("lanes of a warp wait for different things");
        again = apart && first.wait == WARP;
      }
    }
    bool some_wait = threads > 32;
    for (int i = 0; i < threads - 32; ++i) some_wait &= !fibers[i].done && fibers[i].wait == SOME;
    if (some_wait) {
      for (int i = 0; i < threads - 32; ++i) fibers[i].wait = NONE;
      continue;
    }
    if (moved || !left) continue;
    if (left != threads || fibers[0].wait == SOME) fail("some threads ended, others wait for them");
    for (int i = 0; i < threads; ++i) fibers[i].wait = NONE;
  }
}
