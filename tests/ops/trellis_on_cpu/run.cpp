// Runs every block of a trellis kernel, given what a launch is given (host.py). KIND: 0 of trellis_portable.cu,
// 1 of trellis_dequantize.cu, 2 of trellis_batch.cu, 3 of trellis_experts.cu. `which`: the place of the kernel in the source's `functions`.

#if KIND == 1
#include "trellis_dequantize.cu"
#elif KIND == 2
#include "trellis_batch.cu"
#elif KIND == 3
#include "trellis_experts.cu"
#else
#include "trellis_portable.cu"
#endif

static Arguments arguments;
static int which;

static void thread() {
#if KIND == 1
  trellis_dequantize(arguments);
#elif KIND == 2
  if (which == 0) trellis_batch_turn(arguments);
  else if (which == 1) trellis_batch(arguments);
  else trellis_batch_end(arguments);
#elif KIND == 3
  if (which) trellis_experts_combine(arguments);
  else trellis_experts(arguments);
#else
  if (which) trellis_portable_turn(arguments);
  else trellis_portable(arguments);
#endif
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// `step`: blocks come in steps of so many, round and round; it divides nothing of their number. Reads of codes are checked.
extern "C" void run(const Arguments* given, int function, int across, int down, int threads, int bytes, int step) {
  arguments = *given, which = function;
#if KIND == 1 || KIND == 2
  readable = {{given->codes, (size_t)given->n * given->k * BITS / 8}};
#else
#if KIND == 3
  const size_t matrices = (size_t)given->matrices * HALVES;
#else
  const size_t matrices = 1;
#endif
  readable = {{given->codes, matrices * N * K * BITS / 8}};
  for (const float* rows : {given->out_scale, given->bias}) readable.push_back({(const u8*)rows, matrices * N * 4});
#endif
#if KIND == 2
  readable.push_back({given->operands, (size_t)(given->k + UNIT - 1) / UNIT * UNIT * TOKENS * 2});
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
