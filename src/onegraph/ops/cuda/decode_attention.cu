// The attention of a decode step: RMSNorm and RoPE of q and k, the cache write, attention over the pages, one launch.
//
// A cluster of blocks owns one row and kv head, so the heads of a group share every load. Warps take batches of keys in
// turn; a group of LANES lanes holds one key, 8 dimensions (16 bytes) a lane, and the q of all heads of the group stands
// in registers. Each warp has a ring of batches under way in shared memory (cp.async; a lane reads what it fetched, so
// nothing synchronises). The ring is filled before the wait for the linear that makes q, k and v: keys of earlier tokens,
// positions and the block table change between steps only. Scores are summed over the lanes by halving: at each step a
// lane sends half of its values and keeps the other, until value `index` (key of the batch, head) is in one lane.
// Partial results meet in shared memory, then across the cluster, in a fixed order: the same bits whatever the timing.
//
// Set when compiled: HALF (1: float16, 0: bfloat16), DIM (64 or 128), GROUP (1 to 8 heads a kv head), PAGE (tokens),
// NORM, ROPE.

using u16 = unsigned short;
using u32 = unsigned int;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LANES = DIM / 8;                     // that hold a key
constexpr int SIDE = 32 / LANES;                   // keys side by side in a warp
constexpr int LOADS = 4;                           // keys one after the other in a batch
constexpr int BATCH = SIDE * LOADS;
constexpr int HEADS = GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP;  // GROUP, up to a power of two
constexpr int VALUES = LOADS * HEADS;              // scores of a lane group: index = load * HEADS + head
constexpr int KEPT = VALUES > LANES ? VALUES / LANES : 1;     // scores that a lane holds in the end
constexpr int TWINS = VALUES < LANES ? LANES / VALUES : 1;    // lanes that then hold the same
constexpr int FIRST = HEADS * TWINS / KEPT;        // lanes apart by this and more hold the same heads
constexpr int STAGES = 3;                          // batches that a warp has under way
constexpr int MAX_CLUSTER = 16;
constexpr float NONE = -1e30f;                     // below every score; finite, so that a difference is never NaN

struct Arguments {
  const u16* qkv;           // [rows, (GROUP + 2) kv_heads, DIM]
  const u16* q_norm;        // [DIM] if NORM
  const u16* k_norm;
  const float* cos;         // [max_position + 1, DIM / 2] if ROPE
  const float* sin;
  const int* positions;     // [rows]
  const int* counts;        // [rows]
  const int* table;         // [rows, reach / PAGE], rows table_stride apart
  u16* keys;                // [pages, PAGE, kv_heads, DIM]
  u16* values;
  u16* out;                 // [rows, kv_heads, GROUP, DIM]
  int kv_heads, pages, table_stride, reach, max_position, window;
  float eps, scale;
};

struct Shared {
  float q[GROUP][DIM];      // times scale and log2(e)
  float key[DIM], value[DIM];                       // of the step's own token
  float best[WARPS + 1][GROUP], sum[WARPS + 1][GROUP];  // the last: the own token's
  float block_best[GROUP], block_sum[GROUP], block_part[GROUP][DIM];
  union {
    uint4 ring[STAGES][2][LOADS][32];               // keys, values
    float part[GROUP][DIM];                         // the warp's result, when its ring is done with
  } warps[WARPS];
};

__device__ __forceinline__ float widen(u16 x) {
  if (HALF) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  return __uint_as_float((u32)x << 16);
}

