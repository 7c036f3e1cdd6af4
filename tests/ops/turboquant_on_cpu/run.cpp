// Runs every block of a kernel of turboquant_attention.cu, or with WRITE of turboquant_write.cu, given what a launch is given
// (test_turboquant_kernel.py).

#ifdef WRITE
#define SHARED static
#include "turboquant_write.cu"
#else
#define SHARED
#include "turboquant_attention.cu"
#endif

static Arguments arguments;
static int which;

static void thread() {
#ifdef WRITE
  turboquant_write(arguments);
#else
  if (which == 0) attend(arguments);
  else if (which == 1) merge_1(arguments);
  else merge_4(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number.
extern "C" void run(const Arguments* given, int function, int x, int y, int threads, int bytes, int step) {
  arguments = *given, which = function;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
#ifndef WRITE
  static u8 rotation[2 * DIM * DIM * 4];
  const size_t size = DIM * DIM * (DTYPE == 2 ? 4 : 2);
  if (given->rotation) {
    memcpy(rotation, given->rotation, size);
    arguments.rotation = rotation, nobodys = rotation + size, nobodys_end = rotation + sizeof rotation;
  }
#endif
  gridDim.x = x, gridDim.y = y, gridDim.z = 1, blockDim.x = threads;
  for (int i = 0; i < x * y; ++i) {
    const int at = (long long)i * step % (x * y);
    blockIdx.x = at % x, blockIdx.y = at / x;
    run_block(threads);
    for (int at = bytes; at < (int)sizeof shared; ++at)
      if (shared[at] != blank) fail("more shared memory than the launch has");
  }
}
