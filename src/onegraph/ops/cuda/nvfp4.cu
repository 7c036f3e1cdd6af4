// NVFP4 linears for few tokens, weights only: codes straight from the layout on disk to the tensor cores.
//
// A block owns 16 rows; its warps share k out among themselves, 256 columns at a time, and their sums meet in shared
// memory and are added in a fixed order. A lane loads 16 bytes of a row, 32 codes. Code p of the lower and of the upper
// half of a word come out as a pair in one register: sign to bit 15, the three other bits to where exponent and mantissa
// of a 16-bit float meet. That is the code's value times a power of two, its subnormal included, so that there is no
// table. Times the group's scale it has six bits of mantissa, exact in bfloat16 and float16. The order of k that pairs
// come in is given to the activations too, by byte permutes.
//
// Powers of two: bfloat16 holds code * 2^-126 and scale * 2^119, float16 code * 2^-14 and scale * 2^7; the product is
// code * scale * 2^-7 either way, undone with the row's global scale in float32.
//
// Set when compiled: HALF (1: x and y are float16, 0: bfloat16), TILES (column tiles of 8 tokens), MODE (0: linear and
// grouped linear; 1: gate and up of routed experts with SwiGLU; 2: down of routed experts, weighted and added up), WARPS,
// BLOCKS (__launch_bounds__), AHEAD (1: the next slice is fetched before this one's product).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

constexpr int ROWS = 16;
constexpr int SLICE = 256;  // columns that a warp takes at a time: two steps of 128, 32 a lane

struct Arguments {
  const u16* x;               // linear: [tokens, groups, k]; gate-up: [tokens, k]; down: [pairs, k]
  const u8* codes;            // [matrices, n, k/2]
  const u8* scale;            // [matrices, n, k/16]
  const float* global_scale;  // [matrices, n]
  const float* bias;          // [n] or null
  const int* experts;         // [tokens, top_k]
  const float* weights;       // [tokens, top_k]
  u16* y;                     // linear: [tokens, groups, n]; gate-up: [pairs, n/2]; down: [tokens, n]
  int tokens, n, k, matrices, top_k;
  float limit;
};

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  u32 d;
#if HALF
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  return d;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 stream(const u8* p) {  // read once: past the L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u16 narrow(float v) {
  u16 d;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
#endif
  return d;
}

// Codes of a word as four pairs (p, p + 4), times a power of two.
template <int P>
__device__ __forceinline__ u32 pair(u32 w) {
#if HALF
  constexpr int LEFT = 9 - 4 * P;
  constexpr u32 MASK = 0x0E000E00u;
#else
  constexpr int LEFT = 6 - 4 * P;
  constexpr u32 MASK = 0x01C001C0u;
#endif
  u32 magnitude = (LEFT >= 0 ? w << (LEFT & 31) : w >> (-LEFT & 31)) & MASK;
  return ((w << (12 - 4 * P)) & 0x80008000u) | magnitude;
}

// Two scales (two groups of one row) -> both halves of `low` and `high` hold one of them, times a power of two.
__device__ __forceinline__ void widen(u32 two, u32& low, u32& high) {
#if HALF
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)two));
  v = multiply(v, 0x58005800u);  // 2^7
#else
  u32 v = prmt(two, 0, 0x4140) << 4;
  v = multiply(multiply(v, 0x7F007F00u), 0x77807780u);  // 2^127, 2^112
#endif
  low = prmt(v, v, 0x1010);
  high = prmt(v, v, 0x3232);
}

extern __shared__ __align__(16) u8 shared[];

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
      f.scale[step][row] = inside ? *(const u16*)(scale[row] + at / 16) : 0;
    }
  }
}

__device__ __forceinline__ void product(float (&acc)[TILES][4], const Fetched& f, const u16* const (&x)[TILES], int k0, int k) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    u32 s[2][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) widen(f.scale[step][row], s[row][0], s[row][1]);
    int at = k0 + step * 128;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      u32 w0 = (&f.codes[step][0].x)[word], w1 = (&f.codes[step][1].x)[word];
      u32 s0 = s[0][word / 2], s1 = s[1][word / 2];
      u32 a[2][4] = {{multiply(pair<0>(w0), s0), multiply(pair<1>(w0), s0), multiply(pair<2>(w0), s0), multiply(pair<3>(w0), s0)},
                     {multiply(pair<0>(w1), s1), multiply(pair<1>(w1), s1), multiply(pair<2>(w1), s1), multiply(pair<3>(w1), s1)}};
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

