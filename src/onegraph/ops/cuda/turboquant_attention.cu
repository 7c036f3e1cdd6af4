// Attention straight from TurboQuant's packed codes. The page layout is told in formats/turboquant_layout.py.
// How codes become bytes u, whose level is (u - 127.5) / 127.5 times the largest, is told in turboquant_codes.cuh; how
// sequences are cut into splits, in turboquant_plan.cuh; how a ring is attended to, in turboquant_ring.cuh; how the parts
// become results, in turboquant_merge.cuh. What is left here is one kernel, which is why this file is long.
//
// Scores: mma.m16n8k32 (u8 x s8, exact). 16 tokens are the rows, so that the words of a page are the operand as they
// lie. Queries are the columns, in 16 bits on a scale of their own: the high byte and the low byte of a query are two
// columns next to each other, so that a lane holds both sums of one query. Even integers, so that the half of
// u - 127.5 = (u - 128) + 1/2 is an integer of what the accumulators start from.
// Values: mma.m16n8k16 (float16). Tokens run along k: a page interleaves two tokens, and one permute makes [u, 0, u', 0],
// the subnormal float16 u / 2^24 of two tokens; what u - 127.5 lacks of u is taken off at the end.
// Probabilities times norms are float16 on a reference of each query that rises only when they would exceed 2^15, so
// that the accumulators are hardly ever rescaled and no shuffle is needed for the maximum.
//
// A warp owns a tile of 32 tokens at a time, fetched STAGES tiles ahead by cp.async into its own shared memory; warps
// and splits meet by their references, in a fixed order. Splits follow from the lengths and together fill the grid, which
// is constant; or, where rows can hold little, each is a block of a cluster, which then merges without a second launch.
//
// What stands before the wait for the kernel that writes this step's tokens: the plan and the first tiles' codes, if
// none of their tokens is new. Then warps take tiles of the rings, first those of blocks that have no split.
//
// With WRITES, which is for clusters alone, the launch also does a decode step's write (`turboquant_fresh.cuh`): it waits
// for the linear that makes q, k and v, every block turns its queries by itself, and one of each pair writes codes and
// ring. No code that is read is new, since the latest tokens come from the ring, and the ring's new token comes from where
// it was made. A pair's blocks take its ring, and meet through the cluster's shared memory. What such a launch costs is
// mostly the reading of its instructions, thousands that run once: what is unrolled there has to be worth it.
//
// Set when compiled: DIM, KBITS, VBITS, ROWS (4, 8 or 16 queries of a kv head at a time), DTYPE (of q, rotation and out:
// 0 bfloat16, 1 float16, 2 float32), PAGE_BLOCKS (blocks of 16 tokens in a page), WARPS, STAGES, PER_SM; WRITES (0 or 1),
// GROUP (queries of a kv head) and SCALE if so.

#include "turboquant_common.cuh"
#include "turboquant_codes.cuh"
#include "turboquant_plan.cuh"
#include "turboquant_quantize.cuh"
#include "turboquant_fresh.cuh"
#include "turboquant_ring.cuh"

constexpr int NT = ROWS / 4, NV = (ROWS + 7) / 8;        // column tiles of scores (4 queries) and of values (8)
constexpr int P_STRIDE = 80;                             // bytes of a query's 32 probabilities: other banks for each
constexpr int RINGERS = WRITES ? 4 : 0;                  // warps that may attend to the ring, with WRITES
constexpr int RECEIVED = 8;                              // rows that the blocks of a cluster send to one of them, at most

