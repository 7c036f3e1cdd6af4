// E8P linear for up to 8 tokens in one pass over the codes. The codes' layout is told in formats/e8p.py.
//
// Decoding. An E8P integer a is odd and |a| <= 11, so u = (a + 15) / 2 is a nibble, and both the sign and the shift of
// a code are XORs on it: eight nibbles in one word are  T1[index byte] ^ T2[sign byte],  two lookups in shared memory,
// where each entry stands 32 times, once a bank. E81B integers e are nibbles e + 8 likewise.
//
// The word is not unpacked. Its bytes are 16 h + l (two nibbles), those of word << 4 are 16 l + h of the byte below; both
// go to the tensor cores as unsigned bytes, and the activations beside them solve, for the four pairs of a group,
// 16 b1[j] + b2[j+1] = z[4+j],  b1[j] + 16 b2[j] = z[j].  So a code of eight weights costs two byte permutes, two loads,
// one XOR and one shift. The activations have 16 bits, high and low byte as two columns of mma.m16n8k32 (u8 x s8, exact
// in 32 bits), on a scale of each slice's own.
//
// A warp owns a slice of 256 columns: it scales and rotates the activations, keeps them in registers and walks down the
// rows of its tile. It takes GROUP row tiles at a time, so that the lookups of one are under way while the tensor cores
// work on the other; alone it would do one after the other, and all warps of an SM march in step. Slices meet in shared
// memory (and across a cluster) as float32 and are added in a fixed order: the same bits whatever the timing.
//
// With ranks (exchange.cuh) the end of a launch sums over them.
//
// Set when compiled: BITS (2, 3, 4), TOKENS (1, 2, 4 or 8), HALF (1: x and y are float16, 0: bfloat16), DEPTH (row tiles
// of codes that a warp has under way), GROUP (divides DEPTH and the row tiles of a warp), COPY (2: the copy engine fetches
// codes, those that all warps begin with at once, 1: for each warp, 0: each lane), THREADS (of a block at most), DOWN (warps
// that share the rows of a slice), and, since each line of the start and of the end is run once, what `Shape` is made of.
//
// e8p_decode_ring.cuh brings the codes, e8p_decode_turn.cuh rotates several tokens, e8p_decode_product.cuh multiplies. What
// is here is past 400 lines because the start, both ways to gather and the end share a block's warps and shared memory.

#include "e8p_common.cuh"
#include "exchange.cuh"

constexpr int PAD = 8;            // floats after a token's partial sums: other banks for each t
constexpr float LEVELS = 32512.f;  // of the largest activation; 127 * 256: both bytes stay in int8

// The four linears of a layer of 8B at 2 bits take 27.1 us for one token and 39.5 for four, 28.3 and 43.3 with a shape that
// is known at run time.
struct Shape {
  static constexpr int n = N, k = K,
                       across = ACROSS,                           // warps side by side in k; DOWN such rows of warps
                       inverse = (256 + ACROSS - 1) / ACROSS,     // 256 / across, rounded up
                       slices = (K + SLICE - 1) / SLICE,
                       per_block = PER_BLOCK,                     // slices that a block of the cluster owns
                       blocks = BLOCKS,                           // of 128 rows that a cluster owns
                       turns = BLOCKS * (ROWS / 16) / DOWN,       // row tiles that a warp takes of each slice
                       normed = NORMED,                           // x is normed in front (RMSNorm)
                       silu = SILU,                               // x is [tokens, 2 k], gate beside up
                       biased = BIASED, added = ADDED,            // there is a bias, something to add
                       wide = WIDE,                               // y and add are float
                       ranks = WORLD;                             // whose results are summed
  static constexpr u32 cluster = CLUSTER,                                    // blocks that share k
                       per_cluster = (65536 + CLUSTER - 1) / CLUSTER,        // what small numbers are divided with
                       per_blocks = (65536 + BLOCKS - 1) / BLOCKS;
};

