// FP8 (E4M3) linears for up to TILES * 8 tokens a pass, weights only: codes from the layout on disk to the tensor cores
// of 16-bit floats. They go in unscaled, and a scale multiplies the sums of the columns that share it, in float32.
//
// Cut. A tile is 16 rows, a slice SLICE columns. A block stays on its SM and owns a run of row tiles; its warps share k
// out, slice by slice, and walk down the tiles, so that a warp's activations stay in its registers. What a warp reads
// next is a fixed list (tile after tile, then its next slice), and DEPTH entries of it are always under way, into a ring
// of its own in shared memory: no warp waits for another before the sums are added, in a fixed order, at the end. Where a
// block has few row tiles, activations are as many bytes as codes, and come through the ring too, at a slice's first tile.
//
// Routed experts (`routes.cuh`): gate-up: each of the distinct experts is a matrix more of tiles. down: their k follow one
// another, and columns are added to their tokens' sums.
//
// Scales: float32, one for 2^row_shift rows by 2^column_shift columns.
//
// Set when compiled: HALF (1: x is float16, 0: bfloat16), TILES (column tiles of 8 tokens), MODE (0: linear and grouped
// linear; 1: gate and up of routed experts with SwiGLU; 2: down of routed experts, weighted and added up), SLICE (128 or
// 256), GRAIN (columns that share a scale wherever they begin: 32 or 128), DEPTH, WARPS (of a block at
// most), TOGETHER (experts of up to 16 tokens; TILES is 1), RING_X (1: activations through the ring; MODE is 0),
// EARLY (units requested before the first activations: DEPTH, or fewer where these do not come through the ring).

#include "nvfp4_common.cuh"
#include "fp8_decode.cuh"

static_assert(EARLY == DEPTH || (EARLY < DEPTH && !RING_X));
constexpr int ROWS = 16, SCALES = SLICE / GRAIN;           // of a row of a unit
constexpr int CODES = ROWS * SLICE, BESIDE = CODES + ROWS * SCALES * 4;  // bytes: of codes, and scales
constexpr int SLOT = BESIDE + (RING_X ? TILES * SLICE * 16 : 0);
constexpr int COLUMNS = TILES * 8, TOKENS = TOGETHER ? 16 : COLUMNS;  // of a product, of a pass
constexpr int PITCH = TOKENS + 1;                                     // down, together: a tile's sums are [ROWS][PITCH]
constexpr int SUMS = MODE == 2 && TOGETHER ? ROWS * PITCH * 4 : TILES * 512;  // bytes of a warp's sums of a tile
constexpr int CHUNKS = SLICE / 16, AT_ONCE = 32 / CHUNKS;  // 16 bytes a lane: pieces of a row, rows of a copy
constexpr int BLOCKS = SLICE / 32;                         // of 32 columns, eight a lane: two steps of the tensor core

#if MODE != 0
constexpr bool WEIGHED = MODE == 2;
#include "routes.cuh"
#endif

struct Arguments {
  const u16* x;          // linear: [tokens, matrices, k]; gate-up: [tokens, k]; down: [tokens, top_k, k]
  const u8* codes;       // [matrices, n, k]
  const float* scale;    // [matrices, ceil(n / 2^row_shift), scale_pitch]
  const float* bias;     // [n] or null
  const int* experts;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  void* y;               // linear: [tokens, matrices, n]; gate-up: [tokens, top_k, n/2]; down: [tokens, n]
  int tokens, n, k, matrices, top_k;
  int row_shift, column_shift, scale_pitch;
  int wide;    // y is float32, else x's type
  int across;  // warps side by side in k; groups of so many warps share a block's tiles
  int hold;    // row tiles whose sums fit into shared memory: more take several rounds
  float limit, alpha, shift;
};

// Where a warp is in its list: rounds of `hold` tiles; in a round its slices; in a slice its tiles of the round.
struct Walk {
  int first;              // tile of the round
  int turn, tile;         // of the warp's slices; of its tiles
  int tiles;              // its tiles of the round
  int slot, row, column;  // matrix among the slots; first row (gate-up: of eight); first column
};

// Which place in its row a piece of 16 bytes takes: no bank conflicts when eight bytes of each of four rows are read.
__device__ __forceinline__ int place(int row, int chunk) { return chunk ^ (row & 1 | (row & 3) << 1); }

