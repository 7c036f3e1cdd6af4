// The codes of e8p_decode.cu on their way from memory to a warp: a ring of DEPTH row tiles in shared memory. Included
// there alone, behind its `Arguments`.

#include "e8p_codes.cuh"

// What a warp has under way. COPY 1 and 2: the copy engine takes GROUP row tiles at a time, one below the other. COPY 2:
// what all warps of the block begin with is one box a place of the ring (two with a residual), codes and residual codes side
// by side for all warps. Sixteen warps' own boxes take the engine 600 cycles a place to accept, and x is asked for behind
// them: 28.5 us for the four linears of a layer of 8B at 2 bits in place of 29.0; four tokens at 3 bits 54.1 for 56.2. COPY 1:
// k is no multiple of a slice. COPY 0: each lane copies what it reads itself, where a row of the residual is no multiple of
// 16 bytes.
constexpr int PLACES = DEPTH / GROUP;
template <bool> struct Ring;
template <> struct Ring<true> {
  const Arguments& p;
  u32 full, own, to;
  const u8* read;
  int step;  // bytes from place to place
  int residual;  // bytes from a warp's codes to its residual codes
  int column, row, end_column, first_row, rows_end, phase;
  bool leader;
  __device__ __forceinline__ Ring(const Arguments& p, Shared& shared, u8* ring, int warps, int warp, int column_warp,
                                  int row_warp, int begin, int end, int tile_row, int row_tiles, int lane)
      : p(p), phase(0), leader(lane == 0) {
    const int place = COPY == 2 ? column_warp * DOWN + row_warp : warp * PLACES;
    step = (COPY == 2 ? warps : 1) * (GROUP * SLOT);
    const int first = place * (GROUP * (COPY == 2 ? 1024 : SLOT));
    read = ring + first + lane * 16;
    to = address(ring) + first;
    residual = COPY == 2 ? warps * (GROUP * 1024) - place * (GROUP * (1024 - RESIDUAL)) : GROUP * 1024;
    own = address(shared.full[warp]);
    full = COPY == 2 ? address(shared.filled) : own;
    column = (begin + column_warp) * 64, end_column = end * 64;
    row = first_row = tile_row + row_warp * (16 * GROUP), rows_end = tile_row + row_tiles * 16;
    if (leader) {
      for (int d = 0; d < PLACES; d++) make_barrier(own + 8 * d, 1);
      barriers_made();
    }
    __syncwarp();
  }
  // COPY 2: by one thread of the block, for all, in place of the first fetches.
  __device__ __forceinline__ static void fill(const Arguments& p, Shared& shared, u8* ring, int warps, int begin, int end,
                                              int tile_row, int row_tiles) {
    const u32 filled = address(shared.filled), to = address(ring);
    int slice = begin, row = tile_row;
#pragma unroll
    for (int d = 0; d < PLACES; d++) {
      if (slice < end) {  // else no warp waits for it
        const u32 barrier = filled + 8 * d, codes = to + d * warps * (GROUP * SLOT);
        expect(barrier, warps * (GROUP * SLOT));
        slices(codes, p.first_codes_map, row, slice, barrier);
        if (BITS > 2) slices(codes + warps * (GROUP * 1024), p.first_residual_map, row, slice, barrier);
      }
      row += DOWN * (16 * GROUP);
      if (row >= tile_row + row_tiles * 16) row = tile_row, slice += p.across;
    }
  }
  __device__ __forceinline__ void pass() {  // over what the next fetch would take
    row += DOWN * (16 * GROUP);
    if (!one_slice(p) && row >= rows_end) row = first_row, column += p.across * 64;
  }
  __device__ __forceinline__ void fetch(int at) {
    if (leader && column < end_column && (!one_slice(p) || row < rows_end)) {
      const u32 barrier = own + 8 * at, codes = to + at * step;
      // What is overwritten was asked for, and may not have been read: without the fence twenty launches had a wrong row
      // block or more (2 bits, 14336 -> 4096).
      copies_ordered();
      expect(barrier, GROUP * SLOT);
      box(codes, p.codes_map, column, row, barrier);
      if (BITS == 4) box(codes + residual, p.residual_map, column, row, barrier);
      if (BITS == 3) box(codes + residual, p.residual_map, column / 2, row, barrier);
    }
    pass();
  }
  __device__ __forceinline__ const u8* take(int at) {
    wait_barrier(full + 8 * at, phase);
    return read + at * step;
  }
  __device__ __forceinline__ void refill(int at) {
    __syncwarp();
    fetch(at);
  }
  __device__ __forceinline__ void passed() {  // all places once
    phase = full == own ? phase ^ 1 : 0;
    full = own;
  }
};
template <> struct Ring<false> {
  static_assert(COPY || GROUP == 1, "a lane copies single row tiles");
  static constexpr int residual = 1024;
  const Arguments& p;
  u32 to;
  const u8 *read, *codes, *rest;
  u32 row_bytes, rest_bytes;
  int slice, end, tile, first_tile, row_tiles, real_tiles, t, lane;
  __device__ __forceinline__ Ring(const Arguments& p, Shared&, u8* ring, int, int warp, int column_warp, int row_warp,
                                  int begin, int end, int tile_row, int row_tiles, int lane)
      : p(p), slice(begin + column_warp), end(end), tile(row_warp), first_tile(row_warp), row_tiles(row_tiles),
        t(lane % 4), lane(lane) {
    ring += warp * DEPTH * SLOT;
    to = address(ring) + lane * 16, read = ring + lane * 16;
    row_bytes = (u32)p.k / 4, rest_bytes = (u32)p.k / (BITS == 4 ? 4 : 8);
    real_tiles = min(row_tiles, (p.n - tile_row) / 16);
    codes = p.codes + (size_t)(tile_row + lane / 4) * row_bytes + t * 16;
    rest = p.residual + (size_t)(tile_row + lane / 4) * rest_bytes + t * (BITS == 4 ? 16 : 8);
  }
  __device__ __forceinline__ void fetch(int at) {
    if (slice < end) {
      const bool real = tile < real_tiles && slice * SLICE + t * 64 < p.k;
      const u8* from = codes + (size_t)tile * 16 * row_bytes + slice * 64;
      copy16(to + at * SLOT, from, real);
      copy16(to + at * SLOT + 512, from + 8 * row_bytes, real);
      const u8* more = rest + (size_t)tile * 16 * rest_bytes + slice * (BITS == 4 ? 64 : 32);
      if (BITS == 4) {
        copy16(to + at * SLOT + 1024, more, real);
        copy16(to + at * SLOT + 1536, more + 8 * rest_bytes, real);
      } else if (BITS == 3) {
        copy_few<8>(to + at * SLOT + 1024 - lane * 8, more, real);
        copy_few<8>(to + at * SLOT + 1280 - lane * 8, more + 8 * rest_bytes, real);
      }
    }
    commit();
    tile += DOWN;
    if (tile >= row_tiles) tile = first_tile, slice += p.across;
  }
  __device__ __forceinline__ static void fill(const Arguments&, Shared&, u8*, int, int, int, int, int) {}
  __device__ __forceinline__ void pass() {}
  __device__ __forceinline__ const u8* take(int at) {
    wait_but<DEPTH - 1>();
    return read + at * SLOT;
  }
  __device__ __forceinline__ void refill(int at) { fetch(at); }
  __device__ __forceinline__ void passed() {}
};