struct Fixed {  // of shared memory, before the probabilities and the stages
  u32 k_table[8], v_table[8];
  int2 start[ROWS];         // what the accumulators of a query start from
  float scale[ROWS];
  float2 reference[WARPS + RINGERS][ROWS];  // reference, sum
  float2 received[RECEIVED];      // the same of each part of a row, of the cluster
  float weights[WARPS][ROWS];     // sum of probabilities times norms
  float scaled[WARPS][ROWS];      // sum, of the highest reference
  int items;
  __align__(4) u8 query[2 * ROWS][DIM + 16];
};
constexpr int P_AT = (sizeof(Fixed) + 127) / 128 * 128;
constexpr int STAGES_AT = P_AT + WARPS * NV * 8 * P_STRIDE;
constexpr int MERGE = WARPS * ROWS * DIM * 4;  // bytes; in place of the stages
constexpr int STAGE = 2 * BLOCK_SHARED;
constexpr int RINGS_AT = STAGES_AT + (WARPS * STAGES * STAGE > MERGE ? WARPS * STAGES * STAGE : MERGE);
constexpr int RECEIVED_AT = RINGS_AT + RINGERS * ROWS * DIM * 4;
constexpr int FRESH_AT = RECEIVED_AT + (WRITES ? RECEIVED * DIM * 4 : 0);
constexpr int WORK_AT = FRESH_AT + (WRITES ? (int)sizeof(Fresh) : 0);

// Rows of a pair that a block of its cluster merges.
__device__ __forceinline__ int received_rows(int splits) { return (ROWS + splits - 1) / splits; }

#include "turboquant_merge.cuh"

