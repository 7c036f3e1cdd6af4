// Routed experts in E8P for up to 64 tokens: a linear whose matrix depends on the token, in one pass over the codes of
// every expert that was chosen. Decoding and its tables are told in e8p_decode.cu, the codes' layout in formats/e8p.py.
//
// A pair is a token and one of its experts. Pairs of an expert make chunks of CHUNK, and a chunk meets a tile of rows as
// the tokens of e8p_decode.cu do: a warp has a slice of 256 columns of each pair in registers and walks down the rows of
// the tile. An item is a chunk and a tile. Chunks of an expert are neighbours, so what one reads the others find in the
// L2: from memory an expert comes once. Which experts there are every block finds for itself.
//
//   e8p_experts          MODE 0 (plain): y = out_scale * H_n(sum) + bias, a pair a row, float32
//                        MODE 1 (gated): a tile is 128 gate rows and their 128 up rows, which end in SwiGLU and the
//                        rotation of what comes next; n / 2 is a multiple of 128
//                        MODE 2 (summed): one token; the cluster has all of its experts, EACH a block, one after the
//                        other; their results are added up
//   e8p_experts_prepare  a warp a pair and slice: x, or SwiGLU of gate and up, rotated and in the bytes of the product
//   e8p_experts_combine  the weighted sum of each token's pairs
//
// ONE token: a pair is a chunk, and a block has one item, or a part of its k: the parts meet in the first block of their
// cluster. More: blocks walk over items, and codes of the next one are under way while one ends. Sums are added in a fixed
// order: the same bits whatever the timing.
//
// Set when compiled: BITS, HALF (1: x and the result are float16, 0: bfloat16), MODE, ONE, SOURCE (0: prepared bytes, 1: x,
// 2: what MODE 1 gives, 3: gate | up of each pair, float32), SILU (prepare: x is gate | up, float32), GROUPS (chunks are of 4 * GROUPS; ONE: of one), DEPTH (row tiles of
// codes that a warp has under way), ACROSS and DOWN (warps side by side in k, and in rows), BLOCKS (of 128 rows, of a
// tile), PARTS (of k), SLOTS (blocks of a cluster that share its experts), EACH (experts of such a block at most), PER_SM
// (blocks that an SM is to hold), EARLY (experts were there before the launch in front), and N, K.

#if PORTABLE
#define E81B_RUN 64  // its table in half the bytes: 99 KB hold no more
#endif
#include "e8p_common.cuh"
#include "e8p_codes.cuh"

constexpr float LEVELS = 32512.f;  // of the largest activation; 127 * 256: both bytes stay in int8
#include "e8p_decode_product.cuh"

constexpr int PLAIN = 0, GATED = 1, SUMMED = 2;
constexpr int PREPARED = 0, FROM_X = 1, FROM_GATED = 2, FROM_BOTH = 3;
constexpr int WARPS = ACROSS * DOWN, CHUNK = ONE ? 1 : 4 * GROUPS, CLUSTER = PARTS * SLOTS;
constexpr int ROW_TILES = BLOCKS * 8, MINE = ROW_TILES / DOWN, PITCH = BLOCKS * ROWS + 8;
constexpr int SLICES = (K + SLICE - 1) / SLICE, PER_PART = (SLICES + PARTS - 1) / PARTS;
constexpr int TURNS = (PER_PART + ACROSS - 1) / ACROSS;
constexpr int TILES = MODE == GATED ? N / 2 / ROWS : (N + BLOCKS * ROWS - 1) / (BLOCKS * ROWS);
constexpr int IN_BLOCK = K % 128 ? 64 : 128, OUT_BLOCK = N % 128 ? 64 : 128;
constexpr int SENT = MODE == SUMMED ? 1 : BLOCKS;  // runs of 128 rows that a block of a cluster gives
constexpr int MAX_PAIRS = 1024, MAX_EXPERTS = 528;
constexpr int BARRIERS = 128;
static_assert(ROW_TILES % DOWN == 0 && (MODE != GATED || (BLOCKS == 2 && N % 256 == 0)) && (ONE || CLUSTER == 1));
static_assert(MODE != SUMMED || (ONE && BLOCKS == 1));
static_assert(EACH == 1 || (MODE == SUMMED && CLUSTER > 1));

