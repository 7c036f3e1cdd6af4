// Runs every block of route.cu, given what a launch is given: the last one beside the others, which come two at a time.

#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a fault
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "route.cu"

static const Arguments* arguments;
static thread_local int left;

static void thread() {
  route(*arguments);
  --left;
  for (;;) yield();
}

static void run_block(int which) {
  constexpr size_t STACK = 32 << 10;
  Block own;
  block = &own, own.threads = left = THREADS, blockIdx.x = which;
  own.fibers.resize(THREADS), own.lanes.resize(THREADS);
  own.met.resize(THREADS / 32 + 1), own.turn.resize(THREADS / 32 + 1);
  std::unique_ptr<char[]> stacks(new char[THREADS * STACK]);
  for (int i = 0; i < THREADS; ++i) {
    ucontext_t& begin = own.fibers[i].begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = stacks.get() + i * STACK, begin.uc_stack.ss_size = STACK, begin.uc_link = nullptr;
    makecontext(&begin, thread, 0);
  }
  while (left) {
    for (current = 0; current < THREADS; ++current) go(own.scheduler, own.fibers[current]);
    std::this_thread::yield();
  }
}

extern "C" void run(const Arguments* given, int blocks) {
  arguments = given, gridDim.x = blocks;
  std::atomic<int> next{0};
  std::thread last(run_block, blocks - 1);
  auto work = [&] {
    for (int at; (at = next++) < blocks - 1;) run_block(at);
  };
  std::thread one(work), other(work);
  one.join(), other.join(), last.join();
}