struct Arguments : Shape {
  TensorMap codes_map;      // of codes, boxes of GROUP * 16 rows x 256 columns; COPY 1, 2
  TensorMap residual_map;   // ... of residual
  TensorMap first_codes_map;     // of codes as slices, boxes of what the warps of a block take at a time; COPY 2
  TensorMap first_residual_map;  // ... of residual
  const u16* x;             // [tokens, k]
  const u8* codes;          // int16 [n, k/8]
  const u8* residual;       // uint8 or int16 [n, k/8]
  const u8* tables;         // as they stand in shared memory
  const float* in_scale;    // [k]
  const float* out_scale;   // [n]
  const float* bias;        // [n] or null
  const void* add;          // [tokens, n] of y's type, or null
  void* y;                  // [tokens, n], x's type, or float if wide
  u64* state;               // with ranks, as `Exchange` has it
  u64* alarm;
  u64 *inbox0, *inbox1, *inbox2, *inbox3, *inbox4, *inbox5, *inbox6, *inbox7;
  float norm;               // of both Hadamard transforms
  float eps;                // of the RMSNorm in front
  float inverse_k;          // 1 / k
  int tokens;               // 1 to TOKENS
  int room;
  int rank;
};

// Places of the ring in a turn of the loop: all, where that divides the turns.
constexpr int UNROLLED = Shape::turns % DEPTH == 0 ? DEPTH / GROUP : 1;

struct __align__(128) Shared {  // after the tables
  float squares[21][8];     // by warp across and token, of the warp's columns of x
  float received[8][8];     // ... of each block of the cluster
  u64 full[21][4];          // by warp and place of its ring: the codes are there
  u64 sent[1];              // all that the cluster sends to this block is there
  u64 tables[1];            // the tables are there
  u64 filled[4];            // COPY 2: by place of the ring, the codes that all warps begin with are there
  u64 scale[10];            // DOWN > 1: by warp across, the scale and the sum that gather() hands on
};

__device__ __forceinline__ bool one_slice(const Arguments& p) {  // a warp: it writes each of its sums one time
  return p.per_block <= p.across;
}

#include "e8p_decode_ring.cuh"
#include "e8p_decode_product.cuh"
#include "e8p_decode_turn.cuh"

// The warps of a slice wait for each other; a barrier each.
__device__ __forceinline__ void meet(int column_warp) {
  if (DOWN == 1) __syncwarp();
  else some_meet(column_warp + 1, DOWN * 32);
}

