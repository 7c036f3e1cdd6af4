// NVFP4 and MXFP4 linears and routed experts for one token, weights only: int8 tensor cores on codes that the copy engine brings.
//
// Cut. A unit is 16 rows by 256 columns; a block owns a run of row tiles, and its warps take the units of these, tile
// after tile, in turn. Eight units are a stage; one more warp keeps DEPTH stages under way: the copy engine brings codes
// (swizzled by 128 bytes, against bank conflicts) and scales. (MXFP4's are too narrow for its boxes: a lane loads the two of
// its next unit itself.) Registers allow one block an SM: where two fit, those of the
// next launch gather in pairs on SMs that this one left free, and the slowest SM sets the time.
//
// Experts. A token's choice of an expert is a matrix more of row tiles (gate-up) or of k (down), whoever else chose it.
//
// Arithmetic. Twice an E2M1 number is a small integer, and a byte permute looks four of them up by their codes. It takes
// a selector's fourth bit, here the sign, as "replicate the byte's sign", so there are two tables, one for either sign,
// of which one gives the number and the other a known remainder: positive codes find their number plus one in the first
// and minus one in the second, negative ones nothing and their number. The tensor core multiplies both and adds. x is
// brought to integers of 15 bits, by a power of two for every 256 columns (MXFP4, whose scales may be far apart: 32); they go in as two bytes. A product has eight
// columns: lane t of four has codes of a group of 16 that is its own, and columns 2 t and 2 t + 1 hold the upper and
// lower bytes of x for that group, zeros for the others. So the lane that holds a group's scale gets that group's sum, and
// scales are multiplied in float32. MXFP4's may be anything up to 2^127: x's own power of two goes first.
//
// Set when compiled: HALF (1: x and y are float16, 0: bfloat16), MODE (0: linear and grouped linear; 1: gate and up of
// routed experts with SwiGLU; 2: down of routed experts, weighted and added up), WARPS (that multiply: 16), DEPTH,
// PACE (nanoseconds between the first stages), GROUP (16: NVFP4, 32: MXFP4), EDGE (1: k is no multiple of 256), FLOAT
// (linears: 1: y is float32).

#include "nvfp4_common.cuh"

constexpr int ROWS = 16, SLICE = 256, THREADS = WARPS * 32;
constexpr int STAGE = 8;  // units; groups of so many warps take turns
static_assert(DEPTH % (WARPS / STAGE) == 0, "a group would not see every turn of a stage's barriers");
constexpr int REGISTERS = GROUP == 32 ? 96 : 72;  // of a thread
constexpr int CODES = ROWS * SLICE / 2, SCALES = GROUP == 32 ? 0 : ROWS * SLICE / 16;  // bytes of a unit
constexpr int X_SCALES = GROUP == 32 ? SLICE / GROUP : 1;             // of a slice of x
constexpr int HALVES = MODE == 1 ? 2 : 1;  // gate-up: a unit is eight gate rows and their eight up rows

struct Arguments {
  TensorMap codes;            // uint8 [k/256, matrices * n, 128] in boxes of `box` by 16 rows (gate-up: 8);
                              // EDGE: [1, matrices * n, k/2] in boxes of 1 by 16 rows by 128
  TensorMap scale;            // NVFP4: uint8 [k/256, matrices * n, 16] in boxes of as many
  const u16* x;               // linear: [matrices, k]; gate-up: [tokens, k]; down: [tokens, top_k, k]
  const u8* scales;           // MXFP4: [matrices, n, k/32]
  const float* global_scale;  // NVFP4: [matrices, n]
  const float* bias;          // linear: [n] or null; experts in MXFP4: [matrices, n] or null
  const int* experts;         // [tokens, top_k]
  const float* weights;       // [tokens, top_k]
  u16* y;                     // linear: [matrices, n]; gate-up: [tokens, top_k, n/2]; down: [tokens, n]
  int tokens, n, k, matrices, top_k;
  int hold;   // row tiles of a block at most
  int round;  // row tiles whose sums it holds: more take several rounds
  int span;   // rows of x of a block at most
  int box;    // slices of a box: divides k / 256 and STAGE
  float limit, alpha, shift;
};

struct Unit {         // of a warp
  int tile, slice;    // row tile of the block, slice of its row of x
  int row_of_x, slot; // which row that is, and of which expert the slice
  int inner, outer;   // tile % row_tiles and tile / row_tiles of the whole
};

