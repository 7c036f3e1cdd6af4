// Runs every block of a kernel: `run IN OUT`. IN: 22 words of 32 bits, then the tensors; OUT: y. A tensor ends where a
// page begins that nobody may read. HOST: a function instead, given what a launch is given (host.py).

#include <sys/mman.h>

#ifdef OUT
#include "fp8_dequantize.cu"
#elif BYTE_SCALES
#include "mxfp8.cu"
#else
#include "fp8.cu"
#endif

static Arguments arguments;

static void thread() {
#ifdef OUT
  fp8_dequantize(arguments);
#elif BYTE_SCALES
  mxfp8_linear(arguments);
#else
  fp8_linear(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

static void run_blocks(int x, int y, int z, int threads) {
  gridDim.x = x, gridDim.y = y, gridDim.z = z, blockDim.x = threads;
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block(threads);
}

#ifdef HOST
extern "C" void run(const Arguments* given, int x, int y, int z, int threads) {
  arguments = *given;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
  run_blocks(x, y, z, threads);
}
#else
static u8* ending_a_page(size_t bytes) {
  const size_t page = 4096, all = (bytes + page - 1) / page * page;
  u8* p = (u8*)mmap(nullptr, all + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(p + all, page, PROT_NONE);
  return p + all - bytes;
}

int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int h[22];
  if (fread(h, 4, 22, file) != 22) return 1;
  auto tensor = [&](size_t bytes) -> u8* {
    if (!bytes) return nullptr;
    u8* p = ending_a_page(bytes);
    if (fread(p, 1, bytes, file) != bytes) fail("the input is too short");
    readable.push_back({p, bytes});
    return p;
  };
  Arguments& a = arguments;
  a.n = h[1], a.k = h[2], a.matrices = h[3];
#if defined OUT || !BYTE_SCALES
  a.row_shift = h[5], a.column_shift = h[6], a.scale_pitch = h[7];
#endif
  u8* const x = tensor((size_t)h[15] * 2);
  a.codes = tensor((size_t)h[3] * h[1] * h[2]);
  a.scale = (decltype(a.scale))tensor((size_t)h[16] * sizeof *a.scale);
  const size_t bytes = h[17];
  a.y = ending_a_page(bytes);
  memset(a.y, 0xFF, bytes);
#ifndef OUT
  a.x = (u16*)x, a.tokens = h[0], a.top_k = h[4], a.wide = h[8], a.across = h[9], a.hold = h[10];
  a.bias = (float*)tensor((size_t)h[18] * 4);
  a.experts = (int*)tensor((size_t)h[0] * h[4] * 4);
  a.weights = (float*)tensor((size_t)h[0] * h[4] * 4);
  memcpy(&a.limit, h + 19, 12);
#endif
  run_blocks(h[11], h[12], h[13], h[14]);
  FILE* out = fopen(names[2], "wb");
  fwrite(a.y, 1, bytes, out);
  fclose(out);
}
#endif
