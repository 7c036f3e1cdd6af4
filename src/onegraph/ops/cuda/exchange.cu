// What GPUs of one process hand each other inside of a step: sums of partial results, and the parts of a row.
//
// Every rank stores its words to every peer's inbox, each as 8 bytes of 4 bytes data and 4 bytes round number, and polls
// its own inbox for the others' (NCCL calls the protocol LL): no barrier, no fence, no multicast. A rank begins round
// n + 1 when it has all of round n, which its peers began when they had read all of round n - 1: two buffers suffice, in
// the order of a stream. So the wait for the launch before stands in front of the first store. Every thread sends all
// that it has before it waits, and waits for a bounded time: who waits longer writes who was missing into the alarm,
// which lies in the host's memory, and leaves; others that wait see the alarm and leave too, and from then on no round
// waits. Sums are formed in the order of ranks, in float32, so that every rank has the same bits.

#include "system.cuh"

#ifndef WORLD
#define WORLD 2
#define ITEM 1
#endif
constexpr int MAX_WORLD = 8;
constexpr int PATIENCE = 256;  // polls between two looks at the clock and the alarm
static_assert(WORLD >= 1 && WORLD <= MAX_WORLD, "ranks of one process");
static_assert(ITEM >= 0 && ITEM <= 2, "0: float32, 1: bfloat16, 2: float16");

enum State { ROUND, TICKET, ARMED, EXPIRED, LIMIT };       // of int64s; LIMIT in nanoseconds
enum Alarm { RAISED, RECORDS };                            // 1, then of each rank the peer it missed + 1, and the round
constexpr u64 LAST_ROUND = 0x7FFFFFFE;                     // then 1: parity goes on alternating, and no round is 0

struct Arguments {
  const u32* x;       // this rank's words
  const void* add;    // of x's type and size, or null
  void* out;
  u64* state;         // State
  u64* alarm;         // Alarm, in the host's memory
  u64 *inbox0, *inbox1, *inbox2, *inbox3, *inbox4, *inbox5, *inbox6, *inbox7;  // of each rank: [2, WORLD, room]
  int room;           // words that an inbox takes of a rank
  int rank;
  int words;          // all_reduce: of a rank; all_gather: of a row
  int rows, part;     // all_gather: words of a row that a rank has; the last one has what is left
};

struct Inboxes {
  u64* of[MAX_WORLD];
};

__device__ __forceinline__ Inboxes inboxes(const Arguments& a) {
  return {{a.inbox0, a.inbox1, a.inbox2, a.inbox3, a.inbox4, a.inbox5, a.inbox6, a.inbox7}};
}

// What a thread knows of the round.
struct Round {
  const Arguments& a;
  u64 number;
  size_t buffer;  // words of an inbox before this round's
  bool alone;

  __device__ __forceinline__ explicit Round(const Arguments& a) : a(a) {
    number = load_system(a.state + ROUND);
    buffer = (size_t)(number & 1) * WORLD * a.room;
    alone = !load_system(a.state + ARMED) || load_system(a.state + EXPIRED);
  }
  __device__ __forceinline__ void send(int at, u32 word) const {
    const Inboxes to = inboxes(a);
    const u64 packet = number << 32 | word;
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer)
      if (peer != a.rank) store_system(to.of[peer] + buffer + (size_t)a.rank * a.room + at, packet);
  }
  // The peer's word, 0 where it did not come.
  __device__ __forceinline__ u32 receive(const u64* own, int peer, int at) {
    if (alone) return 0;
    const u64* from = own + buffer + (size_t)peer * a.room + at;
    u64 begun = 0;
    for (int polls = 0;; ++polls) {
      const u64 packet = load_system(from);
      if (packet >> 32 == number) return (u32)packet;
      if (polls % PATIENCE != PATIENCE - 1) continue;
      const u64 now = nanoseconds();
      if (!begun) begun = now;
      const bool late = now - begun > load_system(a.state + LIMIT);
      if (!late && !load_system(a.alarm + RAISED)) continue;
      if (late && atomicCAS(a.state + EXPIRED, 0ull, 1ull) == 0) {
        store_system(a.alarm + RECORDS + 2 * a.rank, peer + 1);
        store_system(a.alarm + RECORDS + 2 * a.rank + 1, number);
        __threadfence_system();
        store_system(a.alarm + RAISED, 1);
      }
      store_system(a.state + EXPIRED, 1);
      alone = true;
      return 0;
    }
  }
  // After every thread's last word: the last block begins the next round.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(a.state + TICKET, 1ull) + 1 < gridDim.x) return;
    store_system(a.state + TICKET, 0);
    if (load_system(a.state + ARMED)) store_system(a.state + ROUND, number == LAST_ROUND ? 1 : number + 1);
  }
};

__device__ __forceinline__ float2 numbers(u32 word) {
  if (ITEM == 0) return make_float2(__uint_as_float(word), 0.f);
  if (ITEM == 1) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  return halves_to_floats(word);
}
__device__ __forceinline__ u32 word_of(float2 v) {
  return ITEM == 0 ? __float_as_uint(v.x) : ITEM == 1 ? floats_to_bf16s(v.x, v.y) : floats_to_halves(v.x, v.y);
}

// out = sum over ranks of x, + add.
extern "C" __global__ void all_reduce(const __grid_constant__ Arguments a) {
  wait_for_previous();
  Round round(a);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (!round.alone)
    for (int i = first; i < a.words; i += step) round.send(i, a.x[i]);
  let_next_start();  // every block runs by then: what follows may fetch its weights meanwhile
  const Inboxes all = inboxes(a);
  const u64* own = all.of[0];
#pragma unroll
  for (int peer = 1; peer < WORLD; ++peer)
    if (peer == a.rank) own = all.of[peer];
  for (int i = first; i < a.words; i += step) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) {
      const float2 v = numbers(peer == a.rank ? a.x[i] : round.receive(own, peer, i));
      sum.x += v.x, sum.y += v.y;
    }
    if (a.add) {
      const float2 v = numbers(((const u32*)a.add)[i]);
      sum.x += v.x, sum.y += v.y;
    }
    ((u32*)a.out)[i] = word_of(sum);
  }
  round.end();
}

// out [rows, words] = the ranks' parts [rows, part] side by side.
extern "C" __global__ void all_gather(const __grid_constant__ Arguments a) {
  wait_for_previous();
  Round round(a);
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const int before = a.rank * a.part, width = min(a.part, a.words - before);
  u32* const out = (u32*)a.out;
  for (int i = first; i < a.rows * width; i += step) {
    if (!round.alone) round.send(i, a.x[i]);
    out[(size_t)(i / width) * a.words + before + i % width] = a.x[i];
  }
  let_next_start();
  const Inboxes all = inboxes(a);
  const u64* own = all.of[0];
#pragma unroll
  for (int peer = 1; peer < WORLD; ++peer)
    if (peer == a.rank) own = all.of[peer];
#pragma unroll
  for (int peer = 0; peer < WORLD; ++peer) {
    if (peer == a.rank) continue;
    const int start = peer * a.part, size = min(a.part, a.words - start);
    for (int i = first; i < a.rows * size; i += step)
      out[(size_t)(i / size) * a.words + start + i % size] = round.receive(own, peer, i);
  }
  round.end();
}
