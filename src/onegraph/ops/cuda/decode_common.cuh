// What the attention of a decode step (decode_attention.cuh) and that of a round (decode_round.cu) have in common: tiles of keys
// and values, numbers, products, norm and RoPE of a head, and how blocks meet in memory where there are no clusters.
#pragma once

#include "ptx.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 16;                           // keys
constexpr int CHUNKS = DIM / 8;                    // of 16 bytes, of a key
constexpr int STEPS = DIM / 32;                    // chunks 4 i + t of a head are with lane (g, t) = (lane / 4, lane % 4)
constexpr int TURNS = (ROPE ? ROPE : DIM) / 64;    // steps i that rotate with i + TURNS; the head's rest does not rotate
constexpr int PARTS = CHUNKS > 32 ? CHUNKS / 32 : 1;  // fetches of a warp, of 16 bytes a lane, for a key
constexpr int KEYS = 32 * PARTS / CHUNKS;          // that it takes in so many
static_assert(ROPE % 64 == 0 && ROPE <= DIM, "a lane holds both of what rotates together");
static_assert(PAGE % TILE == 0, "a tile lies in one page");
constexpr float NONE = -1e30f;                     // below every score; finite, so that a difference is never NaN

struct Tile { uint4 keys[TILE][CHUNKS], values[TILE][CHUNKS]; };

__device__ __forceinline__ float2 widen(u32 x) {
  if (HALF) return halves_to_floats(x);
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

__device__ __forceinline__ u32 narrow(float lower, float upper) {
  return HALF ? floats_to_halves(lower, upper) : floats_to_bf16s(lower, upper);
}

__device__ __forceinline__ void fetch(uint4* to, const u16* from, bool there) {  // zeros where not there
  copy16<ALONE>(address(to), from, there);
}
__device__ __forceinline__ void arrived_before_last() {  // all groups but the last, for the whole warp
  wait_but<1>();
  __syncwarp();
}

// c [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HALF) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}

// A head, of which four lanes hold STEPS chunks each: normed and rotated in float32, rounded as the composition's q and k
// are. Chunks i and i + TURNS are half of what rotates apart. `weight` [DIM]: of 16 bits with NORM 1, float32 with NORM 2.
// load(i) is called before angles 2 i and 2 i + 1 are used.
template <class Load>
__device__ __forceinline__ void turn(uint4 (&x)[STEPS], const void* weight, float eps, const float4 (&cosine)[2 * TURNS],
                                     const float4 (&sine)[2 * TURNS], const Load& load) {
  if (!NORM && !ROPE) return;
  const int t = threadIdx.x % 4;
  float gain = 1.f;
  if (NORM) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const float2 a = widen(x[i].x), b = widen(x[i].y), c = widen(x[i].z), d = widen(x[i].w);
      squares += a.x * a.x + a.y * a.y + (b.x * b.x + b.y * b.y) + (c.x * c.x + c.y * c.y) + (d.x * d.x + d.y * d.y);
    }
#pragma unroll
    for (int o = 1; o < 4; o *= 2) squares += __shfl_xor_sync(~0u, squares, o);
    gain = rsqrtf(squares / DIM + eps);
  }
  struct Weights { uint4 narrow, wide[2]; };                       // of a chunk, as NORM says
  auto weights = [&](int i) {
    Weights w = {x[i], {}};
    if (NORM == 1) w.narrow = ((const uint4*)weight)[i * 4 + t];
    if (NORM == 2) w.wide[0] = ((const uint4*)weight)[(i * 4 + t) * 2], w.wide[1] = ((const uint4*)weight)[(i * 4 + t) * 2 + 1];
    return w;
  };
  auto of_pair = [&](const Weights& w, int k) {
    if (NORM == 1) return widen(k < 2 ? k ? w.narrow.y : w.narrow.x : k > 2 ? w.narrow.w : w.narrow.z);
    const uint4& v = w.wide[k / 2];
    return make_float2(__uint_as_float(k % 2 ? v.z : v.x), __uint_as_float(k % 2 ? v.w : v.y));
  };
  auto turn2 = [&](u32& lower, u32& upper, const Weights& w, const Weights& w2, int k, float c0, float c1, float s0, float s1) {
    float2 a = widen(lower), b = widen(upper);
    if (NORM) {
      const float2 f = of_pair(w, k), f2 = of_pair(w2, k);
      a.x *= gain * f.x, a.y *= gain * f.y, b.x *= gain * f2.x, b.y *= gain * f2.y;
    }
    if (ROPE) {
      lower = narrow(a.x * c0 - b.x * s0, a.y * c1 - b.y * s1);
      upper = narrow(b.x * c0 + a.x * s0, b.y * c1 + a.y * s1);
    } else {
      lower = narrow(a.x, a.y), upper = narrow(b.x, b.y);
    }
  };
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    load(i);
    const float4 c = cosine[2 * i], d = cosine[2 * i + 1], e = sine[2 * i], f = sine[2 * i + 1];
    const Weights w = weights(i), w2 = weights(i + TURNS);
    turn2(x[i].x, x[i + TURNS].x, w, w2, 0, c.x, c.y, e.x, e.y);
    turn2(x[i].y, x[i + TURNS].y, w, w2, 1, c.z, c.w, e.z, e.w);
    turn2(x[i].z, x[i + TURNS].z, w, w2, 2, d.x, d.y, f.x, f.y);
    turn2(x[i].w, x[i + TURNS].w, w, w2, 3, d.z, d.w, f.z, f.w);
  }
  if (!NORM) return;
