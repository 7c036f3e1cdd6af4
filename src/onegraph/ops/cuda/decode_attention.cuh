// The kernel of decode_attention.cu, and with PORTABLE of decode_portable.cu, which tell how it goes and what is set when
// compiled. One kernel, whose steps share registers and one layout of shared memory: hence past 400 lines.

#include "decode_common.cuh"

constexpr int OUTPUTS = GROUP * DIM;
// With EARLY the next launch is let go in the first line, and then values are fetched in time before the wait: what follows
// holds back its own reading, or reads little. Elsewhere the codes that the next linear asks for would come before keys and
// values: .7 us a layer (8B, 1k keys, B = 1). In front of a small model's chain of linears it gains 1.3 us a layer
// (SmolLM2-135M, 137 keys).
#if !PORTABLE
constexpr int SHARE = OUTPUTS / SIZE;              // outputs that a block of the cluster ends
#endif
constexpr int LANES = THREADS >= 2 * OUTPUTS ? 4 : THREADS >= OUTPUTS ? 2 : 1;  // that add up a pair of outputs

struct Arguments {
  const u16* qkv;           // [rows, (GROUP + 2) kv_heads, DIM]
  const u16* q_norm;        // [DIM] if NORM
  const u16* k_norm;
  const float* cos;         // [max_position + 1, ROPE / 2] if ROPE, rows turn_stride apart
  const float* sin;
  const int* positions;     // [rows], too large by `ahead`
  const int* counts;        // [rows]
  const int* table;         // [rows, reach / PAGE], rows table_stride apart
  u16* keys;                // [pages, PAGE, kv_heads, DIM], strides in units of DIM
  u16* values;              // the same strides
  u16* out;                 // [rows, kv_heads, GROUP, DIM]
  const float* sinks;       // [kv_heads, GROUP] or null
#if PORTABLE
  float* partial;           // [rows, kv_heads, SIZE, OUTPUTS]
  float2* sums;             // [rows, kv_heads, SIZE, GROUP]: best, sum
  u32* arrived;             // [rows, kv_heads], zero between launches
#endif
  int pages, table_stride, reach, max_position, ahead;
  float eps, scale;
};

struct Shared {
  float best[WARPS][8], sum[WARPS][8];              // of each warp and head
#if PORTABLE
  u32 last;                                         // whether this block is
#else
  float2 all[SIZE][8];                              // of each block of the cluster and head: best, sum
  float received[SIZE][SHARE];                      // this block's share of the outputs, by block of the cluster
  unsigned long long sent;                          // barrier: counts the bytes of the two above
#endif
  union __align__(128) {
    Tile tile;
    float part[GROUP][DIM + 4];                     // the warp's result, when its tiles are done with
  } warps[WARPS];
};

#if PORTABLE
// Blocks that an SM is to hold: registers of two do not hold eight heads of 128 with norms.
constexpr int PER_SM = GROUP == 8 && DIM == 128 && NORM ? 1 : 512 / THREADS;

