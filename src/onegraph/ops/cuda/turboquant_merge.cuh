// `merge` takes queries by their splits' references, then rotates back; the rotation is read once for the MERGED queries
// of a block. The tiles of a ring are splits like any other; with WRITES they are parts of splits, and blocks merge what
// those of their cluster have sent (`merge_rows`).

constexpr int MERGERS = 8, OWN = (DIM + 31) / 32, AHEAD = 4;
constexpr int PARTS = MERGERS * 32 / (DIM / 2), PART = (DIM + PARTS - 1) / PARTS;  // rows of the rotation, of a thread
constexpr bool EVEN = DIM % PARTS == 0 && MERGERS * 32 % (DIM / 2) == 0;  // no thread has rows past the last
// Part of the rotation, of a thread. No kernel of a step writes it: it may be read ahead.
constexpr int TURNS = DTYPE < 2 ? PART : 1;
__device__ __forceinline__ void load_rotation(const Arguments& p, u32 (&rotation)[TURNS]) {
  const int column = threadIdx.x % (DIM / 2) * 2, from = threadIdx.x / (DIM / 2) * PART;
  if (DTYPE < 2 && p.rotation) {
#pragma unroll
    for (int i = 0; i < PART; i++)
      rotation[i] = EVEN || from + i < DIM ? __ldg((const u32*)p.rotation + (from * DIM + column) / 2 + i * (DIM / 2)) : 0;
  }
}
// Rows of `result` times the rotation to `out`, row m as query(m), none from the first that is negative on.
template <int MERGED, typename Query> __device__ __forceinline__ void turn_back(
    const Arguments& p, const u32 (&rotation)[TURNS], const float (*result)[DIM], float (*turned)[DIM], Query query) {
  const int column = threadIdx.x % (DIM / 2) * 2, from = threadIdx.x / (DIM / 2) * PART;
  __syncthreads();
  if (from < DIM) {
    float s[MERGED][2];
#pragma unroll
    for (int m = 0; m < MERGED; m++) s[m][0] = s[m][1] = 0.f;
#pragma unroll
    for (int i = 0; i < PART; i++) {
      float2 c;
      if (DTYPE == 2) {
        c = from + i < DIM ? *(const float2*)((const float*)p.rotation + (from + i) * DIM + column) : make_float2(0.f, 0.f);
      } else {
        const u32 word = rotation[DTYPE < 2 ? i : 0];
        c = DTYPE == 1 ? make_float2(lower_half_to_float(word), lower_half_to_float(word >> 16))
                       : make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
      }
#pragma unroll
      for (int m = 0; m < MERGED; m++) {
        const float z = DIM % PARTS == 0 || from + i < DIM ? result[m][from + i] : 0.f;
        s[m][0] = fmaf(z, c.x, s[m][0]), s[m][1] = fmaf(z, c.y, s[m][1]);
      }
    }
    if (threadIdx.x / (DIM / 2) < PARTS) {
#pragma unroll
      for (int m = 0; m < MERGED; m++)
        *(float2*)&turned[threadIdx.x / (DIM / 2) * MERGED + m][column] = make_float2(s[m][0], s[m][1]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < MERGED * DIM; i += MERGERS * 32) {
    const int m = i / DIM, d = i % DIM, at = query(m);
    if (at < 0) break;
    float s = 0.f;
#pragma unroll
    for (int k = 0; k < PARTS; k++) s += turned[k * MERGED + m][d];
    store(p.out, (size_t)at * DIM + d, s);
  }
}

// Queries from `start` on; the warp's is the `row`-th of kv head `kv_head` of sequence b. `ready` waits until the splits'
// results stand there and says where the sequence's begin, and how many there are.
template <int MERGED, typename Ready>
__device__ __forceinline__ void merge(const Arguments& p, int start, int b, int kv_head, int row, Ready ready) {
  constexpr int EACH = MERGERS / MERGED;  // warps of a query
  float (*part)[DIM] = (float (*)[DIM])smem, (*result)[DIM] = part + MERGERS, (*turned)[DIM] = result + MERGED;
  float2* sums = (float2*)(turned + PARTS * MERGED);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = p.kv_heads * p.group, queries = p.batch * p.length * heads;
  u32 rotation[TURNS];
  load_rotation(p, rotation);
  {
    const int at = start + warp / EACH;
    float most = NONE, total = 0.f, v[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) v[k] = 0.f;
    const int step = step_of(p, row), r = row % ROWS, pair = row / ROWS * p.kv_heads + kv_head;
    const int near = at < queries ? p.ring_tiles : 0;  // of the ring
    const int2 work = ready();
    const bool far = step < p.counts[b] && (!p.ring_tiles || p.positions[b] + step >= p.recent + p.spare);
    const int splits = at < queries && far ? work.y : 0;
    const size_t first = work.x + (size_t)pair * work.y;
    const size_t ring = p.ring_at + ((size_t)b * p.row_tiles * p.kv_heads + pair) * near - splits;
    for (int begin = warp % EACH; begin < splits + near; begin += EACH * AHEAD) {
      float2 sum[AHEAD];
      float u[AHEAD][OWN];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int split = begin + i * EACH;
        const size_t row = ((split < splits ? first : ring) + split) * ROWS + r;
        sum[i] = split < splits + near ? p.sums[row] : make_float2(NONE, 0.f);
#pragma unroll
        for (int k = 0; k < OWN; k++) {
          const bool there = split < splits + near && (DIM % 32 == 0 || k * 32 + lane < DIM);
          u[i][k] = there ? p.partial[row * DIM + k * 32 + lane] : 0.f;
        }
      }
      float higher = most;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) higher = fmaxf(higher, sum[i].x);
      const float keep = exp2f(most - higher);
      total *= keep;
#pragma unroll
      for (int k = 0; k < OWN; k++) v[k] *= keep;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const float f = exp2f(sum[i].x - higher);
        total = fmaf(sum[i].y, f, total);
#pragma unroll
        for (int k = 0; k < OWN; k++) v[k] = fmaf(u[i][k], f, v[k]);
      }
      most = higher;
    }
#pragma unroll
    for (int k = 0; k < OWN; k++)
      if (DIM % 32 == 0 || k * 32 + lane < DIM) part[warp][k * 32 + lane] = v[k];
    if (lane == 0) sums[warp] = make_float2(most, total);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < MERGED * DIM; i += MERGERS * 32) {
    const int m = i / DIM, d = i % DIM, at = start + m;
    if (at >= queries) break;
    const float sink = p.sinks ? p.sinks[at % heads] * 1.4426950408889634f : -INF;
    float most = fmaxf(NONE, sink), s = 0.f;
#pragma unroll
    for (int k = 0; k < EACH; k++) most = fmaxf(most, sums[m * EACH + k].x);
    float total = p.sinks ? exp2f(sink - most) : 0.f;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const float f = exp2f(sums[m * EACH + k].x - most);
      total = fmaf(sums[m * EACH + k].y, f, total);
      s = fmaf(part[m * EACH + k][d], f, s);
    }
    s = total > 0.f ? s / total : 0.f;
    if (p.rotation) result[m][d] = s * p.back;
    else store(p.out, (size_t)at * DIM + d, s);
    if (d == 0 && p.lse) p.lse[at] = total > 0.f ? (most + log2f(total)) * 0.6931471805599453f : -INF;
  }
  if (p.rotation) turn_back<MERGED>(p, rotation, result, turned, [&](int m) { return start + m < queries ? start + m : -1; });
}

