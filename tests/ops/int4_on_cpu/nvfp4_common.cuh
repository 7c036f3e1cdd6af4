// What the INT4 kernels need besides of what the NVFP4 kernels have on a CPU (cpu.cuh: nvfp4_on_cpu/nvfp4_common.cuh).

#include "cpu.cuh"

static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

static void prefetch(const void* p) { check_read(p, 1); }

static float half_to_float(u16 v) {
  const int e = v >> 10 & 31, m = v & 1023;
  const float f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return v >> 15 ? -f : f;
}
static u32 subtract_f16(u32 a, u32 b) {
  return narrow(wide(a & 0xFFFF) - wide(b & 0xFFFF)) | (u32)narrow(wide(a >> 16) - wide(b >> 16)) << 16;
}
static u32 subtract_bf16(u32 a, u32 b) { return subtract_f16(a, b); }  // narrow and wide are of the type in use

static void mma_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
  const u32 own[6] = {a0, a1, a2, a3, b.x, b.y};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  auto byte = [&](int lane, int reg, int k) { return fibers[warp + lane].fragments[reg] >> 8 * (k % 4) & 255; };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int lane = k % 16 / 4, upper = k >= 16;
      c[i] += (int)byte(row % 8 * 4 + lane, row / 8 + 2 * upper, k) * (signed char)byte(column * 4 + lane, 4 + upper, k);
    }
  }
  meet(WARP);
}