#define decode_attention decode_portable
#else
constexpr int PER_SM = 512 / THREADS;
#endif
extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) decode_attention(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if PORTABLE
  const u32 rank = blockIdx.x % SIZE;
#else
  const u32 rank = cluster_rank(), sent = (u32)__cvta_generic_to_shared(&s.sent);
#endif
  const int group = blockIdx.x / SIZE, row = group / KV_HEADS, kv_head = group % KV_HEADS;
  if (EARLY) pdl_trigger();
#if !PORTABLE
  if (threadIdx.x == 0) make_barrier(sent, 1), expect(sent, OUTPUTS * 4 + SIZE * GROUP * 8), barriers_visible();
  __syncwarp();
  cluster_begun();
#endif

  // Pages of a warp's first tile in both cuts, looked up beside the position that decides between them.
  const int* table = p.table + (size_t)row * p.table_stride;
  auto page_of = [&](int start) { return table[min(start, p.reach - TILE) / PAGE]; };
  auto place_of = [&](int page, int start) {                       // of a tile, in units of DIM
    page = min(max(page, 0), p.pages - 1);                         // a wrong table must not read past the cache
    return page * PAGE_STRIDE + start % PAGE * PLACE_STRIDE + kv_head * HEAD_STRIDE;
  };
  constexpr int stride = SIZE * WARPS * TILE;
  const int start_alone = (rank * WARPS + warp) * TILE;
  int start = (warp * SIZE + rank) * TILE;
  int page = 0, page_alone = 0;
  if (WINDOW == 0) page = page_of(start), page_alone = page_of(start_alone);
  const int position = p.positions[row] - p.ahead;
  const int last = min(max(position, 0), p.reach - 1);             // where the own token stands
  const int seen = WINDOW > 0 ? max(last - WINDOW + 1, 0) : 0;     // the first key
  const int first = seen / TILE * TILE;
  const bool alone = last - first < WARPS * TILE;                  // the first block, with a tile for each warp at most
  if (alone) start = start_alone, page = page_alone;
  if (WINDOW > 0) start += first, page = page_of(start);
  Tile& tile = s.warps[warp].tile;
  // Chunks are permuted so that the lanes that read together meet in no bank: (g, t) reads chunk 4 i + t of key g, and
  // the transposing load reads one chunk of eight keys.
  auto spot = [&](bool values, int key, int chunk) -> uint4& {
    return values ? tile.values[key][chunk ^ key % 8] : tile.keys[key][chunk ^ key % 2 * 4];
  };
  auto issue = [&](bool values, int place, int start) {            // all but the own token
    const int chunk = lane % CHUNKS;
    const u16* from = (values ? p.values : p.keys) + (size_t)place * DIM + lane / CHUNKS * (PLACE_STRIDE * DIM) + chunk * 8;
#pragma unroll
    for (int i = 0; i < TILE / KEYS; i++) {
      const int key = i * KEYS + lane / CHUNKS;
      if (start + key != last) fetch(&spot(values, key, chunk), from + i * (KEYS * PLACE_STRIDE * DIM), start + key < last);
    }
  };
  const u16* qkv = p.qkv + (size_t)row * (GROUP + 2) * KV_HEADS * DIM;
  auto issue_own = [&](int start) {                                // the value of the own token, if the tile holds it
    if (start + TILE > last && lane < CHUNKS)
      fetch(&spot(true, last - start, lane), qkv + (KV_HEADS * (GROUP + 1) + kv_head) * DIM + lane * 8, true);
  };
  const size_t turned = (size_t)min(max(position, 0), p.max_position) * TURN_STRIDE;
  auto angle = [&](const float* from, int chunk, float4& lower, float4& upper) {
    lower = upper = make_float4(0.f, 0.f, 0.f, 0.f);
    if (ROPE) lower = *(const float4*)(from + turned + chunk * 8), upper = *(const float4*)(from + turned + chunk * 8 + 4);
  };
  auto angles = [&](float4 (&cosine)[STEPS], float4 (&sine)[STEPS]) {
#pragma unroll
    for (int i = 0; i < STEPS / 2; i++) {
      angle(p.cos, 4 * i + t, cosine[2 * i], cosine[2 * i + 1]);
      angle(p.sin, 4 * i + t, sine[2 * i], sine[2 * i + 1]);
    }
  };
  float4 cosine[STEPS], sine[STEPS];
  int place = place_of(page, start);
  if (start <= last) {
    angles(cosine, sine);
    issue(false, place, start);
    commit();
    if (EARLY) {
      issue(true, place, start);
      commit();
    }
  }
  if (start + stride <= last) page = page_of(start + stride);      // used a tile later
#if !PORTABLE
  all_begun();                                                     // so that their memory can be written
#endif
  pdl_wait();
  if (!EARLY) pdl_trigger();
  if (alone && rank > 0) return;
  const bool real = p.counts[row] > 0 && position == last;
  float acc[DIM / 16][4], best[2] = {NONE, NONE}, sum[2] = {0.f, 0.f};  // [dims 16 m + g and + 8][heads 2 t and 2 t + 1]
#pragma unroll
  for (int m = 0; m < DIM / 16; m++) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.f;
  if (p.sinks && rank == 0 && warp == 0) {                         // of one warp of all: a key of this score, whose value is 0
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (2 * t + h < GROUP) best[h] = p.sinks[kv_head * GROUP + 2 * t + h] * 1.4426950408889634f, sum[h] = g == 0;
  }
  if (start <= last) {
    // The own key is turned in a column that the heads leave free; eight heads leave none.
    const bool with_key = GROUP < 8 && g == GROUP;
    const uint4* from = (const uint4*)qkv + (with_key ? KV_HEADS * GROUP + kv_head : kv_head * GROUP + g) * CHUNKS + t;
    const uint4* own_key = (const uint4*)qkv + (KV_HEADS * GROUP + kv_head) * CHUNKS + t;
    uint4 q[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) q[i] = g < GROUP || with_key ? from[i * 4] : make_uint4(0, 0, 0, 0);
    if (!EARLY) issue(true, place, start);                         // behind q, which would be late behind them
    issue_own(start);
    commit();
    turn(q, with_key ? p.k_norm : p.q_norm, p.eps, cosine, sine);
    const float factor = p.scale * 1.4426950408889634f;

#pragma unroll 1
    for (;;) {
      const int after = start + stride, at = last - start;
      const bool more = after <= last, own = at < TILE;
      const size_t to = (size_t)(place + at * PLACE_STRIDE) * CHUNKS;  // the own token's place
      arrived_before_last();
      if (own) {
        uint4 key[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) key[i] = GROUP < 8 ? q[i] : own_key[i * 4];
        if (GROUP == 8) {
          float4 c[STEPS], d[STEPS];
          angles(c, d);
          turn(key, p.k_norm, p.eps, c, d);
        }
        if (g == GROUP % 8) {
#pragma unroll
          for (int i = 0; i < STEPS; i++) {
            spot(false, at, i * 4 + t) = key[i];
            if (real) ((uint4*)p.keys)[to + i * 4 + t] = key[i];
          }
        }
        __syncwarp();
      }
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.f;
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const uint4 k = tile.keys[g][(i * 4 + t) ^ g % 2 * 4], l = tile.keys[g + 8][(i * 4 + t) ^ g % 2 * 4];
        multiply(x[0], k.x, l.x, k.y, l.y, q[i].x, q[i].y);
        multiply(x[1], k.z, l.z, k.w, l.w, q[i].z, q[i].w);
      }
      if (more) {
        __syncwarp();
        place = place_of(page, after);
        issue(false, place, after);
      }
      commit();                                                    // also an empty one, so that groups count tiles
      float top[2] = {NONE, NONE};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float score = (x[0][j] + x[1][j]) * factor;
        const int key = start + g + j / 2 * 8;
        x[0][j] = key <= last && (WINDOW == 0 || key >= seen) ? score : NONE;
        top[j % 2] = fmaxf(top[j % 2], x[0][j]);
      }
#pragma unroll
      for (int o = 4; o < 32; o *= 2) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], o));
        top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], o));
      }
      float fade[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(best[h], top[h]);
        fade[h] = exp2_fast(best[h] - now), best[h] = now;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) x[0][j] = exp2_fast(x[0][j] - best[j % 2]);
      const u32 lower = narrow(x[0][0], x[0][1]), upper = narrow(x[0][2], x[0][3]);
      const float2 a = widen(lower), b = widen(upper);             // the sum is of what the product sees
      sum[0] = sum[0] * fade[0] + (a.x + b.x), sum[1] = sum[1] * fade[1] + (a.y + b.y);
      const u32 b0 = transpose(lower), b1 = transpose(upper);
