// What GPUs of one process hand each other inside of a launch.
//
// Every rank stores its words to every peer's inbox, each as 8 bytes of 4 bytes data and 4 bytes round number, and polls
// its own inbox for the others' (NCCL calls the protocol LL): no barrier, no fence, no multicast. Each chunk of an inbox
// counts its own rounds, so whoever has the last word of a chunk begins its next round, and nobody counts blocks.
// A rank begins a launch when it has all of the one before, of which every peer sent something, which every peer began
// when it had read all of the one before that: two buffers suffice, in the order of a stream. So the wait for the launch
// before stands in front of the first store. Whoever waits has sent all that it has, and waits for a bounded time: who
// waits longer writes who was missing into the alarm, which lies in the host's memory, unless another rank did, and
// leaves; so does what else of its rank waits, and from then on none of its rounds waits. Sums are formed in the order of
// ranks, in float32, so that every rank has the same bits.
#pragma once

#include "system.cuh"

constexpr int MAX_WORLD = 8;
constexpr int CHUNK = 128;     // words with a round number of their own
constexpr int POLLS = 256;     // between two looks at the clock

enum State { MODE, LIMIT, ROUNDS = 4 };  // of u64s; LIMIT in nanoseconds; from ROUNDS on the next round of each chunk
enum Mode { UNARMED, ARMED, EXPIRED };
enum Alarm { RAISED, RECORDS };         // 1, then of each rank the peer it missed + 1, and the round
constexpr u64 LAST_ROUND = 0x7FFFFFFE;  // then 1: parity goes on alternating, and no round is 0

