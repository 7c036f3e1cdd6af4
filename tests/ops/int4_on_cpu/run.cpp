// Runs every block of an INT4 kernel: `run IN OUT`. IN: sixteen 32-bit words, then the tensors, each of which ends where
// memory does; OUT: y.

#include <sys/mman.h>

#ifdef ONE
#include "int4_one.cu"
#else
#include "int4_batch.cu"
#endif

static Arguments arguments;

static void thread() {
#ifdef ONE
  int4_one(arguments);
#else
  int4_batch(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int h[16];
  if (fread(h, 4, 16, file) != 16) return 1;
  auto tensor = [&](size_t bytes) {  // behind it lies a page that nobody may read
    const size_t pages = (bytes + 4095) / 4096 * 4096;
    u8* const start = (u8*)mmap(nullptr, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(start + pages, 4096, PROT_NONE);
    u8* const p = start + (pages - bytes) / 16 * 16;
    if (fread(p, 1, bytes, file) != bytes) fail("the input is too short");
    readable.push_back({p, bytes});
    return p;
  };
  const int tokens = h[0], n = h[1], k = h[2], groups = h[3];
  Arguments& a = arguments;
  a.tokens = tokens, a.n = n, a.k = k, a.groups = groups, a.shift = h[4];
  a.x = (u16*)tensor((size_t)tokens * k * 2);
  const u8* const codes = tensor((size_t)n * k / 2);
  a.scale = (u16*)tensor((size_t)n * groups * 2);
  a.zero = tensor((size_t)n * groups);
#ifdef ONE
  a.order = h[10] ? (int*)tensor((size_t)k * 4) : nullptr;
  a.hold = h[5], a.round = h[6];
  a.box = k / 256 % 8 == 0 ? 8 : k / 256 % 4 == 0 ? 4 : k / 256 % 2 == 0 ? 2 : 1;
  a.codes = {codes, n, k / 2, 16, 128, a.box};
#else
  a.codes = codes, a.across = h[5], a.hold = h[6];
#endif
  a.bias = h[11] ? (float*)tensor((size_t)n * 4) : nullptr;
  std::vector<u8> y((size_t)tokens * n * (FLOAT32 ? 4 : 2), 0xFF);
  a.y = (u16*)y.data();
  gridDim.x = h[7], gridDim.y = 1, gridDim.z = h[8], blockDim.x = h[9];
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(blockDim.x);
  FILE* out = fopen(names[2], "wb");
  fwrite(y.data(), 1, y.size(), out);
  fclose(out);
}
