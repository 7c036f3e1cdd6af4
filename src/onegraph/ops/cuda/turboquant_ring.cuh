// Attention to the exact tokens of a ring, a tile of 16 places a warp; see ops/recent_attention.py for who sees which.
//
// mma.m16n8k16: queries are the rows, tokens the columns, so that probabilities are the operand of the values as they
// lie. Sums over dimensions take them in any order: a lane holds DIM / 4 neighbours of a key, or the same DIM / 8 of four
// values, and loads them from where they stand.

template <int N> __device__ __forceinline__ void load_row(u32 (&v)[N], const u16* p, bool there) {  // through the L2
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = 0;
  if (!there) return;
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

// The `index`-th tile of all rings, to its own place of `partial` and `sums`.
__device__ __forceinline__ void attend_ring(const Arguments& p, int index) {
  constexpr int K_LOADED = DIM / 8, V_LOADED = DIM / 16;  // words of a lane, of one token
  constexpr int HALVES = ROWS > 8 ? 2 : 1;                // of the rows: 8 each
  constexpr int WIDE = DIM / 8 % 4 == 0 ? 4 : 2;          // neighbouring dimensions stored together
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pair = index / p.ring_tiles, start = index % p.ring_tiles * 16;
  const int head = pair % p.kv_heads, row_tile = pair / p.kv_heads % p.row_tiles, b = pair / p.kv_heads / p.row_tiles;
  const int position = p.positions[b], last = position + p.length - 1, queries = p.length * p.group;
  const size_t apart = (size_t)p.kv_heads * DIM;          // of key and value
  const u16* ring = (const u16*)p.ring + (size_t)p.slots[b] * p.ring_size * 2 * apart + head * DIM;
  auto key_at = [&](int place) {                          // the latest position that the place can hold
    const int behind = (last - place) % p.ring_size;
    return place < p.ring_size ? last - behind - (behind < 0 ? p.ring_size : 0) : -1;
  };
  auto seen_from = [&](int token) {
    int from = token >= p.recent + p.spare ? token - p.recent + 1 : 0;
    if (p.near_limit > 0) from = max(from, token - p.near_limit + 1);
    return max(from, 0);
  };
  auto token_of = [&](int r) { return position + min(row_tile * ROWS + r, queries - 1) / p.group; };

  u32 q[HALVES][K_LOADED], k[2][K_LOADED], v[4][V_LOADED];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int place = start + i * 8 + g;
    load_row(k[i], ring + (size_t)place * 2 * apart + t * (DIM / 4), place < p.ring_size);
  }
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const int row = row_tile * ROWS + h * 8 + g;
    const size_t at = ((size_t)b * p.length + row / p.group) * p.kv_heads * p.group + head * p.group + row % p.group;
    load_row(q[h], (const u16*)p.q + at * DIM + t * (DIM / 4), h * 8 + g < ROWS && row < queries);
  }
  // A value that nobody sees may be NaN, as may one that only padding sees.
  const int from = seen_from(token_of(0)), to = token_of(ROWS - 1), real = position + p.counts[b];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int place = start + 2 * t + i % 2 + i / 2 * 8, key = key_at(place);
    load_row(v[i], ring + ((size_t)place * 2 + 1) * apart + g * (DIM / 8), key >= from && key <= to);
    if (key >= real)
#pragma unroll
      for (int j = 0; j < V_LOADED; j++) v[i][j] = finite(v[i][j]);
  }

  float s[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int c = 0; c < K_LOADED; c += 2) {
      const u32 low = HALVES == 2 ? q[HALVES - 1][c] : 0, high = HALVES == 2 ? q[HALVES - 1][c + 1] : 0;
      if (DTYPE == 1) mma(s[i], q[0][c], low, q[0][c + 1], high, k[i][c], k[i][c + 1]);
      else mma_bf16(s[i], q[0][c], low, q[0][c + 1], high, k[i][c], k[i][c + 1]);
    }
  }
  u32 weight[2][2] = {};                                  // of half h and 8 tokens: two neighbours
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const int token = token_of(h * 8 + g), first = seen_from(token);
    float most = NONE, sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = key_at(start + i / 2 * 8 + 2 * t + i % 2);
      float& x = s[i / 2][2 * h + i % 2];
      x = key >= first && key <= token ? x * p.scale : -INF;
      most = fmaxf(most, x);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float e = exp2_fast(s[i / 2][2 * h + i % 2] - most);
      const u32 rounded = DTYPE == 1 ? to_half(e) : to_bf16(e);
      sum += DTYPE == 1 ? from_half(rounded) : __uint_as_float(rounded << 16);
      weight[h][i / 2] |= rounded << i % 2 * 16;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0 && h * 8 + g < ROWS) p.sums[(size_t)(p.ring_at + index) * ROWS + h * 8 + g] = make_float2(most, sum);
  }
  float* to_row = p.partial + (size_t)(p.ring_at + index) * ROWS * DIM;
#pragma unroll
  for (int j = 0; j < DIM / 8; j += WIDE) {
    float c[WIDE][4];
#pragma unroll
    for (int n = 0; n < WIDE; n++) {
      const u32 pick = n % 2 ? 0x7632 : 0x5410;           // of a word two dimensions, of two words two tokens
      const int w = (j + n) / 2;
      c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
      const u32 near = prmt(v[0][w], v[1][w], pick), far = prmt(v[2][w], v[3][w], pick);
      if (DTYPE == 1) mma(c[n], weight[0][0], weight[1][0], weight[0][1], weight[1][1], near, far);
      else mma_bf16(c[n], weight[0][0], weight[1][0], weight[0][1], weight[1][1], near, far);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (h * 8 + g >= ROWS) continue;
        float* here = to_row + (h * 8 + g) * DIM + (2 * t + e) * (DIM / 8) + j;
        if (WIDE == 4) *(float4*)here = make_float4(c[0][2 * h + e], c[1][2 * h + e], c[WIDE - 2][2 * h + e], c[WIDE - 1][2 * h + e]);
        else *(float2*)here = make_float2(c[0][2 * h + e], c[1][2 * h + e]);
      }
  }
}
