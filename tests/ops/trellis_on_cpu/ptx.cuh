// What ops/cuda/ptx.cuh gives the trellis kernels, for a CPU (portable.cuh: e8p_portable_on_cpu/ptx.cuh, with what that includes).
//
// Activations may be bfloat16 while products are of float16: what converts float16 is named apart.

#define floats_to_halves of_activations_to_halves
#define halves_to_floats of_activations_halves
#define subtract_f16 of_activations_subtract
#define fma_f16 of_activations_fma
#include "portable.cuh"
#undef floats_to_halves
#undef halves_to_floats
#undef subtract_f16
#undef fma_f16

static u32 as_half(float f) {
  const _Float16 h = (_Float16)f;
  u16 v;
  memcpy(&v, &h, 2);
  return v;
}
static float of_half(u32 v) { return half_to_float((u16)v); }
static u32 floats_to_halves(float lower, float upper) { return as_half(lower) | as_half(upper) << 16; }
static float2 halves_to_floats(u32 v) { return {of_half(v), of_half(v >> 16)}; }
static u32 subtract_f16(u32 a, u32 b) {
  return as_half(of_half(a) - of_half(b)) | as_half(of_half(a >> 16) - of_half(b >> 16)) << 16;
}
static u32 fma_f16(u32 a, u32 b, u32 c) {  // of 11 bits each: exact in double
  const auto one = [](u32 a, u32 b, u32 c) {
    const _Float16 h = (_Float16)((double)of_half(a) * of_half(b) + of_half(c));
    u16 v;
    memcpy(&v, &h, 2);
    return (u32)v;
  };
  return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
static u32 __dp4a(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
  return c;
}
static u32 __funnelshift_r(u32 lo, u32 hi, u32 by) { return ((u64)hi << 32 | lo) >> by % 32; }
static u32 stream4(const u8* p) {
  if ((uintptr_t)p % 4) fail("a load that is not aligned");
  check_read(p, 4);
  return *(const u32*)p;
}
static void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  auto element = [&](int lane, int reg, int k) { return of_half(fibers[warp + lane].fragments[reg] >> k % 2 * 16); };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, upper = k >= 8;
      sum += (double)element(row % 8 * 4 + lane, row / 8 + 2 * upper, k) * element(column * 4 + lane, 4 + upper, k);
    }
    c[i] = sum;
  }
  meet(WARP);
}