// A warp's operands for one slice of one token or two: rotated here by one of the slice's warps, one after the other, and
// handed to the others through 512 bytes of shared memory. Two take less time so than as half of `Several`.
struct InTurn {
  float in_scale[8];
  Raw asked;
  float square;  // of the lane's token, over the warp's columns of x
  __device__ __forceinline__ void load_constants(const Arguments& p, int slice, bool mine, int lane) {
    const int column = slice * SLICE + lane * 8;
    load8(in_scale, p.in_scale + column, mine && column < p.k);
  }
  __device__ __forceinline__ void prepare(const Arguments&, u8*, u8*, int, int, int) {}
  __device__ __forceinline__ void ask(const Arguments& p, int slice, bool mine, int, int, int lane) {
    const int column = slice * SLICE + lane * 8;
    asked = ask_x(p, p.silu, 0, column, mine && column < p.k);
  }
  __device__ __forceinline__ void gather(Product (&to)[FOURS], const Arguments& p, int slice, bool first, int, int row_warp,
                                         int column_warp, u8* exchange, Shared& shared, int lane) {
    if (first) square = 0.f;
    const int column = slice * SLICE + lane * 8, g = lane / 4, t = lane % 4;
    const bool mine = DOWN == 1 || row_warp == 0, inside = mine && column < p.k;
    uint4* const bytes = (uint4*)exchange;
    float2* const handed = (float2*)&shared.scale[column_warp];
#pragma unroll
    for (int i = 0; i < 8; i++) to[0].b[i] = make_uint2(0, 0);
    set_scale(to[0], make_float2(0.f, 0.f));
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
      float2 scale;
      if (mine) {
        float v[8];
        take_x(v, asked, p.silu);
        if (token + 1 < TOKENS) asked = ask_x(p, p.silu, token + 1, column, inside);
        if (p.normed) {  // one token's lanes meet after the loop
          float own = squares_of(v);
          if (TOKENS > 1) own = over_lanes(own);
          if (t == token || TOKENS == 1) square += own;
        }
        rotate(v, in_scale, p.k % 128 ? 64 : 128, lane);
        bytes[lane] = to_bytes(v, scale);
        if (DOWN > 1 && lane == 0) *handed = scale;
      }
      meet(column_warp);
      if (DOWN > 1) scale = *handed;
      if (g / 2 == token) {
#pragma unroll
        for (int i = 0; i < 8; i++) to[0].b[i] = *(const uint2*)((const u8*)(bytes + t * 8 + i) + g % 2 * 8);
      }
      if (t == token) set_scale(to[0], scale);
      if (DOWN == 1 || token + 1 < TOKENS || !one_slice(p)) meet(column_warp);  // before it is overwritten
    }
  }
  __device__ __forceinline__ void leave_squares(Shared& shared, int column_warp, int row_warp, int lane) const {
    const float sum = TOKENS == 1 ? over_lanes(square) : square;
    if (row_warp == 0 && lane < TOKENS) shared.squares[column_warp][lane] = sum;
  }
};
// The same of more tokens, four a warp at a time, shared by the slice's warps.
struct Several {
  static constexpr int OWN = DOWN == 1 ? FOURS : 1;  // fours of a warp that has any
  float in_scale[8];
  u8* weights;
  Raw asked[4];
  float squares[OWN];  // as `turn` adds them
  static __device__ __forceinline__ int four(int i, int row_warp) { return DOWN == 1 ? i : row_warp; }
  __device__ __forceinline__ void load_constants(const Arguments& p, int slice, bool mine, int lane) {
    const int column = slice * SLICE + lane * 8;
    load8(in_scale, p.in_scale + column, mine && column < p.k);
  }
  // While x is not there. Alone, a warp has read its weights when it writes the last four tokens; sums of more rows than
  // 128 leave room behind the tokens.
  __device__ __forceinline__ void prepare(const Arguments& p, u8* exchange, u8* beside, int row_warp, int column_warp,
                                          int lane) {
    weights = DOWN == 1                       ? exchange + (FOURS - 1) * 4 * TURNED
              : one_slice(p) && p.blocks > 1 ? exchange + FOURS * 4 * TURNED
                                              : beside + column_warp * WEIGHTS;
    if (row_warp == 0) keep_weights(weights, in_scale, lane);
  }
  __device__ __forceinline__ void ask(const Arguments& p, int slice, bool mine, int tokens, int row_warp, int lane) {
    ask_groups(asked, p, four(0, row_warp) * 4 + lane / 8, tokens, turned_column(slice, lane), mine);
  }
  __device__ __forceinline__ void gather(Product (&to)[FOURS], const Arguments& p, int slice, bool first, int tokens,
                                         int row_warp, int column_warp, u8* exchange, Shared&, int lane) {
    if (DOWN == 1 || row_warp < FOURS) {
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int token = four(i, row_warp) * 4;
        if (first) squares[i] = 0.f;
        turn(p, asked, weights, squares[i], exchange + token * TURNED, token + lane % 4 < tokens, lane, [&]() {
          if (i + 1 < OWN) ask_groups(asked, p, token + 4 + lane / 8, tokens, turned_column(slice, lane), true);
          else __syncwarp();
        });
      }
    }
    meet(column_warp);
#pragma unroll
    for (int j = 0; j < FOURS; j++) take_turned(to[j], exchange, j * 4, tokens, lane);
    meet(column_warp);  // before it is overwritten
  }
  __device__ __forceinline__ void leave_squares(Shared& shared, int column_warp, int row_warp, int lane) const {
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if ((DOWN == 1 || row_warp < FOURS) && lane / 4 == lane % 4 * 2)
        shared.squares[column_warp][four(i, row_warp) * 4 + lane % 4] = squares[i];
  }
};
template <bool, class A, class> struct Either { typedef A type; };
template <class A, class B> struct Either<false, A, B> { typedef B type; };
typedef Either<(TOKENS > 2), Several, InTurn>::type Gather;

__device__ __forceinline__ float4 out_scale_of(const Arguments& p, int row) {
  return row < p.n ? *(const float4*)(p.out_scale + row) : make_float4(0.f, 0.f, 0.f, 0.f);
}
__device__ __forceinline__ float inverse_rms(float squares, const Arguments& p) {
  return rsqrtf(fmaf(squares, p.inverse_k, p.eps));
}