__device__ __forceinline__ void store(const Arguments& a, long long at, float v) {
  if (a.wide) ((float*)a.y)[at] = v;
  else ((u16*)a.y)[at] = narrow(v);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) fp8_linear(const Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = a.across, down = blockDim.x / 32 / across, own_slice = warp % across, own_tile = warp / across;
  const int first_token = blockIdx.z * TOKENS, count = min(a.tokens - first_token, TOKENS);
  const int slices = (a.k + SLICE - 1) / SLICE;
  // gate-up: a tile is eight gate rows and their eight up rows
  const int step_rows = MODE == 1 ? ROWS / 2 : ROWS, up = MODE == 1 ? a.n / 2 - 8 : 0;
  const int row_tiles = ((MODE == 1 ? a.n / 2 : a.n) + step_rows - 1) / step_rows;
  const int scale_rows = (a.n + (1 << a.row_shift) - 1) >> a.row_shift;

  if (MODE == 1) wait_for_previous();  // experts are the last kernel's; so down may read them at once
  let_next_start();
  int all_tiles = row_tiles, all_slices = slices;
#if MODE != 0
  const long long first_pair = (long long)first_token * a.top_k;
  find_routes(a.experts + first_pair, a.weights + first_pair, count, a.top_k, a.matrices);
  if (MODE == 1) all_tiles *= routes.slots;
  if (MODE == 2) all_slices *= routes.slots;
#endif
  // Runs of tiles that differ by one at most.
  const int begin = (u32)all_tiles * blockIdx.x / gridDim.x, end = (u32)all_tiles * (blockIdx.x + 1) / gridDim.x;
  const int turns = own_slice < all_slices ? (all_slices - own_slice + across - 1) / across : 0;

  u8* const ring = shared + warp * (DEPTH * SLOT);
  u8* const partial = shared + blockDim.x / 32 * (DEPTH * SLOT);  // [hold][across][SUMS]

  auto matrix_of = [&](int slot) {
#if MODE == 0
    return (long long)blockIdx.y;
#else
    return (long long)routes.expert[slot];
#endif
  };
  auto enter_slice = [&](Walk& w) {  // w.turn was set
    const int slice = own_slice + w.turn * across, tile = w.first + own_tile;
    w.tile = 0;
    w.slot = MODE == 2 ? slice / slices : MODE == 1 ? tile / row_tiles : 0;
    w.column = (MODE == 2 ? slice % slices : slice) * SLICE;
    w.row = (MODE == 1 ? tile % row_tiles : tile) * step_rows;
  };
  auto enter_round = [&](Walk& w, int first) {
    w.first = first;
    w.turn = 0;
    w.tiles = max(0, (min(a.hold, end - first) - own_tile + down - 1) / down);
    enter_slice(w);
  };
  auto next_tile = [&](Walk& w) {
    ++w.tile;
    w.row += down * step_rows;
    if (MODE == 1)
      while (w.row >= row_tiles * step_rows) w.row -= row_tiles * step_rows, ++w.slot;
  };
  auto advance = [&](Walk& w) {  // to the next of the list; whether that is elsewhere than a few rows below
    const int slot = w.slot;
    next_tile(w);
    if (w.tile != w.tiles) return w.slot != slot;
    if (++w.turn < turns) enter_slice(w);
    else enter_round(w, w.first + a.hold);
    return w.tiles != 0;
  };

  Walk ahead = {};
  int put = 0, get = 0;
  const u8* codes_at;  // the lane's of the tile that is fetched next
  const float* scale_at;  // the matrix's
  auto aim = [&]() {
    const long long matrix = matrix_of(ahead.slot);
    codes_at = a.codes + (matrix * a.n + ahead.row + lane / CHUNKS) * a.k + ahead.column + lane % CHUNKS * 16;
    scale_at = a.scale + matrix * scale_rows * a.scale_pitch;
  };
  enter_round(ahead, begin);
  if (turns && ahead.tiles) aim();
  auto fetch_x = [&](const Walk& w, u8* to) {  // what the lane itself will read
    if (!RING_X || w.tile) return;
    const int column = w.column + t * 8;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int mine = tile * 8 + g;
      const u16* const from = a.x + ((long long)(first_token + mine) * a.matrices + blockIdx.y) * a.k + column;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        copy16(to + BESIDE + (tile * BLOCKS + b) * 512 + lane * 16, (const u8*)(from + b * 32),
               mine < count && column + b * 32 < a.k);
    }
  };
  auto fetch = [&](bool with_x) {  // the next of the list into the ring; nothing at its end
    if (turns && ahead.tiles) {
      u8* const to = ring + put * SLOT;
      const bool inside = ahead.column + lane % CHUNKS * 16 < a.k;
#pragma unroll
      for (int i = 0; i < ROWS / AT_ONCE; ++i) {
        const int r = i * AT_ONCE + lane / CHUNKS;
        copy16(to + r * SLICE + place(r, lane % CHUNKS) * 16,
               codes_at + (i * AT_ONCE + (MODE == 1 && i * AT_ONCE >= 8 ? up : 0)) * (long long)a.k,
               inside && (MODE == 1 || ahead.row + r < a.n));
      }
#pragma unroll
      for (int i = 0; i < (ROWS * SCALES + 31) / 32; ++i) {
        const int s = i * 32 + lane, r = s / SCALES, column = ahead.column + s % SCALES * GRAIN;
        if (ROWS * SCALES % 32 && r >= ROWS) break;
        const int row = ahead.row + r + (MODE == 1 && r >= 8 ? up : 0);
        copy4(to + CODES + s * 4, (const u8*)(scale_at + (row >> a.row_shift) * a.scale_pitch + (column >> a.column_shift)),
              column < a.k && (MODE == 1 || row < a.n));
      }
      if (with_x) fetch_x(ahead, to);
      put = put + 1 == DEPTH ? 0 : put + 1;
      codes_at += (long long)down * step_rows * a.k;
      if (advance(ahead)) aim();
    }
  };
