// Runs every block of trellis_encode.cu, given what a launch is given (test_trellis_encode.py).

#include "trellis_encode.cu"

static Arguments arguments;

static void thread() {
  trellis_encode(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

extern "C" void run(const Arguments* given, int blocks, int threads, int bytes) {
  arguments = *given;
  gridDim.x = blocks, gridDim.y = gridDim.z = 1, blockDim.x = threads;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = i;
    run_block(threads);
    for (int at = bytes; at < (int)sizeof shared; ++at)
      if (shared[at] != blank) fail("more shared memory than the launch has");
  }
}
