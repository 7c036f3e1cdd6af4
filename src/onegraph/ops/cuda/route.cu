// From the residual stream to the experts of up to 4 tokens in one launch: the sum with what a sublayer gave, RMSNorms of
// it, the router's product, and the choice by softmax or sigmoid (ops/normed_route.py).
//
// A block has ROWS rows of the router, in registers before the wait for the stream. Every block norms every token for itself,
// which takes less time than a launch for all of them, and the block of a token's number writes what it was normed to. A
// logit is published as one word that is never 0. The last block looks at the words until none is 0: its warps choose,
// a token each, and leave zeros behind. Words order nothing but themselves, so no block waits for its stores, and none
// waits for another but the last, whose launch begins when all others have begun or ended. Two launches that share words would wait forever.
//
// A lane has PER experts that stand side by side: of equal scores the first expert is the first match of the first lane.
// Scores are compared as whole numbers of the same order, NaN above all; 0 is none's, which those have that were taken.
//
// Set when compiled: TYPE of the stream, NORM of the norms' weights, POST of the weight of the norm behind the sublayer (-1:
// there is none), GATE of the router (as numbers.cuh numbers types), ADD (whether there is a sum), HIDDEN, EXPERTS, TOP_K, SHARED (an
// expert more for every token), GATED (its weight is the sigmoid of a logit more), ROWS, ONE (there is one token), SIGMOID
// (else softmax), NORMALISE (weights sum to 1, or to `factor` by sigmoid), GROUPS and TOP_GROUPS of them that are chosen first.

#include "numbers.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, TOKENS = ONE ? 1 : 4;
constexpr int FOURS = (HIDDEN / 4 + THREADS - 1) / THREADS;  // of columns that a thread has
constexpr int GROUP = ONE || FOURS > 6 ? 1 : FOURS > 3 ? 2 : 4;  // tokens whose loads are under way
constexpr int PER = (EXPERTS + 127) / 128 * 4, PITCH = 32 * PER + 4;  // experts of a lane; words of a token
constexpr int MATRIX = EXPERTS + GATED, CHOSEN = TOP_K + SHARED;
constexpr int EACH = EXPERTS / GROUPS;  // experts of a group
constexpr bool BEHIND = POST >= 0, GROUPED = TOP_GROUPS < GROUPS;
static_assert(HIDDEN % 4 == 0 && CHOSEN <= 32 && GROUPS * EACH == EXPERTS && (!GROUPED || GROUPS <= 32));

struct Arguments {
  const void* x;         // [tokens, HIDDEN], with ADD what a sublayer gave
  const void* residual;  // [tokens, HIDDEN], with ADD
  const void* post;      // [HIDDEN], of the norm of x before the sum
  const void* norm;      // [norms, HIDDEN]; the router reads what the last of them gives
  const void* gate;      // [MATRIX, HIDDEN]
  const float* bias;     // [EXPERTS] or null; by sigmoid there is one
  const float* scales;   // [EXPERTS] or null, of weights by softmax
  void* total;           // [tokens, HIDDEN], with ADD
  void* normed;          // [norms, tokens, HIDDEN]
  u32* words;            // [tokens, PITCH], zeros between launches
  int* experts;          // [tokens, CHOSEN]
  float* weights;        // [tokens, CHOSEN]
  int tokens, norms;
  float eps, factor;
};

// Four numbers as they lie in memory: what is asked for before the wait is not waited for to be unpacked.
template <int T> struct Four { uint2 v; };
template <> struct Four<FLOAT32> { float4 v; };
template <int T> __device__ __forceinline__ Four<T> ask(const void* p, size_t at) { return ((const Four<T>*)p)[at / 4]; }
template <int T> __device__ __forceinline__ float4 numbers(const Four<T>& four) { return load_four<T>(&four, 0); }

__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float accurate_sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