__device__ __forceinline__ float2 widen2(u32 x) {
  if (HALF) return make_float2(widen((u16)x), widen((u16)(x >> 16)));
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

__device__ __forceinline__ u16 narrow(float x) {
  u16 y;
  if (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void fetch(uint4* to, const u16* from, bool there) {  // zeros where not there
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ float peer(const float* p, u32 rank) {  // *p of another block of the cluster
  u32 at = (u32)__cvta_generic_to_shared(p);
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, GROUP > 4 ? 1 : 2) decode_attention(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int inner = lane % LANES, side = lane / LANES;
  u32 rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  const int group = blockIdx.x / size, row = group / p.kv_heads, kv_head = group % p.kv_heads;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int position = p.positions[row];
  const int last = min(max(position, 0), p.reach - 1);             // where the own token stands
  const int first = p.window > 0 ? max(last - p.window + 1, 0) : 0;  // keys [first, last) come from the cache
  const int* table = p.table + (size_t)row * p.table_stride;
  auto place = [&](int key) {
    const int page = min(max(table[key / PAGE], 0), p.pages - 1);  // a wrong table must not read past the cache
    return (((size_t)page * PAGE + key % PAGE) * p.kv_heads + kv_head) * DIM;
  };
  auto locate = [&](int start, size_t* at) {                       // the loads of the table under way together
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int key = start + i * SIDE + side;
      at[i] = key < last ? place(key) + inner * 8 : ~(size_t)0;
    }
  };
  auto issue = [&](int slot, const size_t* at) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const bool there = ~at[i];
      fetch(&s.warps[warp].ring[slot][0][i][lane], p.keys + (there ? at[i] : 0), there);
      fetch(&s.warps[warp].ring[slot][1][i][lane], p.values + (there ? at[i] : 0), there);
    }
  };
  const int stride = size * WARPS * BATCH;
  int start = first + (warp * size + rank) * BATCH, slot = 0;
  {
    size_t at[STAGES][LOADS];
#pragma unroll
    for (int i = 0; i < STAGES; i++) locate(start + i * stride, at[i]);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      if (start + i * stride < last) issue(i, at[i]);
      asm volatile("cp.async.commit_group;" ::: "memory");         // also an empty one, so that groups count batches
    }
  }
  constexpr int PAIRS = DIM / 64;                                  // (d, d + DIM / 2) of a head that a lane rotates
  float cosine[PAIRS], sine[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const size_t turn = (size_t)min(max(position, 0), p.max_position) * (DIM / 2) + lane + 32 * i;
    cosine[i] = ROPE ? p.cos[turn] : 1.f, sine[i] = ROPE ? p.sin[turn] : 0.f;
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  const bool real = p.counts[row] > 0 && position == last;
  const u16* qkv = p.qkv + (size_t)row * (GROUP + 2) * p.kv_heads * DIM;
  for (int h = warp; h <= GROUP; h += WARPS) {                     // heads of the group, then the own key
    const u16* x = qkv + (h < GROUP ? kv_head * GROUP + h : p.kv_heads * GROUP + kv_head) * DIM;
    float a[PAIRS], b[PAIRS], squares = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      a[i] = widen(x[lane + 32 * i]), b[i] = widen(x[lane + 32 * i + DIM / 2]);
      squares += a[i] * a[i] + b[i] * b[i];
    }
    float gain = 1.f;
    if (NORM) {
#pragma unroll
      for (int o = 16; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
      gain = rsqrtf(squares / DIM + p.eps);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int d = lane + 32 * i;
      if (NORM) {
        const u16* weight = h < GROUP ? p.q_norm : p.k_norm;
        a[i] *= gain * widen(weight[d]), b[i] *= gain * widen(weight[d + DIM / 2]);
      }
      if (ROPE) {
        const float old = a[i];
        a[i] = old * cosine[i] - b[i] * sine[i], b[i] = b[i] * cosine[i] + old * sine[i];
      }
      const u16 lower = narrow(a[i]), upper = narrow(b[i]);        // rounded as the composition's q and k are
      if (h < GROUP) {
        const float factor = p.scale * 1.4426950408889634f;
        s.q[h][d] = widen(lower) * factor, s.q[h][d + DIM / 2] = widen(upper) * factor;
      } else {
        const u16* mine = qkv + (p.kv_heads * (GROUP + 1) + kv_head) * DIM;
        const u16 value = mine[d], value2 = mine[d + DIM / 2];
        s.key[d] = widen(lower), s.key[d + DIM / 2] = widen(upper);
        s.value[d] = widen(value), s.value[d + DIM / 2] = widen(value2);
        if (rank == 0 && real) {
          const size_t to = place(last) + d;
          p.keys[to] = lower, p.keys[to + DIM / 2] = upper;
          p.values[to] = value, p.values[to + DIM / 2] = value2;
        }
      }
    }
  }
  __syncthreads();

  float q[GROUP][8], acc[GROUP][8];
#pragma unroll
  for (int g = 0; g < GROUP; g++)
#pragma unroll
    for (int d = 0; d < 8; d++) q[g][d] = s.q[g][inner * 8 + d], acc[g][d] = 0.f;
  float best[KEPT], sum[KEPT];                                     // of the heads whose scores this lane holds
#pragma unroll
  for (int j = 0; j < KEPT; j++) best[j] = NONE, sum[j] = 0.f;
  for (int g = warp; g < GROUP; g += WARPS) {                      // the own token's score
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) score += s.q[g][lane + 32 * i] * s.key[lane + 32 * i];
#pragma unroll
    for (int o = 16; o; o /= 2) score += __shfl_xor_sync(~0u, score, o);
    if (lane == 0) s.best[WARPS][g] = rank == 0 ? score : NONE, s.sum[WARPS][g] = rank == 0 ? 1.f : 0.f;
  }

#pragma unroll 1
  for (; start < last; start += stride) {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
    const auto& batch = s.warps[warp].ring[slot];
    float x[VALUES];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint4 k = batch[0][i][lane];
      const u32 words[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int g = 0; g < HEADS; g++) x[i * HEADS + g] = 0.f;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float2 pair = widen2(words[w]);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
          x[i * HEADS + g] = fmaf(q[g][2 * w], pair.x, x[i * HEADS + g]);
          x[i * HEADS + g] = fmaf(q[g][2 * w + 1], pair.y, x[i * HEADS + g]);
        }
      }
    }
    int n = VALUES;