struct Arguments {
  const void* x;            // FROM_X: [tokens, K]; FROM_GATED: float [pairs, K]; FROM_BOTH, prepare with SILU: float [pairs, 2 K]
  u8* bytes;                // [pairs, SLICES, 512]
  float2* scales;           // [pairs, SLICES]: of a slice, and the sum of its bytes
  const int* experts;       // [pairs]
  const float* weights;     // [pairs]
  const u8* codes;          // int16 [matrices, N, K/8]
  const u8* residual;       // uint8 or int16 [matrices, N, K/8]
  const u8* tables;         // as they stand in shared memory
  const float* in_scale;    // [matrices, K]
  const float* out_scale;   // [matrices, N]
  const float* bias;        // [matrices, N] or null
  const float* next_scale;  // gated: [matrices, N/2], the in_scale of what comes next
  const void* add;          // summed, combine: [tokens, N] or null
  void* y;                  // plain: float [pairs, N]; gated: float [pairs, N/2]; summed: [N]; combine: [tokens, N]
  int tokens, top_k, matrices;
  float norm;               // of both Hadamard transforms
  float limit, alpha, shift;
};

__device__ __forceinline__ int expert_of(const Arguments& a, int pair) {
  return min(max(a.experts[pair], 0), a.matrices - 1);
}
#include "experts_common.cuh"

// ------------------------------------------------------------------------------------------------------------- chunks

struct Chunks {
  int count;
  int pairs[MAX_EXPERTS];  // of an expert; then the place of its first one
  u16 order[MAX_PAIRS];    // pairs by expert
  u16 expert[MAX_PAIRS], first[MAX_PAIRS];  // of a chunk; its first place in the order
  u8 size[MAX_PAIRS];
};
#define chunks (*(Chunks*)(smem + TABLE_BYTES + BARRIERS))  // static memory would stand before the tables
constexpr int BESIDE = BARRIERS + (ONE ? 0 : (sizeof(Chunks) + 127) / 128 * 128);
static_assert(ONE || BESIDE == BARRIERS + 9344, "CHUNKS of e8p_experts.py");

