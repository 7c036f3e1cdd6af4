// Between two sublayers of ranks, in one launch: the sublayer's partial results added up over ranks (exchange.cuh), the
// streams updated, the next sublayer's input and mixing weights.
//
// As in deepseek_hyper.cu a cluster of 16 blocks owns PER tokens, a block DIM / 16 columns of all streams, a thread two
// of them, and half of the threads half of the rows of fn. Two things are otherwise. The mixing matrix comes and goes
// as logits: a warp runs Sinkhorn's iterations, which take as long as words to another GPU, while these are under way.
// And the cluster meets once: with the dots go the products of the streams with each other, of which and of the weights
// `pre` the norm of the mixture is made, before that is rounded.
//
// A block's words have chunks of an inbox of their own, so that nobody else counts their rounds.
//
// Set when compiled: HALF (1: float16, 0: bfloat16), WIDE (whether `norm` is float32), DIM (a multiple of 1024), PER,
// WORLD (ranks).

#include "deepseek_hyper.cuh"
#include "exchange.cuh"

constexpr int PRODUCTS = H * (H + 1) / 2;                   // of two streams: 00 11 22 33 | 01 02 03 12 13 23
constexpr int SUMS = (ROWS + PRODUCTS + 3) / 4 * 4;         // of a token: the dots, then the products
constexpr int CHUNKS = (PAIRS + CHUNK - 1) / CHUNK;         // of a block's words of a token

struct Arguments {
  u16* streams;        // [tokens, H, DIM], updated
  const u16* x;        // [tokens, DIM]: this rank's part of the sublayer's result
  const float* post;   // [tokens, H]
  const float* logits; // [tokens, H, H]: of the mixing matrix
  const float* fn;     // [ROWS, H, DIM]: rows pre | post | comb
  const float* base;   // [ROWS]
  const float* scale;  // [3]
  const void* norm;    // [DIM]
  u16* out;            // [tokens, DIM]: the next sublayer's input
  float* post_out;
  float* logits_out;
  u64* state;
  u64* alarm;
  u64 *inbox0, *inbox1, *inbox2, *inbox3, *inbox4, *inbox5, *inbox6, *inbox7;
  int room, rank;
  int tokens, iterations;
  float eps, floor;
};

extern "C" __global__ void __launch_bounds__(THREADS) hyper_all_reduce(const __grid_constant__ Arguments a) {
  __shared__ __align__(16) float partial[PER][SIDE][SUMS], gathered[PER][BLOCKS][SUMS];
  __shared__ float matrix[PER][H * H];
  __shared__ u64 barrier;
  pdl_trigger();  // every block runs by then: what follows may fetch its weights meanwhile
  if (threadIdx.x == 0) {
    make_barrier(address(&barrier), 1);
    expect(address(&barrier), PER * SUMS * BLOCKS * 4);
    barriers_visible();
  }
  __syncwarp();
  cluster_begun();
  const u32 block = blockIdx.x % BLOCKS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x / BLOCKS * PER;
  const int half = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS, column = block * (DIM / BLOCKS) + 2 * pair;
  float2 weight[MINE][H];
#pragma unroll
  for (int m = 0; m < MINE; ++m)
#pragma unroll
    for (int k = 0; k < H; ++k)
      weight[m][k] = load_now(a.fn + ((size_t)(half * MINE + m) * H + k) * DIM + column);
  const float2 gain =
      WIDE ? __ldg((const float2*)a.norm + column / 2) : widen2(__ldg((const u32*)a.norm + column / 2));
  const float base = lane < ROWS ? __ldg(a.base + lane) : 0.0f;
  const float scale = __ldg(a.scale + (lane < H ? 0 : lane < 2 * H ? 1 : 2));
  pdl_wait();

  Exchange<Arguments, WORLD> peers(a);
  // Beyond the last token: the last once more, neither sent nor written.
  auto token_of = [&](int p) { return min(first + p, a.tokens - 1); };
  auto place_of = [&](int p) { return ((token_of(p) * BLOCKS + block) * CHUNKS) * CHUNK + pair; };
  u32 own[PER], old[PER][H];
  u64 number[PER];
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    number[p] = peers.number(place_of(p) / CHUNK);
    own[p] = *(const u32*)(a.x + (size_t)token_of(p) * DIM + column);
  }
#pragma unroll
  for (int p = 0; p < PER; ++p)
    if (half == 0 && peers.armed && first + p < a.tokens) peers.send(number[p], place_of(p), own[p]);
  float post[PER][H];
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    load4(post[p], a.post + (size_t)token_of(p) * H);
#pragma unroll
    for (int k = 0; k < H; ++k) old[p][k] = *(const u32*)(a.streams + ((size_t)token_of(p) * H + k) * DIM + column);
  }
#pragma unroll
  for (int p = 0; p < PER; ++p)
    if (warp == 2 * SIDE - 1 - p) {  // all lanes the same
      float c[H][H];
#pragma unroll
      for (int i = 0; i < H; ++i) load4(c[i], a.logits + ((size_t)token_of(p) * H + i) * H);
      sinkhorn(c, a.iterations, a.floor);
      if (lane == 0)
#pragma unroll
        for (int i = 0; i < H; ++i) *(float4*)(matrix[p] + i * H) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
  float2 x[PER];
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    u32 words[WORLD];
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) words[peer] = own[p];
    peers.receive(peers.own(), number[p], place_of(p), words);
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < WORLD; ++peer) {
      const float2 v = widen2(words[peer]);
      sum.x += v.x, sum.y += v.y;
    }
    x[p] = widen2(narrow2(sum));
  }
  __syncthreads();  // the matrix is there, and every word: their chunks begin their next round
  if (half == 0 && pair % CHUNK == 0)