#pragma unroll
    for (int o = LANES / 2; o; o /= 2) {
      if (n > 1) {
        n /= 2;
        const bool up = inner & o;
#pragma unroll
        for (int j = 0; j < VALUES / 2; j++) {
          if (j < n) {
            const float give = up ? x[j] : x[j + n], keep = up ? x[j + n] : x[j];
            x[j] = keep + __shfl_xor_sync(~0u, give, o);
          }
        }
      } else {
        x[0] += __shfl_xor_sync(~0u, x[0], o);
      }
    }
    bool higher = false;
    float top[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      const int index = inner / TWINS * KEPT + j;
      if (start + index / HEADS * SIDE + side >= last) x[j] = NONE;
      top[j] = x[j];
#pragma unroll
      for (int o = FIRST; o < 32; o *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], o));
      higher |= top[j] > best[j];
    }
    if (__any_sync(~0u, higher)) {
      float fade[KEPT];
#pragma unroll
      for (int j = 0; j < KEPT; j++) {
        const float now = fmaxf(best[j], top[j]);
        fade[j] = exp2_fast(best[j] - now);
        sum[j] *= fade[j], best[j] = now;
      }
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const float f = __shfl_sync(~0u, fade[g % KEPT], g / KEPT * TWINS, LANES);
#pragma unroll
        for (int d = 0; d < 8; d++) acc[g][d] *= f;
      }
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      x[j] = x[j] == NONE ? 0.f : exp2_fast(x[j] - best[j]);
      sum[j] += x[j];
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint4 v = batch[1][i][lane];
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      float weight[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const int index = i * HEADS + g;
        weight[g] = __shfl_sync(~0u, x[index % KEPT], index / KEPT * TWINS, LANES);
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float2 pair = widen2(words[w]);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
          acc[g][2 * w] = fmaf(weight[g], pair.x, acc[g][2 * w]);
          acc[g][2 * w + 1] = fmaf(weight[g], pair.y, acc[g][2 * w + 1]);
        }
      }
    }
    if (start + STAGES * stride < last) {
      size_t at[LOADS];
      locate(start + STAGES * stride, at), issue(slot, at);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();                                                    // the ring becomes the warp's result

  // The warp's lanes, then the block's warps and the own token, then the cluster's blocks.
#pragma unroll
  for (int j = 0; j < KEPT; j++) {
#pragma unroll
    for (int o = FIRST; o < 32; o *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], o);
    const int head = (inner / TWINS * KEPT + j) % HEADS;
    if (lane < LANES && inner / TWINS * KEPT + j < HEADS && inner % TWINS == 0 && head < GROUP)
      s.best[warp][head] = best[j], s.sum[warp][head] = sum[j];
  }
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
#pragma unroll
    for (int d = 0; d < 8; d++) {
#pragma unroll
      for (int o = LANES; o < 32; o *= 2) acc[g][d] += __shfl_xor_sync(~0u, acc[g][d], o);
      if (side == 0) s.warps[warp].part[g][inner * 8 + d] = acc[g][d];
    }
  }
  __syncthreads();
  for (int t = tid; t < GROUP * DIM; t += THREADS) {
    const int g = t / DIM, d = t % DIM;
    float top = NONE;
#pragma unroll
    for (int w = 0; w <= WARPS; w++) top = fmaxf(top, s.best[w][g]);
    float whole = 0.f, total = 0.f;
#pragma unroll
    for (int w = 0; w <= WARPS; w++) {
      const float f = exp2_fast(s.best[w][g] - top);
      whole += f * s.sum[w][g];
      // the own token's part is its value: only rank 0 counts it, elsewhere its sum is 0
      total += f * (w < WARPS ? s.warps[w].part[g][d] : s.sum[WARPS][g] * s.value[d]);
    }
    s.block_part[g][d] = total;
    if (d == 0) s.block_best[g] = top, s.block_sum[g] = whole;
  }
  cluster_arrive();
  cluster_wait();
  for (int t = tid * size + rank; t < GROUP * DIM; t += THREADS * size) {
    const int g = t / DIM, d = t % DIM;
    float best[MAX_CLUSTER], sum[MAX_CLUSTER], part[MAX_CLUSTER], top = NONE, whole = 0.f, total = 0.f;
#pragma unroll
    for (int r = 0; r < MAX_CLUSTER; r++) {                        // all under way before the first is used
      if (r < size) best[r] = peer(&s.block_best[g], r), sum[r] = peer(&s.block_sum[g], r),
                    part[r] = peer(&s.block_part[g][d], r);
      else best[r] = NONE, sum[r] = part[r] = 0.f;
    }
#pragma unroll
    for (int r = 0; r < MAX_CLUSTER; r++) top = fmaxf(top, best[r]);
#pragma unroll
    for (int r = 0; r < MAX_CLUSTER; r++) {
      const float f = exp2_fast(best[r] - top);
      whole += f * sum[r], total += f * part[r];
    }
    p.out[((size_t)group * GROUP + g) * DIM + d] = narrow(real ? total / whole : 0.f);
  }
  cluster_arrive();  // until all have read, nobody's shared memory may go
  cluster_wait();
}