// Queries of a launch of its own.
template <int MERGED> __device__ __forceinline__ void merge_splits(const Arguments& p) {
  pdl_trigger();
  const int heads = p.kv_heads * p.group, queries = p.batch * p.length * heads, start = blockIdx.x * MERGED;
  const int at = min(start + (int)threadIdx.x / 32 / (MERGERS / MERGED), queries - 1), token = over(at, heads);
  const int b = p.length == 1 ? token : over(token, p.length), of_token = at - token * heads, head = over(of_token, p.group);
  merge<MERGED>(p, start, b, head, (token - b * p.length) * p.group + of_token - head * p.group, [&]() {
    pdl_wait();
    return p.work[b];
  });
}
#if !WRITES
// Queries of the cluster's pair, one after the other.
__device__ __forceinline__ void merge_cluster(const Arguments& p) {
  const int head = blockIdx.x / (u32)p.cluster, b = over(blockIdx.y, p.row_tiles), row_tile = blockIdx.y - b * p.row_tiles;
  bool ready = false;
  for (int r = blockIdx.x - head * p.cluster; r < ROWS || !ready; r += p.cluster) {
    const int row = row_tile * ROWS + r;
    const bool mine = r < ROWS && row < p.length * p.group;
    merge<1>(p, mine ? query_at(p, b, head, row) : p.batch * p.length * p.kv_heads * p.group, b, head, row, [&]() {
      if (!ready) cluster_sync();
      ready = true;
      return make_int2(b * gridDim.x * p.row_tiles, p.cluster);
    });
    __syncthreads();
  }
}
#else
// Rows rank, rank + splits, ... of the cluster's pair.
template <int MERGED> __device__ __forceinline__ void merge_rows(const Arguments& p, int b, int kv_head, int rank) {
  float (*result)[DIM] = (float (*)[DIM])(smem + STAGES_AT), (*turned)[DIM] = result + MERGED;
  const float (*part)[DIM] = (const float (*)[DIM])(smem + RECEIVED_AT);
  const Fixed& fixed = *(const Fixed*)smem;
  u32 rotation[TURNS];
  if (rank < GROUP) load_rotation(p, rotation);
  cluster_arrive();
  if (rank == p.cluster - 1) write_token(p, *(const Fresh*)(smem + FRESH_AT), b, kv_head);  // while the others come
  cluster_wait();
  if (rank >= GROUP) return;
  const bool real = p.counts[b] > 0;
  for (int i = threadIdx.x; i < MERGED * DIM; i += MERGERS * 32) {
    const int m = i / DIM, d = i % DIM;
    float most = NONE, total = 0.f, s = 0.f;
#pragma unroll
    for (int k = 0; k < RECEIVED / MERGED; k++)
      if (k < p.cluster) most = fmaxf(most, fixed.received[k * MERGED + m].x);
#pragma unroll
    for (int k = 0; k < RECEIVED / MERGED; k++)
      if (k < p.cluster) {
        const float2 of = fixed.received[k * MERGED + m];
        const float f = exp2_fast(of.x - most);
        total = fmaf(of.y, f, total), s = fmaf(part[k * MERGED + m][d], f, s);
      }
    result[m][d] = real && total > 0.f ? s / total * p.back : 0.f;
  }
  const int start = (b * p.kv_heads + kv_head) * GROUP;
  turn_back<MERGED>(p, rotation, result, turned, [&](int m) {
    const int r = rank + m * p.cluster;
    return r < GROUP ? start + r : -1;
  });
}
__device__ __forceinline__ void merge_cluster(const Arguments& p) {
  const int kv_head = blockIdx.x / (u32)p.cluster, rank = blockIdx.x - kv_head * p.cluster, rows = received_rows(p.cluster);
  if (rows == 1) merge_rows<1>(p, blockIdx.y, kv_head, rank);
  else if (rows == 2) merge_rows<2>(p, blockIdx.y, kv_head, rank);
  else if (rows == 4) merge_rows<4>(p, blockIdx.y, kv_head, rank);
  else merge_rows<ROWS>(p, blockIdx.y, kv_head, rank);
}
#endif
