// The attention of a round that checks drafts: RMSNorm and RoPE of 1 to 8 tokens a row, their write to the cache, attention
// over the pages and over the round's own tokens, one launch. How tiles go: decode_attention.cu.
//
// A column of the products is a (token, head of the group) pair, so that the tokens share each load of a key: SETS sets of
// eight columns are a warp's, and where there are more than its registers hold SLICES groups of blocks share the tokens.
// The cache's keys are those before the round, in the same bits for each token. The round's own are a last tile behind them:
// nothing orders the blocks of a launch, so the one that holds this tile makes its keys and values from qkv, and of the first
// slice's also writes them, each once. Queries are turned once a block, into shared memory.
// STEADY, where a token's result must not depend on the tokens beside it: tiles are cut by a key's place alone, so that those
// that hold the round's own tokens, one or two, hold keys of the cache in front of them; which warp takes a tile follows from
// its number; and no block works alone. What a token does not see adds zeros to its sums.
//
// Blocks meet as those of a decode step do: through a cluster's shared memory, with PORTABLE through memory, where the last one
// adds up, in a fixed order.
//
// With GATED each head's query has a gate behind it, whose sigmoid its result is multiplied by. VALUES: 1, values go through
// RMSNorm without weights; 2, they are the keys as they came, so normed. Then DIM is 256 or 512.
//
// Set when compiled: HALF (1: float16, 0: bfloat16), DIM (64, 128, 256 or 512), GROUP (heads a kv head), TOKENS (1 to 8 that
// a row brings), SLICES, STEADY, PAGE (tokens), NORM (0: none, 1: weights of 16 bits, 2: of float32), ROPE (how many of a
// head's coordinates rotate, the first ones: a multiple of 64), GATED, WARPS (of a block), SIZE (blocks that share keys),
// KV_HEADS, WINDOW (0: none), VALUES, and strides of the cache and of the angles: PAGE_STRIDE, PLACE_STRIDE, HEAD_STRIDE (units of
// DIM), TURN_STRIDE.

#include "decode_common.cuh"

constexpr int SPAN = (TOKENS + SLICES - 1) / SLICES;  // tokens of a slice
constexpr int COLUMNS = SPAN * GROUP;
constexpr int SETS = (COLUMNS + 7) / 8;
constexpr int OUTPUTS = COLUMNS * DIM;
constexpr int EACH = 1 + GATED;                       // vectors of a query
constexpr int KEY_AT = GROUP * EACH * KV_HEADS;       // of a token, the first vector that is a key
constexpr int VALUE_AT = KEY_AT + (VALUES == 2 ? 0 : KV_HEADS);
constexpr int WIDTH = VALUE_AT + KV_HEADS;            // vectors of q, k and v
constexpr int WORKERS = SIZE * WARPS;
constexpr int OWN_TILES = STEADY ? 2 : 1;             // that the round's own tokens may lie in
static_assert(!VALUES || CHUNKS % 32 == 0, "a warp norms a value");
static_assert(TOKENS <= 8 && SETS + 2 <= WARPS, "a warp turns a set, one the keys, one copies the values");

struct Arguments {
  const u16* qkv;        // [rows, TOKENS, WIDTH, DIM]
  const void* q_norm;    // [DIM] if NORM
  const void* k_norm;
  const float* cos;      // [max_position + 1, ROPE / 2] if ROPE, rows turn_stride apart
  const float* sin;
  const int* positions;  // [rows], of the first token
  const int* counts;     // [rows], how many tokens are real
  const int* table;      // [rows, reach / PAGE], rows table_stride apart
  u16* keys;             // [pages, PAGE, kv_heads, DIM], strides in units of DIM
  u16* values;           // the same strides
  u16* out;              // [rows, TOKENS, kv_heads, GROUP, DIM]
  const float* sinks;    // [kv_heads, GROUP] or null
  float* partial;        // with PORTABLE and SIZE > 1: [rows, SLICES, kv_heads, SIZE, OUTPUTS]
  float2* sums;          // [rows, SLICES, kv_heads, SIZE, COLUMNS]: best, sum
  u32* arrived;          // [rows, SLICES, kv_heads], zero between launches
  int pages, table_stride, reach, max_position;
  float eps, scale;
};

