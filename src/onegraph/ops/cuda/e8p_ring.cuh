// The codes of e8p.cu on their way from memory to a warp: a ring of DEPTH row tiles in shared memory. Included by
// e8p.cu alone, behind its `Arguments`.

struct Codes {
  uint4 first[2];  // rows g and g + 8
  uint4 second[BITS == 4 ? 2 : 1];
  uint2 small[BITS == 3 ? 2 : 1];
};

constexpr int SLOT = BITS == 2 ? 1024 : BITS == 3 ? 1536 : 2048;  // bytes of a row tile's codes

// A lane's codes of the u-th of GROUP row tiles, whose residual codes lie behind the codes of all; `at` is 16 bytes behind
// their start for each lane below.
__device__ __forceinline__ Codes codes_at(const u8* at, int u, int lane) {
  const u8* const rest = at + GROUP * 1024;
  Codes c;
  at += u * 1024;
  c.first[0] = *(const uint4*)at, c.first[1] = *(const uint4*)(at + 512);
  if (BITS == 4) {
    c.second[0] = *(const uint4*)(rest + u * 1024), c.second[BITS == 4] = *(const uint4*)(rest + u * 1024 + 512);
  }
  if (BITS == 3) {
    c.small[0] = *(const uint2*)(rest + u * 512 - lane * 8);
    c.small[BITS == 3] = *(const uint2*)(rest + u * 512 + 256 - lane * 8);
  }
  return c;
}

__device__ __forceinline__ void copy16(u32 to, const u8* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const u8* from, bool real) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" :: "r"(to), "l"(from), "r"(real ? 8 : 0) : "memory");
}

// What a warp has under way. COPY 1: the copy engine takes GROUP row tiles at a time, one below the other; COPY 0: each lane
// copies what it reads itself, where a row of the residual is no multiple of 16 bytes.
template <bool> struct Ring;
template <> struct Ring<true> {
  const Arguments& p;
  u32 full, slots;
  const u8* read;
  int column, row, end_column, first_row, rows_end, slot, phase;
  bool leader;
  __device__ __forceinline__ Ring(const Arguments& p, u64* barriers, u8* ring, int start, int end, int tile_row,
                                  int row_warp, int row_tiles, int lane)
      : p(p), slot(0), phase(0), leader(lane == 0) {
    full = (u32)__cvta_generic_to_shared(barriers), slots = (u32)__cvta_generic_to_shared(ring);
    read = ring + lane * 16;
    column = start * 64, end_column = end * 64;
    row = first_row = tile_row + row_warp * (16 * GROUP), rows_end = tile_row + row_tiles * 16;
    if (leader) {
      for (int d = 0; d < DEPTH / GROUP; d++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * d) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  __device__ __forceinline__ static void box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
  }
  __device__ __forceinline__ void fetch(int at) {
    if (leader && column < end_column) {
      const u32 barrier = full + 8 * at, to = slots + at * (GROUP * SLOT);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(GROUP * SLOT) : "memory");
      box(to, p.codes_map, column, row, barrier);
      if (BITS == 4) box(to + GROUP * 1024, p.residual_map, column, row, barrier);
      if (BITS == 3) box(to + GROUP * 1024, p.residual_map, column / 2, row, barrier);
    }
    row += DOWN * (16 * GROUP);
    if (row >= rows_end) row = first_row, column += p.across * 64;
  }
  __device__ __forceinline__ const u8* take() {
    asm volatile(
        "{\n.reg .pred P;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra AGAIN;\nDONE:\n}"
        :: "r"(full + 8 * slot), "r"(phase) : "memory");
    return read + slot * (GROUP * SLOT);
  }
  __device__ __forceinline__ void refill() {
    __syncwarp();
    fetch(slot);
    if (++slot == DEPTH / GROUP) slot = 0, phase ^= 1;
  }
};
template <> struct Ring<false> {
  static_assert(COPY || GROUP == 1, "a lane copies single row tiles");
  const Arguments& p;
  u32 to;
  const u8 *read, *codes, *rest;
  u32 row_bytes, rest_bytes;
  int slice, end, tile, first_tile, row_tiles, real_tiles, slot, t, lane;
  __device__ __forceinline__ Ring(const Arguments& p, u64*, u8* ring, int start, int end, int tile_row, int row_warp,
                                  int row_tiles, int lane)
      : p(p), slice(start), end(end), tile(row_warp), first_tile(row_warp), row_tiles(row_tiles), slot(0), t(lane % 4),
        lane(lane) {
    to = (u32)__cvta_generic_to_shared(ring) + lane * 16, read = ring + lane * 16;
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
        copy8(to + at * SLOT + 1024 - lane * 8, more, real);
        copy8(to + at * SLOT + 1280 - lane * 8, more + 8 * rest_bytes, real);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    tile += DOWN;
    if (tile >= row_tiles) tile = first_tile, slice += p.across;
  }
  __device__ __forceinline__ const u8* take() {
    asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
    return read + slot * SLOT;
  }
  __device__ __forceinline__ void refill() {
    fetch(slot);
    if (++slot == DEPTH) slot = 0;
  }
};