template <bool CLUSTERED> __device__ __forceinline__ void attend_splits(const Arguments& p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool at_once = !WRITES || p.early;
  if (at_once) pdl_trigger();
  if (WRITES) cluster_begun();
  Fixed& fixed = *(Fixed*)smem;
  Fresh& fresh = *(Fresh*)(smem + FRESH_AT);
  int2* work = (int2*)(smem + WORK_AT);
  Span* spans = (Span*)(work + p.batch);
  u8* probabilities = smem + P_AT + warp * NV * 8 * P_STRIDE;
  auto prepare = [&]() {
    for (int i = lane; i < NV * 8 * P_STRIDE / 4; i += 32) ((u32*)probabilities)[i] = 0;
    if (warp == WARPS - 1) make_table<KBITS, true>(fixed.k_table, p.k_codebook, lane);
    if (warp == WARPS - 2) make_table<VBITS, false>(fixed.v_table, p.v_codebook, lane);
  };
  if (!p.ahead) pdl_wait();
  if (!WRITES) prepare();
  if (!CLUSTERED) {
    for (int b = threadIdx.x; b < p.batch; b += WARPS * 32) spans[b] = span_of(p, b);
    __syncthreads();
    if (warp == 0) plan(p, spans, work, fixed.items, lane);
    __syncthreads();
  }

  const u32 stages = address(smem + STAGES_AT) + warp * STAGES * STAGE;
  const u8* stages_here = smem + STAGES_AT + warp * STAGES * STAGE;
  const u32 page_bytes = PAGE_BLOCKS * BLOCK_BYTES, page_stride = p.kv_heads * page_bytes;
  u32 moved[PER_LANE];  // where a lane's pieces of a block go in shared memory
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int o = (j * 32 + lane) * 16, v = o - V_AT;
    moved[j] = v < 0 ? o : v < 8 * V_ROW ? V_AT + v / V_ROW * V_STRIDE + v % V_ROW : o + MOVED;
  }

  for (int item = CLUSTERED ? blockIdx.y * gridDim.x + blockIdx.x : blockIdx.x;; item += gridDim.x) {
    const bool begins = CLUSTERED || item == blockIdx.x, some = CLUSTERED || item < fixed.items;
    int b = 0, head, row_tile, split, splits;
    if (CLUSTERED) {
      b = WRITES ? blockIdx.y : over(blockIdx.y, p.row_tiles), row_tile = WRITES ? 0 : blockIdx.y - b * p.row_tiles;
      splits = p.cluster, head = blockIdx.x / (u32)splits, split = blockIdx.x - head * splits;
    } else {
      for (int step = 1 << (31 - __clz(p.batch)); step; step >>= 1)
        if (b + step < p.batch && work[b + step].x <= item) b += step;
      splits = max(work[b].y, 1);
      const int rest = item - work[b].x, pair = over(max(rest, 0), splits);
      split = rest - pair * splits, row_tile = over(pair, p.kv_heads), head = pair - row_tile * p.kv_heads;
    }
    const Span span = CLUSTERED ? span_of(p, b) : spans[b];
    const int first = span.tile + (u32)(split * span.tiles) / (u32)splits;
    const int stop = some ? span.tile + (u32)(split * span.tiles + span.tiles) / (u32)splits : 0;

    // Fetching: 32 tokens as two blocks, which may stand in different pages.
    const int* table = p.block_table + (size_t)b * p.table_stride;
    const int blocks = p.reach / BLOCK;
    int next = first + warp, page[2];
    auto look_ahead = [&]() {
#pragma unroll
      for (int i = 0; i < 2; i++)
        page[i] = next < stop ? __ldg(table + min(next * 2 + i, blocks - 1) / PAGE_BLOCKS) : 0;
    };
    const u8* mine = p.cache + (size_t)head * page_bytes + lane * 16;
    auto fetch = [&](int stage) {
      if (next < stop) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 at = min(max(page[i], 0), p.pages - 1);
          const u8* from = mine + (u64)at * page_stride;
          if (PAGE_BLOCKS > 1) from += (u32)min(next * 2 + i, blocks - 1) % PAGE_BLOCKS * BLOCK_BYTES;
          const u32 to = stages + stage * STAGE + i * BLOCK_SHARED;
#pragma unroll
          for (int j = 0; j < PER_LANE; j++)
            if (CHUNKS % 32 == 0 || j < PER_LANE - 1 || (j * 32 + lane) * 16 < BLOCK_BYTES) copy16(to + moved[j], from + j * 512);
        }
        next += WARPS;
        look_ahead();
      }
      commit();
    };
    look_ahead();
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      if (!WRITES && next < stop && next * TILE + TILE > span.old) pdl_wait();
      fetch(s);
    }
    if (WRITES) {
      for (int i = split + warp * splits; i < p.ring_tiles; i += WARPS * splits) prefetch_ring(p, b, head, i);
      Turn turn;
      load_turn(p, turn, b);
      prepare();  // while codes and rotation are on their way
      pdl_wait();
      if (!at_once) pdl_trigger();
      turn_token(p, turn, fresh, b, head);
      __syncthreads();  // the tables, too
    } else if (begins) {
      if constexpr (DTYPE < 2) {
        const int turn = (warp + WARPS / 2) % WARPS;  // the first warps have queries to prepare
        if (CLUSTERED) {  // the tiles of the cluster's own pair
          for (int i = split + turn * splits; i < p.ring_tiles; i += WARPS * splits)
            attend_ring(p, b, row_tile, head, i, nullptr, nullptr, nullptr, false);
        } else {
          const int tiles = p.batch * p.row_tiles * p.kv_heads * p.ring_tiles;
          for (int i = gridDim.x - 1 - blockIdx.x + turn * gridDim.x; i < tiles; i += WARPS * gridDim.x) {
            const int pair = over(i, p.ring_tiles), rows = over(pair, p.kv_heads), sequence = over(rows, p.row_tiles);
            attend_ring(p, sequence, rows - sequence * p.row_tiles, pair - rows * p.kv_heads, i - pair * p.ring_tiles,
                        nullptr, nullptr, nullptr, false);
          }
        }
      }
      pdl_wait();
      if (!CLUSTERED && blockIdx.x == 0)
        for (int i = threadIdx.x; i < p.batch; i += WARPS * 32) p.work[i] = work[i];
      __syncthreads();  // the tables are there
    }
    if (!some) break;

    const float k_unit = ((float*)fixed.k_table)[4], v_unit = ((float*)fixed.v_table)[4];
    // Queries: 16 bits on a scale of their own, bytes apart.
    const int queries = p.length * p.group;
    for (int r = warp; r < ROWS; r += WARPS) {
      const int row = row_tile * ROWS + r;
      float v[QUADS][4], most = 0.f;
#pragma unroll
      for (int i = 0; i < QUADS; i++)  // no load behind a branch, so that all are under way together
        if (WRITES) load_four(v[i], fresh.rounded[min(r, GROUP - 1)], min(i * 128 + lane * 4, DIM - 4));
        else load_four(v[i], p.q, query_at(p, b, head, min(row, queries - 1)) * DIM + min(i * 128 + lane * 4, DIM - 4));
#pragma unroll
      for (int i = 0; i < QUADS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (row >= queries || i * 128 + lane * 4 >= DIM) v[i][e] = 0.f;
          most = fmaxf(most, fabsf(v[i][e]));
        }
      most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
      const float inverse = most > 0.f ? 16256.f / most : 0.f;
      int high_sum = 0, low_sum = 0;
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        u32 highs = 0, lows = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int z = 2 * (int)rintf(v[i][e] * inverse), high = (z + 128) >> 8, low = z - (high << 8);
          highs |= (high & 255) << 8 * e, lows |= (low & 255) << 8 * e;
          high_sum += high, low_sum += low;
        }
        const int d = i * 128 + lane * 4;
        if (d < DIM) *(u32*)&fixed.query[2 * r][d] = highs, *(u32*)&fixed.query[2 * r + 1][d] = lows;
      }
      high_sum = __reduce_add_sync(~0u, high_sum), low_sum = __reduce_add_sync(~0u, low_sum);
      if (lane == 0) {
        fixed.start[r] = make_int2(-128 * high_sum, -128 * low_sum + (256 * high_sum + low_sum) / 2);
        fixed.scale[r] = most / 32512.f * k_unit * p.scale;
      }
    }
    __syncthreads();
    const int near = WRITES ? (p.ring_tiles - split + splits - 1) / splits : 0, ringers = min(near, RINGERS);
    float* rings = (float*)(smem + RINGS_AT);
    if constexpr (WRITES) {
      const int turn = WARPS - 1 - warp;
      for (int i = turn; turn < RINGERS && i < near; i += RINGERS)
        attend_ring(p, b, row_tile, head, split + i * splits, &fresh, rings + turn * ROWS * DIM, fixed.reference[WARPS + turn],
                    i > turn);
    }
    const Table kt = {fixed.k_table[0], fixed.k_table[1], fixed.k_table[2], fixed.k_table[3]};
    const Table vt = {fixed.v_table[0], fixed.v_table[1], fixed.v_table[2], fixed.v_table[3]};
    u64 qf[K_STEPS][NT];
    int2 start[NT];
    float unit[NT];
    int seen_to[NT], seen_from[NT];  // keys that the lane's query of each column tile sees
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int c = 0; c < K_STEPS; c++) {
        const u8* query = fixed.query[2 * (n * 4 + g / 2) + g % 2];
        u32 words[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 word = 0;
          if (KW == 4) {
            const int d = k_dimension(c, half, 0, t);
            if (d < DIM) word = *(const u32*)(query + d);
          } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int d = k_dimension(c, half, i, t);
              if (d < DIM) word |= (u32)query[d] << 8 * i;
            }
          }
          words[half] = word;
        }
        qf[c][n] = (u64)words[1] << 32 | words[0];
      }
      start[n] = fixed.start[n * 4 + t];
      unit[n] = fixed.scale[n * 4 + t];
      const int token = min(span.last + step_of(p, row_tile * ROWS + n * 4 + t), p.reach - 1);
      seen_to[n] = min(token + 1, span.end);
      seen_from[n] = p.window > 0 ? token - p.window + 1 : 0;
    }
    // Tiles within these bounds are seen by every query of the row tile.
    const int top = min(span.last + step_of(p, row_tile * ROWS), p.reach - 1);
    const int bottom = min(span.last + step_of(p, row_tile * ROWS + ROWS - 1), p.reach - 1);
    const int whole_to = min(top + 1, span.end), whole_from = p.window > 0 ? bottom - p.window + 1 : 0;

    float acc[NV][V_TILES][4], reference[NT], sum[NT], weights[NT];
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int m = 0; m < V_TILES; m++) acc[n][m][0] = acc[n][m][1] = acc[n][m][2] = acc[n][m][3] = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++) reference[n] = NONE, sum[n] = weights[n] = 0.f;

    int stage = 0;