// Pairs of an expert stand in rising order: which of them make a chunk every block must find alike.
__device__ __forceinline__ void find_chunks(const Arguments& a) {
  const int pairs = a.tokens * a.top_k;
  for (int e = threadIdx.x; e < a.matrices; e += WARPS * 32) chunks.pairs[e] = 0;
  __syncthreads();
  constexpr int RUN = (MAX_PAIRS + WARPS * 32 - 1) / (WARPS * 32);
  int expert[RUN], place[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int pair = threadIdx.x + i * WARPS * 32;
    if (pair >= pairs) break;
    expert[i] = expert_of(a, pair);
    place[i] = atomicAdd(&chunks.pairs[expert[i]], 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // a lane takes a run of experts
    const int run = (a.matrices + 31) / 32, begin = threadIdx.x * run, end = min(begin + run, a.matrices);
    int own = 0, own_chunks = 0;
    for (int e = begin; e < end; e++) own += chunks.pairs[e], own_chunks += (chunks.pairs[e] + CHUNK - 1) / CHUNK;
    int both = own << 16 | own_chunks;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int before = __shfl_up_sync(~0u, both, o);
      if (threadIdx.x >= o) both += before;
    }
    if (threadIdx.x == 31) chunks.count = both & 0xFFFF;
    int first = (both >> 16) - own, chunk = (both & 0xFFFF) - own_chunks;
    for (int e = begin; e < end; e++) {
      const int size = chunks.pairs[e];
      chunks.pairs[e] = first;
      for (int i = 0; i < size; i += CHUNK, chunk++)
        chunks.expert[chunk] = e, chunks.first[chunk] = first + i, chunks.size[chunk] = min(CHUNK, size - i);
      first += size;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int pair = threadIdx.x + i * WARPS * 32;
    if (pair >= pairs) break;
    chunks.order[chunks.pairs[expert[i]] + place[i]] = pair;  // as they arrived
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int pair = threadIdx.x + i * WARPS * 32;
    if (pair >= pairs) break;
    const int e = expert[i], begin = chunks.pairs[e], end = e + 1 < a.matrices ? chunks.pairs[e + 1] : pairs;
    place[i] = begin;
    for (int at = begin; at < end; at++) place[i] += chunks.order[at] < pair;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int pair = threadIdx.x + i * WARPS * 32;
    if (pair >= pairs) break;
    chunks.order[place[i]] = pair;
  }
  __syncthreads();
}

struct Item {
  int tile, expert, first, size;  // size: pairs
  __device__ __forceinline__ int pair(int i) const { return ONE ? first : chunks.order[first + i]; }
};
__device__ __forceinline__ Item item_at(const Arguments& a, int item, int slot) {
  if (MODE == SUMMED) {
    const int pair = slot * EACH + item;
    return {(int)blockIdx.x / CLUSTER, expert_of(a, pair), pair, 1};
  }
  if (ONE) return {item % TILES, expert_of(a, item / TILES), item / TILES, 1};
  const int chunk = item / TILES;
  return {item % TILES, chunks.expert[chunk], chunks.first[chunk], chunks.size[chunk]};
}
__device__ __forceinline__ int first_row(int tile, int row_tile) {
  if (MODE == GATED) return tile * ROWS + row_tile % 8 * 16 + (row_tile < 8 ? 0 : N / 2);
  return tile * (BLOCKS * ROWS) + row_tile * 16;
}

// ---------------------------------------------------------------------------------------------------------- activations

// Eight columns of a lane of a slice, in two parts as ever: asked for, then taken.
struct Asked {
  uint4 low, high, low_up, high_up;
};
__device__ __forceinline__ Asked ask(const void* x, size_t row, int column, bool wide, bool silu) {
  Asked asked;
  asked.low = asked.high = asked.low_up = asked.high_up = make_uint4(0, 0, 0, 0);
  if (column >= K) return asked;
  if (!wide) {
    asked.low = *(const uint4*)((const u16*)x + row * K + column);
    return asked;
  }
  const uint4* from = (const uint4*)((const float*)x + row * (silu ? 2 * K : K) + column);
  asked.low = from[0], asked.high = from[1];
  if (silu) asked.low_up = from[K / 4], asked.high_up = from[K / 4 + 1];
  return asked;
}
__device__ __forceinline__ void as_floats(float (&v)[8], const uint4& low, const uint4& high) {
  v[0] = __uint_as_float(low.x), v[1] = __uint_as_float(low.y), v[2] = __uint_as_float(low.z);
  v[3] = __uint_as_float(low.w), v[4] = __uint_as_float(high.x), v[5] = __uint_as_float(high.y);
  v[6] = __uint_as_float(high.z), v[7] = __uint_as_float(high.w);
}

// A slice of the pairs of a chunk, as they were prepared.
__device__ __forceinline__ void load(Product (&to)[GROUPS], const Arguments& a, const Item& item, int slice, bool real,
                                     int g, int t) {
#pragma unroll
  for (int j = 0; j < GROUPS; j++) {
    const int token = j * 4 + g / 2;
    const bool there = real && token < item.size;
    load_kept(to[j], a.bytes + ((size_t)(there ? item.pair(token) : 0) * SLICES + slice) * KEPT, there, g, t);
    set_scale(to[j], real && j * 4 + t < item.size ? a.scales[(size_t)item.pair(j * 4 + t) * SLICES + slice]
                                                   : make_float2(0.f, 0.f));
  }
}
// The same from activations, which every warp of a slice prepares for itself. `exchange`: 512 bytes of the warp's own.
__device__ __forceinline__ void gather(Product (&to)[GROUPS], const Arguments& a, const Item& item, int slice, bool real,
                                       uint4* exchange, int lane, int g, int t) {
  const int column = real ? slice * SLICE + lane * 8 : K;
  float in_scale[8];
  if (SOURCE != FROM_GATED) load8(in_scale, a.in_scale + (size_t)item.expert * K + column, column < K);
#pragma unroll
  for (int j = 0; j < GROUPS; j++) {
    Asked asked[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int pair = j * 4 + i < item.size ? item.pair(j * 4 + i) : -1;
      asked[i] = ask(a.x, SOURCE == FROM_X && !ONE ? pair / a.top_k : SOURCE == FROM_X ? 0 : pair, pair < 0 ? K : column,
                     SOURCE != FROM_X, SOURCE == FROM_BOTH);
    }
    set_scale(to[j], make_float2(0.f, 0.f));
#pragma unroll
    for (int i = 0; i < 8; i++) to[j].b[i] = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (j * 4 + i >= item.size) break;
      float v[8];
      if (SOURCE == FROM_X) unpack8(v, asked[i].low);
      else as_floats(v, asked[i].low, asked[i].high);
      if (SOURCE == FROM_BOTH) {
        float up[8];
        as_floats(up, asked[i].low_up, asked[i].high_up);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = column < K ? swiglu(v[e], up[e], a) : 0.f;
      }
      if (SOURCE != FROM_GATED) rotate(v, in_scale, IN_BLOCK, lane);
      float2 scale;
      exchange[lane] = to_bytes(v, scale);
      __syncwarp();
      if (g / 2 == i)
#pragma unroll
        for (int c = 0; c < 8; c++) to[j].b[c] = *(const uint2*)((const u8*)(exchange + t * 8 + c) + g % 2 * 8);
      if (t == i) set_scale(to[j], scale);
      __syncwarp();
    }
  }
}

