// MXFP8 linears: E4M3 codes go into the products unscaled, and E8M0 scales (a byte, 2^(byte - 127)), one for 32 columns of a
// row, multiply the sums of those columns, in float32. k is a multiple of 128, whose scales one copy brings.

#define KERNEL mxfp8_linear
#define FLOAT a.wide
#define SCALES const u8* scale;  // [matrices, n, k/32]
#define SCALE_SIZES int wide;
#include "stream.cuh"
#include "fp8_codes.cuh"
#include "e8m0.cuh"

struct Codes : Bytes {
  static constexpr int GROUPS = SLICE / 32, WORDS = GROUPS / 4;  // scales of a row of a unit, words of them
  static constexpr int BYTES = CODES + ROWS * GROUPS;

  const int pitch;
  const u8* scale_at;  // the lane's

  Codes(const Arguments& a, int lane, int count) : Bytes(a, lane), pitch(a.k / 32) {}

  void aim(long long matrix, const Walk& w) {
    Bytes::aim(matrix, w);
    const int row = w.row + lane / WORDS + (MODE == 1 && lane / WORDS >= 8 ? up : 0);
    scale_at = a.scale + (matrix * a.n + row) * pitch + w.column / 32 + lane % WORDS * 4;
  }
  void pass(int rows) {
    Bytes::pass(rows);
    scale_at += (long long)rows * pitch;
  }
  void fetch(u8* to, const Walk& w) {
    Bytes::fetch(to, w);
    if (lane < ROWS * WORDS)
      copy4(to + CODES + lane * 4, scale_at,
            w.column + lane % WORDS * 128 < a.k && (MODE == 1 || w.row + lane / WORDS < a.n));
  }

  struct Unit : Bytes::Unit {
    u32 words[2][WORDS];

    void load(const Codes& c, const u8* from) {
      Bytes::Unit::load(c, from);
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[row][i] = *(const u32*)(from + CODES + ((row * 8 + c.lane / 4) * WORDS + i) * 4);
    }
    float scale(int row, int group) const { return e8m0_to_float(words[row][group / 4] >> 8 * (group % 4) & 255u); }
  };
};

#include "stream_linear.cuh"
