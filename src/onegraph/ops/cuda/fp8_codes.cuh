// Units of E4M3 codes, a byte each, whatever their scales: codes go into the products unscaled.
#pragma once

#include "fp8_decode.cuh"

struct Bytes : Plain {
  static constexpr int CODES = ROWS * SLICE;  // bytes of a unit
  static constexpr int CHUNKS = SLICE / 16, AT_ONCE = 32 / CHUNKS;  // 16 bytes a lane: pieces of a row, rows of a copy
  static constexpr bool SCALES_SUMS = true;

  const Arguments& a;
  const int lane, up;
  const u8* codes_at;  // the lane's

  Bytes(const Arguments& a, int lane) : a(a), lane(lane), up(rows_to_up(a)) {}

  static constexpr int column(int t, int j) { return t * 8 + j * 32; }  // of a lane's piece j of a slice
  static constexpr int edge(int j) { return j * 32; }                  // a piece is inside where this column is
  static void order(uint4 v, u32 (&x)[4]) {                            // activations as `decode` gives codes
    in_order(v.x, v.y, x[0], x[1]);
    in_order(v.z, v.w, x[2], x[3]);
  }
  // Which place in its row a piece of 16 bytes takes: no bank conflicts when eight bytes of each of four rows are read.
  static int place(int row, int chunk) { return chunk ^ (row & 1 | (row & 3) << 1); }

  void aim(long long matrix, const Walk& w) {
    codes_at = a.codes + (matrix * a.n + w.row + lane / CHUNKS) * a.k + w.column + lane % CHUNKS * 16;
  }
  void pass(int rows) { codes_at += (long long)rows * a.k; }
  void fetch(u8* to, const Walk& w) {
    const bool inside = w.column + lane % CHUNKS * 16 < a.k;
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i) {
      const int r = i * AT_ONCE + lane / CHUNKS;
      copy16(to + r * SLICE + place(r, lane % CHUNKS) * 16,
             codes_at + (i * AT_ONCE + (MODE == 1 && i * AT_ONCE >= 8 ? up : 0)) * (long long)a.k,
             inside && (MODE == 1 || w.row + r < a.n));
    }
  }

  struct Unit {
    uint2 codes[2][PIECES];  // of rows g and g + 8

    void load(const Bytes& c, const u8* from) {
      const int g = c.lane / 4, t = c.lane % 4;
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
          codes[row][j] = *(const uint2*)(from + (row * 8 + g) * SLICE + place(g, j * 2 + t / 2) * 16 + t % 2 * 8);
    }
    void begin(int group) {}
    bool beyond() const { return false; }
    template <bool> void decode(int row, int j, int half, u32& first, u32& second) const {
      ::decode(half ? codes[row][j].y : codes[row][j].x, first, second);
    }
  };
};