#pragma unroll 1
    for (int tile = first + warp; tile < stop; tile += WARPS) {
      wait_but<STAGES - 1>();
      __syncwarp();
      const u8* here = stages_here + stage * STAGE;
      float x[2][NT][2], norm[2][2];  // scores, norms of values: of block i, tokens g and g + 8
      const bool whole = tile * TILE >= whole_from && tile * TILE + TILE <= whole_to;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u8* block = here + i * BLOCK_SHARED;
        int s[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++) s[n][0] = s[n][2] = start[n].x, s[n][1] = s[n][3] = start[n].y;
        u32 top_words[K_LANE], low_words[K_LANE];
        constexpr int k_row = DIM * KW / 8;
        if (K_RUN) {
          load_words<K_LANE>(top_words, block + g * k_row + t * K_LANE * 4);
          load_words<K_LANE>(low_words, block + (g + 8) * k_row + t * K_LANE * 4);
        } else {
#pragma unroll
          for (int j = 0; j < K_LANE; j++) {
            const u8* from = block + g * k_row + min(j * 4 + t, K_WORDS - 1) * 4;
            if (DIM * KW % 32 == 0) {
              top_words[j] = *(const u32*)from, low_words[j] = *(const u32*)(from + 8 * k_row);
            } else {  // rows of 16-bit words, the last without its second half
              top_words[j] = ((const u16*)from)[0] | ((const u16*)from)[1] << 16;
              low_words[j] = ((const u16*)(from + 8 * k_row))[0] | ((const u16*)(from + 8 * k_row))[1] << 16;
            }
          }
        }
#pragma unroll
        for (int j = 0; j < K_LANE; j++) {
          u32 top_high = 0, low_high = 0;
          if (KBITS == 3) {
            const int word = K_RUN ? t * K_LANE + j : min(j * 4 + t, K_WORDS - 1);
            const u8* from = block + K_HIGH + g * (DIM / 8) + word * 2;
            const u32 a = *(const u16*)from, c = *(const u16*)(from + DIM);
            top_high = a << 2 | a << 16, low_high = c << 2 | c << 16;
          }
#pragma unroll
          for (int q = 0; q < 4 / KW; q++) {
            u32 a0, a1, a2, a3;
            if (KBITS == 4) {
              u32 d0, d1, d2, d3;
              look_up_parts(a0, a2, d0, d2, top_words[j], kt);
              look_up_parts(a1, a3, d1, d3, low_words[j], kt);
#pragma unroll
              for (int n = 0; n < NT; n++) {
                mma_signed(s[n], a0, a1, a2, a3, qf[j * (4 / KW) + q][n]);
                mma(s[n], d0, d1, d2, d3, qf[j * (4 / KW) + q][n]);
              }
            } else {
              look_up<KBITS>(a0, a2, nibbles<KBITS>(top_words[j], top_high, q), kt);
              look_up<KBITS>(a1, a3, nibbles<KBITS>(low_words[j], low_high, q), kt);
#pragma unroll
              for (int n = 0; n < NT; n++) mma(s[n], a0, a1, a2, a3, qf[j * (4 / KW) + q][n]);
            }
          }
        }
        const u16* norms = (const u16*)(block + NORMS + MOVED);
        float k_norm[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          k_norm[h] = lower_half_to_float(norms[g + 8 * h]);
          norm[i][h] = lower_half_to_float(norms[BLOCK + g + 8 * h]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int n = 0; n < NT; n++)
            x[i][n][h] = (float)(s[n][2 * h] * 256 + s[n][2 * h + 1]) * (k_norm[h] * unit[n]);
        if (!whole) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int token = tile * TILE + i * BLOCK + g + 8 * h;
            if (token >= span.end) norm[i][h] = 0.f;  // may be NaN
#pragma unroll
            for (int n = 0; n < NT; n++)
              if (token >= seen_to[n] || token < seen_from[n]) x[i][n][h] = -INF;
          }
        }
      }

      float e[2][NT][2], w[2][NT][2];
      auto exponentials = [&]() {
        bool fits = true;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              e[i][n][h] = exp2_fast(x[i][n][h] - reference[n]);
              w[i][n][h] = e[i][n][h] * norm[i][h];
              fits = fits && w[i][n][h] <= 32768.f;
            }
        return fits;
      };
      if (!__all_sync(~0u, exponentials())) {  // raise the references
        float factor[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float most = -INF;
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) most = fmaxf(most, x[i][n][h] + __log2f(fmaxf(norm[i][h], 5.9604645e-8f)));
#pragma unroll
          for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
          const float raised = fmaxf(reference[n], most - 8.f);
          factor[n] = exp2_fast(reference[n] - raised);
          reference[n] = raised;
          sum[n] *= factor[n], weights[n] *= factor[n];
        }
