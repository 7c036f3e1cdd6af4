// NVFP4 and MXFP4 linears for up to 16 tokens a pass, weights only: codes straight from the layout on disk to the tensor cores.
//
// Cut. A tile is 16 rows, a slice 256 columns. A block stays on its SM and owns a run of row tiles; its warps share k
// out, slice by slice, and walk down the tiles, so that a warp's activations stay in its registers. What a warp reads
// next is a fixed list (tile after tile, then its next slice), and DEPTH entries of it are always under way, into a ring
// of its own in shared memory: no warp waits for another before the sums are added, in a fixed order, at the end.
//
// Routed experts. The distinct experts that the pass's tokens chose are counted on the device, in every block, each with
// its tokens beside it: an expert's weights are read once however many chose it. Of up to eight tokens each has a column
// of its own, and columns of tokens that did not choose are masked. Of up to 16 those that chose are moved together into
// eight columns, since most experts have one or two; one that more chose is read twice. gate-up: each of them is a matrix
// more of tiles. down: their k follow one another, and columns are added to their tokens' sums.
//
// Set when compiled: HALF (1: x and y are float16, 0: bfloat16), TILES (column tiles of 8 tokens), MODE (0: linear and
// grouped linear; 1: gate and up of routed experts with SwiGLU; 2: down of routed experts, weighted and added up), DEPTH,
// TOGETHER (experts of up to 16 tokens; TILES is 1), GROUP (16: NVFP4, 32: MXFP4), FLOAT (linears: 1: y is float32).
//
// MXFP4 has no scale of a row. Its scales of a lane's 64 columns are two bytes, at an even address: the word that they are
// in is copied.

#include "nvfp4_common.cuh"
#include "nvfp4_decode.cuh"

constexpr int ROWS = 16;
constexpr int CODES = ROWS * SLICE / 2, SLOT = CODES + ROWS * SLICE / 16;  // bytes
constexpr int COLUMNS = TILES * 8, TOKENS = TOGETHER ? 16 : COLUMNS;  // of a product, of a pass
constexpr int PITCH = TOKENS + 1;                                     // down, together: a tile's sums are [ROWS][PITCH]
constexpr int SUMS = MODE == 2 && TOGETHER ? ROWS * PITCH * 4 : TILES * 512;  // bytes of a warp's sums of a tile

struct Arguments {
  const u16* x;               // linear: [tokens, matrices, k]; gate-up: [tokens, k]; down: [tokens, top_k, k]
  const u8* codes;            // [matrices, n, k/2]
  const u8* scale;            // [matrices, n, k/GROUP]
  const float* global_scale;  // [matrices, n]; MXFP4: null
  const float* bias;          // linear: [n] or null; experts in MXFP4: [matrices, n] or null
  const int* experts;         // [tokens, top_k]
  const float* weights;       // [tokens, top_k]
  u16* y;                     // linear: [tokens, matrices, n]; gate-up: [tokens, top_k, n/2]; down: [tokens, n]
  int tokens, n, k, matrices, top_k;
  int across;                 // warps side by side in k; groups of so many warps share a block's tiles
  int hold;                   // row tiles whose sums fit into shared memory: more take several rounds
  float limit, alpha, shift;
};

#if MODE != 0
constexpr int PAIRS = 255;  // of a token and an expert, in a pass
constexpr u8 NOBODY = 255;
struct Routes {
  int slots, key[PAIRS];
  int expert[PAIRS];         // of a slot
  float weight[PAIRS];       // of a pair
  u16 leader[PAIRS];
  u8 chosen[PAIRS][COLUMNS];  // by slot and column: the pair
  u8 column[PAIRS], token[PAIRS];
};
__shared__ Routes routes;

// Slots are the distinct experts in order of appearance. (One that a token chose twice gets two, and so does one that,
// moved together, has more tokens than columns.)
__device__ __forceinline__ void find_routes(const Arguments& a, int first_token, int count) {
  const int pairs = count * a.top_k;
  for (int i = threadIdx.x; i < pairs * COLUMNS; i += blockDim.x) routes.chosen[i / COLUMNS][i % COLUMNS] = NOBODY;
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    routes.expert[p] = min(max(a.experts[first_token * a.top_k + p], 0), a.matrices - 1);
    routes.weight[p] = MODE == 2 ? a.weights[first_token * a.top_k + p] : 0.f;
    routes.token[p] = p / a.top_k;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    int before = 0;
    for (int q = p - p % a.top_k; q < p; ++q) before += routes.expert[q] == routes.expert[p];
    routes.key[p] = routes.expert[p] * PAIRS + before;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    constexpr int SPAN = TOGETHER ? COLUMNS : PAIRS;
    int leader = p, rank = 0;
#pragma unroll 8
    for (int q = 0; q < p; ++q)
      if (routes.key[q] == routes.key[p] && rank++ % SPAN == 0) leader = q;
    routes.leader[p] = rank % SPAN ? leader : p;
    routes.column[p] = TOGETHER ? rank % SPAN : routes.token[p];
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    const int leader = routes.leader[p];
    int slot = 0;
#pragma unroll 8
    for (int q = 0; q < leader; ++q) slot += routes.leader[q] == q;
    routes.chosen[slot][routes.column[p]] = p;
    if (leader == p) routes.expert[slot] = routes.key[p] / PAIRS;
  }
  if (threadIdx.x == blockDim.x - 1) {
    int slots = 0;
#pragma unroll 8
    for (int q = 0; q < pairs; ++q) slots += routes.leader[q] == q;
    routes.slots = slots;
  }
  __syncthreads();
}
#endif

