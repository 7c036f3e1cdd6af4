// Runs every block of a kernel of sampling_portable.cu, given what a launch is given (test_sampling_kernel.py).

#include "sampling_portable.cu"

static Arguments arguments;
static bool draws;

static void thread() {
  if (draws) sample_draw(arguments);
  else sample_bounds(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number.
extern "C" void run(const Arguments* given, int draw, int blocks, int threads, int step) {
  arguments = *given, draws = draw;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = (long long)i * step % blocks;
    run_block(threads);
  }
}
