// What a streaming kernel of codes is given and how it walks over them: stream_linear.cuh has the kernel.
//
// Set when compiled: HALF (1: x is float16, 0: bfloat16), TILES (column tiles of 8 tokens), MODE (0: linear and grouped
// linear; 1: gate and up of routed experts with SwiGLU; 2: down of routed experts, weighted and added up), SLICE (columns
// of a unit), DEPTH, WARPS (of a block at most), TOGETHER (experts of up to 16 tokens; TILES is 1), RING_X (1: activations
// through the ring; MODE is 0), EARLY (units requested before the first activations: DEPTH, or fewer where these do not
// come through the ring).
//
// Set before, by the source of a format: KERNEL (name of the kernel), SCALES and SCALE_SIZES (fields of Arguments), FLOAT
// (whether y is float32).
#pragma once

#include "nvfp4_common.cuh"

static_assert(EARLY == DEPTH || (EARLY < DEPTH && !RING_X));
constexpr int ROWS = 16;
constexpr int COLUMNS = TILES * 8, TOKENS = TOGETHER ? 16 : COLUMNS;  // of a product, of a pass
constexpr int PITCH = TOKENS + 1;                                     // down, together: a tile's sums are [ROWS][PITCH]
constexpr int SUMS = MODE == 2 && TOGETHER ? ROWS * PITCH * 4 : TILES * 512;  // bytes of a warp's sums of a tile
constexpr int PIECES = SLICE / 32;                                    // of eight columns, that a lane has of a slice

#if MODE != 0
constexpr bool WEIGHED = MODE == 2;
#include "routes.cuh"
#endif

struct Arguments {
  const u16* x;          // linear: [tokens, matrices, k]; gate-up: [tokens, k]; down: [tokens, top_k, k]
  const u8* codes;       // [matrices, n, bytes]
  SCALES
  const float* bias;     // linear: [n] or null; experts: [matrices, n] or null, of formats that have them
  const int* experts;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  void* y;               // linear: [tokens, matrices, n]; gate-up: [tokens, top_k, n/2]; down: [tokens, n]
  int tokens, n, k, matrices, top_k;
  SCALE_SIZES
  int across;  // warps side by side in k; groups of so many warps share a block's tiles
  int hold;    // row tiles whose sums fit into shared memory: more take several rounds
  float limit, alpha, shift;
};

// Where a warp is in its list: rounds of `hold` tiles; in a round its slices; in a slice its tiles of the round.
struct Walk {
  int first;              // tile of the round
  int turn, tile;         // of the warp's slices; of its tiles
  int tiles;              // its tiles of the round
  int slot, row, column;  // matrix among the slots; first row (gate-up: of eight); first column
};

// gate-up: a tile is eight gate rows and their eight up rows, which are so many rows further on.
__device__ __forceinline__ int rows_to_up(const Arguments& a) { return MODE == 1 ? a.n / 2 - 8 : 0; }
constexpr int STEP_ROWS = MODE == 1 ? ROWS / 2 : ROWS;
__device__ __forceinline__ int row_tiles_of(const Arguments& a) {  // of a matrix
  return ((MODE == 1 ? a.n / 2 : a.n) + STEP_ROWS - 1) / STEP_ROWS;
}

// The matrix of a slot: experts have one each.
__device__ __forceinline__ long long matrix_of(int slot) {
#if MODE == 0
  return (long long)blockIdx.y;
#else
  return (long long)routes.expert[slot];
#endif
}

// What a format's `Codes` has where the format does not say otherwise.
struct Plain {
  static constexpr bool EXPERT_BIASES = false;
  static constexpr bool BEYOND = false;                             // units may need a second factor
  void enter_round(u8* to, int first, int tiles) {}                 // writes numbers of the round's rows
  float gain(const Walk& w, int row) const { return 1.f; }          // down: of a row of the tile
  float finish(float sum, int tile, int row) const { return sum; }  // of a tile of the round
  float bias(int token, int r) const { return 0.f; }                // down: of a token of the pass, over its experts
};