struct Shared {
  float best[WARPS][8 * SETS], sum[WARPS][8 * SETS];  // of each warp and column
#if PORTABLE
  u32 last;                                           // whether this block is
#else
  float2 all[SIZE][COLUMNS];                          // of each block of the cluster and column: best, sum
  float received[SIZE][OUTPUTS / SIZE];               // this block's share of the outputs, by block of the cluster
  unsigned long long sent;                            // barrier: counts the bytes of the two above
#endif
  __align__(128) uint4 q[SETS][8][CHUNKS];
  union {
    Tile tile;
    float part[8][DIM + 4];                           // the warp's result of a set, when its tiles are done with
  } warps[WARPS + OWN_TILES];                         // behind theirs, the tiles of the round's own tokens
};

// A warp's value, normed: chunks i * 32 + lane of `from`, which points at the lane's first.
__device__ __forceinline__ void norm_value(uint4 (&v)[PARTS], const uint4* from, float eps) {
  float squares = 0.f;
  auto each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) change(v[i].x), change(v[i].y), change(v[i].z), change(v[i].w);
  };
#pragma unroll
  for (int i = 0; i < PARTS; i++) v[i] = from[i * 32];
  each([&](u32& pair) {
    const float2 a = widen(pair);
    squares += a.x * a.x + a.y * a.y;
  });
