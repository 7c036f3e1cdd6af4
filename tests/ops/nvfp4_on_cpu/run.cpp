// Runs every block of a kernel: `run IN OUT`. IN: eighteen 32-bit words, then the tensors; OUT: y.

#ifdef ONE
#include "nvfp4_one.cu"
#elif defined MODE
#include "nvfp4.cu"
#else
#include "nvfp4_short.cu"
#endif

static Arguments arguments;

static void thread() {
#ifdef ONE
  nvfp4_one(arguments);
#elif defined MODE
  nvfp4_linear(arguments);
#else
  nvfp4_short(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int h[18];
  if (fread(h, 4, 18, file) != 18) return 1;
  auto tensor = [&](size_t bytes) {
    u8* p = (u8*)aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (fread(p, 1, bytes, file) != bytes) fail("the input is too short");
    readable.push_back({p, bytes});
    return p;
  };
  const int tokens = h[0], n = h[1], k = h[2], matrices = h[3], top_k = h[4], numbers = h[12];
  Arguments& a = arguments;
  a.x = (u16*)tensor((size_t)h[11] * 2);
  const u8* const codes = tensor((size_t)matrices * n * k / 2);
  const u8* const scale = tensor((size_t)matrices * n * k / GROUP);
#ifdef ONE
  const int box_rows = MODE == 1 ? 8 : 16;
  a.box = EDGE ? 1 : k / 256 % 8 == 0 ? 8 : k / 256 % 4 == 0 ? 4 : k / 256 % 2 == 0 ? 2 : 1;
  a.codes = {codes, matrices * n, k / 2, box_rows, 128, a.box};
  a.scale = {scale, matrices * n, k / 16, box_rows, 16, a.box};
  a.scales = scale;
#else
  a.codes = codes, a.scale = scale, a.tokens = tokens;
#endif
  if (GROUP == 16) a.global_scale = (float*)tensor((size_t)matrices * n * 4);
  if (h[13]) a.bias = (float*)tensor((size_t)(top_k ? matrices : 1) * n * 4);
#ifdef MODE
  if (top_k) {
    a.experts = (int*)tensor((size_t)tokens * top_k * 4);
    a.weights = (float*)tensor((size_t)tokens * top_k * 4);
  }
  a.top_k = top_k, a.hold = h[6];
#ifdef ONE
  a.tokens = tokens, a.round = h[5], a.span = h[17];
#else
  a.across = h[5];
#endif
  memcpy(&a.limit, &h[14], 12);
#endif
  std::vector<u16> y(numbers * (FLOAT ? 2 : 1), 0x7FFF);
  a.y = y.data();
  a.n = n, a.k = k, a.matrices = matrices;
  gridDim.x = h[7], gridDim.y = h[8], gridDim.z = h[9], blockDim.x = h[10];
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(blockDim.x);
  FILE* out = fopen(names[2], "wb");
  fwrite(y.data(), 2, y.size(), out);
  fclose(out);
}
