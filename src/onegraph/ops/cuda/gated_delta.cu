// A decode step of Gated DeltaNet, Kimi Delta Attention or Mamba2: convolution, gates, update of S, and the gated norm (of
// Mamba2, whose norm goes over the heads of a group, the gate) in one launch.
//
// A block has one head of one row. Before the wait for the projections it loads S and the records that wait, and replays
// them: what it reads until then is written once a step, and steps have a border between them (rule 4 of
// triton/launch.py). Of more blocks than run at once most begin behind that wait: then (`many`) the projections' part is
// on its way to shared memory beside S. Of fewer blocks a few begin early, on SMs that the launch before leaves idle (4 of
// an H200's 132 beside an E8P linear of 16384 rows): they bring the other heads' S to the L2. Three threads of four convolve
// two channels of q, k or v each, the others compute beta and the decay; then the tokens go over S one after the other. The
// block of a key head's first value head writes what the key head's blocks share: its places of both rings are none that
// the others read in this launch.
//
// With HIDDEN a block computes its head's b and a from the residual stream too: two dot products of a token's columns with
// weights that are in shared memory before the wait, and the sum of squares of the norm in front of them. A thread has the
// same columns and the sums the same order whatever TOKENS and the rows are.
//
// Set when compiled: TYPE of the activations, WEIGHT and NORM of the convolution's and the norm's weights, STATE of S (as
// numbers.cuh numbers them), TOKENS of a row (1 to 8), WIDTH of the convolution, DV of a value, CHANNELS (a decay for
// each key channel), DELTA (the delta rule; else Mamba2, whose query is C, key B, value x), HIDDEN (columns of x, a multiple
// of 8; 0 where b and a are given), GAIN of x_norm.

#include "linear_state.cuh"

constexpr int ROWS = DV / WARPS / 4;
constexpr int DECAYS = CHANNELS ? KEYS : 1;  // of a token
constexpr int PAIRS = (2 * KEYS + DV) / 2;   // of channels of a block
constexpr int RESULT = DELTA ? TYPE : FLOAT32;
constexpr bool FIRST = STATE == FLOAT32 && TOKENS <= 4;  // registers suffice to load activations before S is stored
constexpr int SIZE = TYPE == FLOAT32 ? 4 : 2;  // bytes of an activation
constexpr int EARLY = 8;                       // blocks of a row that begin first
constexpr int RATES = 2 * HIDDEN * SIZE, GAINS = HIDDEN * (GAIN == FLOAT32 ? 4 : 2);  // bytes of b's and a's weights, of x_norm
constexpr int FOURS = (HIDDEN / 4 + THREADS - 1) / THREADS;                           // of columns that a thread has
static_assert(HIDDEN % 8 == 0 && (HIDDEN == 0 || DELTA && !CHANNELS), "16 bytes at a time; one decay a head");
static_assert(PAIRS <= THREADS - 64 && TOKENS <= WARPS, "a warp writes a token, two warps compute gates");

struct Arguments {
  const void* qkv;       // [rows, TOKENS, qkv_stride]: q | k | v, of Mamba2 v | k | q
  const void* z;         // [rows, TOKENS, z_stride]
  const void* b;         // [rows, TOKENS, b_stride], of the delta rule
  const void* a;         // [rows, TOKENS, a_stride], of Mamba2 dt
  const void* weight;    // [channels, WIDTH]
  const void* bias;      // [channels], or none
  const float* a_log;    // [heads]
  const float* dt_bias;  // [heads, DECAYS]
  const float* skip;     // [heads], D of Mamba2
  const void* norm;      // [DV], of the delta rule
  const void* x;         // [rows, TOKENS, x_stride], with HIDDEN
  const void* rates;     // [2 heads, HIDDEN]: b's rows, then a's
  const void* x_norm;    // [HIDDEN], or none
  void* ring;            // [slots, ring_size, channels]
  void* state;           // [slots, heads, DV, KEYS]
  int* base;             // [slots, heads]
  float* keys;           // [slots, depth, key_heads, KEYS]
  float* deltas;         // [slots, depth, heads, DV]
  float* decays;         // [slots, depth, heads, DECAYS]
  const int* slots;      // [rows]
  const int* positions;  // [rows]
  const int* counts;     // [rows]
  void* out;             // [rows, TOKENS, heads, DV]
  int qkv_stride, z_stride, b_stride, a_stride, x_stride, key_heads, heads, ring_size, depth, limit, is_sigmoid, many;
  float eps, beta_scale, dt_min, x_eps;
};

