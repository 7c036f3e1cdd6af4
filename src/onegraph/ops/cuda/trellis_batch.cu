// Trellis-coded linear for up to 64 tokens, whose weights are each decoded once, on every card from compute capability 8.0 on.
//
// Three launches. The first rotates the activations, a block a token: float16 on one scale, a power of two, in the order in which
// lanes take them as second operands (`Operands`). The second multiplies. The third adds up what blocks brought of the same rows,
// in a fixed order, rotates and scales it.
//
// Cut. The matrix is a list of units of 32 WARPS rows by 128 columns, those of the same rows side by side; blocks have equal parts of
// the list. A warp has two row tiles of a unit, whose codes come straight into registers, up to a unit ahead. It decodes them to first
// operands of m16n8k16 (trellis_portable.cu tells how) and multiplies them with all tokens, whose sums stay in its registers from
// unit to unit. Activations pass through a ring of units in shared memory, which a block's warps share.
//
// Values of code 0 are OFFSET too large: the last launch subtracts as often the sum of a token's activations.
//
// Set when compiled: BITS (1 to 8), CODE (0 to 3), TOKENS (16, 32, 48 or 64 at most), HALF (1: x and y are float16, 0: bfloat16),
// WARPS of a block of the product, PER_SM (its blocks of an SM), AHEAD (pairs of column tiles whose codes are under way).

#include "rotated_common.cuh"
#include "trellis_decode.cuh"

constexpr int TILES = 2;                       // row tiles of 16 of a warp
constexpr int GROUP = WARPS * TILES * 16;      // rows of a unit: whole blocks of 128
constexpr int UNIT = 128, PAIRS = UNIT / 32;   // columns of a unit; pairs of column tiles
constexpr int EIGHTS = TOKENS / 8;             // of tokens
constexpr int STAGE = PAIRS * EIGHTS * 32;     // pieces of 16 bytes of a unit's activations
constexpr int STAGES = 3;
constexpr int TURN_WARPS = 16;
constexpr int PITCH = ROWS + 4;                // floats of a token's rows: other banks for each t

struct Arguments {
  const u16* x;            // [tokens, k], with silu [tokens, 2 k], gate beside up
  const u8* codes;         // int16 [n / 16, k BITS]
  const float* in_scale;   // [k]
  const float* out_scale;  // [n]
  const float* bias;       // [n] or null
  const void* add;         // [tokens, n] of y's type, or null
  void* y;                 // [tokens, n], x's type, or float if wide
  u8* operands;            // [units of k][PAIRS][EIGHTS][32] of 16 bytes: a lane's inputs of a token, of two column tiles
  float2* scales;          // [tokens]: the factor of all, what is added before
  float4* sums;            // [blocks + groups][WARPS][TILES][EIGHTS][32], as lanes have them
  float norm;              // of both Hadamard transforms
  float eps;               // of the RMSNorm in front; negative: there is none
  float inverse_k;         // 1 / k
  int tokens, n, k;
  int blocks;              // of the product
  int silu, wide;
};

// The list of units, and blocks' parts of it.
struct Units {
  u32 across, count, blocks;
  __device__ __forceinline__ Units(const Arguments& p)
      : across((p.k + UNIT - 1) / UNIT), count((p.n + GROUP - 1) / GROUP * across), blocks(p.blocks) {}
  __device__ __forceinline__ u32 begin(u32 block) const { return count * block / blocks; }
  __device__ __forceinline__ u32 block_of(u32 unit) const { return ((unit + 1) * blocks - 1) / count; }
};

// ------------------------------------------------------------------------------------------------------------- activations

// Eight columns of a token, 8 l and on of slice: half of a column tile.
__device__ __forceinline__ void put(u8* operands, const uint4& v, int slice, int l, int token) {
  const int tile = slice * (SLICE / 16) + l / 2;
  u8* const at = operands + (((size_t)(tile / 2) * EIGHTS + token / 8) * 32 + token % 8 * 4) * 16 + tile % 2 * 8;
  if (NEXT == 2) {
    *(uint2*)(at + l % 2 * 32) = make_uint2(v.x, v.y), *(uint2*)(at + l % 2 * 32 + 16) = make_uint2(v.z, v.w);
  } else {
    u8* const half = at + l % 2 * 4;
    *(u32*)half = v.x, *(u32*)(half + 16) = v.y, *(u32*)(half + 32) = v.z, *(u32*)(half + 48) = v.w;
  }
}
__device__ __forceinline__ u32 scaled(u32 two, float by, float& sum) {
  const float2 f = halves_to_floats(two);
  const u32 made = floats_to_halves(f.x * by, f.y * by);
  const float2 rounded = halves_to_floats(made);
  sum += rounded.x + rounded.y;
  return made;
}

