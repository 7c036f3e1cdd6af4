// Attention to the exact tokens of a ring, a tile of 16 places a warp; see ops/recent_attention.py for who sees which.
//
// mma.m16n8k16: queries are the rows, tokens the columns, so that probabilities are the operand of the values as they
// lie. Sums over dimensions take them in any order: a lane holds DIM / 4 neighbours of a key, or the same DIM / 8 of four
// values, and loads them from where they stand. They are on their way to the L2 before the wait.
//
// With WRITES this step's token comes from `fresh`, its place in the ring being written meanwhile, and the result stays
// in shared memory, where a warp's tiles add up.

template <int N> __device__ __forceinline__ void load_row(u32 (&v)[N], const u16* p) {  // through the L2
#pragma unroll
  for (int i = 0; i < N;) {
    if (N % 4 == 0) {
      const uint4 x = __ldcg((const uint4*)(p + 2 * i));
      v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w, i += 4;
    } else if (N % 2 == 0) {
      const uint2 x = __ldcg((const uint2*)(p + 2 * i));
      v[i] = x.x, v[i + 1] = x.y, i += 2;
    } else {
      v[i] = __ldcg((const u32*)(p + 2 * i)), i++;
    }
  }
}
// Without infinities and NaN.
__device__ __forceinline__ u32 finite(u32 pair) {
  constexpr u32 most = DTYPE == 1 ? 0x7C00 : 0x7F80;
  if ((pair & most) == most) pair &= 0xFFFF0000u;
  if ((pair >> 16 & most) == most) pair &= 0xFFFFu;
  return pair;
}

__device__ __forceinline__ void prefetch_ring(const Arguments& p, int b, int head, int tile) {
  constexpr int SECTORS = DIM / 16;                       // of 32 bytes, of a row
  const u32 apart = p.kv_heads * DIM;
  const u16* ring = (const u16*)p.ring + (size_t)p.slots[b] * p.ring_size * 2 * apart + head * DIM;
#pragma unroll
  for (int i = threadIdx.x % 32; i < 16 * SECTORS; i += 32) {
    const u16* row = ring + min(tile * 16 + i / SECTORS, p.ring_size - 1) * 2 * apart + i % SECTORS * 16;
    prefetch(row), prefetch(row + apart);
  }
}
// The `tile`-th of a ring for the rows of a kv head, to its own place of `partial` and `sums`, or with WRITES to those
// given; `again`: added to what is there.
__device__ __forceinline__ void attend_ring(
    const Arguments& p, int b, int row_tile, int head, int tile, const Fresh* fresh, float* partial, float2* sums, bool again) {
  constexpr int K_LOADED = DIM / 8, V_LOADED = DIM / 16;  // words of a lane, of one token
  constexpr int HALVES = ROWS > 8 ? 2 : 1;                // of the rows: 8 each
  constexpr int WIDE = DIM / 8 % 4 == 0 ? 4 : 2;          // neighbouring dimensions stored together
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int index = ((b * p.row_tiles + row_tile) * p.kv_heads + head) * p.ring_tiles + tile, start = tile * 16;
  const int position = p.positions[b], last = position + p.length - 1, queries = p.length * p.group;
  const int turn = last - over(max(last, 0), p.ring_size) * p.ring_size;  // the place of the last token
  const u32 apart = p.kv_heads * DIM;                     // of key and value
  const u16* ring = (const u16*)p.ring + (size_t)p.slots[b] * p.ring_size * 2 * apart + head * DIM;
  auto key_at = [&](int place) {                          // the latest position that the place can hold
    return place < p.ring_size ? last - turn + place - (place > turn ? p.ring_size : 0) : -1;
  };
  auto k_row = [&](int i) { return ring + min(start + i * 8 + g, p.ring_size - 1) * 2 * apart + t * (DIM / 4); };
  auto v_place = [&](int i) { return start + 2 * t + i % 2 + i / 2 * 8; };
  auto v_row = [&](int i) { return ring + (min(v_place(i), p.ring_size - 1) * 2 + 1) * apart + g * (DIM / 8); };
  auto seen_from = [&](int token) {
    const int from = token >= p.recent + p.spare ? token - p.recent + 1 : 0;
    return max(from, p.near_limit > 0 ? token - p.near_limit + 1 : 0);
  };
  auto token_of = [&](int r) { return position + step_of(p, min(row_tile * ROWS + r, queries - 1)); };

  if (!WRITES) prefetch_ring(p, b, head, tile);
  size_t at[HALVES];
  int first[HALVES], token[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    if (!WRITES) at[h] = query_at(p, b, head, min(row_tile * ROWS + min(h * 8 + g, ROWS - 1), queries - 1)) * DIM + t * (DIM / 4);
    token[h] = token_of(h * 8 + g), first[h] = seen_from(token[h]);
  }
  const int from = seen_from(token_of(0)), to = token_of(ROWS - 1);
  pdl_wait();
  u32 q[HALVES][K_LOADED], k[2][K_LOADED], v[4][V_LOADED];
#pragma unroll
  for (int i = 0; i < 2; i++) load_row(k[i], k_row(i));
#pragma unroll
  for (int i = 0; i < 4; i++) load_row(v[i], v_row(i));
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    if (WRITES) load_words(q[h], (const u8*)&fresh->rounded[min(g, GROUP - 1)][t * (DIM / 4)]);
    else load_row(q[h], (const u16*)p.q + at[h]);
  }
  if (WRITES) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (start + i * 8 + g == turn) load_words(k[i], (const u8*)&fresh->rounded[GROUP][t * (DIM / 4)]);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (v_place(i) == turn) load_words(v[i], (const u8*)&fresh->rounded[GROUP + 1][g * (DIM / 8)]);
  }

  float s[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int c = 0; c < K_LOADED; c += 2) {
      const u32 low = HALVES == 2 ? q[HALVES - 1][c] : 0, high = HALVES == 2 ? q[HALVES - 1][c + 1] : 0;
      if (DTYPE == 1) mma_f16(s[i], q[0][c], low, q[0][c + 1], high, k[i][c], k[i][c + 1]);
      else mma_bf16(s[i], q[0][c], low, q[0][c + 1], high, k[i][c], k[i][c + 1]);
    }
  }
  u32 weight[2][2] = {};                                  // of half h and 8 tokens: two neighbours
  float fade = 0.f;                                       // of what is there
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    float most = NONE, sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = key_at(v_place(i));
      float& x = s[i / 2][2 * h + i % 2];
      x = key >= first[h] && key <= token[h] ? x * p.scale : -INF;
      most = fmaxf(most, x);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const int r = h * 8 + g;
    const float2 before = WRITES && again && r < ROWS ? sums[r] : make_float2(NONE, 0.f);
    most = fmaxf(most, before.x), fade = exp2_fast(before.x - most);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float e = exp2_fast(s[i / 2][2 * h + i % 2] - most);
      const u32 rounded = DTYPE == 1 ? float_to_half(e) : float_to_bf16(e);
      sum += DTYPE == 1 ? lower_half_to_float(rounded) : __uint_as_float(rounded << 16);
      weight[h][i / 2] |= rounded << i % 2 * 16;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    __syncwarp();
    if (t == 0 && r < ROWS) (WRITES ? sums : p.sums + (size_t)(p.ring_at + index) * ROWS)[r] = make_float2(most, fmaf(before.y, fade, sum));
  }
  const int real = position + p.counts[b];