// Where a warp is in its list: rounds of `hold` tiles; in a round its slices; in a slice its tiles of the round.
struct Walk {
  int first;              // tile of the round
  int turn, tile;         // of the warp's slices; of its tiles
  int tiles;              // its tiles of the round
  int slot, row, column;  // matrix among the slots; first row (gate-up: of eight); first column
};

// A tile's product with a lane's 64 columns of rows g and g + 8. BEYOND: scales of MXFP4 above LARGE are among them.
template <bool BEYOND>
__device__ __forceinline__ void product(float (&acc)[TILES][4], const uint4 (&codes)[2][2], const u32 (&scales)[2],
                                        const u32 (&x)[TILES][8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 s[2][2];
#if GROUP == 32
    u32 more[2];
#endif
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#if GROUP == 32
      const u32 byte = scales[row] >> 8 * half & 255u;
      s[row][0] = s[row][1] = factor(byte);
      more[row] = excess(byte);
#else
      if (half == 0) widen<0>(scales[row], s[row][0], s[row][1]);
      else widen<1>(scales[row], s[row][0], s[row][1]);
#endif
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u32 w0 = (&codes[0][half].x)[word], w1 = (&codes[1][half].x)[word];
      const u32 s0 = s[0][word / 2], s1 = s[1][word / 2];
      u32 a0 = multiply(pair<0>(w0), s0), b0 = multiply(pair<0>(w1), s1);
      u32 a1 = multiply(pair<1>(w0), s0), b1 = multiply(pair<1>(w1), s1);
      u32 a2 = multiply(pair<2>(w0), s0), b2 = multiply(pair<2>(w1), s1);
      u32 a3 = multiply(pair<3>(w0), s0), b3 = multiply(pair<3>(w1), s1);
#if GROUP == 32
      if (BEYOND) {
        a0 = multiply(a0, more[0]), a1 = multiply(a1, more[0]), a2 = multiply(a2, more[0]), a3 = multiply(a3, more[0]);
        b0 = multiply(b0, more[1]), b1 = multiply(b1, more[1]), b2 = multiply(b2, more[1]), b3 = multiply(b3, more[1]);
      }
#endif
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const u32(&v)[4] = x[tile][half * 4 + word];
        mma(acc[tile], a0, b0, a1, b1, v[0], v[1]);
        mma(acc[tile], a2, b2, a3, b3, v[2], v[3]);
      }
    }
  }
}