#pragma unroll
    for (int p = 0; p < PER; ++p)
      if (first + p < a.tokens) peers.next(place_of(p) / CHUNK, number[p]);

  float2 stream[PER][H];
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    float comb[H][H];
#pragma unroll
    for (int j = 0; j < H; ++j) load4(comb[j], matrix[p] + j * H);
#pragma unroll
    for (int k = 0; k < H; ++k) {
      float2 v = make_float2(post[p][k] * x[p].x, post[p][k] * x[p].y);
#pragma unroll
      for (int j = 0; j < H; ++j) {
        const float2 u = widen2(old[p][j]);
        v.x += comb[j][k] * u.x, v.y += comb[j][k] * u.y;
      }
      stream[p][k] = widen2(narrow2(v));
    }
  }
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    float sums[16] = {}, last = 0.0f;
#pragma unroll
    for (int k = 0; k < H; ++k)
#pragma unroll
      for (int m = 0; m < MINE; ++m) sums[m] += weight[m][k].x * stream[p][k].x + weight[m][k].y * stream[p][k].y;
    auto product = [&](int j, int k) { return stream[p][j].x * stream[p][k].x + stream[p][j].y * stream[p][k].y; };
    if (half == 0) {
      sums[12] = product(0, 0), sums[13] = product(1, 1), sums[14] = product(2, 2), sums[15] = product(3, 3);
      last = product(0, 1);
    } else {
      sums[12] = product(0, 2), sums[13] = product(0, 3), sums[14] = product(1, 2), sums[15] = product(1, 3);
      last = product(2, 3);
    }
    const float sum = add_lanes(sums, lane);
#pragma unroll
    for (int n = 16; n > 0; n /= 2) last += __shfl_xor_sync(~0u, last, n);
    const int value = lane / 2, products = ROWS + half * (PRODUCTS / 2);
    float* const to = partial[p][warp % SIDE];
    if (lane % 2 == 0) to[value < MINE ? half * MINE + value : products + value - MINE] = sum;
    if (lane == 1) to[products + 4] = last;
  }
  __syncthreads();
  if (half == 0)  // both halves have read
#pragma unroll
    for (int p = 0; p < PER; ++p)
      if (first + p < a.tokens)
#pragma unroll
        for (int k = 0; k < H; ++k)
          *(u32*)(a.streams + ((size_t)(first + p) * H + k) * DIM + column) = narrow2(stream[p][k]);
  all_begun();  // all blocks of the cluster run and have their barriers
  for (int i = threadIdx.x; i < PER * (SUMS / 4) * BLOCKS; i += THREADS) {
    const int p = i / (SUMS / 4 * BLOCKS), which = i % (SUMS / 4), to = i / (SUMS / 4) % BLOCKS;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < SIDE; ++w) {
      const float4 v = ((const float4*)partial[p][w])[which];
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    send(at_rank(&gathered[p][block][4 * which], to), total, at_rank(&barrier, to));
  }
  receive(address(&barrier));

#pragma unroll
  for (int p = 0; p < PER; ++p) {
    const bool tells = block == p && warp == 2 * SIDE - 1;
    if (half == 1 && !tells) continue;
    float dot = 0.0f, rest = 0.0f;  // lane i: sums i and 32 + i of the token
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) dot += gathered[p][b][lane];
    if (lane < ROWS + PRODUCTS - 32)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) rest += gathered[p][b][32 + lane];
    float square[H];
#pragma unroll
    for (int k = 0; k < H; ++k) square[k] = __shfl_sync(~0u, dot, ROWS + k);
    const float unit = rsqrtf(((square[0] + square[1]) + (square[2] + square[3])) / (H * DIM) + a.eps);
    const float logit = dot * unit * scale + base, gate = sigmoid(logit);
    if (tells) {
      if (first + p < a.tokens) {
        if (lane >= H && lane < 2 * H) a.post_out[(size_t)(first + p) * H + lane - H] = 2.0f * gate;
        if (lane >= 2 * H && lane < ROWS) a.logits_out[(size_t)(first + p) * H * H + lane - 2 * H] = logit;
      }
      continue;
    }
    float pre[H], total = 0.0f;
    float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < H; ++k) {
      pre[k] = __shfl_sync(~0u, gate, k) + a.floor;
      v.x += pre[k] * stream[p][k].x, v.y += pre[k] * stream[p][k].y;
      total += pre[k] * pre[k] * square[k];
    }
    int at = ROWS + H;
#pragma unroll
    for (int j = 0; j < H; ++j)
#pragma unroll
      for (int k = j + 1; k < H; ++k, ++at)
        total += 2.0f * pre[j] * pre[k] * (at < 32 ? __shfl_sync(~0u, dot, at) : __shfl_sync(~0u, rest, at - 32));
    const float root = rsqrtf(fmaxf(total, 0.0f) / DIM + a.eps);
    const float2 mixed = widen2(narrow2(v));
    if (first + p < a.tokens)
      *(u32*)(a.out + (size_t)(first + p) * DIM + column) =
          narrow2(make_float2(mixed.x * root * gain.x, mixed.y * root * gain.y));
  }
}
