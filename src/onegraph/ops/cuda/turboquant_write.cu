// A decode step's write into a TurboQuant cache: norm, RoPE, rotation, quantization, packing, scatter, one launch.
//
// A block takes what one token has of a kv head: the queries of its group, its key, its value. The rotation is a product
// on the tensor cores, m16n8k16: these vectors are the rows, and a warp owns 16 of the dimensions that come out. Its part
// of the matrix is in registers before the wait for the linear that makes q, k and v, as are cosines, sines, codebooks
// and the place in the cache. Then a warp takes a vector at a time, a lane four neighbouring dimensions of it.
// How codes are packed: formats/turboquant_layout.py.
//
// Set when compiled: DIM, KBITS, VBITS, GROUP (queries of a kv head, up to 16), SCALE (0 norm, 1 matched, 2 unbiased),
// DTYPE (0 bfloat16, 1 float16), TURNED (coordinates that rotate, the first ones), NORM32 (1: norms are float32).

#include "turboquant_common.cuh"
#include "turboquant_quantize.cuh"

struct Arguments {
  const u16* qkv;           // [tokens, (GROUP + 2) kv_heads, DIM]
  const u16* q_norm;        // [DIM] or null; with NORM32 of float32
  const u16* k_norm;
  const float* cos;         // [max_position + 1, TURNED / 2] or null
  const float* sin;
  const int* positions;     // [batch]
  const int* counts;        // [batch]
  const int* block_table;   // [batch, table_stride]
  const u16* turn;          // [DIM, DIM]
  const float* k_codebook;  // [2^KBITS]
  const float* v_codebook;
  u8* cache;                // [pages, kv_heads, page_bytes]
  u16* ring;                // [rings, ring_size, 2, kv_heads, DIM] or null
  const int* slots;         // [batch]
  u16* out;                 // [tokens, GROUP kv_heads, DIM]
  int length, kv_heads, table_stride, reach, max_position, page_size, page_bytes, ring_size;
  float eps;
};

constexpr int WARPS = DIM / 16;
constexpr int VECTORS = GROUP + 2, TILES = (VECTORS + 15) / 16;
constexpr int PAIRS = (DIM + 63) / 64;                   // of coordinates, of a lane: what rotates together, then the rest
constexpr int BLOCK_BYTES = 2 * DIM * (KBITS + VBITS) + 64;

// The two coordinates of pair d: half of what rotates apart, or half of the rest.
__device__ __forceinline__ int lower_of(int d) { return TURNED == DIM || d < TURNED / 2 ? d : d + TURNED / 2; }
__device__ __forceinline__ int upper_of(int d) { return d + (TURNED == DIM || d < TURNED / 2 ? TURNED / 2 : DIM / 2); }

