// Runs every block of a kernel of e8p_portable.cu, given what a launch is given (host.py).

#include "e8p_portable.cu"

static Arguments arguments;
static bool turns;

static void thread() {
  if (turns) e8p_portable_turn(arguments);
  else e8p_portable(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number. Reads of codes, scales and
// bias are checked.
extern "C" void run(const Arguments* given, int turn, int blocks, int threads, int bytes, int step) {
  arguments = *given, turns = turn;
  readable = {{given->codes, (size_t)N * K / 4}, {given->residual, (size_t)N * K / (BITS == 3 ? 8 : 4)}};
  for (const float* rows : {given->out_scale, given->bias}) readable.push_back({(const u8*)rows, (size_t)N * 4});
  gridDim.x = blocks, gridDim.y = gridDim.z = 1, blockDim.x = threads;
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = (long long)i * step % blocks;
    run_block(threads);
    for (int at = bytes; at < (int)sizeof shared; ++at)
      if (shared[at] != blank) fail("more shared memory than the launch has");
  }
}