#pragma unroll
  for (int o = 1; o < 32; o *= 2) squares += __shfl_xor_sync(~0u, squares, o);
  const float gain = rsqrtf(squares / DIM + eps);
  each([&](u32& pair) {
    const float2 a = widen(pair);
    pair = narrow(a.x * gain, a.y * gain);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_round(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = blockIdx.x / SIZE, kv_head = group % KV_HEADS;
  const int slice = group / KV_HEADS % SLICES, row = group / (KV_HEADS * SLICES), begin = slice * SPAN;
#if PORTABLE
  const int rank = blockIdx.x % SIZE;
#else
  const int rank = SIZE > 1 ? cluster_rank() : 0;
  const u32 sent = address(&s.sent);
  if (SIZE > 1) {
    if (threadIdx.x == 0) make_barrier(sent, 1), expect(sent, OUTPUTS * 4 + SIZE * COLUMNS * 8), barriers_visible();
    __syncwarp();
    cluster_begun();
  }
#endif

  const int* table = p.table + (size_t)row * p.table_stride;
  auto page_of = [&](int start) { return table[min(start, p.reach - TILE) / PAGE]; };
  auto place_of = [&](int page, int start) {                       // of a key, in units of DIM
    page = min(max(page, 0), p.pages - 1);                         // a wrong table must not read past the cache
    return page * PAGE_STRIDE + start % PAGE * PLACE_STRIDE + kv_head * HEAD_STRIDE;
  };
  const int among = warp * SIZE + rank, by_itself = rank * WARPS + warp;
  int page = 0, page_alone = 0;                                    // of a warp's first tile in both cuts
  if (WINDOW == 0) page = page_of(among * TILE), page_alone = page_of(by_itself * TILE);
  const int position = p.positions[row], end = min(max(position, 0), p.reach);  // keys of the cache are those before `end`
  const int seen = WINDOW > 0 ? min(max(position + begin - WINDOW + 1, 0), end) : 0, first = seen / TILE * TILE;
  const int tiles = STEADY ? end / TILE - first / TILE : (end - first + TILE - 1) / TILE;  // of the cache alone
  const bool alone = !STEADY && tiles < WARPS;                     // the first block, with a tile for each warp at most
  const int place_in_own = STEADY ? end % TILE : 0;                // of the round's first token
  const int own_tiles = (place_in_own + TOKENS + TILE - 1) / TILE;
  const int own_number = STEADY ? end / TILE : alone ? 0 : tiles;  // of the first of them: whose it is
  const bool writes = rank == own_number % SIZE, holds = writes || (own_tiles > 1 && rank == (own_number + 1) % SIZE);
  int at = alone ? by_itself : among;
  if (STEADY && WINDOW > 0) at = (among + WORKERS - first / TILE % WORKERS) % WORKERS;
  int start = first + at * TILE;
  if (alone) page = page_alone;
  if (WINDOW > 0 && at < tiles) page = page_of(start);
  auto spot = [&](int of, bool values, int key, int chunk) -> uint4& {  // permuted, so that lanes meet in no bank
    Tile& tile = s.warps[of].tile;
    return values ? tile.values[key][chunk ^ key % 8] : tile.keys[key][chunk ^ key % 2 * 4];
  };
  auto own_spot = [&](bool values, int token, int chunk) -> uint4& {  // of the round's own, and of what is behind them
    const int key = place_in_own + token;
    return spot(WARPS + key / TILE, values, key % TILE, chunk);
  };
  auto issue = [&](bool values, int place, int start) {
    const int chunk = lane % CHUNKS;
    const u16* from = (values ? p.values : p.keys) + (size_t)place * DIM + lane / CHUNKS * (PLACE_STRIDE * DIM) + chunk * 8;
#pragma unroll
    for (int i = 0; i < TILE / KEYS * PARTS; i++) {
      const int key = i / PARTS * KEYS + lane / CHUNKS, part = i % PARTS * 32;
      fetch(&spot(warp, values, key, chunk + part), from + i / PARTS * (KEYS * PLACE_STRIDE * DIM) + part * 8, start + key < end);
    }
  };
  int place = place_of(page, start);
  if (at < tiles) issue(false, place, start);
  commit();
  if (at + WORKERS < tiles) page = page_of(start + WORKERS * TILE);  // used a tile later
  if (STEADY && writes) {                                          // what the cache has of the first own tile
    const size_t near = place_of(page_of(end - place_in_own), end - place_in_own);
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * TILE * CHUNKS; i += THREADS) {
      const bool values = i >= TILE * CHUNKS;
      const int key = i / CHUNKS % TILE, chunk = i % CHUNKS;
      const uint4* from = (const uint4*)(values ? p.values : p.keys) + (near + key * PLACE_STRIDE) * CHUNKS;
      if (key < place_in_own) spot(WARPS, values, key, chunk) = from[chunk];
    }
  }

  // Who turns what: a warp a set of queries, the next one the round's keys; the one behind it copies their values.
  const bool queries = warp < SETS, keys = holds && warp == SETS;
  const int column = 8 * warp + g, token = queries ? begin + column / GROUP : g;
  const bool there = token < TOKENS && (keys || (queries && column < COLUMNS));
  constexpr bool AHEAD = TURNS <= 4;                               // registers hold all angles, which are read before the wait
  float4 cosine[2 * TURNS], sine[2 * TURNS];
  auto turned_at = [&]() { return (size_t)min(max(position + token, 0), p.max_position) * TURN_STRIDE; };
  auto angle = [&](size_t turned, int i) {
    const size_t chunk = turned + (4 * (i / 2) + t) * 8 + i % 2 * 4;
    cosine[i] = sine[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (ROPE) cosine[i] = *(const float4*)(p.cos + chunk), sine[i] = *(const float4*)(p.sin + chunk);
  };
  if (AHEAD && (queries || keys)) {
    const size_t turned = turned_at();
#pragma unroll
    for (int i = 0; i < 2 * TURNS; i++) angle(turned, i);
  }
#if !PORTABLE
  if (SIZE > 1) all_begun();                                       // so that their memory can be written
#endif
  pdl_wait();
  pdl_trigger();
  if (alone && rank > 0) return;
  const int count = min(p.counts[row], TOKENS);
  auto real = [&](int token) { return token < count && position + token >= 0 && position + token < p.reach; };
  auto own_place = [&](int token) {                                // of a real one, in the cache
    return (size_t)place_of(table[(position + token) / PAGE], position + token) * CHUNKS;
  };
  const uint4* qkv = (const uint4*)p.qkv + (size_t)row * TOKENS * WIDTH * CHUNKS;
  uint4 x[STEPS];
  if (queries || keys) {
    const int head = keys ? KEY_AT + kv_head : (kv_head * GROUP + column % GROUP) * EACH;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      x[i] = there ? qkv[(token * WIDTH + head) * CHUNKS + i * 4 + t] : make_uint4(0, 0, 0, 0);
  }
  if (at < tiles) issue(true, place, start);                       // behind q, which would be late behind them
  commit();
  if (queries || keys) {
    turn(x, keys ? p.k_norm : p.q_norm, p.eps, cosine, sine, [&](int i) {
      if (!AHEAD) __syncwarp(), angle(turned_at(), 2 * i), angle(turned_at(), 2 * i + 1);  // no load comes earlier
    });
#pragma unroll
    for (int i = 0; i < STEPS; i++) (keys ? own_spot(false, g, i * 4 + t) : s.q[warp][g][(i * 4 + t) ^ g % 2 * 4]) = x[i];
    if (keys && there && writes && slice == 0 && real(token)) {
      uint4* to = (uint4*)p.keys + own_place(token) + t;
#pragma unroll
      for (int i = 0; i < STEPS; i++) to[i * 4] = x[i];
    }
  } else if (VALUES && holds && warp == SETS + 1) {
#pragma unroll 1
    for (int own = 0; own < own_tiles * TILE - place_in_own; own++) {
      uint4 v[PARTS] = {};
      if (real(own)) norm_value(v, qkv + (own * WIDTH + VALUE_AT + kv_head) * CHUNKS + lane, p.eps);
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        if (real(own) && writes && slice == 0) ((uint4*)p.values)[own_place(own) + i * 32 + lane] = v[i];
        own_spot(true, own, i * 32 + lane) = v[i];
      }
    }
  } else if (holds && warp == SETS + 1) {
#pragma unroll 1
    for (int i = lane; i < (own_tiles * TILE - place_in_own) * CHUNKS; i += 32) {
      const int own = i / CHUNKS, chunk = i % CHUNKS;
      uint4 v = make_uint4(0, 0, 0, 0);                            // 0 * NaN would carry what is not real into the sum
      if (real(own)) {
        v = qkv[(own * WIDTH + VALUE_AT + kv_head) * CHUNKS + chunk];
        if (writes && slice == 0) ((uint4*)p.values)[own_place(own) + chunk] = v;
      }
      own_spot(true, own, chunk) = v;
    }
  }
  __syncthreads();

  float acc[SETS][DIM / 16][4], best[SETS][2], sum[SETS][2];       // [dims 16 m + g and + 8][columns 2 t and 2 t + 1 of a set]
#pragma unroll
  for (int n = 0; n < SETS; n++) {
    best[n][0] = best[n][1] = NONE, sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
    for (int m = 0; m < DIM / 16; m++) acc[n][m][0] = acc[n][m][1] = acc[n][m][2] = acc[n][m][3] = 0.f;
    if (!p.sinks || rank > 0 || warp > 0) continue;
#pragma unroll
    for (int h = 0; h < 2; h++) {                                  // of one warp of all: a key of this score, whose value is 0
      const int column = 8 * n + 2 * t + h;
      if (column < COLUMNS) best[n][h] = p.sinks[kv_head * GROUP + column % GROUP] * 1.4426950408889634f, sum[n][h] = g == 0;
    }
  }
  const float factor = p.scale * 1.4426950408889634f;
#pragma unroll 1
  for (; at < tiles + own_tiles; at += WORKERS) {
    const bool own = at >= tiles, more = at + WORKERS < tiles;
    const int of = own ? WARPS + at - tiles : warp, base = own && !STEADY ? position : start;
    const Tile& tile = s.warps[of].tile;
    start += WORKERS * TILE;
    arrived_before_last();
    float scores[SETS][4];
#pragma unroll
    for (int n = 0; n < SETS; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int chunk = (i * 4 + t) ^ g % 2 * 4;
      const uint4 k = tile.keys[g][chunk], l = tile.keys[g + 8][chunk];
#pragma unroll
      for (int n = 0; n < SETS; n++) {
        const uint4 q = s.q[n][g][chunk];
        multiply(scores[n], k.x, l.x, k.y, l.y, q.x, q.y);
        multiply(scores[n], k.z, l.z, k.w, l.w, q.z, q.w);
      }
    }
    if (more) {
      __syncwarp();
      place = place_of(page, start);
      issue(false, place, start);
    }
    commit();                                                      // also an empty one, so that groups count tiles
    u32 b[SETS][2];
    float fade[SETS][2];
    bool higher = false;
#pragma unroll
    for (int n = 0; n < SETS; n++) {
      float(&score)[4] = scores[n];
      float top[2] = {NONE, NONE};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = base + g + j / 2 * 8, column = 8 * n + 2 * t + j % 2;
        const int last = position + begin + column / GROUP;        // what the column's token stands at
        score[j] *= factor;
        score[j] = (u32)key <= (u32)(own || STEADY ? last : end - 1) ? score[j] : NONE;
        if (WINDOW > 0) score[j] = key > last - WINDOW ? score[j] : NONE;
        top[j % 2] = fmaxf(top[j % 2], score[j]);
      }
#pragma unroll
      for (int o = 4; o < 32; o *= 2) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], o));
        top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], o));
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(best[n][h], top[h]);
        fade[n][h] = exp2_fast(best[n][h] - now), best[n][h] = now;
        higher |= fade[n][h] < 1.f;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) score[j] = exp2_fast(score[j] - best[n][j % 2]);
      const u32 lower = narrow(score[0], score[1]), upper = narrow(score[2], score[3]);
      const float2 c = widen(lower), d = widen(upper);             // the sum is of what the product sees
      sum[n][0] = sum[n][0] * fade[n][0] + (c.x + d.x);
      sum[n][1] = sum[n][1] * fade[n][1] + (c.y + d.y);
      b[n][0] = transpose(lower), b[n][1] = transpose(upper);
    }
    if (__any_sync(~0u, higher)) {                                 // seldom, once a warp has read many keys
#pragma unroll
      for (int n = 0; n < SETS; n++)
#pragma unroll
        for (int m = 0; m < DIM / 16; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) acc[n][m][j] *= fade[n][j % 2];
    }
    arrived_before_last();