// Grid: tokens. Shared memory: a token's slices as float16, each on a scale of its own; their exponents; sums of warps.
extern "C" __global__ void __launch_bounds__(TURN_WARPS * 32, 1) trellis_batch_turn(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, token = blockIdx.x;
  const int slices = (p.k + SLICE - 1) / SLICE;
  uint4* const kept = (uint4*)smem;
  u32* const tops = (u32*)(kept + slices * 32);
  float* const found = (float*)(tops + slices);
  pdl_wait();
  pdl_trigger();
  float squares = 0.f, sum = 0.f;
#pragma unroll 1
  for (int slice = warp; slice < slices; slice += TURN_WARPS) {
    const int column = slice * SLICE + lane * 8;
    float v[8], in_scale[8];
    load_x(v, p, token, column, column < p.k);
    load8(in_scale, p.in_scale + column, column < p.k);
    squares += squares_of(v);
    rotate(v, in_scale, p.k % 128 ? 64 : 128, lane);
    u32 top = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) top = max(top, __float_as_uint(v[e]) & 0x7FFFFFFFu);
    top = max(__reduce_max_sync(~0u, top) >> 23, 15u);  // the exponent of the largest, of NaN the largest of all
    const float by = __uint_as_float((268 - top) << 23);  // so that it becomes 2^14 to 2^15
    kept[slice * 32 + lane] = make_uint4(floats_to_halves(v[0] * by, v[1] * by), floats_to_halves(v[2] * by, v[3] * by),
                                         floats_to_halves(v[4] * by, v[5] * by), floats_to_halves(v[6] * by, v[7] * by));
    if (lane == 0) tops[slice] = top;
  }
  __syncthreads();
  u32 most = 0;
  for (int slice = lane; slice < slices; slice += 32) most = max(most, tops[slice]);
  most = __reduce_max_sync(~0u, most);
#pragma unroll 1
  for (int slice = warp; slice < slices; slice += TURN_WARPS) {
    const float by = __uint_as_float((u32)max(127 + (int)tops[slice] - (int)most, 0) << 23);
    uint4 v = kept[slice * 32 + lane];
    v.x = scaled(v.x, by, sum), v.y = scaled(v.y, by, sum), v.z = scaled(v.z, by, sum), v.w = scaled(v.w, by, sum);
    if (slice * SLICE + lane * 8 < (p.k + UNIT - 1) / UNIT * UNIT) put(p.operands, v, slice, lane, token);
  }
  sum = over_lanes(sum), squares = over_lanes(squares);
  if (lane == 0) found[warp] = sum, found[TURN_WARPS + warp] = squares;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < TURN_WARPS; w++) sum += found[w], squares += found[TURN_WARPS + w];
  const float norm = p.eps < 0.f ? p.norm : p.norm * rsqrtf(fmaf(squares, p.inverse_k, p.eps));
  p.scales[token] = make_float2(norm * __uint_as_float((most - 14) << 23), -OFFSET * sum);
}

// ----------------------------------------------------------------------------------------------------------------- product

typedef u32 Words[AHEAD][TILES][2][FIRST];  // a lane's of pairs of column tiles

// What a warp reads, unit by unit.
struct Reader {
  const Arguments& p;
  const u8* from;           // a lane's words of the unit's first tile
  u32 across, column, row;  // of units; of the unit, in units and in row tiles
  int left;                 // units, with this one
  __device__ __forceinline__ Reader(const Arguments& p, const Units& list, u32 begin, u32 end, int warp, u32 lane)
      : p(p), across(list.across), column(begin % across), row(begin / across * (GROUP / 16) + warp * TILES), left(end - begin) {
    begin_row(lane);
  }
  __device__ __forceinline__ int pitch() const { return p.k / 16 * TILE_BYTES; }
  // Beyond n there is the last row again, whose sums nobody adds.
  __device__ __forceinline__ void begin_row(u32 lane) {
    from = p.codes + (size_t)min(row, (u32)p.n / 16 - TILES) * pitch() + column * (UNIT / 16 * TILE_BYTES) + lane_bytes(lane);
  }
  __device__ __forceinline__ void advance(u32 lane) {
    left--, from += UNIT / 16 * TILE_BYTES;
    if (++column == across) column = 0, row += GROUP / 16, begin_row(lane);
  }
  // Beyond k are the first half's words again, which zeros are multiplied with.
  __device__ __forceinline__ void read(Words& to, int pair) const {
    if (left <= 0) return;
    const bool beyond = pair >= PAIRS / 2 && column * UNIT + UNIT / 2 >= p.k;
    const u8* const at = from - (beyond ? PAIRS / 2 * 2 * TILE_BYTES : 0);
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
      for (int c = 0; c < 2; c++)
#pragma unroll
        for (int w = 0; w < FIRST; w++)
          to[pair % AHEAD][r][c][w] = stream4(at + (r ? pitch() : 0) + (pair * 2 + c) * TILE_BYTES + w * 4);
  }
};

// Grid: blocks. Shared memory: activations [STAGES][STAGE] of 16 bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM) trellis_batch(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const u32 lane = threadIdx.x % 32;
  const Units list(p);
  const u32 begin = list.begin(blockIdx.x), end = list.begin(blockIdx.x + 1);
  Reader reader(p, list, begin, end, warp, lane);
  Words words;