#pragma unroll
        for (int n = 0; n < NV; n++)
#pragma unroll
          for (int c = 0; c < 2; c++) {  // column 2 t + c belongs to that query
            const int query = n * 8 + 2 * t + c;
            float f = 1.f;
#pragma unroll
            for (int k = 0; k < NT; k++) {
              const float there = __shfl_sync(~0u, factor[k], (lane & ~3) | (query & 3));
              if (query / 4 == k) f = there;
            }
#pragma unroll
            for (int m = 0; m < V_TILES; m++) acc[n][m][c] *= f, acc[n][m][2 + c] *= f;
          }
        exponentials();
      }
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const u32 rounded = float_to_half(w[i][n][h]);
            sum[n] += e[i][n][h];
            weights[n] += lower_half_to_float(rounded);
            *(u16*)(probabilities + (n * 4 + t) * P_STRIDE + (i * BLOCK + g + 8 * h) * 2) = (u16)rounded;
          }
      __syncwarp();

#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u8* block = here + i * BLOCK_SHARED;
        u32 pf[NV][2];
#pragma unroll
        for (int n = 0; n < NV; n++)
#pragma unroll
          for (int k = 0; k < 2; k++)
            pf[n][k] = *(const u32*)(probabilities + (n * 8 + g) * P_STRIDE + (i * BLOCK + 2 * t + 8 * k) * 2);
        u32 near[V_LANE], far[V_LANE];  // token pairs t and t + 4
        const u8* row = block + V_AT + t * V_STRIDE;
        if (V_RUN) {
          load_words<V_LANE>(near, row + g * V_LANE * 4);
          load_words<V_LANE>(far, row + 4 * V_STRIDE + g * V_LANE * 4);
        } else {
#pragma unroll
          for (int j = 0; j < V_LANE; j++) {
            near[j] = *(const u32*)(row + min(j * 8 + g, V_WORDS - 1) * 4);
            far[j] = *(const u32*)(row + 4 * V_STRIDE + min(j * 8 + g, V_WORDS - 1) * 4);
          }
        }
