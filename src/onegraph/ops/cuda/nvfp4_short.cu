// NVFP4 and MXFP4 linears for 9 to 32 tokens where an SM has few rows: nvfp4.cu would load more activations than codes before it
// begins. Here a block owns 16 rows and ends with them; its warps share k out among themselves, 256 columns at a time, and
// read activations as they go, through the L1. A lane loads 16 bytes of a row, the next slice's before this one's product.
//
// Set when compiled: HALF (1: x and y are float16, 0: bfloat16), TILES (column tiles of 8 tokens), WARPS, GROUP (16: NVFP4,
// 32: MXFP4), FLOAT (1: y is float32).

#include "nvfp4_common.cuh"
#include "nvfp4_decode.cuh"

constexpr int ROWS = 16, SLICE = 256;

struct Arguments {
  const u16* x;               // [tokens, matrices, k]
  const u8* codes;            // [matrices, n, k/2]
  const u8* scale;            // [matrices, n, k/GROUP]
  const float* global_scale;  // [matrices, n]; MXFP4: null
  const float* bias;          // [n] or null
  u16* y;                     // [tokens, matrices, n]
  int tokens, n, k, matrices;
};

struct Fetched {  // of rows g and g + 8: both steps of a slice
  uint4 codes[2][2];
  u32 scale[2][2];
};

__device__ __forceinline__ void fetch(Fetched& f, const u8* const (&codes)[2], const u8* const (&scale)[2], int k0, int k) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    int at = k0 + step * 128;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      bool inside = at < k;
      f.codes[step][row] = inside ? stream(codes[row] + at / 2) : make_uint4(0, 0, 0, 0);
#if GROUP == 32
      f.scale[step][row] = inside ? scale[row][at / 32] : 0;
#else
      f.scale[step][row] = inside ? *(const u16*)(scale[row] + at / 16) : 0;
#endif
    }
  }
}

template <bool BEYOND> __device__ __forceinline__ void product(float (&acc)[TILES][4], const Fetched& f, const u16* const (&x)[TILES], int k0, int k) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    u32 s[2][2];
#if GROUP == 32
    u32 more[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      s[row][0] = s[row][1] = factor(f.scale[step][row]);
      more[row] = excess(f.scale[step][row]);
    }
#else
#pragma unroll
    for (int row = 0; row < 2; ++row) widen<0>(f.scale[step][row], s[row][0], s[row][1]);
#endif
    int at = k0 + step * 128;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      u32 w0 = (&f.codes[step][0].x)[word], w1 = (&f.codes[step][1].x)[word];
      u32 s0 = s[0][word / 2], s1 = s[1][word / 2];
      u32 a[2][4] = {{multiply(pair<0>(w0), s0), multiply(pair<1>(w0), s0), multiply(pair<2>(w0), s0), multiply(pair<3>(w0), s0)},
                     {multiply(pair<0>(w1), s1), multiply(pair<1>(w1), s1), multiply(pair<2>(w1), s1), multiply(pair<3>(w1), s1)}};
#if GROUP == 32
      if (BEYOND) {
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = multiply(a[i / 4][i % 4], more[i / 4]);
      }
#endif
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (x[tile] && at < k) v = *(const uint4*)(x[tile] + at + word * 8);
        mma(acc[tile], a[0][0], a[1][0], a[0][1], a[1][1], prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632));
        mma(acc[tile], a[0][2], a[1][2], a[0][3], a[1][3], prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
      }
    }
  }
}

#if PORTABLE
constexpr int WARPS_OF_SM = 12;  // with 16 some forms spill
#else
constexpr int WARPS_OF_SM = 16;
#endif
extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS_OF_SM / WARPS) nvfp4_short(const Arguments a) {
  float4* const partial = (float4*)shared;  // [WARPS][TILES][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slices = (a.k + SLICE - 1) / SLICE, each = (slices + WARPS - 1) / WARPS;
  const int from = min(warp * each, slices), to = min(from + each, slices);
  const int first_token = blockIdx.z * TILES * 8;
  pdl_trigger();

  const u8* codes[2];
  const u8* scale[2];
  const u16* x[TILES];
  float acc[TILES][4] = {}, gain[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const long long r = (long long)blockIdx.y * a.n + min((int)blockIdx.x * ROWS + g + row * 8, a.n - 1);
    codes[row] = a.codes + r * (a.k / 2);
    scale[row] = a.scale + r * (a.k / GROUP);
    gain[row] = GROUP == 32 ? 1.f : a.global_scale[r] * 128.f;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int token = first_token + tile * 8 + g;
    x[tile] = token < a.tokens ? a.x + ((long long)token * a.matrices + blockIdx.y) * a.k : nullptr;
  }

  Fetched now;
  int k0 = from * SLICE + t * 32;
  if (from < to) fetch(now, codes, scale, k0, a.k);
  pdl_wait();
#pragma unroll 1
  for (int slice = from; slice < to; ++slice, k0 += SLICE) {
    Fetched next;
    if (slice + 1 < to) fetch(next, codes, scale, k0 + SLICE, a.k);
#if GROUP == 32
    if (any(max(max(now.scale[0][0], now.scale[0][1]), max(now.scale[1][0], now.scale[1][1])) > LARGE))
      product<true>(acc, now, x, k0, a.k);
    else
#endif
      product<false>(acc, now, x, k0, a.k);
    if (slice + 1 < to) now = next;
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    partial[(warp * TILES + tile) * 32 + lane] =
        make_float4(acc[tile][0] * gain[0], acc[tile][1] * gain[0], acc[tile][2] * gain[1], acc[tile][3] * gain[1]);
  __syncthreads();
  // A lane's four sums: rows g and g + 8 of tokens 2 t and 2 t + 1.
  for (int at = threadIdx.x; at < TILES * 32; at += WARPS * 32) {
    float sum[4] = {};
    const int tile = at / 32, row = at % 32 / 4, column = at % 4 * 2;
    for (int w = 0; w < WARPS; ++w) {
      const float4 v = partial[w * TILES * 32 + at];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = blockIdx.x * ROWS + row + i / 2 * 8, token = first_token + tile * 8 + column + i % 2;
      if (r < a.n && token < a.tokens)
        write<FLOAT>(a.y, ((long long)token * a.matrices + blockIdx.y) * a.n + r, sum[i] + (a.bias ? a.bias[r] : 0.f));
    }
  }
}