extern "C" __global__ void __maxnreg__(REGISTERS) nvfp4_one(const __grid_constant__ Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slots = MODE == 0 ? 1 : a.top_k, row_tiles = (a.n + ROWS - 1) / ROWS, k_slices = (a.k + SLICE - 1) / SLICE;
  const int slices = MODE == 2 ? k_slices * slots : k_slices;  // of a row tile, and of a token's x
  const int all_tiles = row_tiles * (MODE == 0 ? a.matrices : MODE == 1 ? a.tokens * slots : a.tokens);
  const int begin = (long long)all_tiles * blockIdx.x / gridDim.x;
  const int tiles = (int)((long long)all_tiles * (blockIdx.x + 1) / gridDim.x) - begin, units = tiles * slices;

  u8* const codes_ring = shared;                                          // [DEPTH][HALVES][STAGE][CODES / HALVES]
  u8* const scale_ring = shared + DEPTH * STAGE * CODES;                  // the same of scales
  u8* const bytes = shared + DEPTH * STAGE * (CODES + SCALES);            // of x: [span][slices][4][upper, lower][64]
  float* const x_scale = (float*)(bytes + a.span * slices * 2 * SLICE);   // [span][slices][X_SCALES]
  float* const zeros = x_scale + (a.span * slices * X_SCALES + 3) / 4 * 4;  // [4]
  float* const partial = zeros + 4;                                       // [round][WARPS][ROWS]
  // What a row's sum is multiplied by, NVFP4: [hold][ROWS]; down, either: [hold][top_k][ROWS]. What is added, MXFP4:
  // [hold][ROWS].
  float* const gain = partial + a.round * WARPS * ROWS;
  float* const added = gain + (MODE == 2 ? a.hold * ROWS * slots : 0);
  Barrier* const full = (Barrier*)(gain + a.hold * ROWS * (MODE == 2 ? slots + (GROUP == 32) : 1));
  Barrier* const empty = full + DEPTH;

  if (threadIdx.x == THREADS) {
    for (int i = 0; i < DEPTH; ++i) make_barrier(full + i, 1), make_barrier(empty + i, STAGE);
    barriers_made();
  }
  if (MODE == 1) pdl_wait();  // experts are the last kernel's; so down may read them at once
  pdl_trigger();

  auto expert = [&](int pair) { return min(max(a.experts[pair], 0), a.matrices - 1); };
  const int row_tiles_of_x = MODE == 1 ? row_tiles * slots : row_tiles;  // row tiles that a row of x meets
  const int first_x = begin / row_tiles_of_x, rows_of_x = tiles ? (begin + tiles - 1) / row_tiles_of_x - first_x + 1 : 0;

  if (warp == WARPS) {
    __syncwarp();
    // A lane fetches the rows of a half of a box, those of other boxes other lanes at once: one after the other would take
    // longer than what small boxes bring.
    const int box = lane / HALVES * a.box, half = lane % HALVES;
#pragma unroll 1
    for (int stage = 0, put = 0, parity = 1, left = units; left > 0 || stage == 0; ++stage) {
      if (stage == DEPTH) __syncthreads();
      if (stage >= DEPTH) wait_barrier(empty + put, parity);
      const int count = min(STAGE, left);
      if (lane == 0 && count) expect(full + put, count * (CODES + SCALES));
      __syncwarp();
      if (box < count) {
        const int unit = stage * STAGE + box, tile = begin + unit / slices;
        const int slot = MODE == 2 ? unit % slices / k_slices : 0, slice = unit % slices - slot * k_slices;
        const int outer = tile / row_tiles, matrix = MODE == 0 ? outer : expert(MODE == 2 ? outer * slots + slot : outer);
        const int row = matrix * a.n + tile % row_tiles * (ROWS / HALVES) + half * (a.n / 2);
        const int at = (put * HALVES + half) * STAGE + box;
        copy_box(codes_ring + at * (CODES / HALVES), a.codes, row, EDGE ? 0 : slice, full + put, EDGE ? slice * (SLICE / 2) : 0);
        if (GROUP == 16) copy_box(scale_ring + at * (SCALES / HALVES), a.scale, row, slice, full + put);
      }
      left -= count;
      if (++put == DEPTH) put = 0, parity ^= 1;
      if (PACE && stage + 1 < DEPTH) pause(PACE);  // or the last launch's activations would come behind all of them
    }
    if (units <= DEPTH * STAGE) __syncthreads();
    return;
  }

  Unit now = {0, warp, 0, 0, begin % row_tiles, begin / row_tiles};
  auto settle = [&](Unit& u) {  // its slice grew
    while (u.slice >= slices) {
      u.slice -= slices, u.slot = 0, ++u.tile;
      if (++u.inner == row_tiles) u.inner = 0, ++u.outer;
      if ((begin + u.tile) % row_tiles_of_x == 0) ++u.row_of_x;
    }
    if (MODE == 2)
      while (u.slice >= (u.slot + 1) * k_slices) ++u.slot;
  };
  settle(now);
  u32 scales[2];
#if GROUP == 32
  auto fetch = [&](const Unit& u, u32 (&to)[2]) {  // the lane's scales of rows g and g + 8
    const int column = (u.slice - (MODE == 2 ? u.slot * k_slices : 0)) * SLICE + t * 64, row = u.inner * (ROWS / HALVES) + g;
    to[0] = to[1] = 0;
    if (u.tile >= tiles || column >= a.k) return;
    const long long matrix = MODE == 0 ? u.outer : expert(MODE == 1 ? u.outer : u.outer * slots + u.slot);
    const u8* const from = a.scales + (matrix * a.n + row) * (a.k / 32) + column / 32;
    const int below = MODE == 1 ? a.n / 2 : 8;
    if (MODE == 1 || row < a.n) to[0] = load_pair(from);
    if (MODE == 1 || row + 8 < a.n) to[1] = load_pair(from + (long long)below * (a.k / 32));
  };
  fetch(now, scales);
#endif

  if (threadIdx.x < 4) zeros[threadIdx.x] = 0.f;
  for (int i = threadIdx.x; i < a.round * WARPS * ROWS; i += THREADS) partial[i] = 0.f;
  if (MODE == 2) {
    for (int i = threadIdx.x; i < tiles * slots * ROWS; i += THREADS) {
      const int tile = begin + i / (ROWS * slots), pair = tile / row_tiles * slots + i / ROWS % slots;
      const int row = min(tile % row_tiles * ROWS + i % ROWS, a.n - 1);
      gain[i] = GROUP == 32 ? a.weights[pair] : a.global_scale[(long long)expert(pair) * a.n + row] * a.weights[pair];
    }
  }
  if (GROUP == 32) {
    for (int i = threadIdx.x; i < tiles * ROWS; i += THREADS) {
      const int tile = begin + i / ROWS, outer = tile / row_tiles, inner = tile % row_tiles, r = i % ROWS;
      float sum = 0.f;
      if (a.bias && MODE == 1) sum = a.bias[(long long)expert(outer) * a.n + inner * 8 + r % 8 + r / 8 * (a.n / 2)];
      if (a.bias && MODE != 1 && inner * ROWS + r < a.n) {
        if (MODE == 0) sum = a.bias[inner * ROWS + r];
        else
#pragma unroll 4
          for (int pair = outer * slots; pair < (outer + 1) * slots; ++pair)
            sum += a.weights[pair] * a.bias[(long long)expert(pair) * a.n + inner * ROWS + r];
      }
      added[i] = sum;
    }
  } else if (MODE != 2) {
    for (int i = threadIdx.x; i < tiles * ROWS; i += THREADS) {
      const int tile = begin + i / ROWS, r = i % ROWS;
      if (MODE == 0) gain[i] = a.global_scale[(long long)(tile / row_tiles) * a.n + min(tile % row_tiles * ROWS + r, a.n - 1)];
      else gain[i] = a.global_scale[(long long)expert(tile / row_tiles) * a.n + tile % row_tiles * 8 + r % 8 + r / 8 * (a.n / 2)];
    }
  }
  if (MODE != 1) pdl_wait();

  const u16* const x = a.x + (long long)first_x * (EDGE ? (MODE == 2 ? slots : 1) * a.k : slices * SLICE);
  for (int slice = warp; slice < rows_of_x * slices; slice += WARPS) {  // a lane takes eight columns
    uint4 v = make_uint4(0, 0, 0, 0);
    if (!EDGE) v = *(const uint4*)(x + slice * SLICE + lane * 8);
    else if (slice % k_slices * SLICE + lane * 8 < a.k)
      v = *(const uint4*)(x + (long long)(slice / k_slices) * a.k + slice % k_slices * SLICE + lane * 8);
    float f[8];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      f[i] = widen(i % 2 ? (&v.x)[i / 2] >> 16 : (&v.x)[i / 2] & 0xFFFF);
      most = max(most, as_bits(f[i]) & 0x7FFFFFFFu);
    }
#if GROUP == 32
    most = max(most, as_bits(shuffle_xor(as_float(most), 1)));
    most = max(most, as_bits(shuffle_xor(as_float(most), 2)));
#else
    most = warp_max(most);
#endif
    const u32 exponent = max(most >> 23, 32u);  // biased; what is below 2^-95 all over is zero
    const float to_integer = as_float((267 - exponent) << 23);
    u32 q[8];  // low half: the integer, below 2^14
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = as_bits(f[i] * to_integer + 12582912.f);
    u32 word[2][2];  // [upper, lower]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32* const p = q + 4 * i;
      word[0][i] = prmt(prmt(p[0] + 128, p[1] + 128, 0x51), prmt(p[2] + 128, p[3] + 128, 0x51), 0x5410);
      word[1][i] = prmt(prmt(p[0], p[1], 0x40), prmt(p[2], p[3], 0x40), 0x5410);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      u32* const to = (u32*)(bytes + slice * 2 * SLICE + lane / 8 * 128 + part * 64 + lane % 8 * 8);
      to[0] = word[part][0], to[1] = word[part][1];
    }
    // The power of two undone, and the factor two of the codes'; not a number where x has one that is not finite.
    if (lane % (32 / X_SCALES) == 0) x_scale[slice * X_SCALES + lane * X_SCALES / 32] = as_float(exponent == 255 ? 0x7FFFFFFFu : (exponent - 14) << 23);
  }
  __syncthreads();

  const bool own = g / 2 == t;  // else the lane holds zeros of x
  const u8* const x_from = own ? bytes + t * 128 + g % 2 * 64 : (const u8*)zeros;
  const int x_slice = own ? 2 * SLICE : 0, x_group = own ? 16 : 0;
  const u32 nothing = *(const volatile u32*)zeros;  // keeps the compiler from fetching constants anew for every use
  const u32 a_low = (nothing | 0x04030200u), a_high = (nothing | 0x0D090705u);  // 0, 2, 3, 4, 5, 7, 9, 13
  const u32 b_low = (nothing | 0xFDFEFF00u), b_high = (nothing | 0xF4F8FAFCu);  // 0, -1, -2, -3, -4, -6, -8, -12
  const int begin_at = (nothing | 0x4B400000u);  // 1.5 * 2^23 as a float32: sums of 22 bits come out as floats
  const int start[4] = {0, begin_at, 0, begin_at};
  int get = warp / STAGE, parity = 0;
  float sum[2] = {};
  for (int from_tile = 0; from_tile < tiles; from_tile += a.round) {
    const int round = min(a.round, tiles - from_tile);
#pragma unroll 1
    while (now.tile < from_tile + round) {
      wait_barrier(full + get, parity);
      const u8* const from = codes_ring + (get * HALVES * STAGE + warp % STAGE) * (CODES / HALVES) + g * 128;
      const u8* const scale_from = scale_ring + (get * HALVES * STAGE + warp % STAGE) * (SCALES / HALVES) + lane * 4;
      u32 codes[2][8];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 v = *(const uint4*)(from + row * (HALVES == 2 ? STAGE * CODES / 2 : CODES / 2) + ((2 * t + half) ^ g) * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) codes[row][half * 4 + i] = (&v.x)[i];
        }
        if (GROUP == 16) scales[row] = *(const u32*)(scale_from + row * (HALVES == 2 ? STAGE * SCALES / 2 : SCALES / 2));
      }
      __syncwarp();
      if (lane == 0) arrive(empty + get);
      get += WARPS / STAGE;
      if (get >= DEPTH) get -= DEPTH, parity ^= 1;

      float part[2] = {};
      const int x_at = now.row_of_x * slices + now.slice;