__device__ __forceinline__ int inside(int expert, int experts) { return min(max(expert, 0), experts - 1); }

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) nvfp4_linear(const Arguments a) {
  float4* const partial = (float4*)shared;  // [WARPS][TILES][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slices = (a.k + SLICE - 1) / SLICE;
  const int rows[2] = {MODE == 1 ? (int)blockIdx.x * 8 + g : min((int)blockIdx.x * ROWS + g, a.n - 1),
                       MODE == 1 ? a.n / 2 + (int)blockIdx.x * 8 + g : min((int)blockIdx.x * ROWS + g + 8, a.n - 1)};
  const int first_token = MODE == 0 ? blockIdx.z * TILES * 8 : 0;
  const int parts = MODE == 2 ? a.top_k : 1;
  const int items = slices * parts, each = (items + WARPS - 1) / WARPS;
  const int from = min(warp * each, items), to = min(from + each, items);

  asm volatile("griddepcontrol.launch_dependents;");
  if (MODE != 0) asm volatile("griddepcontrol.wait;" ::: "memory");  // the experts' numbers are the last kernel's

  const u8* codes[2];
  const u8* scale[2];
  const u16* x[TILES];
  float total[TILES][4] = {}, acc[TILES][4] = {}, gain[2];

  auto enter = [&](int part) {  // points at the part's matrix and activations
    int matrix = MODE == 0 ? blockIdx.y : inside(a.experts[MODE == 1 ? blockIdx.y : blockIdx.y * a.top_k + part], a.matrices);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      long long r = (long long)matrix * a.n + rows[row];
      codes[row] = a.codes + r * (a.k / 2);
      scale[row] = a.scale + r * (a.k / 16);
      gain[row] = a.global_scale[r] * 128.f;
      if (MODE == 2) gain[row] *= a.weights[blockIdx.y * a.top_k + part];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      int token = first_token + tile * 8 + g;
      if (MODE == 0) x[tile] = token < a.tokens ? a.x + ((long long)token * a.matrices + blockIdx.y) * a.k : nullptr;
      if (MODE == 1) x[tile] = g == 0 ? a.x + (long long)(blockIdx.y / a.top_k) * a.k : nullptr;
      if (MODE == 2) x[tile] = g == 0 ? a.x + ((long long)blockIdx.y * a.top_k + part) * a.k : nullptr;
    }
  };
  auto leave = [&]() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[tile][i] += acc[tile][i] * gain[i / 2];
        acc[tile][i] = 0.f;
      }
  };

  Fetched now;
  int part = from / slices, k0 = (from - part * slices) * SLICE + t * 32;
  if (from < to) {
    enter(part);
    fetch(now, codes, scale, k0, a.k);
  }
  if (MODE == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int item = from; item < to; ++item) {
    bool more = item + 1 < to, crosses = MODE == 2 && item + 1 == (part + 1) * slices;
#if AHEAD
    Fetched next;
    if (more && !crosses) fetch(next, codes, scale, k0 + SLICE, a.k);
#endif
    product(acc, now, x, k0, a.k);
    k0 += SLICE;
    if (!more) break;
    if (crosses) {
      leave();
      enter(++part);
      k0 = t * 32;
    }
#if AHEAD
    if (crosses) fetch(next, codes, scale, k0, a.k);
    now = next;
#else
    fetch(now, codes, scale, k0, a.k);
#endif
  }
  if (from < to) leave();

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    partial[(warp * TILES + tile) * 32 + lane] = make_float4(total[tile][0], total[tile][1], total[tile][2], total[tile][3]);
  __syncthreads();
  // A lane's four sums: rows g and g + 8 of tokens 2 t and 2 t + 1.
  for (int at = threadIdx.x; at < TILES * 32; at += WARPS * 32) {
    float sum[4] = {};
    int tile = at / 32, l = at % 32;
    for (int w = 0; w < WARPS; ++w) {
      float4 v = partial[w * TILES * 32 + at];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
    int row = l / 4, column = l % 4 * 2;
    if (MODE == 1) {
      if (column) continue;
      float gate = fminf(sum[0], a.limit), up = fminf(fmaxf(sum[2], -a.limit), a.limit);
      a.y[(long long)blockIdx.y * (a.n / 2) + blockIdx.x * 8 + row] = narrow(gate / (1.f + __expf(-gate)) * up);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int r = blockIdx.x * ROWS + row + i / 2 * 8, token = first_token + tile * 8 + column + i % 2;
      if (r >= a.n) continue;
      if (MODE == 0 && token < a.tokens)
        a.y[((long long)token * a.matrices + blockIdx.y) * a.n + r] = narrow(sum[i] + (a.bias ? a.bias[r] : 0.f));
      if (MODE == 2 && column + i % 2 == 0) a.y[(long long)blockIdx.y * a.n + r] = narrow(sum[i]);
    }
  }
}

// codes [n, k/2], scale, global_scale -> y [n, k] in x's type, for products of many tokens. Eight codes a thread.
extern "C" __global__ void nvfp4_dequantize(const Arguments a) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");  // y may still be read by the kernel before
  const long long words = (long long)a.n * a.k / 8;
  for (long long at = blockIdx.x * 256ll + threadIdx.x; at < words; at += gridDim.x * 256ll) {
    u32 word = ((const u32*)a.codes)[at];
    float gain = a.global_scale[at / (a.k / 8)];
    u32 bits = (u32)a.scale[at / 2];  // E4M3 as the exponent's low bits and the mantissa of a float32
    gain *= __uint_as_float(bits << 20) * 0x1p120f;
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 code = word >> (8 * i + 4 * j);
        v[j] = __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f * gain;
      }
      out[i] = (u32)narrow(v[0]) | (u32)narrow(v[1]) << 16;
    }
    ((uint4*)a.y)[at] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