// A warp a pair and slice; eight warps a block.
extern "C" __global__ void e8p_experts_prepare(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32;
  const int pair = at / SLICES, slice = at % SLICES, column = slice * SLICE + lane * 8;
  pdl_wait();
  pdl_trigger();
  if (pair >= a.tokens * a.top_k) return;
  float in_scale[8], v[8];
  load8(in_scale, a.in_scale + (size_t)expert_of(a, pair) * K + column, column < K);
  const Asked asked = ask(a.x, SILU ? pair : pair / a.top_k, column, SILU, SILU);
  if (SILU) {
    float up[8];
    as_floats(v, asked.low, asked.high), as_floats(up, asked.low_up, asked.high_up);
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = column < K ? swiglu(v[e], up[e], a) : 0.f;
  } else {
    unpack8(v, asked.low);
  }
  rotate(v, in_scale, IN_BLOCK, lane);
  float2 scale;
  keep(a.bytes + (size_t)at * KEPT, to_bytes(v, scale), lane);
  if (lane == 0) a.scales[at] = scale;
}

// Four numbers that are added to a result; zeros where there are none.
__device__ __forceinline__ float4 added(const Arguments& a, size_t at) {
  if (!a.add) return make_float4(0.f, 0.f, 0.f, 0.f);
  const uint2 v = *(const uint2*)((const u16*)a.add + at);
  const float2 low = widen<HALF>(v.x), high = widen<HALF>(v.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

extern "C" __global__ void e8p_experts_combine(const __grid_constant__ Arguments a) {
  combine(a, [&](size_t at) { return added(a, at); });
}

// -------------------------------------------------------------------------------------------------------------- product

// Sums of rows `row` and on of an expert -> its outputs, times `weight`; `biased`: with its bias.
__device__ __forceinline__ float4 outputs(float4 v, const Arguments& a, int expert, int row, float weight, bool biased,
                                          int lane) {
  rotate_rows(v, OUT_BLOCK, lane);
  if (row >= N) return make_float4(0.f, 0.f, 0.f, 0.f);
  const size_t at = (size_t)expert * N + row;
  const float4 s = *(const float4*)(a.out_scale + at);
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
  if (biased && a.bias) c = *(const float4*)(a.bias + at);
  return make_float4(weight * fmaf(v.x * a.norm, s.x, c.x), weight * fmaf(v.y * a.norm, s.y, c.y),
                     weight * fmaf(v.z * a.norm, s.z, c.z), weight * fmaf(v.w * a.norm, s.w, c.w));
}
__device__ __forceinline__ void store_gated(const float4& gate_sum, const float4& up_sum, const Arguments& a, const Item& item,
                                            int pair, int lane) {
  const int row = item.tile * ROWS + lane * 4;
  const float4 gate = outputs(gate_sum, a, item.expert, row, 1.f, true, lane);
  const float4 up = outputs(up_sum, a, item.expert, N / 2 + row, 1.f, true, lane);
  const float4 s = *(const float4*)(a.next_scale + (size_t)item.expert * (N / 2) + row);
  float4 v = make_float4(swiglu(gate.x, up.x, a) * s.x, swiglu(gate.y, up.y, a) * s.y, swiglu(gate.z, up.z, a) * s.z,
                         swiglu(gate.w, up.w, a) * s.w);
  rotate_rows(v, 128, lane);
  *(float4*)((float*)a.y + (size_t)pair * (N / 2) + row) = v;
}

#if PORTABLE
// The tables as they stand in memory, but for E81B's: the first half of each of its runs.
__device__ __forceinline__ void copy_tables(u32 to, const u8* tables) {
  for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += WARPS * 32) {
    const int rest = i - 4096, run = rest / (E81B_RUN / 16);
    copy16(to + i * 16, tables + (rest < 0 ? i * 16 : 65536 + run * 128 + rest % (E81B_RUN / 16) * 16), true);
  }
  commit();
}
// A lane's codes of a row tile, straight into registers, in which 99 KB hold more than a ring of theirs would.
__device__ __forceinline__ Codes codes_from(const u8* from, const u8* more, u32 row_bytes, u32 rest_bytes, bool real) {
  Codes c = {};
  if (!real) return c;
  c.first[0] = stream(from), c.first[1] = stream(from + 8 * row_bytes);
  if (BITS == 4) c.second[0] = stream(more), c.second[BITS == 4] = stream(more + 8 * rest_bytes);
  if (BITS == 3) c.small[0] = stream8(more), c.small[BITS == 3] = stream8(more + 8 * rest_bytes);
  return c;
}
constexpr int RINGS = 0;
#else
constexpr int RINGS = WARPS * DEPTH * SLOT;
#endif

// Shared memory: tables, barriers, chunks, ring [WARPS][DEPTH][SLOT], sums [ACROSS][CHUNK][PITCH], what the cluster sends
// [CLUSTER][SENT][128], and where nothing was prepared 512 bytes a warp. The portable form has no ring: a warp has DEPTH
// row tiles of codes in registers, and clusters are of one block.
extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) e8p_experts(const __grid_constant__ Arguments a) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp / ACROSS, column_warp = warp % ACROSS;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, slot = rank / PARTS, part = rank % PARTS;
  const int begin = part * PER_PART, end = min(begin + PER_PART, SLICES);
  const u32 base = address(smem);
  float* const partial = (float*)(smem + TABLE_BYTES + BESIDE + RINGS);
  float* const received = partial + ACROSS * CHUNK * PITCH;
  uint4* const exchange = (uint4*)(received + (CLUSTER > 1 ? CLUSTER * SENT * ROWS : 0)) + warp * 32;

