// What ops/cuda/ptx.cuh gives expert_cache.cu, for a CPU (cpu.cuh: nvfp4_on_cpu/nvfp4_common.cuh). Blocks run one after the
// other, so the last of them writes the state; `run` is told in which order.
#pragma once

#define HALF 0
#include "cpu.cuh"
#undef __launch_bounds__
#define __launch_bounds__(...)

static int __syncthreads_count(int own) {
  fibers[current].fragments[0] = own != 0;
  meet(BLOCK);
  int count = 0;
  for (int i = 0; i < fibers_now; ++i) count += fibers[i].fragments[0];
  meet(BLOCK);
  return count;
}
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static void __threadfence() {}
static int atomicAdd(int* to, int v) { return (*to += v) - v; }
