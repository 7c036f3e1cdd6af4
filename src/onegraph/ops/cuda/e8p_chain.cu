// The E8P linears between two attentions in one launch, for few tokens of a small model. Decoding is e8p_decode.cu's.
//
// A token is one cluster's: tokens share nothing but the L2, so a token's bits do not depend on what runs beside it.
// A cluster's blocks hold the codes of all links in shared memory, asked for before the attention
// in front has ended: nothing is fetched on the way. A worker, one of WORKERS warps, has one job a link: 16 rows times
// one of the PARTS of the columns; jobs are dealt out to the blocks in turn. It decodes them into registers while x is
// not there yet. Sums of rows go, before the output's rotation, to every block of the cluster, where the other warps,
// a slice each, rotate, scale, add, norm and rotate again, each block for itself: so there is one exchange a link, a
// store into the others' shared memory that their barrier counts, and no barrier of the cluster. Only the last link's
// go to one block alone, which stores them.
//
// Activations have 16 bits on one scale for all columns; each worker sums its part of the columns in integers. The
// parts are added in their order: the same bits whatever the timing. All four links share one set of registers and one
// layout of shared memory, which is why they are one file.
//
// Set when compiled: BITS (2, 3, 4), HALF (1: float16, 0: bfloat16), CLUSTER (blocks: 4, 8 or 16), and the sizes HEADS
// (k of the output linear), WIDTH, INNER (k of down) and QKV (0: the last layer, whose chain ends with down).

#include "e8p_common.cuh"

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int slices(int columns) { return (columns + SLICE - 1) / SLICE; }
constexpr int WORKERS = 12;
constexpr int SLICES = larger(larger(slices(HEADS), slices(WIDTH)), larger(slices(INNER), slices(QKV)));
constexpr int WARPS = SLICES + WORKERS;
constexpr int MOST_AHEAD = 5;      // pieces that a worker's registers hold decoded
constexpr int LINKS = QKV ? 4 : 3;
constexpr float LEVELS = 32512.f;  // as in e8p_decode.cu
#include "e8p_activations.cuh"

// Link L: output, gate and up, down, qkv.
template <int L> struct Of {
  static constexpr int N = L == 1 ? 2 * INNER : L == 3 ? QKV : WIDTH;
  static constexpr int K = L == 0 ? HEADS : L == 2 ? INNER : WIDTH;
  static constexpr int N_BLOCK = N % 128 ? 64 : 128, K_BLOCK = K % 128 ? 64 : 128;
  static constexpr int TILES = N / 16, PIECES = K / 64;           // of 16 rows, of 64 columns
  static constexpr int parts() {                                  // as many as give each worker one job at most
    int best = 1;
    for (int i = 1; (TILES * i + CLUSTER - 1) / CLUSTER <= WORKERS; i++)
      if (PIECES % i == 0) best = i;
    return best;
  }
  static constexpr int PARTS = parts(), WIDE = PIECES / PARTS;    // pieces of a job
  static constexpr int JOBS = TILES * PARTS, MOST = (JOBS + CLUSTER - 1) / CLUSTER;  // of all blocks and of one
  static_assert(MOST <= WORKERS, "a worker has one job a link");
  static constexpr int AHEAD = WIDE < MOST_AHEAD ? WIDE : MOST_AHEAD;
  static constexpr int SUMS = PARTS * N;                          // floats that a block receives
  static constexpr int UNITS = slices(K);                         // warps that prepare x, 8 columns a lane
  static constexpr int REST = BITS == 2 ? 0 : BITS == 3 ? 8 : 16; // bytes of a piece's residual codes, a row
  static constexpr int PITCH = (WIDE | 1) * 16, REST_PITCH = BITS == 3 ? WIDE * 8 : PITCH;  // of rows: in other banks
  static constexpr int JOB = 16 * (PITCH + (BITS == 2 ? 0 : REST_PITCH));
  static constexpr int END = MOST * JOB + Of<L - 1>::END;         // of its codes in a block's shared memory
  static constexpr float NORM = N_BLOCK == K_BLOCK ? 1.f / N_BLOCK : 0.011048543456039806f;  // of both rotations
};
template <> struct Of<-1> { static constexpr int END = 0; };
constexpr int CODES = Of<LINKS - 1>::END;
constexpr int EVEN = larger(Of<0>::SUMS, Of<2>::SUMS), ODD = larger(Of<1>::SUMS, Of<LINKS - 1>::SUMS);