#pragma unroll
  for (int i = 2 * TURNS; i < STEPS; i++) {                        // what does not rotate
    const Weights w = weights(i);
    auto keep = [&](u32& pair, int k) {
      const float2 a = widen(pair), f = of_pair(w, k);
      pair = narrow(a.x * gain * f.x, a.y * gain * f.y);
    };
    keep(x[i].x, 0), keep(x[i].y, 1), keep(x[i].z, 2), keep(x[i].w, 3);
  }
}

__device__ __forceinline__ void turn(uint4 (&x)[STEPS], const void* weight, float eps, const float4 (&cosine)[2 * TURNS],
                                     const float4 (&sine)[2 * TURNS]) {
  turn(x, weight, eps, cosine, sine, [](int) {});
}

#if PORTABLE
// A block's part of a pair of outputs of HEADS heads, and with the first pairs of a head what it is weighed by. `p`: the
// kernel's arguments, with `partial` [groups, SIZE, HEADS, DIM], `sums` [groups, SIZE, HEADS] and `arrived` [groups].
template <int HEADS, class Arguments>
__device__ __forceinline__ void leave(const Arguments& p, int place, int pair, int head, bool first, float2 total, float2 sum) {
  __stcg((float2*)p.partial + (size_t)place * (HEADS * DIM / 2) + pair, total);
  if (first) __stcg(p.sums + (size_t)place * HEADS + head, sum);
}
// What the blocks of a group left, by the last of them: end(pair, head, the two outputs, what they are to be divided by).
template <int HEADS, class Arguments, class End>
__device__ __forceinline__ void add_parts(const Arguments& p, u32& last, int group, const End& end) {
  __threadfence();  // the parts before the count
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.arrived + group, 1u) + 1 == SIZE;
    if (last) p.arrived[group] = 0;
    __threadfence();  // the count before the parts
  }
  __syncthreads();
  if (!last) return;
#pragma unroll 1
  for (int pair = threadIdx.x; pair < HEADS * DIM / 2; pair += THREADS) {
    const int head = pair / (DIM / 2);
    float2 sum[SIZE], part[SIZE];
    float top = NONE, whole = 0.f, first = 0.f, second = 0.f;
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
      const size_t place = (size_t)group * SIZE + r;
      sum[r] = __ldcg(p.sums + place * HEADS + head);
      part[r] = __ldcg((const float2*)p.partial + place * (HEADS * DIM / 2) + pair);
    }
#pragma unroll
    for (int r = 0; r < SIZE; r++) top = fmaxf(top, sum[r].x);
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
      const float f = exp2_fast(sum[r].x - top);
      whole += f * sum[r].y, first += f * part[r].x, second += f * part[r].y;
    }
    end(pair, head, first, second, whole);
  }
}
#endif
