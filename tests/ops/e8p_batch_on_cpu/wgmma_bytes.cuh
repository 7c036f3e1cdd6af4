// A warp's 16 rows of a product of 64. b: as the descriptor tells it, swizzled by 128 bytes, eight columns each 1024.
template <int REGISTERS> static void wgmma(int (&c)[REGISTERS], const u32 (&a)[4], u64 b) {
  if (b >> 62 != 1 || (b >> 32 & 0x3FFF) != 64) fail("another layout than the one that is known here");
  u32 all[4][32];
  for (int i = 0; i < 4; ++i) of_lanes(a[i], [&](u32* of) { return memcpy(all[i], of, 128), 0u; });
  const int g = current % 32 / 4, t = current % 4;
  const u32 start = (u32)(b & 0x3FFF) << 4;  // 18 bits of the address
  for (int j = 0; j < REGISTERS; ++j) {
    const int upper = j % 4 / 2, column = j / 4 * 8 + 2 * t + j % 2;
    u32 sum = c[j];
    for (int half = 0; half < 2; ++half) {
      const u32 at = start + column * 128 + half * 16;
      const u8* left = (const u8*)&all[upper + half * 2][g * 4];
      const signed char* right = (const signed char*)shared_at(at ^ (at >> 7 & 7) << 4, 16);
      for (int k = 0; k < 16; ++k) sum += left[k] * right[k];
    }
    c[j] = sum;
  }
}
