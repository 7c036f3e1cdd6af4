// A lane's codes of a row tile: 16 rows by 256 columns.
#pragma once

struct Codes {
  uint4 first[2];  // rows g and g + 8
  uint4 second[BITS == 4 ? 2 : 1];
  uint2 small[BITS == 3 ? 2 : 1];
};

constexpr int RESIDUAL = BITS == 2 ? 0 : BITS == 3 ? 512 : 1024, SLOT = 1024 + RESIDUAL;  // bytes of a row tile's codes

// A lane's codes of the u-th of GROUP row tiles, whose residual codes begin `residual` bytes behind; `at` is 16 bytes behind
// their start for each lane below.
__device__ __forceinline__ Codes codes_at(const u8* at, int residual, int u, int lane) {
  const u8* const rest = at + residual;
  Codes c;
  at += u * 1024;
  c.first[0] = *(const uint4*)at, c.first[1] = *(const uint4*)(at + 512);
  if (BITS == 4) {
    c.second[0] = *(const uint4*)(rest + u * 1024), c.second[BITS == 4] = *(const uint4*)(rest + u * 1024 + 512);
  }
  if (BITS == 3) {
    c.small[0] = *(const uint2*)(rest + u * 512 - lane * 8);
    c.small[BITS == 3] = *(const uint2*)(rest + u * 512 + 256 - lane * 8);
  }
  return c;
}
