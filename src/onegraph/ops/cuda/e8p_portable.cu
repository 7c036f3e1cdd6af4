// E8P linear for up to 16 tokens on every card from compute capability 8.0 on, as `rotated_portable.cuh` cuts it. Decoding, its
// tables and the products are those of e8p_decode.cu, which tells them. A warp reads codes straight into registers: of 99 KB of
// shared memory the tables leave a third.
//
// Set when compiled: BITS (2, 3, 4), and what `rotated_portable.cuh` says.

#define E81B_RUN 64  // its table in half the bytes, and two wavefronts a lookup: 99 KB hold no more
#include "e8p_common.cuh"

constexpr float LEVELS = 32512.f;  // of the largest activation; 127 * 256: both bytes stay in int8

#include "e8p_codes.cuh"
#include "e8p_decode_product.cuh"

#define KERNEL e8p_portable
#define TURN e8p_portable_turn
#define CODE_FIELDS                                        \
  const u8* codes;        /* int16 [n, k/8] */             \
  const u8* residual;     /* uint8 or int16 [n, k/8] */    \
  const uint2* codebook;  /* int8 [512, 8] */

constexpr int GROUP_TOKENS = 4, LANE_TOKENS = 1;
constexpr int ROW_BYTES = K / 4, REST_BYTES = K / (BITS == 4 ? 4 : 8);

struct Tables {
  TableWords words;
  template <class A>
  __device__ __forceinline__ Tables(const A& p, int warp, int warps, int lane)
      : words(load_table_words(p.codebook, warp, warps, lane)) {}
  template <class A> __device__ __forceinline__ void build(const A& p, int warp, int warps, int lane) const {
    check_start(address(smem));
    build_tables(p.codebook, words, warp, warps, lane);
  }
  __device__ __forceinline__ u32 bank(int lane) const { return bank_of(address(smem), lane); }
};

// Column g of the product is the high or low byte of token g / 2; results are of token t.
template <class There, class At, class Scale>
__device__ __forceinline__ void take(Product& to, int first, int g, int t, There there, At at, Scale scale) {
  const int token = first + g / 2;
  const bool real = there(token);
  load_kept(to, at(token, real), real, g, t);
  set_scale(to, scale(first + t));
}
__device__ __forceinline__ float result(const Product& p, const Product::Sums& acc, int h, int) { return p.result(acc, h); }

// What a warp reads: a lane's pieces of its slice in every DOWN-th row tile. Beyond k it reads the first columns instead,
// which zeros are multiplied with.
struct Reader {
  const u8 *codes, *rest;
  int left;  // row tiles
  template <class A> __device__ __forceinline__ Reader(const A& p, int slice, int tile, int end, int g, int t)
      : left(tile < end ? (end - tile + DOWN - 1) / DOWN : 0) {
    const int piece = slice * SLICE + t * 64 < p.k ? slice * 4 + t : 0, row = min(tile, N / 16 - 1) * 16 + g;
    codes = p.codes + (size_t)row * ROW_BYTES + piece * 16;
    rest = p.residual + (size_t)row * REST_BYTES + piece * (BITS == 4 ? 16 : 8);
  }
  __device__ __forceinline__ void next(Codes& to) {
    if (left-- <= 0) return;
    to.first[0] = stream(codes), to.first[1] = stream(codes + 8 * ROW_BYTES);
    if (BITS == 4) to.second[0] = stream(rest), to.second[BITS == 4] = stream(rest + 8 * REST_BYTES);
    if (BITS == 3) to.small[0] = stream8(rest), to.small[BITS == 3] = stream8(rest + 8 * REST_BYTES);
    codes += (size_t)DOWN * 16 * ROW_BYTES, rest += (size_t)DOWN * 16 * REST_BYTES;
  }
};

#include "rotated_portable.cuh"