// With ranks, a warp's sums of 128 rows become those of all ranks: float32 crosses, and a chunk of the inboxes is 128 rows
// of a token, so whoever ends a job begins the chunk's next round.
struct Sum {
  Exchange<Arguments, Shape::ranks> peers;
  int job;
  u64 number;  // of the job's round
  __device__ __forceinline__ Sum(const Arguments& p, int job, int at) : peers(p), job(job), number(0) {
    if (at < p.tokens * p.n) number = peers.number(at / CHUNK);
  }
  __device__ __forceinline__ void operator()(float4& v, int of_job, int at, int lane) {
    if (of_job != job) job = of_job, number = peers.number(at / CHUNK);
    if (peers.armed) peers.send4(number, at, v);
    v = peers.sum4(peers.own(), number, at, v);
    __syncwarp();
    if (lane == 0) peers.next(at / CHUNK, number);
  }
};
struct NoSum {
  __device__ __forceinline__ NoSum(const Arguments&, int, int) {}
  __device__ __forceinline__ void operator()(float4&, int, int, int) {}
};
typedef Either<(Shape::ranks > 1), Sum, NoSum>::type OverRanks;

// Grid: clusters that own p.blocks * 128 rows. Shared memory: tables, Shared, codes, partial sums
// [across][TOKENS][rows + PAD], what the cluster sends [jobs / cluster][cluster][128], where a job is a token's 128 rows,
// and for the rotation of a slice 512 bytes, or TURNED a token and its weights, where they are not in another's place.
extern "C" __global__ void __launch_bounds__(THREADS, 1) e8p_decode(const __grid_constant__ Arguments p) {
  const u32 cluster = p.cluster;
  const u32 rank = cluster > 1 ? cluster_rank() : 0;
  const u32 tile = blockIdx.x / cluster;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warps = p.across * DOWN;
  const int row_warp = DOWN == 1 ? 0 : warp * p.inverse >> 8, column_warp = warp - row_warp * p.across;
  const int tokens = TOKENS == 1 ? 1 : min(TOKENS, p.tokens);
  const int begin = rank * p.per_block, end = min(begin + p.per_block, p.slices), start = begin + column_warp;
  const int rows = p.blocks * ROWS, pitch = rows + PAD, tile_row = tile * rows;

  // Codes come through a ring of DEPTH row tiles a warp; outside the matrix come zeros.
  Shared& shared = *(Shared*)(smem + TABLE_BYTES);
  u8* const ring = (u8*)(&shared + 1);
  const u32 tables = address(shared.tables);

  // Constants first: they would queue behind tables and codes.
  Gather gather;
  const bool rotates = (DOWN == 1 || row_warp < FOURS) && start < end;
  gather.load_constants(p, start, rotates, lane);
  if (threadIdx.x == (warps - 1) * 32) {  // what is no warp's own
    make_barrier(tables, 1);
    for (int d = 0; d < PLACES && COPY == 2; d++) make_barrier(address(shared.filled + d), 1);
    barriers_made();
    expect(tables, TABLE_BYTES);
    copy(address(smem), p.tables, TABLE_BYTES, tables);
    if (COPY == 2) Ring<COPY != 0>::fill(p, shared, ring, warps, begin, end, tile_row, rows / 16);
  }
  __syncwarp();
  Ring<COPY != 0> codes_ring(p, shared, ring, warps, warp, column_warp, row_warp, begin, end, tile_row, rows / 16, lane);
#pragma unroll
  for (int d = 0; d < PLACES; d++)
    if (COPY == 2) codes_ring.pass();
    else codes_ring.fetch(d);

  const int jobs = tokens * p.blocks, first_job = cluster == 1 ? warp : rank + warp * cluster;
  auto token_of = [&](int job) { return (int)(job * p.per_blocks >> 16); };
  const int first_token = token_of(first_job);
  const int first_row = tile_row + (first_job - first_token * p.blocks) * ROWS + lane * 4;
  const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
  const bool first_own = first_job < jobs && first_row < p.n;
  float4 first_scale = zeros, first_sum = zeros;  // what the first job's sums are multiplied with, and what is added
  if (first_own) first_scale = *(const float4*)(p.out_scale + first_row);
  if (first_own && p.biased) first_sum = *(const float4*)(p.bias + first_row);

  float* partial = (float*)((u8*)(&shared + 1) + warps * DEPTH * SLOT);
  float* received = partial + p.across * TOKENS * pitch;
  // Where no sum stands before the last of the slice's warps has its operands, they are rotated in the place of sums.
  const bool in_place = (DOWN == 1 || TOKENS > 2) && one_slice(p);
  u8* const behind = (u8*)(received + (cluster > 1 ? (tokens * p.blocks + cluster) * ROWS : 0));
  constexpr int EXCHANGE = TOKENS <= 2 ? 512 : TOKENS * TURNED;
  u8* const exchange = in_place ? (u8*)(partial + column_warp * TOKENS * pitch) : behind + column_warp * EXCHANGE;
  u8* const beside = behind + (in_place ? 0 : p.across * EXCHANGE);
  if (cluster > 1) {
    if (threadIdx.x == 0) {
      const int own = rank < jobs ? (int)((jobs - 1 - rank) * p.per_cluster >> 16) + 1 : 0;  // jobs that end here
      const int bytes = own * cluster * ROWS * 4 + (p.normed && own ? cluster * tokens * 4 : 0);
      const u32 sent = address(shared.sent);
      make_barrier(sent, 1);
      expect(sent, bytes);
      barriers_visible();
    }
    __syncwarp();
    cluster_begun();
  }
  if (!one_slice(p))
    for (int i = threadIdx.x * 4; i < p.across * TOKENS * pitch; i += blockDim.x * 4) *(float4*)(partial + i) = zeros;
  if (start < end) gather.prepare(p, exchange, beside, row_warp, column_warp, lane);
  pdl_wait();
  pdl_trigger();
  OverRanks over_ranks(p, first_job, first_token * p.n + first_row);
  gather.ask(p, start, rotates, tokens, row_warp, lane);
  uint4 first_add = make_uint4(0, 0, 0, 0);
  if (first_own && p.added) first_add = ask_add(p, (size_t)first_token * p.n + first_row);
  __syncthreads();

  const u32 base = address(smem);
  check_start(base);
  const u32 bank = bank_of(base, lane);  // no lookup stands before the wait for the tables: all need codes taken behind it
  Product product[FOURS];
  int place = 0;  // of the ring
  for (int slice = start; slice < end; slice += one_slice(p) ? p.slices : p.across) {
    if (!one_slice(p) && slice != start) {
      gather.load_constants(p, slice, rotates, lane);
      gather.ask(p, slice, rotates, tokens, row_warp, lane);
      gather.prepare(p, exchange, beside, row_warp, column_warp, lane);
      meet(column_warp);
    }
    gather.gather(product, p, slice, slice == start, tokens, row_warp, column_warp, exchange, shared, lane);
    if (p.normed && (one_slice(p) || slice + p.across >= end))  // the warp's last: its sums are whole
      gather.leave_squares(shared, column_warp, row_warp, lane);
    wait_barrier(tables, 0);
    // Where a lane's sums are; lanes of no token keep none, or what nobody reads.
    float* at = partial + (column_warp * TOKENS + (TOKENS == 1 ? 0 : t)) * pitch + row_warp * (16 * GROUP) + g;
#pragma unroll 1
    for (int turn = 0; turn < p.turns; turn += GROUP * UNROLLED) {
#pragma unroll
      for (int d = 0; d < UNROLLED; d++) {
        if (UNROLLED > 1) place = d;
        const u8* const from = codes_ring.take(place);
        Codes codes[GROUP];
        Product::Sums acc[GROUP][FOURS];
#pragma unroll
        for (int u = 0; u < GROUP; u++) codes[u] = codes_at(from, codes_ring.residual, u, lane);
        if (COPY) codes_ring.refill(place);
#pragma unroll
        for (int u = 0; u < GROUP; u++) multiply_all(acc[u], product, codes[u], bank);
        if (!COPY) codes_ring.refill(place);  // no earlier: nothing but their use orders a lane's reads before its copies
#pragma unroll
        for (int u = 0; u < GROUP; u++)
#pragma unroll
          for (int j = 0; j < FOURS; j++) {
            float* sum = at + j * 4 * pitch + u * 16;
            const float top = product[j].result(acc[u][j], 0), low = product[j].result(acc[u][j], 1);
            if (TOKENS > 2 || t < TOKENS) {
              sum[0] = one_slice(p) ? top : sum[0] + top;
              sum[8] = one_slice(p) ? low : sum[8] + low;
            }
          }
        at += 16 * GROUP * DOWN;
        if (place == PLACES - 1) codes_ring.passed();
        place = place == PLACES - 1 ? 0 : place + 1;
      }
    }
  }
  __syncthreads();

  const bool once = TOKENS == 1 && p.blocks <= p.across * DOWN;  // no warp has a second job
  const int used = min(p.across, end - begin);  // columns of warps that had a slice
  auto squares_here = [&](int b) { return over_lanes(lane < used ? shared.squares[lane][b] : 0.f); };
  auto finish = [&](int job, float4 v) {
    const int b = token_of(job), row = tile_row + (job - b * p.blocks) * ROWS + lane * 4;
    const bool own = row < p.n;
    const size_t at = (size_t)b * p.n + row;
    float4 s = first_scale, c = first_sum, beside = zeros;
    float4& added = p.ranks > 1 ? beside : c;  // `add` is the same on all ranks: it comes last
    if (!once && job != first_job) {
      s = out_scale_of(p, row), c = zeros;
      if (own && p.biased) c = *(const float4*)(p.bias + row);
      if (own && p.added) take_add(added, p, ask_add(p, at));
    } else if (p.added) {
      take_add(added, p, first_add);
    }
    float norm = p.norm;
    if (p.normed) {
      const float of_blocks = lane < cluster ? shared.received[lane][b] : 0.f;
      norm *= inverse_rms(cluster == 1 ? squares_here(b) : over_lanes(of_blocks), p);
    }
    rotate_rows(v, p.n % 128 ? 64 : 128, lane);
    if (!own) return;
    v.x = fmaf(v.x * norm, s.x, c.x), v.y = fmaf(v.y * norm, s.y, c.y);
    v.z = fmaf(v.z * norm, s.z, c.z), v.w = fmaf(v.w * norm, s.w, c.w);
    if (p.ranks > 1) over_ranks(v, job, (int)at, lane), add_to(v, beside);
    store4(p, at, v);
  };
  auto total = [&](int job) {
    const int b = token_of(job);
    const float* from = partial + b * pitch + (job - b * p.blocks) * ROWS + lane * 4;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int w = 0; w < used; w++) add_to(v, *(const float4*)(from + w * TOKENS * pitch));
    return v;
  };
  if (cluster == 1) {
#pragma unroll 1
    for (int job = warp; job < jobs; job += warps) {
      finish(job, total(job));
      if (once) break;
    }
    return;
  }
  // Sums go to the block that ends their job.
  all_begun();  // their memory can be written
#pragma unroll 1
  for (int job = warp; job < jobs; job += warps) {
    const float4 v = total(job);
    const int turn = job * p.per_cluster >> 16, of = job - turn * cluster;
    send(at_rank(received + (turn * cluster + rank) * ROWS + lane * 4, of), v, at_rank(&shared.sent, of));
    if (once) break;
  }
  if (p.normed && warp == warps - 1) {
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
      float mine = 0.f;
      for (int b = j * 4; b < min(tokens, j * 4 + 4); b++) {
        const float sum = squares_here(b);
        if (j * 4 + t == b) mine = sum;
      }
      if (lane < min((int)cluster, jobs) * 4 && j * 4 + t < tokens)
        send(at_rank(&shared.received[rank][j * 4 + t], g), mine, at_rank(&shared.sent, g));
    }
  }
  if (rank + warp * cluster >= jobs) return;
  receive(address(shared.sent));
#pragma unroll 1
  for (int job = rank + warp * cluster; job < jobs; job += warps * cluster) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int r = 0; r < cluster; r++)
      add_to(v, *(const float4*)(received + ((int)(job * p.per_cluster >> 16) * cluster + r) * ROWS + lane * 4));
    finish(job, v);
    if (once) break;
  }
}
