// Runs every block of deepseek_hyper_ranks.cu of all ranks at once, given what their launches are given.

#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a fault
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "deepseek_hyper_ranks.cu"

static thread_local const Arguments* arguments;
static thread_local int left;

static void thread() {
  hyper_all_reduce(*arguments);
  --left;
  for (;;) yield();
}

extern "C" void run(const Arguments* ranks, int blocks) {
  constexpr size_t STACK = 32 << 10;
  const int clusters = blocks / CLUSTER;
  std::vector<Cluster> each(WORLD * clusters);
  std::barrier<> begun(WORLD * blocks), ended(WORLD * blocks);
  std::vector<std::thread> all;
  for (int at = 0; at < WORLD * blocks; ++at)
    all.emplace_back([&, at] {
      Block own;
      block = &own, own.cluster = &each[at / CLUSTER], own.threads = left = THREADS;
      own.fibers.resize(THREADS), own.lanes.resize(THREADS);
      own.met.resize(THREADS / 32 + 1), own.turn.resize(THREADS / 32 + 1);
      arguments = ranks + at / blocks, blockIdx.x = at % blocks;
      own.cluster->base[at % CLUSTER] = &base;
      std::unique_ptr<char[]> stacks(new char[THREADS * STACK]);
      for (int i = 0; i < THREADS; ++i) {
        ucontext_t& begin = own.fibers[i].begin;
        getcontext(&begin);
        begin.uc_stack.ss_sp = stacks.get() + i * STACK, begin.uc_stack.ss_size = STACK, begin.uc_link = nullptr;
        makecontext(&begin, thread, 0);
      }
      begun.arrive_and_wait();
      while (left) {
        for (current = 0; current < THREADS; ++current) go(own.scheduler, own.fibers[current]);
        std::this_thread::yield();
      }
      ended.arrive_and_wait();  // others may still write into what it shares
    });
  for (std::thread& one : all) one.join();
}
