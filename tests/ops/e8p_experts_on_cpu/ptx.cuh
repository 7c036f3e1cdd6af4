// What ops/cuda/ptx.cuh gives e8p_experts.cu, for a CPU (int4.cuh: int4_on_cpu/nvfp4_common.cuh, with what that includes).
//
// Shared memory begins at address 1024, as the hardware has it. Blocks of a cluster run one after the other, the first one
// last: what the others sent to it lies in `mail` until it waits for that.

#pragma push_macro("N")
#undef N
#include "int4.cuh"
#pragma pop_macro("N")

#undef __shared__
#define __shared__
#define __align__(bytes)
#define smem shared
#define __fdividef(a, b) ((a) / (b))

struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float2 halves_to_floats(u32 v) { return {wide(v & 0xFFFF), wide(v >> 16)}; }
static u32 floats_to_halves(float lower, float upper) { return narrow(lower) | (u32)narrow(upper) << 16; }
static u32 floats_to_bf16s(float lower, float upper) { return floats_to_halves(lower, upper); }
static u32 __float_as_uint(float v) { return as_bits(v); }
static float __uint_as_float(u32 v) { return as_float(v); }
static int __popc(u32 v) { return __builtin_popcount(v); }
static void __trap() { fail("a trap"); }
static int atomicAdd(int* to, int v) { return (*to += v) - v; }
static float exp2_fast(float x) { return exp2f(x); }
static u32 hidden_or(u32 a, u32 b) { return a | b; }
static void unknown(u32&) {}

template <class T> static T __shfl_xor_sync(u32, T v, int mask) {
  return of_lanes<T>(v, [=](int) { return of_lane<T>(current ^ mask); });
}
template <class T> static T __shfl_sync(u32, T v, int lane) {
  return of_lanes<T>(v, [=](int warp) { return of_lane<T>(warp + lane); });
}
template <class T> static T __shfl_up_sync(u32, T v, int by) {
  return of_lanes<T>(v, [=](int warp) { return of_lane<T>(max(warp, current - by)); });
}
static u32 __reduce_max_sync(u32, u32 v) { return warp_max(v); }
static int __reduce_add_sync(u32, int v) {
  return of_lanes<int>(v, [](int warp) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += of_lane<int>(warp + i);
    return sum;
  });
}

static u32 address(const void* p) {
  const size_t at = (const u8*)p - shared;
  if (at > sizeof shared) fail("not in shared memory");
  return at + 1024;
}
static u8* shared_at(u32 address, int bytes) {
  if (address < 1024 || address - 1024 + bytes > sizeof shared || address % bytes) fail("a bad address in shared memory");
  return shared + address - 1024;
}
template <int AT> static u32 load_shared(u32 address) { return *(u32*)shared_at(address + AT, 4); }
static void copy16(u32 to, const void* from, bool real) { copy(shared_at(to, 16), (const u8*)from, 16, real); }
template <int BYTES> static void copy_few(u32 to, const void* from, bool real) {
  copy(shared_at(to, BYTES), (const u8*)from, BYTES, real);
}

static void copies_there() { wait_but<0>(); }
static uint2 stream8(const u8* p) {
  if ((uintptr_t)p % 8) fail("a load that is not aligned");
  check_read(p, 8);
  return *(const uint2*)p;
}

static int rank_now, expected_mail;
struct Letter { u32 to; float4 v; };
static List<Letter> mail;
static void make_barrier(u32, int) {}
static void expect(u32, int bytes) { expected_mail = bytes; }  // the last one: of what the cluster sends
static void wait_barrier(u32, u32) { meet(BLOCK); }
static void copy(u32 to, const u8* from, int bytes, u32) {
  check_read(from, bytes);
  memcpy(shared_at(to, 4), from, bytes);
}
static int cluster_rank() { return rank_now; }
static void cluster_begun() {}
static void all_begun() {}
static u32 at_rank(u32 local, u32 rank) {
  if (rank) fail("sent to another block than the first");
  return local;
}
static u32 at_rank(const void* local, u32 rank) { return at_rank(address(local), rank); }
static void send(u32 to, const float4& v, u32) { mail.push_back({to, v}); }
static void receive(u32) {
  meet(WARP);
  for (int turn = 0; expected_mail != (int)mail.size() * 16; ++turn) {
    if (turn > 1000) fail("not what the cluster was to send");
    meet(POLL);
  }
  for (auto& [to, v] : mail) memcpy(shared_at(to, 16), &v, 16);
}
