// Runs every block of a kernel of e8p_experts.cu, given what a launch is given (host.py).

#include "e8p_experts.cu"

static Arguments arguments;
static int function;

static void thread() {
  if (function == 0) e8p_experts(arguments);
  if (function == 1) e8p_experts_prepare(arguments);
  if (function == 2) e8p_experts_combine(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

extern "C" void run(const Arguments* given, int which, int x, int y, int threads, int cluster) {
  arguments = *given, function = which;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
  gridDim.x = x, gridDim.y = y, gridDim.z = 1, blockDim.x = threads;
  for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
    for (int first = 0; first < x; first += cluster) {
      mail.clear();
      for (rank_now = cluster - 1; rank_now >= 0; --rank_now) {
        blockIdx.x = first + rank_now;
        run_block(threads);
      }
    }
}