#if GROUP == 32
      Unit next = now;
      next.slice += WARPS;
      settle(next);
      u32 ahead[2];
      fetch(next, ahead);
#else
      float scale[2][4];
#pragma unroll
      for (int row = 0; row < 2; ++row) e4m3_to_float(scales[row], scale[row]);
#endif
      int c[4];
#pragma unroll
      for (int group = 0; group < 4; ++group) {  // of 16 columns
        const uint4 v = *(const uint4*)(x_from + x_at * x_slice + group * x_group);
#if GROUP == 32
        if (group % 2 == 0) c[0] = c[1] = c[2] = c[3] = 0;
#endif
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          const u32 w0 = codes[0][group * 2 + word], w1 = codes[1][group * 2 + word];
          const u32 m0 = w0 ^ 0x88888888u, m1 = w1 ^ 0x88888888u, b0 = word ? v.z : v.x, b1 = word ? v.w : v.y;
          const u32 plus[4] = {w0, w1, w0 >> 16, w1 >> 16}, minus[4] = {m0, m1, m0 >> 16, m1 >> 16};
          u32 rows[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[i] = prmt(a_low, a_high, plus[i]);
          if (word || GROUP == 32) mma(c, rows, b0, b1, c);
          else mma(c, rows, b0, b1, start);
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[i] = prmt(b_low, b_high, minus[i]);
          mma(c, rows, b0, b1, c);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#if GROUP == 32  // sums of 24 bits
          const u32 power = max((scales[row] >> group / 2 * 8 & 255u) << 23, 1u << 22);  // 2^-127 is subnormal
          if (group % 2) part[row] += (float)(c[2 * row] * 256 + c[2 * row + 1]) * x_scale[x_at * X_SCALES + t * 2 + group / 2] * as_float(power);
#else
          part[row] += (as_float(c[2 * row] * 256 + c[2 * row + 1]) - 12582912.f) * scale[row][group];
#endif
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float row_gain = MODE == 2 ? gain[(now.tile * slots + now.slot) * ROWS + row * 8 + g] : 1.f;
        sum[row] += GROUP == 32 ? part[row] * row_gain : part[row] * (x_scale[x_at] * row_gain);
      }
      if (now.slice + WARPS >= slices) {  // that was the warp's last of the tile
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          sum[row] += shuffle_xor(sum[row], 1);
          sum[row] += shuffle_xor(sum[row], 2);
          if (t == 0) partial[((now.tile - from_tile) * WARPS + warp) * ROWS + row * 8 + g] = sum[row];
          sum[row] = 0.f;
        }
      }
