// Runs every block of nvfp4_activations.cu: `run IN OUT`. IN: rows, k, bytes of x, bytes of tiles, then unit and x; without
// TILES_ONLY, codes come before tiles in OUT.

#include "nvfp4_activations.cu"

static Arguments arguments;

static void thread() {
#ifdef TILES_ONLY
  nvfp4_tiles(arguments);
#else
  nvfp4_activations(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int h[4];
  float unit;
  if (fread(h, 4, 4, file) != 4 || fread(&unit, 4, 1, file) != 1) return 1;
  u8* const x = (u8*)aligned_alloc(64, (h[2] + 127) / 64 * 64);
  if (fread(x, 1, h[2], file) != (size_t)h[2]) return 1;
  std::vector<u8> codes((size_t)h[0] * h[1] / 2, 0xAA), tiles(h[3], 0xAA);
  arguments = {x, &unit, codes.data(), tiles.data(), h[0], h[1]};
  gridDim.x = (h[3] + 255) / 256, blockDim.x = 256;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(256);
  FILE* out = fopen(names[2], "wb");
#ifndef TILES_ONLY
  fwrite(codes.data(), 1, codes.size(), out);
#endif
  fwrite(tiles.data(), 1, tiles.size(), out);
  fclose(out);
}