#pragma unroll
  for (int i = 0; i < EARLY; ++i) {
    fetch(false);
    if (!RING_X) commit();
  }
  if (MODE != 1) wait_for_previous();
  if (RING_X) {  // only now; the first of these groups has all the codes
    Walk again = {};
    enter_round(again, begin);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (turns && again.tiles) {
        fetch_x(again, ring + i * SLOT);
        advance(again);
      }
      commit();
    }
  }

  u32 x[TILES][BLOCKS][4];
  int loaded = -1;
  auto load_x = [&](const Walk& w) {
    const int at = (MODE == 2 || TOGETHER ? w.slot * slices : 0) + w.column / SLICE;
    if (at == loaded) return;
    loaded = at;
    const int column = w.column + t * 8;
#if MODE != 0
    const u8* const chosen = routes.chosen[w.slot];
#endif
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int mine = tile * 8 + g;
      bool there = mine < count;
      long long row = first_token + mine;
#if MODE == 0
      row = row * a.matrices + blockIdx.y;
#else
      if (TOGETHER || MODE == 2) there = chosen[mine] != NOBODY;
      if (TOGETHER && there) row = first_token + routes.token[chosen[mine]];
      if (MODE == 2) row = first_pair + chosen[mine];
#endif
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there && column + b * 32 < a.k) v = *(const uint4*)(a.x + row * a.k + column + b * 32);
        in_order(v.x, v.y, x[tile][b][0], x[tile][b][1]);
        in_order(v.z, v.w, x[tile][b][2], x[tile][b][3]);
      }
    }
  };

  if (EARLY < DEPTH) {
    Walk start = {};
    enter_round(start, begin);
    if (turns && start.tiles) load_x(start);
#pragma unroll
    for (int i = EARLY; i < DEPTH; ++i) {
      fetch(false);
      commit();
    }
  }

  Walk now = {};
  for (int first = begin; first < end; first += a.hold) {
    const int tiles = min(a.hold, end - first);
    enter_round(now, first);
    if (MODE == 2 && TOGETHER)
      for (int tile = own_tile; tile < tiles; tile += down)
        for (int i = lane; i < SUMS / 4; i += 32) ((float*)(partial + (tile * across + own_slice) * SUMS))[i] = 0.f;
#pragma unroll 1
    for (; now.turn < turns && now.tiles; ++now.turn) {
      enter_slice(now);
      if (!RING_X && (MODE != 1 || !TOGETHER)) load_x(now);
      if (MODE == 0 && !RING_X && now.turn + 1 < turns) {  // the next slice's activations come nearer meanwhile, a line a lane
        const int column = now.column + across * SLICE + t * 64;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const int token = tile * 8 + g;
          if (token < count && t < SLICE / 64 && column + 64 <= a.k)
            prefetch_l1(a.x + ((long long)(first_token + token) * a.matrices + blockIdx.y) * a.k + column);
        }
      }
#pragma unroll 1
      for (; now.tile < now.tiles; next_tile(now)) {
        if (MODE == 1 && TOGETHER) load_x(now);  // anew where the expert changes
        wait_but<DEPTH - 1>();
        __syncwarp();
        const u8* const from = ring + get * SLOT;
        uint2 codes[2][BLOCKS];  // of rows g and g + 8
        float scales[2][SCALES];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b)
            codes[row][b] = *(const uint2*)(from + (row * 8 + g) * SLICE + place(g, b * 2 + t / 2) * 16 + t % 2 * 8);
#pragma unroll
          for (int s = 0; s < SCALES; ++s) scales[row][s] = *(const float*)(from + CODES + ((row * 8 + g) * SCALES + s) * 4);
        }
        if (RING_X && now.tile == 0) {
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
              const uint4 v = *(const uint4*)(from + BESIDE + (tile * BLOCKS + b) * 512 + lane * 16);
              in_order(v.x, v.y, x[tile][b][0], x[tile][b][1]);
              in_order(v.z, v.w, x[tile][b][2], x[tile][b][3]);
            }
        }
        get = get + 1 == DEPTH ? 0 : get + 1;
        __syncwarp();
        fetch(true);
        commit();

        float acc[TILES][4] = {};