#if PORTABLE
  copy_tables(base, a.tables);
#else
  const u32 tables = base + TABLE_BYTES, sent = tables + 8;
  u8* const ring = smem + TABLE_BYTES + BESIDE + warp * (DEPTH * SLOT);
  if (threadIdx.x == 0) {
    make_barrier(tables, 1);
    if (CLUSTER > 1) make_barrier(sent, 1);
    barriers_made();
    expect(tables, TABLE_BYTES);
    copy(base, a.tables, TABLE_BYTES, tables);
    if (CLUSTER > 1 && rank == 0) expect(sent, CLUSTER * SENT * ROWS * 4);
  }
  __syncwarp();
  if (CLUSTER > 1) cluster_begun();
#endif
  if (!EARLY) {
    pdl_wait();
    pdl_trigger();
  }
  if (!ONE) find_chunks(a);
  const int first_item = MODE == SUMMED ? 0 : blockIdx.x / CLUSTER, step = ONE ? 1 : gridDim.x;
  const int items = MODE == SUMMED ? min(EACH, a.top_k - slot * EACH) : ONE ? first_item + 1 : chunks.count * TILES;

  // The ring: what a lane copies it reads itself.
  constexpr u32 ROW_BYTES = K / 4, REST_BYTES = BITS == 4 ? K / 4 : K / 8;
