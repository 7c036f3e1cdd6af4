// NVFP4 and MXFP4 linears (GROUP: 16, 32): codes and their scales become 16-bit floats, which products take.
//
// NVFP4: a row's global scale multiplies its sums. MXFP4 has none, and experts may have biases. Its scales of a lane's 64
// columns are two bytes, at an even address: the word that they are in is copied. SLICE is 256.
//
// Set when compiled besides: FLOAT (1: y is float32).

#define KERNEL nvfp4_linear
#define SCALES const u8* scale; const float* global_scale;  // [matrices, n, k/GROUP], [matrices, n] (MXFP4: null)
#define SCALE_SIZES
#include "stream.cuh"
#include "nvfp4_decode.cuh"

struct Codes : Plain {
  static constexpr int CODES = ROWS * SLICE / 2, BYTES = CODES + ROWS * SLICE / 16;
  static constexpr int GROUPS = 2;  // a lane's 64 columns: halves that MXFP4 has a scale for each of
  static constexpr bool SCALES_SUMS = false, EXPERT_BIASES = GROUP == 32, BEYOND = GROUP == 32;

  const Arguments& a;
  const int lane, count, up, code_pitch, scale_pitch;
  const int scale_bit;           // of a lane's scales in the copied word
  const u8 *codes_at, *scale_at;  // the lane's: rows lane / 8 and lane / 4
  float* gains;                  // [hold][ROWS]: factors of sums; MXFP4: what is added to them

  Codes(const Arguments& a, int lane, int count)
      : a(a), lane(lane), count(count), up(rows_to_up(a)), code_pitch(a.k / 2), scale_pitch(a.k / GROUP),
        scale_bit(GROUP == 32 ? ((scale_pitch & 2 ? lane / 4 : 0) + lane % 4) % 2 * 16 : 0) {}

  static constexpr int column(int t, int j) { return t * 64 + j * 8; }  // of a lane's piece j of a slice
  static constexpr int edge(int j) { return 0; }                       // all pieces are inside where the first is
  static void order(uint4 v, u32 (&x)[4]) {  // activations as `decode` gives codes: p and p + 4 of a word as a pair
    x[0] = prmt(v.x, v.z, 0x5410), x[1] = prmt(v.x, v.z, 0x7632);
    x[2] = prmt(v.y, v.w, 0x5410), x[3] = prmt(v.y, v.w, 0x7632);
  }

  void aim(long long matrix, const Walk& w) {
    const long long row = matrix * a.n + w.row;
    codes_at = a.codes + (row + lane / 8) * code_pitch + w.column / 2 + lane % 8 * 16;
    const long long scale = (row + lane / 4) * scale_pitch + w.column / GROUP + lane % 4 * (64 / GROUP);
    scale_at = a.scale + (GROUP == 32 ? scale & ~3ll : scale);
  }
  void pass(int rows) { codes_at += (long long)rows * code_pitch, scale_at += (long long)rows * scale_pitch; }
  void fetch(u8* to, const Walk& w) {
    const bool inside = w.column + lane % 8 * 32 < a.k, scale_inside = w.column + lane % 4 * 64 < a.k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows of 128 bytes; chunks of odd rows change places, against bank conflicts
      const int r = i * 4 + lane / 8;
      copy16(to + i * 512 + (lane ^ (r & 1)) * 16, codes_at + (i * 4 + (MODE == 1 && i >= 2 ? up : 0)) * (long long)code_pitch,
             inside && (MODE == 1 || w.row + r < a.n));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy4(to + CODES + i * 128 + lane * 4, scale_at + (i * 8 + (MODE == 1 && i ? up : 0)) * (long long)scale_pitch,
            scale_inside && (MODE == 1 || w.row + i * 8 + lane / 4 < a.n));
  }

  void enter_round(u8* to, int first, int tiles) {
    gains = (float*)to;
    if (MODE == 2) return;
    const int row_tiles = row_tiles_of(a);
    for (int i = threadIdx.x; i < tiles * ROWS; i += blockDim.x) {
      const int tile = first + i / ROWS, r = i % ROWS;
      const int row = (MODE == 1 ? tile % row_tiles : tile) * STEP_ROWS + r + (r < 8 ? 0 : up);
      const long long at = matrix_of(MODE == 1 ? tile / row_tiles : 0) * a.n + min(row, a.n - 1);
#if GROUP == 32
      gains[i] = MODE == 1 && a.bias ? a.bias[at] : 0.f;
#else
      gains[i] = a.global_scale[at] * 128.f;
#endif
    }
  }
  float gain(const Walk& w, int row) const {
    if (MODE != 2 || GROUP == 32) return 1.f;
    return a.global_scale[matrix_of(w.slot) * a.n + min(w.row + row, a.n - 1)] * 128.f;
  }
  float finish(float sum, int tile, int row) const {
    if (MODE == 2 || (GROUP == 32 && MODE == 0)) return sum;
    return GROUP == 32 ? sum + gains[tile * ROWS + row] : sum * gains[tile * ROWS + row];
  }
  float bias(int token, int r) const {
    float sum = 0.f;
#if GROUP == 32 && MODE == 2
    if (a.bias)
      for (int p = token * a.top_k; p < (token + 1) * a.top_k; ++p)
        sum += routes.weight[p] * a.bias[(long long)expert_of(p, count) * a.n + r];
#endif
    return sum;
  }

  struct Unit {
    uint4 codes[2][2];  // of rows g and g + 8, halves of the lane's 64 columns
    u32 scales[2], factors[2][2], more[2];

    void load(const Codes& c, const u8* from) {
      const int g = c.lane / 4, t = c.lane % 4;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          codes[row][half] = *(const uint4*)(from + (row * 8 + g) * 128 + ((2 * t + half) ^ (g & 1)) * 16);
        scales[row] = *(const u32*)(from + CODES + row * 128 + c.lane * 4);
        if (GROUP == 32) scales[row] = scales[row] >> c.scale_bit & 0xFFFFu;
      }
    }
    void begin(int half) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#if GROUP == 32
        const u32 byte = scales[row] >> 8 * half & 255u;
        factors[row][0] = factors[row][1] = factor(byte);
        more[row] = excess(byte);
#else
        if (half == 0) widen<0>(scales[row], factors[row][0], factors[row][1]);
        else widen<1>(scales[row], factors[row][0], factors[row][1]);
#endif
      }
    }
    bool beyond() const {  // a scale of MXFP4 above LARGE is among them
#if GROUP == 32
      return max(max(scales[0] & 255u, scales[0] >> 8), max(scales[1] & 255u, scales[1] >> 8)) > LARGE;
#else
      return false;
#endif
    }
    template <bool SECOND> void decode(int row, int j, int half, u32& first, u32& second) const {
      const u32 word = (&codes[row][j / 4].x)[j % 4], by = factors[row][j % 4 / 2];
      first = multiply(half ? pair<2>(word) : pair<0>(word), by);
      second = multiply(half ? pair<3>(word) : pair<1>(word), by);
      if (SECOND) first = multiply(first, more[row]), second = multiply(second, more[row]);
    }
    float scale(int row, int group) const { return 1.f; }
  };
};

#include "stream_linear.cuh"