__device__ __forceinline__ u32 word_of(float v) {
  const u32 bits = __float_as_uint(v);
  return ~(bits == ~0u ? 0x7FFFFFFFu : bits);  // one NaN for another: 0 says that there is no logit yet
}
__device__ __forceinline__ u32 key_of(float v) {  // 0 is no key
  const u32 bits = __float_as_uint(v + 0.f);  // of -0 that of 0
  return v != v ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(u32 key) { return __uint_as_float(key == ~0u ? key : key >> 31 ? key ^ 0x80000000u : ~key); }
__device__ __forceinline__ int owner_of(u32 own, u32 top) { return __ffs(__ballot_sync(~0u, own == top)) - 1; }  // the first lane

// Of each group of experts the two largest keys, whose sum is its own key: a lane a group. Those shut out lose their keys.
__device__ __forceinline__ void keep_groups(u32 (&keys)[PER], u32* shared, int lane) {
#pragma unroll
  for (int j = 0; j < PER; ++j) shared[lane * PER + j] = keys[j];
  __syncwarp();
  u32 own = 0, kept = 0;
  if (lane < GROUPS) {
    u32 first = 0, second = 0;
#pragma unroll 4
    for (int i = 0; i < EACH; ++i) {
      const u32 key = shared[lane * EACH + i];
      second = max(second, min(first, key)), first = max(first, key);
    }
    own = key_of(number_of(first) + number_of(second));
  }
#pragma unroll 1
  for (int n = 0; n < TOP_GROUPS; ++n) {
    const int owner = owner_of(own, __reduce_max_sync(~0u, own));
    kept |= 1u << owner;
    if (lane == owner) own = 0;
  }
#pragma unroll
  for (int j = 0; j < PER; ++j)
    if (!(kept >> (lane * PER + j) / EACH % 32 & 1)) keys[j] = 0;
  __syncwarp();  // the keys are read before logits take their place
}

// A warp's choice for a token. `shared`: 32 * PER words of its own.
__device__ __forceinline__ void choose(const Arguments& p, int token, u32* shared, int lane) {
  float biases[PER];
#pragma unroll
  for (int j = 0; j < PER; ++j) biases[j] = p.bias && lane * PER + j < EXPERTS ? p.bias[lane * PER + j] : 0.f;
  u32* const words = p.words + token * PITCH;
  uint4 found[PER / 4];
  u32 gain = 1;
  for (bool all = false; !all;) {
    all = true;
#pragma unroll
    for (int j = 0; j < PER / 4; ++j) found[j] = look(words + lane * PER + 4 * j);
    if (GATED) gain = look_one(words + 32 * PER), all = gain;
#pragma unroll
    for (int j = 0; j < PER / 4; ++j) {
      const int at = lane * PER + 4 * j;
      all = all && (found[j].x || at >= EXPERTS) && (found[j].y || at + 1 >= EXPERTS) && (found[j].z || at + 2 >= EXPERTS)
            && (found[j].w || at + 3 >= EXPERTS);
    }
  }
  __syncwarp();  // every lane has the gate's word
#pragma unroll
  for (int j = 0; j < PER / 4; ++j) *(uint4*)(words + lane * PER + 4 * j) = make_uint4(0, 0, 0, 0);
  if (GATED && lane == 0) words[32 * PER] = 0;

  float scores[PER];
  u32 keys[PER];
  auto logit = [&](int j) {
    const uint4& four = found[j / 4];
    return __uint_as_float(~(j % 4 == 0 ? four.x : j % 4 == 1 ? four.y : j % 4 == 2 ? four.z : four.w));
  };
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    scores[j] = (SIGMOID ? accurate_sigmoid(logit(j)) : logit(j)) + biases[j];
    keys[j] = lane * PER + j < EXPERTS ? key_of(scores[j]) : 0;
  }
  if (GROUPED) keep_groups(keys, shared, lane);
#pragma unroll
  for (int j = 0; j < PER; ++j) shared[lane * PER + j] = __float_as_uint(logit(j));
  int chosen = 0;
#pragma unroll 1
  for (int n = 0; n < TOP_K; ++n) {
    u32 own = 0;
#pragma unroll
    for (int j = 0; j < PER; ++j) own = max(own, keys[j]);
    const u32 top = __reduce_max_sync(~0u, own);
    const int owner = owner_of(own, top);
    int place = 0;
#pragma unroll
    for (int j = PER - 1; j >= 0; --j)
      if (keys[j] == top) place = j;
#pragma unroll
    for (int j = 0; j < PER; ++j)
      if (lane == owner && place == j) keys[j] = 0;
    const int expert = __shfl_sync(~0u, lane * PER + place, owner);
    if (lane == n) chosen = expert;
  }
  __syncwarp();
  const bool there = lane < TOP_K;
  const float own = __uint_as_float(shared[chosen]);
  float weight = 0.f;
  if (SIGMOID) {
    weight = there ? accurate_sigmoid(own) : 0.f;
    if (NORMALISE) weight /= sum_warp(weight) + 1e-20f;
    weight *= p.factor;
  } else {
    const float score = own + (p.bias ? p.bias[chosen] : 0.f), high = __shfl_sync(~0u, score, 0);
    weight = there ? expf(score - high) : 0.f;
    float sum = 0.f;
    if (NORMALISE) sum = weight;
#pragma unroll
    for (int j = 0; j < PER; ++j)
      if (!NORMALISE && lane * PER + j < EXPERTS) sum += expf(scores[j] - high);
    weight /= sum_warp(sum);
    if (p.scales) weight *= p.scales[chosen];
  }
  if (SHARED && lane == TOP_K) chosen = EXPERTS, weight = GATED ? accurate_sigmoid(__uint_as_float(~gain)) : 1.f;
  if (lane >= CHOSEN) return;
  p.experts[token * CHOSEN + lane] = chosen;
  p.weights[token * CHOSEN + lane] = weight;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) route(const __grid_constant__ Arguments p) {
  __shared__ float squares[2][TOKENS][WARPS], dots[TOKENS][ROWS][WARPS];  // of each warp's columns
  __shared__ u32 logits[ONE ? 1 : WARPS][32 * PER];
  pdl_trigger();
  const int tokens = ONE ? 1 : p.tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * ROWS;
  auto column = [](int i) { return 4 * (threadIdx.x + i * THREADS); };
  Four<GATE> matrix[ROWS][FOURS];
  Four<NORM> gains[FOURS];
  Four<BEHIND ? POST : FLOAT16> post[FOURS];
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    if (column(i) >= HIDDEN) continue;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) matrix[r][i] = ask<GATE>(p.gate, (size_t)min(first + r, MATRIX - 1) * HIDDEN + column(i));
    gains[i] = ask<NORM>(p.norm, (size_t)(p.norms - 1) * HIDDEN + column(i));
    if (BEHIND) post[i] = ask<BEHIND ? POST : FLOAT16>(p.post, column(i));
  }
  pdl_wait();

  const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
  float4 v[GROUP][FOURS];  // of some tokens, `from` on
  auto load = [&](const void* tensor, int token, int i) {
    return token < tokens && column(i) < HIDDEN ? load_four<TYPE>(tensor, (size_t)token * HIDDEN + column(i)) : zeros;
  };
  auto sum_squares = [&](float (&to)[TOKENS][WARPS], int from) {
    float sums[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      sums[g] = 0.f;
#pragma unroll
      for (int i = 0; i < FOURS; ++i) sums[g] = dot(v[g][i], v[g][i], sums[g]);
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      sums[g] = sum_warp(sums[g]);
      if (lane == 0) to[from + g][warp] = sums[g];
    }
  };
  auto unit_of = [&](const float (&from)[WARPS]) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += from[w];
    return rsqrtf(sum * (1.f / HIDDEN) + p.eps);
  };
  auto sum = [&](int from) {  // what is normed
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
      for (int i = 0; i < FOURS; ++i) v[g][i] = load(p.x, from + g, i);
    if (!ADD) return;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const float unit = BEHIND ? unit_of(squares[0][from + g]) : 0.f;
#pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        if (column(i) >= HIDDEN) continue;
        if (BEHIND) v[g][i] = times(times(v[g][i], unit), numbers(post[i]));
        v[g][i] = rounded<TYPE>(plus(load(p.residual, from + g, i), v[g][i]));
      }
    }
  };
  if (BEHIND) {
#pragma unroll 1
    for (int from = 0; from < tokens; from += GROUP) {
#pragma unroll
      for (int g = 0; g < GROUP; ++g)
#pragma unroll
        for (int i = 0; i < FOURS; ++i) v[g][i] = load(p.x, from + g, i);
      sum_squares(squares[0], from);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int from = 0; from < tokens; from += GROUP) {
    sum(from);
    sum_squares(squares[1], from);
  }
  __syncthreads();
#pragma unroll 1
  for (int from = 0; from < tokens; from += GROUP) {
    if (!ONE) sum(from);
    float products[GROUP][ROWS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const int token = from + g;
      const float unit = unit_of(squares[1][token]);
      const bool writes = token < tokens && token % gridDim.x == blockIdx.x;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) products[g][r] = 0.f;
#pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        if (column(i) >= HIDDEN) continue;
        const float4 each = times(v[g][i], unit), last = times(each, numbers(gains[i]));
        if (writes) {
          auto place = [&](int n) { return ((size_t)n * tokens + token) * HIDDEN + column(i); };
          if (ADD) store_four<TYPE>(p.total, place(0), v[g][i]);
          for (int n = 0; n < p.norms - 1; ++n)
            store_four<TYPE>(p.normed, place(n), times(each, load_four<NORM>(p.norm, (size_t)n * HIDDEN + column(i))));
          store_four<TYPE>(p.normed, place(p.norms - 1), last);
        }
        const float4 given = rounded<TYPE>(last);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) products[g][r] = dot(given, numbers(matrix[r][i]), products[g][r]);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float total = sum_warp(products[g][r]);
        if (lane == 0) dots[from + g][r][warp] = total;
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tokens * ROWS; i += THREADS) {
    const int token = i / ROWS, row = first + i % ROWS;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += dots[token][i % ROWS][w];
    if (row < MATRIX) publish(p.words + token * PITCH + (row < EXPERTS ? row : 32 * PER), word_of(total));
  }
  if (blockIdx.x < gridDim.x - 1) return;
  for (int token = WARPS - 1 - warp; token < tokens; token += WARPS) choose(p, token, logits[ONE ? 0 : warp], lane);
}