struct Link {
  const u8* codes;         // int16 [n, k/8]
  const u8* rest;          // uint8 or int16 [n, k/8]
  const float* in_scale;   // [k]
  const float* out_scale;  // [n]
  const float* bias;       // [n] or null
};
struct Arguments {
  Link link[4];
  const uint2* codebook;   // int8 [512, 8]
  const u16* x;            // [tokens, HEADS]
  const u16* residual;     // [tokens, WIDTH]
  u16* sum;                // [tokens, WIDTH], the residual stream behind down
  u16* y;                  // [tokens, QKV]
  float eps;
};
struct __align__(128) Shared {   // after the tables; behind it codes, sums of even links, of odd links, x as fragments
  u64 arrived[4];                // a link's sums are there
  u32 top[4][16];                // by link and warp, of the warp's columns of x: the largest magnitude
  int sum[4][16];                // ... in steps of the scale
  float squares[4][16];
};

struct Scale {
  float step, offset, norm;
};
struct Block {
  const Arguments& p;
  Shared& s;
  u8* codes;
  float* sums[2];
  uint4* fragments;  // of x: by piece of 64 columns, lane % 4, high or low bytes, of two codes
  int rank, warp, lane;
  u32 bank;

  template <int L> __device__ __forceinline__ void fetch() const {
    typedef Of<L> O;
    u8* const to = codes + Of<L - 1>::END;
    for (int i = threadIdx.x; i < O::MOST * 16 * O::WIDE; i += WARPS * 32) {
      const int at = i / (16 * O::WIDE), row = i / O::WIDE % 16, piece = i % O::WIDE, job = rank + at * CLUSTER;
      if (job >= O::JOBS) break;
      const size_t from = (size_t)(job / O::PARTS * 16 + row) * O::PIECES + job % O::PARTS * O::WIDE + piece;
      u8* const first = to + at * O::JOB + row * O::PITCH + piece * 16;
      u8* const second = to + at * O::JOB + 16 * O::PITCH + row * O::REST_PITCH + piece * O::REST;
      copy16(address(first), p.link[L].codes + from * 16);
      if (BITS == 4) copy16(address(second), p.link[L].rest + from * 16);
      if (BITS == 3) copy_few<8>(address(second), p.link[L].rest + from * 8);
    }
  }
  template <int L> __device__ __forceinline__ int expected() const {  // bytes of sums
    typedef Of<L> O;
    if (L < LINKS - 1) return O::SUMS * 4;
    return max(0, min(O::N - rank * SLICE, SLICE)) * O::PARTS * 4;
  }
  template <int L> __device__ __forceinline__ void ask_scales() const {  // into the L2, a line a thread of the cluster
    const int at = (threadIdx.x * CLUSTER + rank) * 32;
    if (at < Of<L>::K) prefetch(p.link[L].in_scale + at);
    if (at < Of<L>::N) prefetch(p.link[L].out_scale + at);
  }

