// Between two sublayers: the streams updated, and the next sublayer's input and mixing weights, in one launch.
//
// A cluster of 16 blocks owns PER tokens; a block owns DIM / 16 columns of all four streams, a thread two columns of them.
// Half of the threads multiply the first half of the rows of fn, half the second; fn is in registers before the wait
// for the sublayer's result. Sums meet in shared memory across the cluster, twice: the 24 dots with the sum of squares,
// then the squares of the mixture. Every block adds in the same order, so all have the same bits. The 20 iterations of
// Sinkhorn run in one warp beside the rest, of each token in a block of its own.
//
// Set when compiled: HALF (1: float16, 0: bfloat16), WIDE (whether `norm` is float32), DIM (a multiple of 1024), PER.

#include "deepseek_hyper.cuh"

constexpr int SUMS = ROWS + 1;  // the dots, then the sum of squares

struct Arguments {
  u16* streams;        // [tokens, H, DIM], updated
  const u16* x;        // [tokens, DIM]: the sublayer's result
  const float* post;   // [tokens, H]
  const float* comb;   // [tokens, H, H]
  const float* fn;     // [ROWS, H, DIM]: rows pre | post | comb
  const float* base;   // [ROWS]
  const float* scale;  // [3]
  const void* norm;    // [DIM]
  u16* out;            // [tokens, DIM]: the next sublayer's input
  float* post_out;
  float* comb_out;
  int tokens, iterations;
  float eps, floor;
};

extern "C" __global__ void __launch_bounds__(THREADS) hyper_update_mix(const __grid_constant__ Arguments a) {
  __shared__ float partial[PER][2 * SIDE][MINE + 1], gathered[PER][BLOCKS][SUMS], warp_squares[PER][SIDE];
  __shared__ float squares[PER][BLOCKS];
  __shared__ u64 barriers[2];
  pdl_trigger();
  if (threadIdx.x == 0) {
    make_barrier(address(&barriers[0]), 1), make_barrier(address(&barriers[1]), 1);
    expect(address(&barriers[0]), PER * SUMS * BLOCKS * 4), expect(address(&barriers[1]), PER * BLOCKS * 4);
    barriers_visible();
  }
  __syncwarp();
  cluster_begun();
  const u32 rank = blockIdx.x % BLOCKS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x / BLOCKS * PER;
  const int half = threadIdx.x / PAIRS, column = rank * (DIM / BLOCKS) + 2 * (threadIdx.x % PAIRS);
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

  float2 stream[PER][H];
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    const size_t token = min(first + p, a.tokens - 1);  // beyond the last: the last once more, not written
    const float2 x = widen2(*(const u32*)(a.x + token * DIM + column));
    float2 old[H];
#pragma unroll
    for (int k = 0; k < H; ++k) old[k] = widen2(*(const u32*)(a.streams + (token * H + k) * DIM + column));
    float post[H], comb[H][H];
    load4(post, a.post + token * H);
#pragma unroll
    for (int j = 0; j < H; ++j) load4(comb[j], a.comb + (token * H + j) * H);
#pragma unroll
    for (int k = 0; k < H; ++k) {
      float2 v = make_float2(post[k] * x.x, post[k] * x.y);
#pragma unroll
      for (int j = 0; j < H; ++j) v.x += comb[j][k] * old[j].x, v.y += comb[j][k] * old[j].y;
      stream[p][k] = widen2(narrow2(v));
    }
  }
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    float sums[16] = {};
#pragma unroll
    for (int k = 0; k < H; ++k) {
      const float2 v = stream[p][k];
#pragma unroll
      for (int m = 0; m < MINE; ++m) sums[m] += weight[m][k].x * v.x + weight[m][k].y * v.y;
      sums[MINE] += v.x * v.x + v.y * v.y;
    }
    const float sum = add_lanes(sums, lane);
    if (lane % 2 == 0 && lane / 2 <= MINE) partial[p][warp][lane / 2] = sum;
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
  for (int i = threadIdx.x; i < PER * SUMS * BLOCKS; i += THREADS) {
    const int p = i / (SUMS * BLOCKS), which = i % SUMS, to = i / SUMS % BLOCKS;
    const int begin = which / MINE % 2 * SIDE, at = which < ROWS ? which % MINE : MINE;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SIDE; ++w) total += partial[p][begin + w][at];
    send(at_rank(&gathered[p][rank][which], to), total, at_rank(&barriers[0], to));
  }
  receive(address(&barriers[0]));

  float2 mixed[PER];
  float mine = 0.0f;  // the logit of the token whose Sinkhorn is this block's
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    float dot = 0.0f;  // lane i: sum i of the token
    if (lane < SUMS)
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) dot += gathered[p][b][lane];
    const float unit = rsqrtf(__shfl_sync(~0u, dot, ROWS) / (H * DIM) + a.eps);
    const float logit = dot * unit * scale + base;
    if (rank == p) mine = logit;
    const float gate = sigmoid(logit);
    float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < H; ++k) {
      const float pre = __shfl_sync(~0u, gate, k) + a.floor;
      v.x += pre * stream[p][k].x, v.y += pre * stream[p][k].y;
    }
    mixed[p] = widen2(narrow2(v));
    float square = mixed[p].x * mixed[p].x + mixed[p].y * mixed[p].y;
#pragma unroll
    for (int n = 16; n > 0; n /= 2) square += __shfl_xor_sync(~0u, square, n);
    if (lane == 0 && half == 0) warp_squares[p][warp] = square;
  }
  __syncthreads();
  if (threadIdx.x < PER * BLOCKS) {
    const int p = threadIdx.x / BLOCKS;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SIDE; ++w) total += warp_squares[p][w];
    const u32 to = threadIdx.x % BLOCKS;
    send(at_rank(&squares[p][rank], to), total, at_rank(&barriers[1], to));
  }
  if (rank < PER && first + rank < a.tokens && warp == 2 * SIDE - 1) {
    const size_t token = first + rank;
    float c[H][H];
#pragma unroll
    for (int i = 0; i < H * H; ++i) c[i / H][i % H] = __shfl_sync(~0u, mine, 2 * H + i);
    if (lane >= H && lane < 2 * H) a.post_out[token * H + lane - H] = 2.0f * sigmoid(mine);
    sinkhorn(c, a.iterations, a.floor);
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < H; ++i)
        *(float4*)(a.comb_out + (token * H + i) * H) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
  }
  receive(address(&barriers[1]));
  if (half) return;
#pragma unroll
  for (int p = 0; p < PER; ++p) {
    float total = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) total += squares[p][b];
    const float root = rsqrtf(total / DIM + a.eps);
    if (first + p < a.tokens)
      *(u32*)(a.out + (size_t)(first + p) * DIM + column) =
          narrow2(make_float2(mixed[p].x * root * gain.x, mixed[p].y * root * gain.y));
  }
}
