// Routed experts of a pass of tokens, found by every block for itself: the distinct experts that the tokens chose, each
// with its tokens beside it, so that an expert's weights are read once however many chose it.
//
// Slots are the distinct experts in order of appearance. Of up to eight tokens each has a column of its own. TOGETHER, of
// up to 16: those that chose an expert are moved into eight columns, and one that more chose gets a second slot. So does
// one that a token chose twice.
//
// Set before: COLUMNS (of a product), TOGETHER, WEIGHED (whether weights are read).
#pragma once

constexpr int PAIRS = 255;  // of a token and an expert, in a pass
constexpr u8 NOBODY = 255;
struct Routes {
  int slots, key[PAIRS];
  int expert[PAIRS];         // of a slot
  float weight[PAIRS];       // of a pair
  u16 leader[PAIRS];
  u8 chosen[PAIRS][COLUMNS];  // by slot and column: the pair
  u8 column[PAIRS], token[PAIRS];
};
__shared__ Routes routes;

__device__ __forceinline__ void find_routes(const int* experts, const float* weights, int count, int top_k, int matrices) {
  const int pairs = count * top_k;
  for (int i = threadIdx.x; i < pairs * COLUMNS; i += blockDim.x) {
    const int p = i / COLUMNS, column = i % COLUMNS;
    routes.chosen[p][column] = count == 1 && column == 0 ? p : NOBODY;
  }
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    routes.expert[p] = min(max(experts[p], 0), matrices - 1);
    routes.weight[p] = WEIGHED ? weights[p] : 0.f;
    routes.token[p] = p / top_k;
  }
  if (threadIdx.x == 0) routes.slots = pairs;
  __syncthreads();
  if (count == 1) return;  // a token shares with nobody
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    int before = 0;
    for (int q = p - p % top_k; q < p; ++q) before += routes.expert[q] == routes.expert[p];
    routes.key[p] = routes.expert[p] * PAIRS + before;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    constexpr int SPAN = TOGETHER ? COLUMNS : PAIRS;
    int leader = p, rank = 0;
#pragma unroll 8
    for (int q = 0; q < p; ++q)
      if (routes.key[q] == routes.key[p] && rank++ % SPAN == 0) leader = q;
    routes.leader[p] = rank % SPAN ? leader : p;
    routes.column[p] = TOGETHER ? rank % SPAN : routes.token[p];
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    const int leader = routes.leader[p];
    int slot = 0;
#pragma unroll 8
    for (int q = 0; q < leader; ++q) slot += routes.leader[q] == q;
    routes.chosen[slot][routes.column[p]] = p;
    if (leader == p) routes.expert[slot] = routes.key[p] / PAIRS;
  }
  if (threadIdx.x == blockDim.x - 1) {
    int slots = 0;
#pragma unroll 8
    for (int q = 0; q < pairs; ++q) slots += routes.leader[q] == q;
    routes.slots = slots;
  }
  __syncthreads();
}

// The expert of a pair, after `find_routes`; `count`: tokens of the pass.
__device__ __forceinline__ int expert_of(int pair, int count) {
  return count == 1 ? routes.expert[pair] : routes.key[pair] / PAIRS;
}