#pragma unroll
      for (int m = 0; m < DIM / 16; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[m][j] *= fade[j % 2];
      arrived_before_last();
      if (own && real && lane < CHUNKS) ((uint4*)p.values)[to + lane] = spot(true, at, lane);
#pragma unroll
      for (int m = 0; m < DIM / 16; m++) {                         // matrices: keys 0-7 and chunks 2 m, 2 m + 1; keys 8-15
        const int key = lane / 16 * 8 + lane % 8;
        const uint4 v = load_transposed(&tile.values[key][(2 * m + lane / 8 % 2) ^ key % 8]);
        multiply(acc[m], v.x, v.y, v.z, v.w, b0, b1);
      }
      if (!more) break;
      __syncwarp();
      issue(true, place, after), issue_own(after);
      commit();
      start = after;
      if (start + stride <= last) page = page_of(start + stride);
    }
  }

  // The warp's lanes, then the block's warps, then the cluster's blocks.
#pragma unroll
  for (int o = 4; o < 32; o *= 2) {
    sum[0] += __shfl_xor_sync(~0u, sum[0], o);
    sum[1] += __shfl_xor_sync(~0u, sum[1], o);
  }
  __syncwarp();                                                    // the tile becomes the warp's result
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int head = 2 * t + h;
    if (head < GROUP) {
      if (g == 0) s.best[warp][head] = best[h], s.sum[warp][head] = sum[h];
#pragma unroll
      for (int m = 0; m < DIM / 16; m++) {
        s.warps[warp].part[head][m * 16 + g] = acc[m][h];
        s.warps[warp].part[head][m * 16 + g + 8] = acc[m][2 + h];
      }
    }
  }
  __syncthreads();
  u16* out = p.out + (size_t)group * OUTPUTS;