extern "C" __global__ void __launch_bounds__(WARPS * 32) turboquant_write(const __grid_constant__ Arguments p) {
  __shared__ __align__(16) u16 vectors[TILES * 16][DIM + 8];
  __shared__ __align__(16) float turned[VECTORS][DIM + 4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.x, at = blockIdx.y, b = at / p.length, step = at % p.length;
  pdl_trigger();

  u32 matrix[DIM / 16][2][2];  // of a product: even and odd dimensions of the warp's 16, the halves of k
#pragma unroll
  for (int c = 0; c < DIM / 16; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u16* from = p.turn + (size_t)(c * 16 + half * 8 + 2 * t) * DIM + warp * 16 + 2 * g;
      const u32 one = __ldg((const u32*)from), two = __ldg((const u32*)(from + DIM));
      matrix[c][0][half] = prmt(one, two, 0x5410), matrix[c][1][half] = prmt(one, two, 0x7632);
    }
  float k_sizes[1 << (KBITS - 1)], v_sizes[1 << (VBITS - 1)];
#pragma unroll
  for (int i = 0; i < 1 << (KBITS - 1); i++) k_sizes[i] = __ldg(p.k_codebook + 2 * i);
#pragma unroll
  for (int i = 0; i < 1 << (VBITS - 1); i++) v_sizes[i] = __ldg(p.v_codebook + 2 * i);
  const int position = p.positions[b] + step;
  const int place = min(max(position, 0), p.reach - 1);
  const int page = p.block_table[(size_t)b * p.table_stride + place / p.page_size], slot = p.ring ? p.slots[b] : 0;
  float cosine[PAIRS], sine[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int d = lane + 32 * i;
    const size_t row = (size_t)min(max(position, 0), p.max_position) * (TURNED / 2) + d;
    const bool there = p.cos && d < TURNED / 2;
    cosine[i] = there ? p.cos[row] : 1.f, sine[i] = there ? p.sin[row] : 0.f;
  }
  for (int i = threadIdx.x; i < (TILES * 16 - VECTORS) * DIM; i += WARPS * 32) vectors[VECTORS + i / DIM][i % DIM] = 0;
  pdl_wait();

  const bool real = step < p.counts[b] && position == place;
  for (int r = warp; r < VECTORS; r += WARPS) {
    const int head = r < GROUP ? kv_head * GROUP + r : GROUP * p.kv_heads + (r - GROUP) * p.kv_heads + kv_head;
    const u16* x = p.qkv + ((size_t)at * (GROUP + 2) * p.kv_heads + head) * DIM;
    float low[PAIRS], high[PAIRS], squares = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int d = lane + 32 * i;
      low[i] = d < DIM / 2 ? widen(x[lower_of(d)]) : 0.f, high[i] = d < DIM / 2 ? widen(x[upper_of(d)]) : 0.f;
      squares += low[i] * low[i] + high[i] * high[i];
    }
    const bool turns = r <= GROUP;  // a value has neither norm nor position
    const float gain = p.q_norm ? 1.f / sqrtf(sum_of_warp(squares) / DIM + p.eps) : 1.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int d = lane + 32 * i;
      if (d >= DIM / 2) continue;
      if (turns && p.q_norm) {
        const u16* weight = r < GROUP ? p.q_norm : p.k_norm;
        auto at = [&](int c) { return NORM32 ? ((const float*)weight)[c] : widen(weight[c]); };
        low[i] *= gain * at(lower_of(d)), high[i] *= gain * at(upper_of(d));
      }
      if (turns) {
        const float before = low[i];
        low[i] = before * cosine[i] - high[i] * sine[i], high[i] = high[i] * cosine[i] + before * sine[i];
      }
      vectors[r][lower_of(d)] = (u16)narrow(low[i]), vectors[r][upper_of(d)] = (u16)narrow(high[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
      const u16 *top = &vectors[m * 16 + g][c * 16 + 2 * t], *bottom = &vectors[m * 16 + g + 8][c * 16 + 2 * t];
      const u32 a0 = *(const u32*)top, a1 = *(const u32*)bottom, a2 = *(const u32*)(top + 8), a3 = *(const u32*)(bottom + 8);
      if (DTYPE == 1) {
        mma_f16(even, a0, a1, a2, a3, matrix[c][0][0], matrix[c][0][1]);
        mma_f16(odd, a0, a1, a2, a3, matrix[c][1][0], matrix[c][1][1]);
      } else {
        mma_bf16(even, a0, a1, a2, a3, matrix[c][0][0], matrix[c][0][1]);
        mma_bf16(odd, a0, a1, a2, a3, matrix[c][1][0], matrix[c][1][1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = m * 16 + h * 8 + g;
      if (r < VECTORS) *(float4*)&turned[r][warp * 16 + 4 * t] = make_float4(even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]);
    }
  }
  __syncthreads();

  const int within = place % p.page_size, token = within % 16;
  u8* block = p.cache + ((size_t)page * p.kv_heads + kv_head) * p.page_bytes + within / 16 * BLOCK_BYTES;
  for (int r = warp; r < VECTORS; r += WARPS) {
    float y[QUADS][4];
    uint2 rounded[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const int quad = i * 32 + lane;
      const float4 v = quad < DIM / 4 ? *(const float4*)&turned[r][4 * quad] : make_float4(0.f, 0.f, 0.f, 0.f);
      const float back = rsqrtf((float)DIM);
      y[i][0] = v.x * back, y[i][1] = v.y * back, y[i][2] = v.z * back, y[i][3] = v.w * back;
      rounded[i].x = narrow(y[i][0]) | narrow(y[i][1]) << 16, rounded[i].y = narrow(y[i][2]) | narrow(y[i][3]) << 16;
    }
    u16* to = p.out + ((size_t)at * GROUP * p.kv_heads + kv_head * GROUP + r) * DIM;
    if (r >= GROUP) {
      const size_t at_ring = (size_t)slot * p.ring_size + place % p.ring_size;
      to = p.ring + ((at_ring * 2 + r - GROUP) * p.kv_heads + kv_head) * DIM;
    }
    if (r < GROUP || (p.ring && real))
#pragma unroll
      for (int i = 0; i < QUADS; i++)
        if (i * 32 + lane < DIM / 4) *(uint2*)(to + 4 * (i * 32 + lane)) = rounded[i];
    if (r == GROUP) quantize<KBITS, false>(y, k_sizes, block, block + BLOCK_BYTES - 64, token, lane, real);
    if (r == GROUP + 1) quantize<VBITS, true>(y, v_sizes, block + 2 * DIM * KBITS, block + BLOCK_BYTES - 32, token, lane, real);
  }
}
