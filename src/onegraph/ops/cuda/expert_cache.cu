// Experts that a step chose and that have no slot on the GPU: copied there from host memory, which the GPU reads over
// PCIe by its own loads. What happens when is told in ops/expert_cache.py, whose reference computes the same.
//
// Every block finds the same slots from the same state, one thread an expert and a slot, and copies its part of the
// bytes. The last block that has read the state writes the new one.
//
// Set when compiled: DECAY and GAIN of ops/calls.py.

#include "ptx.cuh"

constexpr int THREADS = 512, FIELDS = 16;
constexpr int PIECE = THREADS * 16;  // bytes that a block copies at a time

struct Arguments {
  const u8* host[FIELDS];    // [count, bytes] of each field, addresses that the GPU can read
  u8* slots[FIELDS];         // [places, bytes]
  u8* shared[FIELDS];        // [count, bytes]
  u64 bytes[FIELDS];         // of an expert; 0 behind the last field
  const int* experts;        // [pairs]
  int* found;                // [pairs]
  int* resident;             // [places]
  int* score;                // [count]
  int* arrived;              // 0 between launches
  int pairs, count, places;  // places <= count <= THREADS
};

struct State {
  int tokens[THREADS], score[THREADS], slot[THREADS];  // of an expert; -1: it has no slot
  int inside[THREADS];                                 // of a slot, the expert
  int into[THREADS];                                   // of an expert, the slot that it is copied to, -1: none
  int missing[THREADS], victims[THREADS], jobs[THREADS];  // by rank
  int last;
};

__device__ __forceinline__ int expert_at(const Arguments& a, int pair) { return min(max(a.experts[pair], 0), a.count - 1); }

// A piece of an expert's field: to one place or two.
__device__ __forceinline__ void copy_piece(const u8* from, u8* to, u8* also, int bytes) {
  if (((u64)from | (u64)to | (u64)also | bytes) % 16 == 0) {
    const int at = threadIdx.x * 16;
    if (at >= bytes) return;
    const uint4 v = stream(from + at);
    *(uint4*)(to + at) = v;
    if (also) *(uint4*)(also + at) = v;
    return;
  }
  for (int at = threadIdx.x; at < bytes; at += THREADS) {
    const u8 v = from[at];
    to[at] = v;
    if (also) also[at] = v;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) expert_cache(const __grid_constant__ Arguments a) {
  __shared__ State s;
  const int i = threadIdx.x;
  const bool many = a.pairs > a.places;
  s.tokens[i] = 0, s.slot[i] = s.into[i] = -1;
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const int inside = i < a.places ? a.resident[i] : -1, before = i < a.count ? a.score[i] : 0;
  const int own = i < a.pairs ? expert_at(a, i) : -1;  // of the first pairs, which are all of a token
  if (own >= 0) atomicAdd(&s.tokens[own], 1);
  for (int pair = i + THREADS; pair < a.pairs; pair += THREADS) atomicAdd(&s.tokens[expert_at(a, pair)], 1);
  if (inside >= 0) s.slot[inside] = i, s.inside[i] = inside;
  __syncthreads();
  const bool used = s.tokens[i] > 0, missing = used && s.slot[i] < 0;
  s.score[i] = before - (before >> DECAY) + (32 - __clz(s.tokens[i]) << GAIN);
  const bool spare = inside >= 0 && !s.tokens[inside];
  const int wanted = __syncthreads_count(missing), free = __syncthreads_count(spare);
  int jobs = wanted;
  if (missing) {  // the highest score first, then the lowest number
    int rank = 0;
    for (int e = 0; e < a.count; e++)
      rank += s.tokens[e] && s.slot[e] < 0 && (s.score[e] > s.score[i] || (s.score[e] == s.score[i] && e < i));
    s.missing[rank] = i;
  }
  if (spare && wanted) {  // the lowest score first
    int rank = 0;
    for (int p = 0; p < a.places; p++) {
      const int other = s.score[s.inside[p]];
      rank += !s.tokens[s.inside[p]] && (other < s.score[inside] || (other == s.score[inside] && p < i));
    }
    s.victims[rank] = i;
  }
  if (many) {
    jobs = __syncthreads_count(used);
    if (used) {
      int rank = 0;
      for (int e = 0; e < i; e++) rank += s.tokens[e] > 0;
      s.jobs[rank] = i;
    }
  }
  __syncthreads();
  if (i < min(wanted, free)) {
    const int e = s.missing[i], slot = s.victims[i];
    if (!many || s.score[e] > s.score[s.inside[slot]]) s.into[e] = slot;
  }
  __syncthreads();
  if (blockIdx.x == 0 && own >= 0) {
    a.found[i] = many ? own : max(s.slot[own], s.into[own]);
    for (int pair = i + THREADS; pair < a.pairs; pair += THREADS) {
      const int e = expert_at(a, pair);
      a.found[pair] = many ? e : max(s.slot[e], s.into[e]);
    }
  }
  // Every block has what it needs of the state: the last one to come here writes the new one.
  __threadfence();
  __syncthreads();
  if (i == 0) s.last = atomicAdd(a.arrived, 1) == (int)gridDim.x - 1;
  __syncthreads();
  if (s.last) {
    if (i < a.count) a.score[i] = s.score[i];
    if (s.into[i] >= 0) a.resident[s.into[i]] = i;
    if (i == 0) *a.arrived = 0;
  }

  int pieces = 0;
  for (int f = 0; f < FIELDS; f++) pieces += (int)((a.bytes[f] + PIECE - 1) / PIECE);
  for (int at = blockIdx.x; at < jobs * pieces; at += gridDim.x) {
    const int e = many ? s.jobs[at / pieces] : s.missing[at / pieces];
    int f = 0, piece = at % pieces;
    for (int of = (int)((a.bytes[0] + PIECE - 1) / PIECE); piece >= of; of = (int)((a.bytes[f] + PIECE - 1) / PIECE))
      piece -= of, f++;
    const u64 size = a.bytes[f], begin = (u64)piece * PIECE;
    const u8* from = s.slot[e] >= 0 ? a.slots[f] + s.slot[e] * size : a.host[f] + e * size;
    u8* const slot = s.into[e] >= 0 ? a.slots[f] + s.into[e] * size + begin : nullptr;
    u8* const to = many ? a.shared[f] + e * size + begin : slot;
    copy_piece(from + begin, to, many ? slot : nullptr, (int)min((u64)PIECE, size - begin));
  }
}