#pragma unroll 1
  for (int pair = threadIdx.x / LANES; pair < OUTPUTS / 2; pair += THREADS / LANES) {
    const int head = pair / (DIM / 2), d = pair % (DIM / 2) * 2, part = threadIdx.x % LANES;
    float top = NONE, whole = 0.f;
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w += LANES) top = fmaxf(top, s.best[w + part][head]);
#pragma unroll
    for (int o = 1; o < LANES; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int w = 0; w < WARPS; w += LANES) {
      const float f = exp2_fast(s.best[w + part][head] - top);
      const float2 v = *(const float2*)&s.warps[w + part].part[head][d];
      whole += f * s.sum[w + part][head], total.x += f * v.x, total.y += f * v.y;
    }
#pragma unroll
    for (int o = 1; o < LANES; o *= 2) {
      whole += __shfl_xor_sync(~0u, whole, o);
      total.x += __shfl_xor_sync(~0u, total.x, o), total.y += __shfl_xor_sync(~0u, total.y, o);
    }
    if (part > 0) continue;
    if (alone || SIZE == 1) {
      ((u32*)out)[pair] = real ? narrow(total.x / whole, total.y / whole) : 0;
      continue;
    }
#if PORTABLE
    leave<GROUP>(p, group * SIZE + rank, pair, head, d == 0, total, make_float2(top, whole));
#else
    const u32 to = 2 * pair / SHARE;
    send(at_rank(&s.received[rank][2 * pair % SHARE], to), total, at_rank(&s.sent, to));
    if (d / 2 < SIZE) send(at_rank(&s.all[rank][head], d / 2), make_float2(top, whole), at_rank(&s.sent, d / 2));
#endif
  }
#if PORTABLE
  if (!alone && SIZE > 1)
    add_parts<GROUP>(p, s.last, group, [&](int pair, int, float first, float second, float whole) {
      ((u32*)out)[pair] = real ? narrow(first / whole, second / whole) : 0;
    });
#else
  if (alone || threadIdx.x >= SHARE) return;
  receive(sent);
#pragma unroll 1
  for (int at = threadIdx.x; at < SHARE; at += THREADS) {
    const int output = rank * SHARE + at, head = output / DIM;
    float top = NONE, whole = 0.f, total = 0.f;
#pragma unroll
    for (int r = 0; r < SIZE; r++) top = fmaxf(top, s.all[r][head].x);
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
      const float f = exp2_fast(s.all[r][head].x - top);
      whole += f * s.all[r][head].y, total += f * s.received[r][at];
    }
    out[output] = (u16)narrow(real ? total / whole : 0.f, 0.f);
  }
#endif
}
