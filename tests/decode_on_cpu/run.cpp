// Runs every block of decode_portable.cu, given what a launch is given (test_decode_kernel.py).

#include "decode_portable.cu"

static Arguments arguments;

static void thread() {
  decode_portable(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number.
extern "C" void run(const Arguments* given, int blocks, int threads, int bytes, int step) {
  arguments = *given;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = (long long)i * step % blocks;
    run_block(threads);
    for (int at = bytes; at < (int)sizeof shared; ++at)
      if (shared[at] != blank) fail("more shared memory than the launch has");
  }
}
