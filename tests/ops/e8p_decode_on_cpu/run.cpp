// Runs every block of e8p_decode.cu, given what a launch is given (host.py).

#include "e8p_decode.cu"

static Arguments arguments;

static void thread() {
  e8p_decode(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

// Reads of codes and tables are checked; no byte from `bytes` on may be written.
extern "C" void run(const Arguments* given, int blocks, int threads, int bytes, int cluster) {
  arguments = *given;
  readable = {{given->codes, (size_t)N * K / 4}, {given->residual, (size_t)N * K / (BITS == 3 ? 8 : 4)}};
  readable.push_back({given->tables, (size_t)TABLE_BYTES});
  gridDim.x = blocks, gridDim.y = gridDim.z = 1, blockDim.x = threads;
  for (int first = 0; first < blocks; first += cluster) {
    sent.clear();
    for (int round = cluster > 1 ? 0 : 1; round < 2; ++round)
      for (rank_now = 0; rank_now < cluster; ++rank_now) {
        first_round = round == 0;
        blockIdx.x = first + rank_now;
        missing.clear(), meetings.clear();
        run_block(threads);
        for (int at = bytes; at < (int)sizeof every_byte; ++at)
          if (every_byte[at] != blank) fail("more shared memory than the launch has");
      }
  }
}