#pragma unroll
    for (int m = 0; m < DIM / 16; m++) {                           // matrices: keys 0-7 and chunks 2 m, 2 m + 1; keys 8-15
      const int key = lane / 16 * 8 + lane % 8;
      const uint4 v = load_transposed(&tile.values[key][(2 * m + lane / 8 % 2) ^ key % 8]);
#pragma unroll
      for (int n = 0; n < SETS; n++) multiply(acc[n][m], v.x, v.y, v.z, v.w, b[n][0], b[n][1]);
    }
    if (more) {
      __syncwarp();
      issue(true, place, start);
    }
    commit();
    if (at + 2 * WORKERS < tiles) page = page_of(start + WORKERS * TILE);
  }

  // The warp's lanes, then the block's warps, a set at a time, then the blocks.
#pragma unroll
  for (int n = 0; n < SETS; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int o = 4; o < 32; o *= 2) sum[n][h] += __shfl_xor_sync(~0u, sum[n][h], o);
      if (g == 0) s.best[warp][8 * n + 2 * t + h] = best[n][h], s.sum[warp][8 * n + 2 * t + h] = sum[n][h];
    }
  auto output = [&](int column) {                                  // where a head's outputs begin, in pairs
    const size_t token = (size_t)row * TOKENS + begin + column / GROUP;
    return (((token * KV_HEADS + kv_head) * GROUP) + column % GROUP) * (DIM / 2);
  };
  auto finish = [&](int column, int pair, float2 found) {
    const int token = begin + column / GROUP;
    if (GATED && token < TOKENS) {
      const float2 gate = widen(((const u32*)qkv)[(token * WIDTH + (kv_head * GROUP + column % GROUP) * 2 + 1) * (DIM / 2) + pair]);
      found.x /= 1.f + exp2_fast(-1.4426950408889634f * gate.x), found.y /= 1.f + exp2_fast(-1.4426950408889634f * gate.y);
    }
    if (token < TOKENS) ((u32*)p.out)[output(column) + pair] = real(token) ? narrow(found.x, found.y) : 0;
  };
