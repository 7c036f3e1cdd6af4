// A step's own token in the launch that attends (WRITES): its queries, key and value of a kv head from q, k and v of the
// linear to rotated coordinates, and by one block of each pair into the cache. `turboquant_write.cu` is the same alone.
//
// Every block turns what it needs by itself, so that none waits for another. A lane holds of vector g the dimensions that
// RoPE turns together, as operands of the product lie: eight neighbours from (4 i + t) 8 on. The rotation's rows are in
// that order, and stand in registers before the wait.

constexpr int VECTORS = GROUP + 2;                       // up to 8: queries, key, value
constexpr int RUNS = DIM / 32;                           // of eight dimensions, of a lane; half as many are turned by the rest

struct Fresh {  // of shared memory
  __align__(16) u16 rounded[VECTORS][DIM + 8];
  __align__(16) float exact[2][DIM + 4];                 // key, value
};
struct Turn {
  u32 matrix[DIM / 16][2][2];                            // of a product: even and odd dimensions of the warp's 16, halves of k
  int row;                                               // of cosines and sines
};

__device__ __forceinline__ void load_turn(const Arguments& p, Turn& turn, int b) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (warp >= DIM / 16) return;
#pragma unroll
  for (int c = 0; c < DIM / 16; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int k = (4 * (c / 2) + t) * 8 + c % 2 * 4 + half * 2;
      const u16* from = p.turn + k * DIM + warp * 16 + 2 * g;
      const u32 one = __ldg((const u32*)from), two = __ldg((const u32*)(from + DIM));
      turn.matrix[c][0][half] = prmt(one, two, 0x5410), turn.matrix[c][1][half] = prmt(one, two, 0x7632);
    }
  turn.row = min(max(p.positions[b], 0), p.max_position) * (DIM / 2);
}

// The token's vectors of a kv head of sequence b to shared memory.
__device__ __forceinline__ void turn_token(const Arguments& p, const Turn& turn, Fresh& fresh, int b, int kv_head) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (warp >= DIM / 16) return;
  const int r = min(g, VECTORS - 1);
  const int head = r < GROUP ? kv_head * GROUP + r : GROUP * p.kv_heads + (r - GROUP) * p.kv_heads + kv_head;
  const u16* from = (const u16*)p.q + ((size_t)b * VECTORS * p.kv_heads + head) * DIM + t * 8;
  u32 x[RUNS][4];
#pragma unroll
  for (int i = 0; i < RUNS; i++) load_words(x[i], (const u8*)(from + 32 * i));
  const bool turns = p.cos && r <= GROUP;                // a value has no position
  float4 cosines[RUNS], sines[RUNS];
#pragma unroll
  for (int i = 0; i < RUNS; i++) {
    const int at = turn.row + (4 * (i / 2) + t) * 8 + i % 2 * 4;
    cosines[i] = turns ? *(const float4*)(p.cos + at) : make_float4(1.f, 1.f, 1.f, 1.f);
    sines[i] = turns ? *(const float4*)(p.sin + at) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  float gain = 1.f;
  if (p.q_norm) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < RUNS; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float low = widen(x[i][k]), high = widen(x[i][k] >> 16);
        squares = fmaf(low, low, fmaf(high, high, squares));
      }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    gain = 1.f / sqrtf(squares / DIM + p.eps);
  }
  const u16* weight = p.q_norm && r <= GROUP ? (r < GROUP ? p.q_norm : p.k_norm) + t * 8 : nullptr;
  auto turned = [&](int i, int k, u32 a, u32 b, float cosine, float sine, float& low, float& high) {
    low = widen(a), high = widen(b);
    if (weight) low *= gain * widen(weight[32 * i + k]), high *= gain * widen(weight[32 * (i + RUNS / 2) + k]);
    const float before = low;
    low = before * cosine - high * sine, high = high * cosine + before * sine;
  };