struct Shared {
  uint4 given[4][TOKENS][KEYS * SIZE / 16];  // q, k, v and z as they come, where `many`
  float q[TOKENS][KEYS], k[TOKENS][KEYS], v[TOKENS][DV], o[TOKENS][DV], decay[TOKENS][DECAYS == 1 ? 4 : DECAYS];
  float squares[TOKENS][4], beta[TOKENS], rate, offset;
  float sums[HIDDEN ? TOKENS : 1][WARPS][3];  // of each warp's columns: x^2, x b's weights, x a's
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) gated_delta(const __grid_constant__ Arguments p) {
  extern __shared__ float4 dynamic[];  // [HIDDEN] weights of b, of a, x_norm; [depth] keys, deltas, decays
  __shared__ Shared s;
  pdl_trigger();
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = lane % 8, first_row = warp * 4 * ROWS + lane / 8;  // of S: keys 4 part + 32 j, rows first_row + 4 i
  const int ratio = p.heads / p.key_heads, key_head = head / ratio, channels = 2 * p.key_heads * KEYS + p.heads * DV;
  char* const weights = (char*)dynamic;
  char* const gains = weights + RATES;
  if (HIDDEN) {
    for (int i = threadIdx.x; i < RATES / 16; i += THREADS) {
      const int which = i >= RATES / 32, c = i - which * (RATES / 32);
      copy16<ALONE>(address(weights + 16 * i), (const char*)p.rates + (size_t)(which * p.heads + head) * (RATES / 2) + 16 * c);
    }
    for (int i = threadIdx.x; p.x_norm && i < GAINS / 16; i += THREADS)
      copy16<ALONE>(address(gains + 16 * i), (const char*)p.x_norm + 16 * i);
  }
  const int slot = p.slots[row], position = p.positions[row];
  const size_t place = (size_t)slot * p.heads + head;
  float4 state[ROWS][4];
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      state[i][j] = position == 0 ? make_float4(0.f, 0.f, 0.f, 0.f)
                                  : load_four<STATE>(p.state, (place * DV + first_row + 4 * i) * KEYS + 4 * part + 32 * j);
  if (!p.many && head < EARLY && threadIdx.x == THREADS - 1) {
    for (int other = head + EARLY; other < p.heads; other += EARLY) {
      constexpr u32 bytes = DV * KEYS * (STATE == FLOAT32 ? 4 : 2);
      if (position > 0) fetch_to_l2((const char*)p.state + ((size_t)slot * p.heads + other) * bytes, bytes);
      for (int which = 0; HIDDEN && which < 2; ++which)
        fetch_to_l2((const char*)p.rates + (size_t)(which * p.heads + other) * (RATES / 2), RATES / 2);
    }
  }
  const int base = position == 0 ? 0 : p.base[place];
  // Two channels of a thread: of q, k or v, which begin at `first` of a block's channels.
  const int kind = threadIdx.x / 64, pair = 2 * (threadIdx.x % 64), keys = p.key_heads * KEYS;
  auto first = [&](int kind) {
    return kind == 2 ? (DELTA ? 2 * keys : 0) + head * DV
                     : (DELTA ? kind * keys : p.heads * DV + (1 - kind) * keys) + key_head * KEYS;
  };
  const int channel = first(kind) + pair;
  const bool convolves = threadIdx.x < PAIRS;
  float2 window[WIDTH - 1 + TOKENS], weight[WIDTH], bias = make_float2(0.f, 0.f);
  if (convolves) {
    if (!DELTA && p.bias) bias = load_two<WEIGHT>(p.bias, channel);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j)
      weight[j] = make_float2(load_one<WEIGHT>(p.weight, (size_t)channel * WIDTH + j),
                              load_one<WEIGHT>(p.weight, (size_t)(channel + 1) * WIDTH + j));
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) {
      const int before = position + j - (WIDTH - 1);
      window[j] = make_float2(0.f, 0.f);
      if (before >= 0) window[j] = load_two<TYPE>(p.ring, ((size_t)slot * p.ring_size + before % p.ring_size) * channels + channel);
    }
  }
  if (threadIdx.x == 0) s.rate = -expf(p.a_log[head]), s.offset = CHANNELS ? 0.f : p.dt_bias[head];
  const size_t token = (size_t)row * TOKENS;
  if (p.many) {
    pdl_wait();
    for (int i = threadIdx.x; i < 4 * TOKENS * (KEYS * SIZE / 16); i += THREADS) {
      const int which = i / (TOKENS * (KEYS * SIZE / 16)), t = i / (KEYS * SIZE / 16) % TOKENS, c = i % (KEYS * SIZE / 16);
      if (which >= 2 && c >= DV * SIZE / 16) continue;
      const void* from = which == 3 ? p.z : p.qkv;
      const size_t at = which == 3 ? (token + t) * p.z_stride + head * DV : (token + t) * p.qkv_stride + first(which);
      copy16<ALONE>(address(&s.given[which][t][c]), (const char*)from + at * SIZE + 16 * c);
    }
  }
  const int waiting = min(max(position - base, 0), p.depth);
  float* const record_keys = (float*)(gains + GAINS);
  float* const record_deltas = record_keys + p.depth * KEYS;
  float* const record_decays = record_deltas + p.depth * DV;
  for (int i = threadIdx.x; i < waiting * 64; i += THREADS) {  // of a record 32 lanes take the key, 32 the delta
    const int n = i / 64, c = i % 32;
    const size_t at = (size_t)slot * p.depth + (base + n) % p.depth;
    if (i % 64 < 32) copy16<ALONE>(address(record_keys + n * KEYS + 4 * c), p.keys + (at * p.key_heads + key_head) * KEYS + 4 * c);
    else if (4 * c < DV) copy16<ALONE>(address(record_deltas + n * DV + 4 * c), p.deltas + (at * p.heads + head) * DV + 4 * c);
  }
  for (int i = threadIdx.x; i < waiting * DECAYS; i += THREADS) {
    const int n = i / DECAYS, c = i % DECAYS;
    const size_t at = (size_t)slot * p.depth + (base + n) % p.depth;
    copy_few<4>(address(record_decays + n * DECAYS + c), p.decays + (at * p.heads + head) * DECAYS + c);
  }
  copies_there();
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < waiting; ++n) {
    float delta[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) delta[i] = record_deltas[n * DV + first_row + 4 * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 key = *(const float4*)(record_keys + n * KEYS + 4 * part + 32 * j);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (CHANNELS) state[i][j] = scale(state[i][j], *(const float4*)(record_decays + n * DECAYS + 4 * part + 32 * j));
        else state[i][j] = scale(state[i][j], record_decays[n]);
        state[i][j] = add(state[i][j], delta[i], key);
      }
    }
  }

  if (!p.many) pdl_wait();
  const int real = slot > 0 ? p.counts[row] : 0;
  auto take = [&] {  // of padding too: what is there can be read, and is dropped
    if (!convolves) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      window[WIDTH - 1 + t] = p.many ? load_two<TYPE>(&s.given[kind][t], pair)
                                     : load_two<TYPE>(p.qkv, (token + t) * p.qkv_stride + channel);
  };
  if (FIRST) take();
  const int mine = threadIdx.x - 3 * 64;  // of the threads that compute gates
  float given_a = 0.f, given_b = 0.f;
  if (HIDDEN) {
    constexpr int LINES = HIDDEN ? (HIDDEN * SIZE + 127) / 128 : 1;  // of a token
    for (int i = threadIdx.x; TOKENS > 1 && i < TOKENS * LINES; i += THREADS)
      prefetch_l1((const char*)p.x + (token + i / LINES) * p.x_stride * SIZE + i % LINES * 128);
#pragma unroll 1
    for (int t = 0; t < TOKENS; ++t) {
      __syncwarp();  // what all tokens are multiplied by is read anew for each: registers hold S
      float4 x[FOURS ? FOURS : 1];
#pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        const int at = 4 * (threadIdx.x + i * THREADS);
        x[i] = at < HIDDEN ? load_four<TYPE>(p.x, (token + t) * p.x_stride + at) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
      float squares = 0.f, b = 0.f, a = 0.f;
#pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        const int at = 4 * (threadIdx.x + i * THREADS);
        if (at >= HIDDEN) continue;
        squares = dot(x[i], x[i], squares);
        if (p.x_norm) x[i] = scale(x[i], load_four<GAIN>(gains, at));
        b = dot(x[i], load_four<TYPE>(weights, at), b);
        a = dot(x[i], load_four<TYPE>(weights, HIDDEN + at), a);
      }
      squares = sum_warp(squares), b = sum_warp(b), a = sum_warp(a);
      if (lane == 0) s.sums[t][warp][0] = squares, s.sums[t][warp][1] = b, s.sums[t][warp][2] = a;
    }
  } else if (mine >= 0 && mine < TOKENS) {
    if (DELTA) given_b = load_one<TYPE>(p.b, (token + mine) * p.b_stride + head);
    if (!CHANNELS) given_a = load_one<TYPE>(p.a, (token + mine) * p.a_stride + head);
  }
  const int count = min(max(real, 0), TOKENS);
  const bool flush = count > 0 && (position == 0 || position + count - base > p.limit);
  if (flush) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_four<STATE>(p.state, (place * DV + first_row + 4 * i) * KEYS + 4 * part + 32 * j, state[i][j]);
        state[i][j] = rounded<STATE>(state[i][j]);
      }
    if (threadIdx.x == 0) p.base[place] = position;
  }
  if (!FIRST) take();
  const bool shares = head % ratio == 0;  // writes what the key head's blocks have in common
  auto gates = [&] {  // of threads of kind 3
    if (DELTA && mine < count) s.beta[mine] = p.beta_scale * sigmoid(given_b);
    for (int i = mine; i < count * DECAYS; i += 64) {
      const int t = i / DECAYS, c = i % DECAYS;
      const float a = CHANNELS ? load_one<TYPE>(p.a, (token + t) * p.a_stride + head * DECAYS + c) + p.dt_bias[head * DECAYS + c]
                               : given_a + s.offset;
      const float step = DELTA ? softplus(a) : fmaxf(softplus(a), p.dt_min);
      s.decay[t][c] = expf(s.rate * step);  // near 1 in long memories, where an ulp counts
      if (!DELTA) s.beta[t] = step;
    }
  };
  float2 mixed[TOKENS];
  if (convolves) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float2 sum = bias;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j)
        sum.x = __fmaf_rn(weight[j].x, window[t + j].x, sum.x), sum.y = __fmaf_rn(weight[j].y, window[t + j].y, sum.y);
      mixed[t] = make_float2(sum.x * sigmoid(sum.x), sum.y * sigmoid(sum.y));
      if (t < count && (kind == 2 || shares))
        store_two<TYPE>(p.ring, ((size_t)slot * p.ring_size + (position + t) % p.ring_size) * channels + channel, window[WIDTH - 1 + t]);
      if (kind == 2) {
        *(float2*)&s.v[t][pair] = mixed[t];
      } else if (DELTA) {
        const float squares = sum_warp(mixed[t].x * mixed[t].x + mixed[t].y * mixed[t].y);
        if (lane == 0) s.squares[t][warp] = squares;
      }
    }
  } else if (!HIDDEN && kind == 3) {
    gates();
  }
  __syncthreads();
  if (kind < 2) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const float unit = DELTA ? rsqrtf(s.squares[t][2 * kind] + s.squares[t][2 * kind + 1] + 1e-6f) : 1.f;
      const float by = DELTA && kind == 0 ? unit * 0.08838834764831845f : unit;  // 128^-0.5
      *(float2*)(kind == 0 ? &s.q[t][pair] : &s.k[t][pair]) = make_float2(mixed[t].x * by, mixed[t].y * by);
    }
  } else if (HIDDEN && kind == 3 && mine < count) {
    float sums[3] = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
#pragma unroll
      for (int i = 0; i < 3; ++i) sums[i] += s.sums[mine][w][i];
    const float unit = p.x_norm ? rsqrtf(sums[0] / HIDDEN + p.x_eps) : 1.f;
    given_b = unit * sums[1], given_a = unit * sums[2];
    gates();
  }
  // What a warp needs to end its token.
  const bool ends = warp < count, writes = 4 * lane < DV;
  const float skip = DELTA ? 0.f : p.skip[head];
  float4 gate = make_float4(0.f, 0.f, 0.f, 0.f), gain = gate;
  if (ends && writes) {
    gate = p.many ? load_four<TYPE>(&s.given[3][warp], 4 * lane)
                  : load_four<TYPE>(p.z, (token + warp) * p.z_stride + head * DV + 4 * lane);
    if (DELTA) gain = load_four<NORM>(p.norm, 4 * lane);
  }
  __syncthreads();
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    float sum[ROWS] = {}, delta[ROWS], out[ROWS] = {};
    const float beta = s.beta[t];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) delta[i] = s.v[t][first_row + 4 * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 key = *(const float4*)&s.k[t][4 * part + 32 * j];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (CHANNELS) state[i][j] = scale(state[i][j], *(const float4*)&s.decay[t][4 * part + 32 * j]);
        else state[i][j] = scale(state[i][j], s.decay[t][0]);
        if (DELTA) sum[i] = dot(state[i][j], key, sum[i]);
      }
    }
    if (DELTA) sum_rows(sum);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) delta[i] = __fmul_rn(beta, __fsub_rn(delta[i], sum[i]));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 query = *(const float4*)&s.q[t][4 * part + 32 * j], key = *(const float4*)&s.k[t][4 * part + 32 * j];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        state[i][j] = add(state[i][j], delta[i], key);
        out[i] = dot(state[i][j], query, out[i]);
      }
    }
    sum_rows(out);
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int v = first_row + 4 * i;
        s.o[t][v] = DELTA ? out[i] : __fmaf_rn(skip, s.v[t][v], out[i]);
        s.v[t][v] = delta[i];
      }
    }
  }
  __syncthreads();
  if (warp >= TOKENS) return;
  const size_t at = ((token + warp) * p.heads + head) * DV + 4 * lane;
  if (!ends) {
    if (writes) store_four<RESULT>(p.out, at, make_float4(0.f, 0.f, 0.f, 0.f));
    return;
  }
  const float4 o = writes ? *(const float4*)&s.o[warp][4 * lane] : make_float4(0.f, 0.f, 0.f, 0.f);
  const float by = DELTA ? rsqrtf(sum_warp(o.x * o.x + o.y * o.y + (o.z * o.z + o.w * o.w)) * (1.f / DV) + p.eps) : 1.f;
  auto end = [&](float v, float weight, float z) {
    return v * (DELTA ? by * weight : 1.f) * (p.is_sigmoid ? sigmoid(z) : z * sigmoid(z));
  };
  const size_t record = (size_t)slot * p.depth + (position + warp) % p.depth;
  if (writes) {
    store_four<RESULT>(p.out, at, make_float4(end(o.x, gain.x, gate.x), end(o.y, gain.y, gate.y), end(o.z, gain.z, gate.z),
                                              end(o.w, gain.w, gate.w)));
    *(float4*)(p.deltas + (record * p.heads + head) * DV + 4 * lane) = *(const float4*)&s.v[warp][4 * lane];
  }
  if (shares) *(float4*)(p.keys + (record * p.key_heads + key_head) * KEYS + 4 * lane) = *(const float4*)&s.k[warp][4 * lane];
  for (int c = lane; c < DECAYS; c += 32) p.decays[(record * p.heads + head) * DECAYS + c] = s.decay[warp][c];
}