#pragma unroll 1
  for (int set = 0; set < SETS; set++) {
    __syncthreads();                                               // tiles, or the set before, are done with
#pragma unroll
    for (int n = 0; n < SETS; n++) {
      if (n != set) continue;
#pragma unroll
      for (int m = 0; m < DIM / 16; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) s.warps[warp].part[2 * t + j % 2][m * 16 + j / 2 * 8 + g] = acc[n][m][j];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * DIM / 2; i += THREADS) {
      const int of = i / (DIM / 2), pair = i % (DIM / 2), column = 8 * set + of;
      if (column >= COLUMNS) break;
      float top = NONE, whole = 0.f;
      float2 total = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.best[w][column]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float f = exp2_fast(s.best[w][column] - top);
        const float2 v = *(const float2*)&s.warps[w].part[of][2 * pair];
        whole += f * s.sum[w][column], total.x += f * v.x, total.y += f * v.y;
      }
      if (alone || SIZE == 1) {
        finish(column, pair, make_float2(total.x / whole, total.y / whole));
        continue;
      }
      const int all = column * (DIM / 2) + pair;                   // of all pairs
#if PORTABLE
      leave<COLUMNS>(p, group * SIZE + rank, all, column, pair == 0, total, make_float2(top, whole));
#else
      const int share = OUTPUTS / SIZE, to = 2 * all / share;
      send(at_rank(&s.received[rank][2 * all % share], to), total, at_rank(&s.sent, to));
      if (pair < SIZE) send(at_rank(&s.all[rank][column], pair), make_float2(top, whole), at_rank(&s.sent, pair));
#endif
    }
  }
  if (alone || SIZE == 1) return;
#if PORTABLE
  add_parts<COLUMNS>(p, s.last, group, [&](int all, int column, float one, float two, float whole) {
    finish(column, all % (DIM / 2), make_float2(one / whole, two / whole));
  });
#else
  receive(sent);
#pragma unroll 1
  for (int i = threadIdx.x; i < OUTPUTS / SIZE / 2; i += THREADS) {
    const int all = rank * (OUTPUTS / SIZE / 2) + i, column = all / (DIM / 2);
    float top = NONE, whole = 0.f;
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < SIZE; r++) top = fmaxf(top, s.all[r][column].x);
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
      const float f = exp2_fast(s.all[r][column].x - top);
      const float2 v = *(const float2*)&s.received[r][2 * i];
      whole += f * s.all[r][column].y, total.x += f * v.x, total.y += f * v.y;
    }
    finish(column, all % (DIM / 2), make_float2(total.x / whole, total.y / whole));
  }
#endif
}
