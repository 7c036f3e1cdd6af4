// Runs every block of a trellis kernel, given what a launch is given (host.py). DENSE: of trellis_dequantize.cu.

#if DENSE
#include "trellis_dequantize.cu"
#else
#include "trellis_portable.cu"
#endif

static Arguments arguments;
static bool turns;

static void thread() {
#if DENSE
  trellis_dequantize(arguments);
#else
  if (turns) trellis_portable_turn(arguments);
  else trellis_portable(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number. Reads of codes are checked.
extern "C" void run(const Arguments* given, int turn, int across, int down, int threads, int bytes, int step) {
  arguments = *given, turns = turn;
#if DENSE
  readable = {{given->codes, (size_t)given->n * given->k * BITS / 8}};
#else
  readable = {{given->codes, (size_t)N * K * BITS / 8}};
  for (const float* rows : {given->out_scale, given->bias}) readable.push_back({(const u8*)rows, (size_t)N * 4});
#endif
  gridDim.x = across, gridDim.y = down, gridDim.z = 1, blockDim.x = threads;
  for (int i = 0; i < across * down; ++i) {
    const int at = (long long)i * step % (across * down);
    blockIdx.x = at % across, blockIdx.y = at / across;
    run_block(threads);
    for (int at = bytes; at < (int)sizeof shared; ++at)
      if (shared[at] != blank) fail("more shared memory than the launch has");
  }
}