// One rank's side. A, the kernel's arguments, has: state; alarm, in the host's memory; inbox0 to inbox7, of each rank
// [2, COUNT, room]; room, words that an inbox takes of a rank; rank.
template <class A, int COUNT> struct Exchange {
  static_assert(COUNT >= 1 && COUNT <= MAX_WORLD, "ranks of one process");
  const A& a;
  bool armed;

  // Behind the wait for the launch before.
  __device__ __forceinline__ explicit Exchange(const A& a) : a(a) { armed = load_system(a.state + MODE) == ARMED; }

  __device__ __forceinline__ u64 number(int chunk) const { return load_system(a.state + ROUNDS + chunk); }
  // When all words of the chunk are there, by one thread. Who runs alone counts too: `Peers.arm` has all begin anew.
  __device__ __forceinline__ void next(int chunk, u64 number) const {
    store_system(a.state + ROUNDS + chunk, number == LAST_ROUND ? 1 : number + 1);
  }
  __device__ __forceinline__ u64* inbox(int peer) const { return (&a.inbox0)[peer]; }  // they stand side by side
  __device__ __forceinline__ const u64* own() const { return inbox(a.rank); }
  __device__ __forceinline__ size_t place(u64 number, int from, int at) const {
    return ((size_t)(number & 1) * COUNT + from) * a.room + at;
  }
  __device__ __forceinline__ void send(u64 number, int at, u32 word) const {
#pragma unroll
    for (int peer = 0; peer < COUNT; ++peer)
      if (peer != a.rank) store_system(inbox(peer) + place(number, a.rank, at), number << 32 | word);
  }
  // Four words; `at` and `room` are multiples of 4.
  __device__ __forceinline__ void send4(u64 number, int at, const float4& v) const {
    const u64 top = number << 32;
    const u64 x = top | __float_as_uint(v.x), y = top | __float_as_uint(v.y);
    const u64 z = top | __float_as_uint(v.z), w = top | __float_as_uint(v.w);
#pragma unroll
    for (int peer = 0; peer < COUNT; ++peer) {
      if (peer == a.rank) continue;
      u64* const to = inbox(peer) + place(number, a.rank, at);
      store_system(to, x, y), store_system(to + 2, z, w);
    }
  }
  // The words of all ranks, this one's given; 0 of a peer that did not come. Their packets are asked for at once.
  __device__ __forceinline__ void receive(const u64* own, u64 number, int at, u32 (&words)[COUNT]) {
    u64 begun = 0;
    for (int polls = 0;; ++polls) {
      u64 packets[COUNT];
#pragma unroll
      for (int peer = 0; peer < COUNT; ++peer)
        packets[peer] = armed && peer != a.rank ? load_system(own + place(number, peer, at)) : 0;
      int missing = -1;
#pragma unroll
      for (int peer = COUNT - 1; peer >= 0; --peer)
        if (armed && peer != a.rank && packets[peer] >> 32 != number) missing = peer;
      if (missing >= 0 && !given_up(polls, begun, missing, number)) continue;
#pragma unroll
      for (int peer = 0; peer < COUNT; ++peer)
        if (peer != a.rank) words[peer] = packets[peer] >> 32 == number ? (u32)packets[peer] : 0;
      return;
    }
  }
  // The peer's word, 0 where it did not come.
  __device__ __forceinline__ u32 receive(const u64* own, u64 number, int peer, int at) {
    if (!armed) return 0;
    const u64* const from = own + place(number, peer, at);
    u64 begun = 0;
    for (int polls = 0;; ++polls) {
      const u64 packet = load_system(from);
      if (packet >> 32 == number) return (u32)packet;
      if (given_up(polls, begun, peer, number)) return 0;
    }
  }
  // Four words of each rank, this one's given, added up.
  __device__ __forceinline__ float4 sum4(const u64* own, u64 number, int at, const float4& v) {
    u64 begun = 0;
    for (int polls = 0;; ++polls) {
      u64 packets[COUNT][4];
      int missing = -1;
#pragma unroll
      for (int peer = 0; peer < COUNT; ++peer) {
        if (!armed || peer == a.rank) continue;
        const u64* const from = own + place(number, peer, at);
        load_system(from, packets[peer][0], packets[peer][1]), load_system(from + 2, packets[peer][2], packets[peer][3]);
      }
#pragma unroll
      for (int peer = COUNT - 1; peer >= 0; --peer)
        if (armed && peer != a.rank && !whole(packets[peer], number)) missing = peer;
      if (missing >= 0 && !given_up(polls, begun, missing, number)) continue;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int peer = 0; peer < COUNT; ++peer) {
        const u64(&p)[4] = packets[peer];
        if (peer == a.rank) {
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        } else if (armed && whole(p, number)) {
          sum.x += __uint_as_float((u32)p[0]), sum.y += __uint_as_float((u32)p[1]);
          sum.z += __uint_as_float((u32)p[2]), sum.w += __uint_as_float((u32)p[3]);
        }
      }
      return sum;
    }
  }
  __device__ __forceinline__ static bool whole(const u64 (&packets)[4], u64 number) {
    return packets[0] >> 32 == number && packets[1] >> 32 == number && packets[2] >> 32 == number &&
           packets[3] >> 32 == number;
  }
  // Looks at this GPU's own memory alone until it is late: reads of the host's memory by all that wait would come in
  // each other's way, for longer than what they wait for.
  __device__ __forceinline__ bool given_up(int polls, u64& begun, int peer, u64 number) {
    if (polls % POLLS != POLLS - 1) return false;
    const u64 now = nanoseconds();
    if (!begun) begun = now;
    const bool late = now - begun > load_system(a.state + LIMIT);
    if (!late && load_system(a.state + MODE) == ARMED) return false;
    const bool first = late && atomicCAS(a.state + MODE, (u64)ARMED, (u64)EXPIRED) == ARMED;
    if (first && !load_system(a.alarm + RAISED)) {
      store_system(a.alarm + RECORDS + 2 * a.rank, peer + 1);
      store_system(a.alarm + RECORDS + 2 * a.rank + 1, number);
      __threadfence_system();
      store_system(a.alarm + RAISED, 1);
    }
    armed = false;
    return true;
  }
};