#pragma unroll
  for (int i = 0; i < 4; i++) {                           // what nobody sees may be NaN, as may what only padding sees
    const int key = key_at(v_place(i));
    const u32 mask = key >= from && key <= to ? ~0u : 0;
#pragma unroll
    for (int j = 0; j < V_LOADED; j++) v[i][j] &= mask;
    if (!WRITES && key >= real)
#pragma unroll
      for (int j = 0; j < V_LOADED; j++) v[i][j] = finite(v[i][j]);
  }
  float* to_row = WRITES ? partial : p.partial + (size_t)(p.ring_at + index) * ROWS * DIM;
#pragma unroll
  for (int j = 0; j < DIM / 8; j += WIDE) {
    float c[WIDE][4];
#pragma unroll
    for (int n = 0; n < WIDE; n++) {
      const u32 pick = n % 2 ? 0x7632 : 0x5410;           // of a word two dimensions, of two words two tokens
      const int w = (j + n) / 2;
      c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
      const u32 near = prmt(v[0][w], v[1][w], pick), far = prmt(v[2][w], v[3][w], pick);
      if (DTYPE == 1) mma_f16(c[n], weight[0][0], weight[1][0], weight[0][1], weight[1][1], near, far);
      else mma_bf16(c[n], weight[0][0], weight[1][0], weight[0][1], weight[1][1], near, far);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (h * 8 + g >= ROWS) continue;
        float* here = to_row + (h * 8 + g) * DIM + (2 * t + e) * (DIM / 8) + j;
        if (WRITES && again)
#pragma unroll
          for (int n = 0; n < WIDE; n++) c[n][2 * h + e] = fmaf(here[n], fade, c[n][2 * h + e]);
        if (WIDE == 4) *(float4*)here = make_float4(c[0][2 * h + e], c[1][2 * h + e], c[WIDE - 2][2 * h + e], c[WIDE - 1][2 * h + e]);
        else *(float2*)here = make_float2(c[0][2 * h + e], c[1][2 * h + e]);
      }
  }
}