#pragma unroll
        for (int j = 0; j < V_LANE; j++) {
          u32 near_high = 0, far_high = 0;
          if (VBITS == 3) {
            const int word = V_RUN ? g * V_LANE + j : min(j * 8 + g, V_WORDS - 1);
            const u8* from = block + V_HIGH + MOVED + t * (DIM / 4) + word / 2 * 4;
            near_high = *(const u32*)from >> word % 2 * 2 << 2;
            far_high = *(const u32*)(from + DIM) >> word % 2 * 2 << 2;
          }
#pragma unroll
          for (int q = 0; q < 4 / VW; q++) {
            u32 a[2], c[2];
            look_up<VBITS>(a[0], a[1], nibbles<VBITS>(near[j], near_high, q), vt);
            look_up<VBITS>(c[0], c[1], nibbles<VBITS>(far[j], far_high, q), vt);
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const u32 a0 = prmt(a[half], 0, 0x4240), a1 = prmt(a[half], 0, 0x4341);
              const u32 a2 = prmt(c[half], 0, 0x4240), a3 = prmt(c[half], 0, 0x4341);
#pragma unroll
              for (int n = 0; n < NV; n++) mma_f16(acc[n][(j * (4 / VW) + q) * 2 + half], a0, a1, a2, a3, pf[n][0], pf[n][1]);
            }
          }
        }
      }
      __syncwarp();
      fetch(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_but<0>();

    // Warps meet: each scales its sums to the highest reference, the block adds them in the order of the warps.
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        sum[n] += __shfl_xor_sync(~0u, sum[n], o);
        weights[n] += __shfl_xor_sync(~0u, weights[n], o);
      }
      if (g == 0) {
        fixed.reference[warp][n * 4 + t] = make_float2(reference[n], sum[n]);
        fixed.weights[warp][n * 4 + t] = weights[n];
      }
    }
    __syncthreads();  // no stage is read any more
    float* merge = (float*)(smem + STAGES_AT);
    auto most_of = [&](int r) {
      float most = NONE;
#pragma unroll
      for (int k = 0; k < WARPS; k++) most = fmaxf(most, fixed.reference[k][r].x);
#pragma unroll 1
      for (int k = 0; k < ringers; k++) most = fmaxf(most, fixed.reference[WARPS + k][r].x);
      return most;
    };
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int r = n * 8 + 2 * t + c;
        if (r >= ROWS) continue;
        const float f = exp2_fast(fixed.reference[warp][r].x - most_of(r)), lack = -127.5f * fixed.weights[warp][r], unit = f * v_unit;
        float* to = merge + (warp * ROWS + r) * DIM;
        auto value = [&](int m, int k) { return fmaf(acc[n][m][2 * k + c], 16777216.f, lack) * unit; };
        if (V_RUN && VW == 4) {  // a lane's dimensions lie side by side
#pragma unroll
          for (int m = 0; m < V_TILES; m += 2)
            *(float4*)(to + v_dimension(m, 0, g)) = make_float4(value(m, 0), value(m, 1), value(m + 1, 0), value(m + 1, 1));
        } else {
#pragma unroll
          for (int m = 0; m < V_TILES; m++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const int d = v_dimension(m, k, g);
              if (V_RUN || d < DIM) to[d] = value(m, k);
            }
        }
        if (g == 0) fixed.scaled[warp][r] = fixed.reference[warp][r].y * f;
      }
    __syncthreads();
    if (WRITES) cluster_wait();  // every block has started: what is sent to it stays
    for (int i = threadIdx.x; i < ROWS * DIM / 4; i += WARPS * 32) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < WARPS; k++) {
        const float4 u = *(const float4*)(merge + k * ROWS * DIM + i * 4);
        v.x += u.x, v.y += u.y, v.z += u.z, v.w += u.w;
      }
      const int r = i * 4 / DIM;
      if (ringers) {
        const float most = most_of(r);
#pragma unroll 1
        for (int k = 0; k < ringers; k++) {
          const float f = exp2_fast(fixed.reference[WARPS + k][r].x - most);
          const float4 u = *(const float4*)(rings + k * ROWS * DIM + i * 4);
          v.x = fmaf(u.x, f, v.x), v.y = fmaf(u.y, f, v.y), v.z = fmaf(u.z, f, v.z), v.w = fmaf(u.w, f, v.w);
        }
      }
      if (WRITES) {  // row r goes to block r % splits
        const int place = split * received_rows(splits) + r / splits;
        push(at_rank((float4*)(smem + RECEIVED_AT) + place * (DIM / 4) + i % (DIM / 4), r % splits), v);
      } else {
        *(float4*)(p.partial + (size_t)item * ROWS * DIM + i * 4) = v;
      }
    }
    if (threadIdx.x < ROWS) {
      const int r = threadIdx.x;
      const float most = most_of(r);
      float total = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) total += fixed.scaled[k][r];
#pragma unroll 1
      for (int k = 0; k < ringers; k++) {
        const float2 v = fixed.reference[WARPS + k][r];
        total += v.y * exp2_fast(v.x - most);
      }
      if (WRITES) push(at_rank(&fixed.received[split * received_rows(splits) + r / splits], r % splits), make_float2(most, total));
      else p.sums[(size_t)item * ROWS + r] = make_float2(most, total);
    }
    __syncthreads();
    if (CLUSTERED) break;
  }
}

#if !PORTABLE
// Both in one launch: the blocks of a cluster are the splits of a pair, and then each merges some of its queries.
extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) attend_and_merge(const __grid_constant__ Arguments p) {
  attend_splits<true>(p);
  merge_cluster(p);
}
#endif
#if !WRITES
extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) attend(const __grid_constant__ Arguments p) {
  attend_splits<false>(p);
}
extern "C" __global__ void __launch_bounds__(MERGERS * 32) merge_1(const __grid_constant__ Arguments p) { merge_splits<1>(p); }
extern "C" __global__ void __launch_bounds__(MERGERS * 32) merge_4(const __grid_constant__ Arguments p) { merge_splits<4>(p); }
#endif