#pragma unroll
        for (int s = 0; s < SCALES; ++s) {
          float part[TILES][4] = {};
#pragma unroll
          for (int b = s * (GRAIN / 32); b < (s + 1) * (GRAIN / 32); ++b) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              u32 a0, a1, b0, b1;
              decode(half ? codes[0][b].y : codes[0][b].x, a0, a1);
              decode(half ? codes[1][b].y : codes[1][b].x, b0, b1);
#pragma unroll
              for (int tile = 0; tile < TILES; ++tile)
                mma(part[tile], a0, b0, a1, b1, x[tile][b][half * 2], x[tile][b][half * 2 + 1]);
            }
          }
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[tile][i] += part[tile][i] * scales[i / 2][s];
        }
        // A lane's four sums: rows g and g + 8 of columns 2 t and 2 t + 1.
        u8* const to = partial + ((own_tile + now.tile * down) * across + own_slice) * SUMS;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const int column = tile * 8 + 2 * t;
          if (!TOGETHER && column >= count) continue;
          float4 v = make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
#if MODE != 0
          const u8* const chosen = routes.chosen[now.slot] + column;
          const int pairs[2] = {chosen[0], chosen[1]};
          if (TOGETHER && pairs[0] == NOBODY) continue;
#endif
#if MODE == 2
          const float weights[2] = {pairs[0] == NOBODY ? 0.f : routes.weight[pairs[0]],
                                    pairs[1] == NOBODY ? 0.f : routes.weight[pairs[1]]};
          v.x *= weights[0], v.y *= weights[1], v.z *= weights[0], v.w *= weights[1];
          if (TOGETHER) {  // no other lane's numbers; its own warp's of the expert before
            float* const sum = (float*)to + g * PITCH + routes.token[pairs[0]];
            sum[0] += v.x, sum[8 * PITCH] += v.z;
            if (pairs[1] == NOBODY) continue;
            float* const other = (float*)to + g * PITCH + routes.token[pairs[1]];
            other[0] += v.y, other[8 * PITCH] += v.w;
            continue;
          }
#endif
          float4* const sum = (float4*)to + tile * 32 + lane;
          if (now.turn) {
            const float4 before = *sum;
            v.x += before.x, v.y += before.y, v.z += before.z, v.w += before.w;
          }
          *sum = v;
        }
      }
    }
    __syncthreads();
    const int used = min(across, all_slices);
    if (MODE == 2 && TOGETHER) {
      for (int i = threadIdx.x; i < tiles * ROWS * TOKENS; i += blockDim.x) {
        const int tile = i / (ROWS * TOKENS), token = i / ROWS % TOKENS, row = i % ROWS, r = (first + tile) * ROWS + row;
        if (token >= count || r >= a.n) continue;
        float sum = 0.f;
        for (int w = 0; w < used; ++w) sum += ((float*)(partial + (tile * across + w) * SUMS))[row * PITCH + token];
        store(a, (long long)(first_token + token) * a.n + r, sum);
      }
      __syncthreads();
      continue;
    }
    for (int i = threadIdx.x; i < tiles * TILES * 32; i += blockDim.x) {
      const int tile = i / (TILES * 32), part = i % (TILES * 32), row = part % 32 / 4, column = part / 32 * 8 + part % 4 * 2;
      const int global_tile = first + tile;
#if MODE == 1
      const u8* const chosen = routes.chosen[global_tile / row_tiles] + column;
      if (chosen[0] == NOBODY && chosen[1] == NOBODY) continue;
#else
      if (column >= count) continue;
#endif
      float sum[4] = {};
#pragma unroll 4
      for (int w = 0; w < used; ++w) {
        const float4 v = ((float4*)(partial + (tile * across + w) * SUMS))[part];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#if MODE == 1
        if (chosen[j] == NOBODY) continue;
        const float gate = fminf(sum[j], a.limit), up = fminf(fmaxf(sum[2 + j], -a.limit), a.limit);
        const float hidden = gate / (1.f + __expf(-a.alpha * gate)) * (up + a.shift);
        store(a, (first_pair + chosen[j]) * (a.n / 2) + global_tile % row_tiles * 8 + row, hidden);
#else
        if (column + j >= count) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = global_tile * ROWS + row + half * 8;
          if (r >= a.n) continue;
          const long long token = first_token + column + j;
          const float bias = MODE == 0 && a.bias ? a.bias[r] : 0.f;
          store(a, (MODE == 0 ? token * a.matrices + blockIdx.y : token) * a.n + r, sum[2 * half + j] + bias);
        }
#endif
      }
    }
    __syncthreads();
  }
}