  // A worker's job of link L: its codes' nibbles, as far as they were decoded ahead, and then its sums, which go out.
  template <int L> struct Job {
    typedef Of<L> O;
    const Block& b;
    const int at, job, g, t;
    struct Piece {
      u32 words[2][STAGES][2];  // which of two codes, stage, row g and g + 8
    };
    Piece ahead[O::AHEAD];

    __device__ __forceinline__ Job(const Block& b, int worker)
        : b(b), at(worker), job(b.rank + worker * CLUSTER), g(b.lane / 4), t(b.lane % 4) {
      if (!works()) return;
#pragma unroll
      for (int c = 0; c < O::AHEAD; c++) nibbles(ahead[c], c);
    }
    __device__ __forceinline__ bool works() const { return at < O::MOST && job < O::JOBS; }
    __device__ __forceinline__ void nibbles(Piece& piece, int number) const {
      u32 (&to)[2][STAGES][2] = piece.words;
      const u8* const from = b.codes + Of<L - 1>::END + at * O::JOB;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = g + 8 * h;
        const u32 first = *(const u32*)(from + row * O::PITCH + number * 16 + t * 4);
        to[0][0][h] = decode<0>(first, b.bank), to[1][0][h] = decode<1>(first, b.bank);
        const u8* const rest = from + 16 * O::PITCH + row * O::REST_PITCH + number * O::REST;
        if (BITS == 4) {
          const u32 second = *(const u32*)(rest + t * 4);
          to[0][STAGES - 1][h] = decode<0>(second, b.bank), to[1][STAGES - 1][h] = decode<1>(second, b.bank);
        } else if (BITS == 3) {
          const u32 second = *(const u16*)(rest + t * 2);
          to[0][STAGES - 1][h] = decode_e81b<0>(second, b.bank), to[1][STAGES - 1][h] = decode_e81b<1>(second, b.bank);
        }
      }
    }
    __device__ __forceinline__ void multiply() const {
      if (!works()) return;
      const int lane = b.lane, tile = job / O::PARTS, part = job % O::PARTS;
      const uint4* const operands = b.fragments + part * (O::WIDE * 8) + t * 2 + g % 2;
      int acc[2][STAGES][4];
#pragma unroll
      for (int c = 0; c < 2; c++)
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++)
          acc[c][stage][0] = acc[c][stage][1] = acc[c][stage][2] = acc[c][stage][3] = 0;
#pragma unroll
      for (int piece = 0; piece < O::WIDE; piece++) {
        const uint4 x = lane < 8 ? operands[piece * 8] : make_uint4(0, 0, 0, 0);
        Piece now;
        if (piece >= O::AHEAD) nibbles(now, piece);
        const Piece& of = piece < O::AHEAD ? ahead[piece] : now;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int stage = 0; stage < STAGES; stage++) {
            const u32 v = of.words[c][stage][0], w = of.words[c][stage][1];
            mma_u8s8(acc[c][stage], v, w, v << 4, w << 4, c ? make_uint2(x.z, x.w) : make_uint2(x.x, x.y));
          }
      }
      float rows[2];  // g and g + 8, in lanes of t = 0
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float stages[STAGES];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
          const int high = acc[0][stage][2 * h] + acc[1][stage][2 * h];
          const int low = acc[0][stage][2 * h + 1] + acc[1][stage][2 * h + 1];
          stages[stage] = fmaf(256.f, (float)high, (float)low);
        }
        rows[h] = BITS == 2 ? stages[0] : fmaf(BITS == 3 ? 2.f : 4.f, stages[0], stages[STAGES - 1]);
      }
      // Row r to lane 4 (r % 8) + r / 8, from there four rows each to a lane for each block.
      const float low = __shfl_sync(~0u, rows[1], lane & ~3), row = t == 0 ? rows[0] : low;
      constexpr int GROUPS = 32 / CLUSTER, QUADS = GROUPS < 4 ? 4 / GROUPS : 1;
      const int to_rank = lane % CLUSTER;
      const u32 to = at_rank(b.sums[L % 2] + part * O::N + tile * 16, to_rank), barrier = at_rank(&b.s.arrived[L], to_rank);
      const bool wanted = L < LINKS - 1 || tile / (SLICE / 16) == to_rank;
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        const int quad = lane / CLUSTER * QUADS + i, from = quad % 2 * 16 + quad / 2;
        const float4 v = make_float4(__shfl_sync(~0u, row, from), __shfl_sync(~0u, row, from + 4),
                                     __shfl_sync(~0u, row, from + 8), __shfl_sync(~0u, row, from + 12));
        if (wanted && quad < 4) send(to + quad * 16, v, barrier);
      }
    }
  };

  // What link L's sums are multiplied with, once its x is prepared. a = 2 u - 15, e = u - 8. 2 bits: a, 3 bits: a + e,
  // 4 bits: 4 a + b.
  template <int L> __device__ __forceinline__ Scale scale_of() const {
    typedef Of<L> O;
    int sum = 0;
    u32 top = 0;
    float squares = 0.f;
#pragma unroll
    for (int w = 0; w < O::UNITS; w++) {
      sum += s.sum[L][w], top = max(top, s.top[L][w]);
      if (L % 2) squares += s.squares[L][w];
    }
    const float unit = __uint_as_float(top) * (1.f / LEVELS);
    return {unit * (BITS == 3 ? 1.f : 2.f), (BITS == 2 ? -15.f : BITS == 3 ? -23.f : -75.f) * (float)sum * unit,
            L % 2 ? O::NORM * rsqrtf(squares / (float)O::K + p.eps) : O::NORM};
  }

  // Eight rows of link L a lane, from `row` on, from what arrived: rotated and scaled, before bias and addition.
  template <int L>
  __device__ __forceinline__ void results(float (&v)[8], const Scale& scale, const float (&out_scale)[8],
                                          int row) const {
    typedef Of<L> O;
    const bool inside = row < O::N;
    float more[8], ones[8];
    load8(v, sums[L % 2] + row, inside);
#pragma unroll
    for (int part = 1; part < O::PARTS; part++) {
      load8(more, sums[L % 2] + part * O::N + row, inside);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] += more[e];
    }
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = fmaf(v[e], scale.step, scale.offset), ones[e] = 1.f;
    rotate(v, ones, O::N_BLOCK, lane);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] *= scale.norm * out_scale[e];
  }
  template <int L> __device__ __forceinline__ void add_bias(float (&v)[8], int row) const {
    if (!p.link[L].bias) return;
    float bias[8];
    load8(bias, p.link[L].bias + row, row < Of<L>::N);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] += bias[e];
  }
  __device__ __forceinline__ static uint4 rounded(float (&v)[8]) {
    const uint4 w = make_uint4(narrow<HALF>(v[0], v[1]), narrow<HALF>(v[2], v[3]), narrow<HALF>(v[4], v[5]),
                               narrow<HALF>(v[6], v[7]));
    unpack8(v, w);
    return w;
  }

  // x of link L, eight columns a lane, becomes the operand; all warps that have columns of it.
  template <int L> __device__ __forceinline__ void prepare(float (&v)[8], const float (&in_scale)[8]) const {
    typedef Of<L> O;
    rotate(v, in_scale, O::K_BLOCK, lane);
    float b1[4], b2[4];
    u32 top = __reduce_max_sync(~0u, solve(v, b1, b2));
    if (lane == 0) s.top[L][warp] = top;
    some_meet(1, O::UNITS * 32);
#pragma unroll
    for (int i = 0; i < O::UNITS; i++) top = max(top, s.top[L][i]);
    int sum;
    const uint4 w = to_integers(b1, b2, inverse_of(__uint_as_float(top)), sum);
    const int code = warp * 32 + lane;  // two of them to a word of codes, four words to a piece
    u8* const to = (u8*)(fragments + code / 2 * 2) + code % 2 * 8;
    if (code * 8 < O::K) {
      *(uint2*)to = make_uint2(w.x, w.y);
      *(uint2*)(to + 16) = make_uint2(w.z, w.w);
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) s.sum[L][warp] = sum;
  }
  template <int L> __device__ __forceinline__ void in_scales(float (&to)[8], int column) const {
    load8(to, p.link[L].in_scale + column, column < Of<L>::K);
  }
  template <int L> __device__ __forceinline__ void out_scales(float (&to)[8], int row) const {
    load8(to, p.link[L].out_scale + row, row < Of<L>::N);
  }
  // The residual stream behind link L, from the one before it, and as it is stored.
  template <int L>
  __device__ __forceinline__ uint4 stream(float (&residual)[8], const float (&out_scale)[8], int column) const {
    float v[8];
    const Scale scale = scale_of<L>();
    wait_barrier(address(&s.arrived[L]), 0);
    results<L>(v, scale, out_scale, column);
    add_bias<L>(v, column);
#pragma unroll
    for (int e = 0; e < 8; e++) residual[e] += v[e];
    return rounded(residual);
  }
  template <int L>
  __device__ __forceinline__ void prepare_stream(const float (&residual)[8], const float (&in_scale)[8]) const {
    float v[8];
    const float squares = sum_of_squares(residual);
    if (lane == 0) s.squares[L][warp] = squares;
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = residual[e];
    prepare<L>(v, in_scale);
  }
};

