// Runs every block of gated_delta.cu, given what a launch is given.

#include <atomic>
#include <memory>

#include "gated_delta.cu"

static const Arguments* arguments;
static int left;
thread_local float4 dynamic[128 * 96];

static void thread() {
  gated_delta(*arguments);
  --left;
  for (;;) yield();
}

// From the last block to the first where `backwards`: what blocks read and write must not depend on their order.
extern "C" void run(const Arguments* given, int heads, int rows, int threads, int backwards) {
  constexpr size_t STACK = 32 << 10;
  arguments = given;
  std::unique_ptr<char[]> stacks(new char[threads * STACK]);
  for (int at = 0; at < heads * rows; ++at) {
    const int which = backwards ? heads * rows - 1 - at : at;
    Block own;
    block = &own, own.threads = left = threads;
    own.fibers.resize(threads), own.lanes.resize(threads);
    own.met.resize(threads / 32 + 1), own.turn.resize(threads / 32 + 1);
    blockIdx = {which % heads, which / heads};
    for (int i = 0; i < threads; ++i) {
      ucontext_t& begin = own.fibers[i].begin;
      getcontext(&begin);
      begin.uc_stack.ss_sp = stacks.get() + i * STACK, begin.uc_stack.ss_size = STACK, begin.uc_link = nullptr;
      makecontext(&begin, thread, 0);
    }
    while (left)
      for (current = 0; current < threads; ++current) go(own.scheduler, own.fibers[current]);
  }
}