#if GROUP == 32
      now = next, scales[0] = ahead[0], scales[1] = ahead[1];
#else
      now.slice += WARPS;
      settle(now);
#endif
    }
    some_meet(1, THREADS);
    for (int i = threadIdx.x; i < round * ROWS; i += THREADS) {
      const int own_tile = from_tile + i / ROWS, tile = begin + own_tile, r = i % ROWS;
      float* const sums = partial + i / ROWS * (WARPS * ROWS) + r;
      float total = 0.f, up = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += sums[w * ROWS];
      if (MODE == 1) {
        if (r >= 8) continue;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) up += sums[w * ROWS + 8];
        const float of_gate = gain[own_tile * ROWS + r], of_up = gain[own_tile * ROWS + r + 8];
        total = fminf(GROUP == 32 ? total + of_gate : total * of_gate, a.limit);
        up = fminf(fmaxf(GROUP == 32 ? up + of_up : up * of_up, -a.limit), a.limit);
        a.y[(long long)(tile / row_tiles) * (a.n / 2) + tile % row_tiles * 8 + r] = narrow(total / (1.f + __expf(-a.alpha * total)) * (up + a.shift));
      } else {
        const int row = tile % row_tiles * ROWS + r;
        if (GROUP == 32) total += added[own_tile * ROWS + r];
        else if (MODE == 0) total = total * gain[own_tile * ROWS + r] + (a.bias && row < a.n ? a.bias[row] : 0.f);
        if (row < a.n) write<FLOAT>(a.y, (long long)(tile / row_tiles) * a.n + row, total);
      }
    }
    if (from_tile + round == tiles) break;
    some_meet(1, THREADS);
    for (int i = threadIdx.x; i < a.round * WARPS * ROWS; i += THREADS) partial[i] = 0.f;
    some_meet(1, THREADS);
  }
}