#if PORTABLE
constexpr int MOST = 384;  // threads of a block: with more some forms spill
#else
constexpr int MOST = 512;
#endif
extern "C" __global__ void __launch_bounds__(MOST, 1) nvfp4_linear(const Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = a.across, down = blockDim.x / 32 / across, own_slice = warp % across, own_tile = warp / across;
  const int first_token = blockIdx.z * TOKENS, count = min(a.tokens - first_token, TOKENS);
  const int slices = (a.k + SLICE - 1) / SLICE, row_tiles = (a.n + ROWS - 1) / ROWS;
  const int step_rows = MODE == 1 ? ROWS / 2 : ROWS;  // gate-up: a tile is eight gate rows and their eight up rows

  if (MODE == 1) pdl_wait();  // experts are the last kernel's; so down may read them at once
  pdl_trigger();
  int all_tiles = row_tiles, all_slices = slices;
#if MODE != 0
  find_routes(a, first_token, count);
  if (MODE == 1) all_tiles *= routes.slots;
  if (MODE == 2) all_slices *= routes.slots;
#endif
  // Runs of tiles that differ by one at most.
  const int begin = (long long)all_tiles * blockIdx.x / gridDim.x, end = (long long)all_tiles * (blockIdx.x + 1) / gridDim.x;
  const int turns = own_slice < all_slices ? (all_slices - own_slice + across - 1) / across : 0;

  u8* const ring = shared + warp * (DEPTH * SLOT);
  u8* const partial = shared + blockDim.x / 32 * (DEPTH * SLOT);   // [hold][across][SUMS]
  float* const gain = (float*)(partial + a.hold * across * SUMS);  // [hold][ROWS]

  auto matrix_of = [&](int slot) {
#if MODE == 0
    return (long long)blockIdx.y;
#else
    return (long long)routes.expert[slot];
#endif
  };
  auto row_of = [&](const Walk& w, int r) {  // r: of the tile
    if (MODE == 1) return r < 8 ? w.row + r : a.n / 2 + w.row + r - 8;
    return min(w.row + r, a.n - 1);
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

  Walk ahead = {};
  int put = 0, get = 0;
  const long long code_pitch = a.k / 2, scale_pitch = a.k / GROUP;
  const int scale_bit = GROUP == 32 ? ((scale_pitch & 2 ? g : 0) + t) % 2 * 16 : 0;  // of a lane's scales in the copied word
  const u8 *codes_at, *scale_at;  // the lane's of the tile that is fetched next: rows lane / 8 and g
  auto aim = [&]() {
    const long long row = matrix_of(ahead.slot) * a.n + ahead.row;
    codes_at = a.codes + (row + lane / 8) * code_pitch + ahead.column / 2 + lane % 8 * 16;
    const long long scale = (row + g) * scale_pitch + ahead.column / GROUP + t * (64 / GROUP);
    scale_at = a.scale + (GROUP == 32 ? scale & ~3ll : scale);
  };
  enter_round(ahead, begin);
  if (turns && ahead.tiles) aim();
  auto fetch = [&]() {  // the next of the list into the ring; nothing at its end
    if (turns && ahead.tiles) {
      u8* const to = ring + put * SLOT;
      const bool inside = ahead.column + lane % 8 * 32 < a.k, scale_inside = ahead.column + t * 64 < a.k;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows of 128 bytes; chunks of odd rows change places, against bank conflicts
        const int r = i * 4 + lane / 8;
        copy16(to + i * 512 + (lane ^ (r & 1)) * 16, codes_at + (MODE == 1 && i >= 2 ? a.n / 2 + i * 4 - 8 : i * 4) * code_pitch,
               inside && (MODE == 1 || ahead.row + r < a.n));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy4(to + CODES + i * 128 + lane * 4, scale_at + (MODE == 1 && i ? a.n / 2 : i * 8) * scale_pitch,
              scale_inside && (MODE == 1 || ahead.row + i * 8 + g < a.n));
      put = put + 1 == DEPTH ? 0 : put + 1;
      const int slot = ahead.slot;
      next_tile(ahead);
      codes_at += down * step_rows * code_pitch;
      scale_at += down * step_rows * scale_pitch;
      if (ahead.tile == ahead.tiles) {
        if (++ahead.turn < turns) enter_slice(ahead);
        else enter_round(ahead, ahead.first + a.hold);
        if (ahead.tiles) aim();
      } else if (ahead.slot != slot) {
        aim();
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch();
  if (MODE != 1) pdl_wait();

  u32 x[TILES][8][4];
  int loaded = -1;
  auto load_x = [&](const Walk& w) {
    const int at = (MODE == 2 || TOGETHER ? w.slot * slices : 0) + w.column / SLICE;
    if (at == loaded) return;
    loaded = at;
    const int column = w.column + t * 64;
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
      if (MODE == 2) row = (long long)first_token * a.top_k + chosen[mine];
#endif
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there && column < a.k) v = *(const uint4*)(a.x + row * a.k + column + j * 8);
        x[tile][j][0] = prmt(v.x, v.z, 0x5410);
        x[tile][j][1] = prmt(v.x, v.z, 0x7632);
        x[tile][j][2] = prmt(v.y, v.w, 0x5410);
        x[tile][j][3] = prmt(v.y, v.w, 0x7632);
      }
    }
  };

  auto bias_of = [&](int token, int r) {  // down: of a token of the pass, over its experts
    float sum = 0.f;
#if GROUP == 32 && MODE == 2
    if (a.bias)
      for (int p = token * a.top_k; p < (token + 1) * a.top_k; ++p)
        sum += routes.weight[p] * a.bias[(long long)(routes.key[p] / PAIRS) * a.n + r];
#endif
    return sum;
  };

  Walk now = {};
  for (int first = begin; first < end; first += a.hold) {
    const int tiles = min(a.hold, end - first);
    if (MODE != 2) {
      for (int i = threadIdx.x; i < tiles * ROWS; i += blockDim.x) {
        const int tile = first + i / ROWS, r = i % ROWS;
        Walk w;
        w.slot = MODE == 1 ? tile / row_tiles : 0;
        w.row = (MODE == 1 ? tile % row_tiles : tile) * step_rows;
        const long long row = matrix_of(w.slot) * a.n + row_of(w, r);
#if GROUP == 32
        gain[i] = MODE == 1 && a.bias ? a.bias[row] : 0.f;  // what is added
#else
        gain[i] = a.global_scale[row] * 128.f;
#endif
      }
    }
    enter_round(now, first);
    if (MODE == 2 && TOGETHER)
      for (int tile = own_tile; tile < tiles; tile += down)
        for (int i = lane; i < SUMS / 4; i += 32) ((float*)(partial + (tile * across + own_slice) * SUMS))[i] = 0.f;
#pragma unroll 1
    for (; now.turn < turns && now.tiles; ++now.turn) {
      enter_slice(now);
      if (MODE != 1 || !TOGETHER) load_x(now);
      if (MODE == 0 && now.turn + 1 < turns) {  // the next slice's activations come nearer meanwhile, a line a lane
        const int column = now.column + across * SLICE + t * 64;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const int token = tile * 8 + g;
          if (token < count && column < a.k)
            prefetch_l1(a.x + ((long long)(first_token + token) * a.matrices + blockIdx.y) * a.k + column);
        }
      }
#pragma unroll 1
      for (; now.tile < now.tiles; next_tile(now)) {
        if (MODE == 1 && TOGETHER) load_x(now);  // anew where the expert changes
        float row_gain[2] = {1.f, 1.f};
        if (MODE == 2 && GROUP == 16) {
          const long long matrix = matrix_of(now.slot) * a.n;
          row_gain[0] = a.global_scale[matrix + row_of(now, g)] * 128.f;
          row_gain[1] = a.global_scale[matrix + row_of(now, g + 8)] * 128.f;
        }
        wait_but<DEPTH - 1>();
        __syncwarp();
        const u8* const from = ring + get * SLOT;
        uint4 codes[2][2];  // [row][half of the lane's 64 columns]
        u32 scales[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            codes[row][half] = *(const uint4*)(from + (row * 8 + g) * 128 + ((2 * t + half) ^ (g & 1)) * 16);
          scales[row] = *(const u32*)(from + CODES + row * 128 + lane * 4);
          if (GROUP == 32) scales[row] = scales[row] >> scale_bit & 0xFFFFu;
        }
        get = get + 1 == DEPTH ? 0 : get + 1;
        __syncwarp();
        fetch();

        float acc[TILES][4] = {};
#if GROUP == 32
        if (any(max(max(scales[0] & 255u, scales[0] >> 8), max(scales[1] & 255u, scales[1] >> 8)) > LARGE))
          product<true>(acc, codes, scales, x);
        else
#endif
          product<false>(acc, codes, scales, x);
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
          v.x *= row_gain[0] * weights[0], v.y *= row_gain[0] * weights[1];
          v.z *= row_gain[1] * weights[0], v.w *= row_gain[1] * weights[1];
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
        if (GROUP == 32) sum += bias_of(token, r);
        a.y[(long long)(first_token + token) * a.n + r] = narrow(sum);
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
      for (int w = 0; w < used; ++w) {
        const float4 v = ((float4*)(partial + (tile * across + w) * SUMS))[part];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
      const bool scaled = MODE != 2 && GROUP == 16;
      const float gains[2] = {scaled ? gain[tile * ROWS + row] : 1.f, scaled ? gain[tile * ROWS + row + 8] : 1.f};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#if MODE == 1
        if (chosen[j] == NOBODY) continue;
        const float added[2] = {GROUP == 32 ? gain[tile * ROWS + row] : 0.f, GROUP == 32 ? gain[tile * ROWS + row + 8] : 0.f};
        const float gate = fminf(GROUP == 32 ? sum[j] + added[0] : sum[j] * gains[0], a.limit);
        const float up = fminf(fmaxf(GROUP == 32 ? sum[2 + j] + added[1] : sum[2 + j] * gains[1], -a.limit), a.limit);
        const long long pair = (long long)first_token * a.top_k + chosen[j];
        a.y[pair * (a.n / 2) + global_tile % row_tiles * 8 + row] = narrow(gate / (1.f + __expf(-a.alpha * gate)) * (up + a.shift));
#else
        if (column + j >= count) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = global_tile * ROWS + row + half * 8;
          if (r >= a.n) continue;
          const float added = MODE == 0 ? (a.bias ? a.bias[r] : 0.f) : bias_of(column + j, r);
          const float v = sum[2 * half + j] * gains[half] + added;
          const long long token = first_token + column + j;
          write<FLOAT>(a.y, (MODE == 0 ? token * a.matrices + blockIdx.y : token) * a.n + r, v);
        }
#endif
      }
    }
    __syncthreads();
  }
}
