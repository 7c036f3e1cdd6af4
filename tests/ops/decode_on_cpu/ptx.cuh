// What ops/cuda/ptx.cuh gives decode_portable.cu and decode_round.cu, for a CPU (experts.cuh:
// e8p_experts_on_cpu/ptx.cuh, with what that includes).
// Blocks run one after the other, so the last of them ends what all brought; `run` is told in which order.
#pragma once

#define widen their_widen
#define narrow their_narrow
#define cluster_rank their_rank
#define at_rank their_at_rank
#define expect their_expect
#define send their_send
#define receive their_receive
#include "experts.cuh"
#undef widen
#undef narrow
#undef cluster_rank
#undef at_rank
#undef expect
#undef send
#undef receive
#undef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define memory shared

enum Fetch { ALONE };
template <Fetch> static void copy16(u32 to, const void* from, bool real) { copy16(to, from, real); }
template <class T> static T __ldcg(const T* p) { return *p; }
template <class T> static void __stcg(T* p, const T& v) { *p = v; }
static void __threadfence() {}
static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static u32 atomicAdd(u32* to, u32 v) { return (*to += v) - v; }
static void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma(c, a0, a1, a2, a3, b0, b1); }
static void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma(c, a0, a1, a2, a3, b0, b1); }
static bool __any_sync(u32, bool v) {
  return of_lanes<u32>(v, [](int warp) {
    u32 some = 0;
    for (int i = 0; i < 32; ++i) some |= of_lane<u32>(warp + i);
    return some;
  });
}
static u32 transpose(u32 x) {  // a row of eight in four lanes
  return of_lanes<u32>(x, [](int warp) {
    const int g = current % 32 / 4, t = current % 4;
    auto at = [&](int row) { return of_lane<u32>(warp + row * 4 + g / 2) >> g % 2 * 16 & 0xFFFF; };
    return at(2 * t) | at(2 * t + 1) << 16;
  });
}

// A cluster runs twice: first each block up to where it waits for what the others send, then with that.
struct Pair { u32 to; float2 v; };
static List<Pair> mail_of[SIZE];
static bool delivered;
static u32 to_come;
static u32 cluster_rank() { return blockIdx.x % SIZE; }
static u32 at_rank(const void* local, u32 rank) {
  if (rank >= SIZE) fail("sent to no block of the cluster");
  return address(local) | rank << 20;
}
static void barriers_visible() {}
static void expect(u32, u32 bytes) { to_come = bytes; }
static void send(u32 to, const float2& v, u32 barrier) {
  if (to >> 20 != barrier >> 20) fail("another block's barrier counts what is sent");
  if (!delivered) mail_of[to >> 20].push_back({to & 0xFFFFF, v});
}
static void receive(u32) {
  if (!delivered) {
    fibers[current].done = true;
    go(fibers[current].place, scheduler);
  }
  const auto& mine = mail_of[cluster_rank()];
  if (mine.size() * sizeof(float2) != to_come) fail("not what the cluster was to send");
  for (auto& [to, v] : mine) memcpy(shared_at(to, 8), &v, sizeof v);
}

static uint4 load_transposed(const uint4* row) {
  address(row);
  memcpy(fibers[current].fragments, &row, sizeof row);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  u32 v[4];
  for (int matrix = 0; matrix < 4; ++matrix) {
    auto at = [&](int r) {
      const u16* from;
      memcpy(&from, fibers[warp + matrix * 8 + r].fragments, sizeof from);
      return (u32)from[g];
    };
    v[matrix] = at(2 * t) | at(2 * t + 1) << 16;
  }
  meet(WARP);
  return {v[0], v[1], v[2], v[3]};
}
#define NONE nobodys_score  // Wait has a name like it
