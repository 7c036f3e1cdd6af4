// Runs every block of expert_cache.cu, given what a launch is given (test_expert_cache_kernel.py).

#include "expert_cache.cu"

static Arguments arguments;

static void thread() {
  expert_cache(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number.
extern "C" void run(const Arguments* given, int blocks, int threads, int step) {
  arguments = *given;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
  for (int f = 0; f < FIELDS; ++f)
    if (!given->bytes[f] != !given->host[f]) fail("a field without bytes, or bytes without a field");
  gridDim.x = blocks;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = (long long)i * step % blocks;
    run_block(threads);
  }
}