template <int L> __device__ __forceinline__ void work(const Block& b, int worker) {
  const Block::Job<L> job(b, worker);
  all_meet();  // x is prepared
  job.multiply();
  if constexpr (L < LINKS - 1) work<L + 1>(b, worker);
}

// What is done to a slice between two links' products: it begins with the attention's result and ends in memory.
__device__ __forceinline__ void between(const Block& b, int column) {
  const Arguments& p = b.p;
  const int warp = b.warp, token = blockIdx.x / CLUSTER;
  float in_scale[8], out_scale[8], up_scale[8], residual[8], v[8], up[8];
  b.in_scales<0>(in_scale, column), b.out_scales<0>(out_scale, column);
#pragma unroll
  for (int e = 0; e < 8; e++) v[e] = residual[e] = 0.f;
  pdl_wait();
  if (column < HEADS) unpack8(v, *(const uint4*)(p.x + token * HEADS + column));
  if (column < WIDTH) unpack8(residual, *(const uint4*)(p.residual + token * WIDTH + column));
  if (warp < Of<0>::UNITS) b.prepare<0>(v, in_scale);
  all_meet();

  b.in_scales<1>(in_scale, column);
  if (warp < Of<1>::UNITS) {
    b.stream<0>(residual, out_scale, column);
    b.prepare_stream<1>(residual, in_scale);
  }
  b.in_scales<2>(in_scale, column);
  b.out_scales<1>(out_scale, column), b.out_scales<1>(up_scale, INNER + column);
  all_meet();

  if (warp < Of<2>::UNITS) {
    const Scale scale = b.scale_of<1>();
    wait_barrier(address(&b.s.arrived[1]), 0);
    b.results<1>(v, scale, out_scale, column), b.results<1>(up, scale, up_scale, INNER + column);
    b.add_bias<1>(v, column), b.add_bias<1>(up, INNER + column);
    b.rounded(v), b.rounded(up);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if (column >= INNER) v[e] = up[e] = 0.f;
      v[e] = __fdividef(v[e], 1.f + __expf(-v[e])) * up[e];
    }
    b.prepare<2>(v, in_scale);
  }
  b.out_scales<2>(out_scale, column);
  if (LINKS == 4) b.in_scales<LINKS - 1>(in_scale, column);
  all_meet();

  if (warp < Of<1>::UNITS && (LINKS == 4 || warp == b.rank)) {
    const uint4 w = b.stream<2>(residual, out_scale, column);
    if (warp == b.rank && column < WIDTH) *(uint4*)(p.sum + token * WIDTH + column) = w;
    if (LINKS == 4) b.prepare_stream<LINKS - 1>(residual, in_scale);
  }
  if (LINKS == 3) return;
  b.out_scales<LINKS - 1>(out_scale, column);
  all_meet();
  if (warp == b.rank && warp * SLICE < QKV) {
    const Scale scale = b.scale_of<LINKS - 1>();
    wait_barrier(address(&b.s.arrived[LINKS - 1]), 0);
    b.results<LINKS - 1>(v, scale, out_scale, column);
    b.add_bias<LINKS - 1>(v, column);
    const uint4 w = b.rounded(v);
    if (column < QKV) *(uint4*)(p.y + token * QKV + column) = w;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) e8p_chain(const __grid_constant__ Arguments p) {
  pdl_trigger();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, column = warp * SLICE + lane * 8;
  Shared& s = *(Shared*)(smem + TABLE_BYTES);
  u8* const codes = (u8*)(&s + 1);
  float* const sums = (float*)(codes + CODES);
  Block b = {p, s, codes, {sums, sums + EVEN}, (uint4*)(sums + EVEN + ODD), (int)cluster_rank(), warp, lane, 0};

  const TableWords words = load_table_words(p.codebook, warp, WARPS, lane);
  if (warp == 0) {
    if (lane < LINKS) make_barrier(address(&s.arrived[lane]), 1), barriers_visible();
    __syncwarp();
    if (lane == 0) {
      expect(address(&s.arrived[0]), b.expected<0>()), expect(address(&s.arrived[1]), b.expected<1>());
      expect(address(&s.arrived[2]), b.expected<2>());
      if (LINKS == 4) expect(address(&s.arrived[LINKS - 1]), b.expected<LINKS - 1>());
    }
  }
  b.fetch<0>(), b.fetch<1>(), b.fetch<2>();
  if (LINKS == 4) b.fetch<LINKS - 1>();
  __syncwarp();
  cluster_arrive();
  b.ask_scales<0>(), b.ask_scales<1>(), b.ask_scales<2>(), b.ask_scales<LINKS - 1>();
  build_tables(p.codebook, words, warp, WARPS, lane);
  copies_there();
  __syncthreads();
  const u32 base = address(smem);
  check_start(base);
  b.bank = bank_of(base, lane);
  cluster_wait();  // every block has started, and its barriers stand
  if (warp < SLICES) between(b, column);
  else work<0>(b, warp - SLICES);
}
