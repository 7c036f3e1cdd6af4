// Linears and routed experts straight from codes, for up to TILES * 8 tokens a pass, weights only: on tensor cores of 16-bit
// floats. A format says in front of this how a unit of its codes is fetched, decoded and multiplied: `Codes`.
//
// Cut. A tile is 16 rows, a slice SLICE columns, both together a unit. A block stays on its SM and owns a run of row tiles;
// its warps share k out, slice by slice, and walk down the tiles, so that a warp's activations stay in its registers. What a
// warp reads next is a fixed list (tile after tile, then its next slice), and DEPTH entries of it are always under way, into
// a ring of its own in shared memory: no warp waits for another before the sums are added, in a fixed order, at the end.
// Where a block has few row tiles, activations are as many bytes as codes, and come through the ring too, at a slice's first
// tile.
//
// Routed experts (`routes.cuh`): gate-up: each of the distinct experts is a matrix more of tiles. down: their k follow one
// another, and columns are added to their tokens' sums.

#include "stream.cuh"

constexpr int SLOT = Codes::BYTES + (RING_X ? TILES * SLICE * 16 : 0);

__device__ __forceinline__ void store(const Arguments& a, long long at, float v) {
  if (FLOAT) ((float*)a.y)[at] = v;
  else ((u16*)a.y)[at] = narrow(v);
}

