// Runs every block of a kernel of e8p_batch.cu, given what a launch is given (host.py).

#include <atomic>
#include <memory>
#include <thread>

#define WARPS_THAT_MULTIPLY (GROUPS * 4)
#include "e8p_batch.cu"

thread_local u8 smem[MEMORY];
static const Arguments* arguments;
static bool rotates;

static void thread() {
  if (rotates) e8p_rotate(*arguments);
  else e8p_batch(*arguments);
  --block->left;
  for (;;) go(block->fibers[current], block->scheduler);
}

static void run_block(Cluster& cluster, int at, int rank, int threads, int bytes) {
  constexpr size_t STACK = 32 << 10;
  Block own;
  block = &own, own.cluster = &cluster, own.threads = own.left = threads, own.rank = rank;
  own.fibers.resize(threads), own.lanes.resize(threads), own.cluster_turn.resize(threads);
  blockIdx.x = at, idle = 0;
  memset(smem, 0xFF, MEMORY);
  cluster.memory[rank] = smem;
  std::unique_ptr<char[]> stacks(new char[threads * STACK]);
  for (int i = 0; i < threads; ++i) {
    ucontext_t& begin = own.fibers[i].begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = stacks.get() + i * STACK, begin.uc_stack.ss_size = STACK, begin.uc_link = nullptr;
    makecontext(&begin, thread, 0);
  }
  for (++cluster.begun; cluster.begun != (int)cluster.memory.size();) std::this_thread::yield();
  while (own.left) {
    for (current = 0; current < threads; ++current) go(own.scheduler, own.fibers[current]);
    if (cluster.memory.size() > 1) std::this_thread::yield();
  }
  for (int i = bytes; i < MEMORY; ++i)
    if (smem[i] != 0xFF) fail("more shared memory than the launch has");
}

// Clusters come one after the other, the last one first if `backwards`.
extern "C" void run(const Arguments* given, int rotate, int blocks, int threads, int bytes, int cluster,
                    int backwards) {
  arguments = given, rotates = rotate, gridDim.x = blocks;
  for (int i = 0; i < blocks; i += cluster) {
    const int first = backwards ? blocks - cluster - i : i;
    Cluster own;
    own.memory.resize(cluster);
    std::vector<std::thread> all;
    for (int rank = 0; rank < cluster; ++rank)
      all.emplace_back([&, rank] { run_block(own, first + rank, rank, threads, bytes); });
    for (std::thread& one : all) one.join();
  }
}
