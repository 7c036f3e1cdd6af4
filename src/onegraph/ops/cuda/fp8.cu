// FP8 (E4M3) linears: codes go into the products unscaled, and a scale multiplies the sums of the columns that share it, in
// float32. Scales: float32, one for 2^row_shift rows by 2^column_shift columns.
//
// Set when compiled besides: GRAIN (columns that share a scale wherever they begin: 32 or 128).

#define KERNEL fp8_linear
#define FLOAT a.wide
#define SCALES const float* scale;  // [matrices, ceil(n / 2^row_shift), scale_pitch]
#define SCALE_SIZES int row_shift, column_shift, scale_pitch, wide;
#include "stream.cuh"
#include "fp8_codes.cuh"

struct Codes : Bytes {
  static constexpr int GROUPS = SLICE / GRAIN;  // scales of a row of a unit
  static constexpr int BYTES = CODES + ROWS * GROUPS * 4;

  const int scale_rows;
  const float* scale_at;  // the matrix's

  Codes(const Arguments& a, int lane, int count) : Bytes(a, lane), scale_rows((a.n + (1 << a.row_shift) - 1) >> a.row_shift) {}

  void aim(long long matrix, const Walk& w) {
    Bytes::aim(matrix, w);
    scale_at = a.scale + matrix * scale_rows * a.scale_pitch;
  }
  void fetch(u8* to, const Walk& w) {
    Bytes::fetch(to, w);
#pragma unroll
    for (int i = 0; i < (ROWS * GROUPS + 31) / 32; ++i) {
      const int s = i * 32 + lane, r = s / GROUPS, column = w.column + s % GROUPS * GRAIN;
      if (ROWS * GROUPS % 32 && r >= ROWS) break;
      const int row = w.row + r + (MODE == 1 && r >= 8 ? up : 0);
      copy4(to + CODES + s * 4, (const u8*)(scale_at + (row >> a.row_shift) * a.scale_pitch + (column >> a.column_shift)),
            column < a.k && (MODE == 1 || row < a.n));
    }
  }

  struct Unit : Bytes::Unit {
    float scales[2][GROUPS];

    void load(const Codes& c, const u8* from) {
      Bytes::Unit::load(c, from);
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int s = 0; s < GROUPS; ++s)
          scales[row][s] = *(const float*)(from + CODES + ((row * 8 + c.lane / 4) * GROUPS + s) * 4);
    }
    float scale(int row, int group) const { return scales[row][group]; }
  };
};

#include "stream_linear.cuh"