// A unit's product with a lane's columns, added to its four sums.
template <bool BEYOND>
__device__ __forceinline__ void multiply(float (&acc)[TILES][4], Codes::Unit& unit, const u32 (&x)[TILES][PIECES][4]) {
  constexpr int EACH = PIECES / Codes::GROUPS;
#pragma unroll
  for (int group = 0; group < Codes::GROUPS; ++group) {
    float part[TILES][4] = {};
    float(&sums)[TILES][4] = Codes::SCALES_SUMS ? part : acc;
    unit.begin(group);
#pragma unroll
    for (int j = group * EACH; j < (group + 1) * EACH; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 a0, a1, b0, b1;
        unit.template decode<BEYOND>(0, j, half, a0, a1);
        unit.template decode<BEYOND>(1, j, half, b0, b1);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
          mma(sums[tile], a0, b0, a1, b1, x[tile][j][half * 2], x[tile][j][half * 2 + 1]);
      }
    }
    if (Codes::SCALES_SUMS)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][i] += part[tile][i] * unit.scale(i / 2, group);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) KERNEL(const Arguments a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int across = a.across, down = blockDim.x / 32 / across, own_slice = warp % across, own_tile = warp / across;
  const int first_token = blockIdx.z * TOKENS, count = min(a.tokens - first_token, TOKENS);
  const int slices = (a.k + SLICE - 1) / SLICE, row_tiles = row_tiles_of(a);

  if (MODE == 1) pdl_wait();  // experts are the last kernel's; so down may read them at once
  pdl_trigger();
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
  u8* const row_numbers = partial + a.hold * across * SUMS;       // of the format

  auto enter_slice = [&](Walk& w) {  // w.turn was set
    const int slice = own_slice + w.turn * across, tile = w.first + own_tile;
    w.tile = 0;
    w.slot = MODE == 2 ? slice / slices : MODE == 1 ? tile / row_tiles : 0;
    w.column = (MODE == 2 ? slice % slices : slice) * SLICE;
    w.row = (MODE == 1 ? tile % row_tiles : tile) * STEP_ROWS;
  };
  auto enter_round = [&](Walk& w, int first) {
    w.first = first;
    w.turn = 0;
    w.tiles = max(0, (min(a.hold, end - first) - own_tile + down - 1) / down);
    enter_slice(w);
  };
  auto next_tile = [&](Walk& w) {
    ++w.tile;
    w.row += down * STEP_ROWS;
    if (MODE == 1)
      while (w.row >= row_tiles * STEP_ROWS) w.row -= row_tiles * STEP_ROWS, ++w.slot;
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
  Codes codes(a, lane, count);  // aimed at the unit that is fetched next
  enter_round(ahead, begin);
  if (turns && ahead.tiles) codes.aim(matrix_of(ahead.slot), ahead);
  auto fetch_x = [&](const Walk& w, u8* to) {  // what the lane itself will read
    if (!RING_X || w.tile) return;
    const int column = w.column + Codes::column(t, 0);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int mine = tile * 8 + g;
      const u16* const from = a.x + ((long long)(first_token + mine) * a.matrices + blockIdx.y) * a.k + column;
#pragma unroll
      for (int j = 0; j < PIECES; ++j)
        copy16(to + Codes::BYTES + (tile * PIECES + j) * 512 + lane * 16, (const u8*)(from + Codes::column(0, j)),
               mine < count && column + Codes::edge(j) < a.k);
    }
  };
  auto fetch = [&](bool with_x) {  // the next of the list into the ring; nothing at its end
    if (turns && ahead.tiles) {
      u8* const to = ring + put * SLOT;
      codes.fetch(to, ahead);
      if (with_x) fetch_x(ahead, to);
      put = put + 1 == DEPTH ? 0 : put + 1;
      codes.pass(down * STEP_ROWS);
      if (advance(ahead)) codes.aim(matrix_of(ahead.slot), ahead);
    }
  };
#pragma unroll
  for (int i = 0; i < EARLY; ++i) {
    fetch(false);
    if (!RING_X) commit();
  }
  if (MODE != 1) pdl_wait();
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

  u32 x[TILES][PIECES][4];
  int loaded = -1;
  auto load_x = [&](const Walk& w) {
    const int at = (MODE == 2 || TOGETHER ? w.slot * slices : 0) + w.column / SLICE;
    if (at == loaded) return;
    loaded = at;
    const int column = w.column + Codes::column(t, 0);
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
      for (int j = 0; j < PIECES; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there && column + Codes::edge(j) < a.k) v = *(const uint4*)(a.x + row * a.k + column + Codes::column(0, j));
        Codes::order(v, x[tile][j]);
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
    codes.enter_round(row_numbers, first, tiles);
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
        const float gains[2] = {codes.gain(now, g), codes.gain(now, g + 8)};
        wait_but<DEPTH - 1>();
        __syncwarp();
        const u8* const from = ring + get * SLOT;
        Codes::Unit unit;
        unit.load(codes, from);
        if (RING_X && now.tile == 0) {
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
              Codes::order(*(const uint4*)(from + Codes::BYTES + (tile * PIECES + j) * 512 + lane * 16), x[tile][j]);
        }
        get = get + 1 == DEPTH ? 0 : get + 1;
        __syncwarp();
        fetch(true);
        commit();

        float acc[TILES][4] = {};
        if (Codes::BEYOND && any(unit.beyond())) multiply<true>(acc, unit, x);
        else multiply<false>(acc, unit, x);
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
          v.x *= gains[0] * weights[0], v.y *= gains[0] * weights[1];
          v.z *= gains[1] * weights[0], v.w *= gains[1] * weights[1];
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
        if (Codes::EXPERT_BIASES) sum += codes.bias(token, r);
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
        const float gate = fminf(codes.finish(sum[j], tile, row), a.limit);
        const float up = fminf(fmaxf(codes.finish(sum[2 + j], tile, row + 8), -a.limit), a.limit);
        const float hidden = gate / (1.f + __expf(-a.alpha * gate)) * (up + a.shift);
        store(a, (first_pair + chosen[j]) * (a.n / 2) + global_tile % row_tiles * 8 + row, hidden);
#else
        if (column + j >= count) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = global_tile * ROWS + row + half * 8;
          if (r >= a.n) continue;
          const long long token = first_token + column + j;
          const float bias = MODE == 2 ? codes.bias(column + j, r) : a.bias ? a.bias[r] : 0.f;
          const float v = codes.finish(sum[2 * half + j], tile, row + half * 8) + bias;
          store(a, (MODE == 0 ? token * a.matrices + blockIdx.y : token) * a.n + r, v);
        }
#endif
      }
    }
    __syncthreads();
  }
}