#if PORTABLE
  static_assert(MINE % DEPTH == 0, "an item begins where the registers ahead do");
  Codes upcoming[DEPTH];
#else
  const u32 to = address(ring) + lane * 16;
#endif
  int ahead = first_item, ahead_turn = 0, ahead_mine = 0, ahead_tile = 0;
  const u8 *codes = a.codes, *rest = a.residual;  // the lane's of row tile 0 and slice 0 of the expert
  auto enter = [&]() {
    if (ahead >= items) return;
    const Item item = item_at(a, ahead, slot);
    ahead_tile = item.tile;
    codes = a.codes + ((size_t)item.expert * N + g) * ROW_BYTES + t * 16;
    rest = a.residual + ((size_t)item.expert * N + g) * REST_BYTES + t * (BITS == 4 ? 16 : 8);
  };
  auto fetch = [&](int place) {
    if (ahead < items) {
      const int slice = begin + column_warp + ahead_turn * ACROSS;
      const int row = first_row(ahead_tile, row_warp + ahead_mine * DOWN);
      const bool real = slice < end && slice * SLICE + t * 64 < K && row < N;
      const u8* from = codes + (size_t)row * ROW_BYTES + slice * 64;
      const u8* more = rest + (size_t)row * REST_BYTES + slice * (BITS == 4 ? 64 : 32);
#if PORTABLE
      upcoming[place] = codes_from(from, more, ROW_BYTES, REST_BYTES, real);
#else
      const u32 at = to + place * SLOT;
      copy16(at, from, real);
      copy16(at + 512, from + 8 * ROW_BYTES, real);
      if (BITS == 4) {
        copy16(at + 1024, more, real);
        copy16(at + 1536, more + 8 * REST_BYTES, real);
      } else if (BITS == 3) {
        copy_few<8>(at + 1024 - lane * 8, more, real);
        copy_few<8>(at + 1280 - lane * 8, more + 8 * REST_BYTES, real);
      }
#endif
      if (++ahead_mine == MINE) {
        ahead_mine = 0;
        if (++ahead_turn == TURNS) ahead_turn = 0, ahead += step, enter();
      }
    }
#if !PORTABLE
    commit();
#endif
  };
  enter();
#pragma unroll
  for (int d = 0; d < DEPTH; d++) fetch(d);
  if (EARLY) {
    pdl_wait();
    pdl_trigger();
  }

#if PORTABLE
  copies_there();
  __syncthreads();  // the tables are there
  check_start(base);
#else
  __syncthreads();  // the barriers are made
  check_start(base);
  wait_barrier(tables, 0);
  int place = 0;
#endif
  const u32 bank = bank_of(base, lane);
  float4 kept = make_float4(0.f, 0.f, 0.f, 0.f);  // of a block's experts so far