#pragma unroll
  for (int pair = 0; pair < AHEAD; pair++) reader.read(words, pair);
  pdl_wait();
  pdl_trigger();

  uint4* const ring = (uint4*)smem;
  u32 asked = begin % list.across, stage_asked = 0;
  auto ask = [&](bool there) {  // for a unit's activations, those behind the last ones
    const u8* const from = p.operands + ((size_t)asked * STAGE + threadIdx.x) * 16;
    if (there)
#pragma unroll
      for (int i = 0; i < STAGE; i += WARPS * 32)
        if (STAGE % (WARPS * 32) == 0 || i + threadIdx.x < STAGE)
          copy16(address(ring + stage_asked * STAGE + i + threadIdx.x), from + i * 16, true);
    commit();
    if (++asked == list.across) asked = 0;
    if (++stage_asked == STAGES) stage_asked = 0;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) ask(begin + i < end);

  float acc[TILES][EIGHTS][4] = {};
  u32 stage = 0, column = begin % list.across, group = begin / list.across;
#pragma unroll 1
  for (u32 unit = begin; unit < end; unit++) {
    wait_but<STAGES - 2>();
    __syncthreads();
    ask(unit + STAGES - 1 < end);
    const uint4* const operands = ring + stage * STAGE + lane;
#pragma unroll 1
    for (int part = 0; part < PAIRS; part += AHEAD)
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        uint4 a[TILES][2];
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
          for (int c = 0; c < 2; c++) a[r][c] = decode(words[i][r][c], lane);
        if (i == 0 && part + AHEAD == PAIRS) reader.advance(lane);
        reader.read(words, (part + AHEAD) % PAIRS + i);
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
          const uint4 b = operands[((part + i) * EIGHTS + j) * 32];
#pragma unroll
          for (int r = 0; r < TILES; r++) {
            mma_f16(acc[r][j], a[r][0].x, a[r][0].y, a[r][0].z, a[r][0].w, b.x, b.y);
            mma_f16(acc[r][j], a[r][1].x, a[r][1].y, a[r][1].z, a[r][1].w, b.z, b.w);
          }
        }
      }
    if (++stage == STAGES) stage = 0;
    if (++column < list.across && unit + 1 < end) continue;
    // Blocks and groups both go up: no other part of a group has the sum of both.
    float4* const to = p.sums + ((size_t)(blockIdx.x + group) * WARPS + warp) * TILES * EIGHTS * 32 + lane;
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
      for (int j = 0; j < EIGHTS; j++) {
        float(&sum)[4] = acc[r][j];
        __stcg(to + (r * EIGHTS + j) * 32, make_float4(sum[0], sum[1], sum[2], sum[3]));
        sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
      }
    column = 0, group++;
  }
}

// -------------------------------------------------------------------------------------------------------------------- sums

// Grid (rows / 128, EIGHTS): 128 rows of eight tokens. Shared memory: sums [8][PITCH].
extern "C" __global__ void __launch_bounds__(ROWS * 2, 1) trellis_batch_end(const __grid_constant__ Arguments p) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Units list(p);
  const u32 group = blockIdx.x * ROWS / GROUP, begin = group * list.across;
  const u32 first = list.block_of(begin), last = list.block_of(begin + list.across - 1);
  // A warp here takes a row tile: sums of one of a warp of the product.
  const int tile = blockIdx.x * (ROWS / 16) % (GROUP / 16) + warp, token = blockIdx.y * 8 + warp, row = blockIdx.x * ROWS + lane * 4;
  const float4* from = p.sums + (((size_t)(first + group) * WARPS * TILES + tile) * EIGHTS + blockIdx.y) * 32 + lane;
  const bool own = token < p.tokens && row < p.n;
  const size_t at = (size_t)token * p.n + row;
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f), c = s, v = s;
  if (own) s = *(const float4*)(p.out_scale + row);
  if (own && p.bias) c = *(const float4*)(p.bias + row);
  pdl_wait();
  pdl_trigger();
  if (own) add4(c, p, at);
#pragma unroll 4
  for (u32 block = first; block <= last; block++, from += WARPS * TILES * EIGHTS * 32) add_to(v, __ldcg(from));
  float* const sums = (float*)smem + 2 * t * PITCH + warp * 16 + g;
  sums[0] = v.x, sums[PITCH] = v.y, sums[8] = v.z, sums[PITCH + 8] = v.w;
  __syncthreads();
  if (token >= p.tokens) return;
  const float2 scale = p.scales[token];
  v = *(const float4*)((float*)smem + warp * PITCH + lane * 4);
  v.x += scale.y, v.y += scale.y, v.z += scale.y, v.w += scale.y;
  rotate_rows(v, p.n % 128 ? 64 : 128, lane);
  if (!own) return;
  v.x = fmaf(v.x * scale.x, s.x, c.x), v.y = fmaf(v.y * scale.x, s.y, c.y);
  v.z = fmaf(v.z * scale.x, s.z, c.z), v.w = fmaf(v.w * scale.x, s.w, c.w);
  store4(p, at, v);
}