#pragma unroll
  for (int i = 0; i < RUNS / 2; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float4 c = cosines[2 * i + k / 2], s = sines[2 * i + k / 2];
      u32 &a = x[i][k], &b = x[i + RUNS / 2][k];
      float low[2], high[2];
      turned(i, 2 * k, a, b, k % 2 ? c.z : c.x, k % 2 ? s.z : s.x, low[0], high[0]);
      turned(i, 2 * k + 1, a >> 16, b >> 16, k % 2 ? c.w : c.y, k % 2 ? s.w : s.y, low[1], high[1]);
      a = narrow(low[0]) | narrow(low[1]) << 16, b = narrow(high[0]) | narrow(high[1]) << 16;
    }
  float even[2][4] = {}, odd[2][4] = {};                 // two sums of each, so that products wait less for one another
#pragma unroll
  for (int c = 0; c < DIM / 16; c++) {
    const u32 a0 = x[c / 2][c % 2 * 2], a2 = x[c / 2][c % 2 * 2 + 1];
    if (DTYPE == 1) {
      mma_f16(even[c % 2], a0, 0, a2, 0, turn.matrix[c][0][0], turn.matrix[c][0][1]);
      mma_f16(odd[c % 2], a0, 0, a2, 0, turn.matrix[c][1][0], turn.matrix[c][1][1]);
    } else {
      mma_bf16(even[c % 2], a0, 0, a2, 0, turn.matrix[c][0][0], turn.matrix[c][0][1]);
      mma_bf16(odd[c % 2], a0, 0, a2, 0, turn.matrix[c][1][0], turn.matrix[c][1][1]);
    }
  }
  if (g >= VECTORS) return;
  const float back = rsqrtf((float)DIM);
  const float y[4] = {(even[0][0] + even[1][0]) * back, (odd[0][0] + odd[1][0]) * back,
                      (even[0][1] + even[1][1]) * back, (odd[0][1] + odd[1][1]) * back};
  const int d = warp * 16 + 4 * t;
  *(uint2*)&fresh.rounded[g][d] = make_uint2(narrow(y[0]) | narrow(y[1]) << 16, narrow(y[2]) | narrow(y[3]) << 16);
  if (g >= GROUP) *(float4*)&fresh.exact[g - GROUP][d] = make_float4(y[0], y[1], y[2], y[3]);
}

// The token's key (VALUE false) or value into the pages and the ring. One warp.
template <int BITS, bool VALUE> __device__ __forceinline__ void write_one(const Arguments& p, const Fresh& fresh, int b, int kv_head) {
  const int lane = threadIdx.x % 32, position = p.positions[b], place = min(max(position, 0), p.reach - 1);
  if (p.counts[b] < 1 || position != place) return;
  float sizes[1 << (BITS - 1)];
#pragma unroll
  for (int i = 0; i < 1 << (BITS - 1); i++) sizes[i] = __ldg((VALUE ? p.v_codebook : p.k_codebook) + 2 * i);
  constexpr int PAGE = 16 * PAGE_BLOCKS;
  const int page = p.block_table[(size_t)b * p.table_stride + place / PAGE], token = place % 16;
  u8* block = (u8*)p.cache + (((size_t)page * p.kv_heads + kv_head) * PAGE_BLOCKS + place % PAGE / 16) * BLOCK_BYTES;
  const size_t in_ring = ((size_t)p.slots[b] * p.ring_size + place % p.ring_size) * 2 + VALUE;
  u16* to = (u16*)p.ring + (in_ring * p.kv_heads + kv_head) * DIM;
  float y[QUADS][4];
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const int d = 4 * (i * 32 + lane);
    const bool there = d < DIM;
    const float4 v = there ? *(const float4*)&fresh.exact[VALUE][d] : make_float4(0.f, 0.f, 0.f, 0.f);
    y[i][0] = v.x, y[i][1] = v.y, y[i][2] = v.z, y[i][3] = v.w;
    if (there) *(uint2*)(to + d) = *(const uint2*)&fresh.rounded[GROUP + VALUE][d];
  }
  quantize<BITS, VALUE>(y, sizes, block + (VALUE ? V_AT : 0), block + NORMS + (VALUE ? 32 : 0), token, lane, true);
}
__device__ __forceinline__ void write_token(const Arguments& p, const Fresh& fresh, int b, int kv_head) {
  if (threadIdx.x / 32 == WARPS - 2) write_one<KBITS, false>(p, fresh, b, kv_head);
  if (threadIdx.x / 32 == WARPS - 1) write_one<VBITS, true>(p, fresh, b, kv_head);
}