#pragma unroll 1
  for (int at = first_item; at < items; at += step) {
    const Item item = item_at(a, at, slot);
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
      const int slice = begin + column_warp + turn * ACROSS;
      Product product[GROUPS];
      if (SOURCE == PREPARED) load(product, a, item, slice, slice < end, g, t);
      else gather(product, a, item, slice, slice < end, exchange, lane, g, t);
#if PORTABLE
#pragma unroll 1
      for (int round = 0; round < MINE; round += DEPTH)
#pragma unroll
      for (int place = 0; place < DEPTH; place++) {
        const int mine = round + place;
        const Codes c = upcoming[place];
#else
#pragma unroll 1
      for (int mine = 0; mine < MINE; mine++) {
        wait_but<DEPTH - 1>();
        const Codes c = codes_at(ring + place * SLOT + lane * 16, 1024, 0, lane);
#endif
        Product::Sums acc[GROUPS];
        multiply_all(acc, product, c, bank);
        fetch(place);  // no earlier: nothing but their use orders a lane's reads before its copies
#if !PORTABLE
        place = place == DEPTH - 1 ? 0 : place + 1;
#endif
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
          if (j * 4 + t >= item.size) continue;
          float* const sum = partial + (column_warp * CHUNK + j * 4 + t) * PITCH + (row_warp + mine * DOWN) * 16 + g;
          const float top = product[j].result(acc[j], 0), low = product[j].result(acc[j], 1);
          sum[0] = turn ? sum[0] + top : top;
          sum[8] = turn ? sum[8] + low : low;
        }
      }
    }
    __syncthreads();
    auto total = [&](int i, int block) {  // four rows of 128 of a pair
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < ACROSS; w++) add_to(v, *(const float4*)(partial + (w * CHUNK + i) * PITCH + block * ROWS + lane * 4));
      return v;
    };
#if !PORTABLE
    if (CLUSTER > 1) {  // one token: the parts go to the first block, summed ones as outputs
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (warp < SENT) {
        v = total(0, warp);
        if (MODE == SUMMED)
          v = outputs(v, a, item.expert, item.tile * ROWS + lane * 4, a.weights[item.first], part == 0, lane);
      }
      if (EACH > 1) {
        add_to(v, kept);
        if (at + 1 < items) {
          kept = v;
          __syncthreads();  // the sums of this expert are read
          continue;
        }
      }
      all_begun();
      if (warp < SENT) {
        send(at_rank(received + (rank * SENT + warp) * ROWS + lane * 4, 0), v, at_rank(sent, 0));
      }
      if (rank || warp) return;
      const int row = item.tile * ROWS + lane * 4;
      const float4 rest = MODE == SUMMED && row < N ? added(a, row) : make_float4(0.f, 0.f, 0.f, 0.f);
      receive(sent);
      float4 sums[SENT];
#pragma unroll
      for (int s = 0; s < SENT; s++) {
        sums[s] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) add_to(sums[s], *(const float4*)(received + (r * SENT + s) * ROWS + lane * 4));
      }
      if (MODE == PLAIN) {
#pragma unroll
        for (int s = 0; s < SENT; s++) {
          const int at = (item.tile * BLOCKS + s) * ROWS + lane * 4;
          const float4 v = outputs(sums[s], a, item.expert, at, 1.f, true, lane);
          if (at < N) *(float4*)((float*)a.y + (size_t)item.first * N + at) = v;
        }
        return;
      }
      if (MODE == SUMMED) add_to(sums[0], rest);
      if (MODE == GATED) store_gated(sums[0], sums[SENT - 1], a, item, item.first, lane);
      else if (row < N)
        *(uint2*)((u16*)a.y + row) = make_uint2(narrow<HALF>(sums[0].x, sums[0].y), narrow<HALF>(sums[0].z, sums[0].w));
      return;
    }
#endif
    for (int job = warp; job < item.size * (MODE == GATED ? 1 : BLOCKS); job += WARPS) {
      if (MODE == GATED) {
        store_gated(total(job, 0), total(job, 1), a, item, item.pair(job), lane);
        continue;
      }
      const int i = job / BLOCKS, row = item.tile * (BLOCKS * ROWS) + job % BLOCKS * ROWS + lane * 4;
      float4 v = outputs(total(i, job % BLOCKS), a, item.expert, row, MODE == SUMMED ? a.weights[0] : 1.f, true, lane);
      if (row >= N) continue;
      if (MODE == SUMMED) add_to(v, added(a, row));
      if (MODE == SUMMED) *(uint2*)((u16*)a.y + row) = make_uint2(narrow<HALF>(v.x, v.y), narrow<HALF>(v.z, v.w));
      else *(float4*)((float*)a.y + (size_t)item.pair(i) * N + row) = v;
    }
    if (ONE) return;
    __syncthreads();
  }
}
