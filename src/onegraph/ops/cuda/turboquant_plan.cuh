// What attention from codes is told, and how sequences are cut into splits: on the device, from the lengths found there.

struct Arguments {
  const void* q;            // [batch, length, heads, DIM]; with WRITES q, k and v, [batch, heads + 2 kv_heads, DIM]
  const u8* cache;          // [pages, kv_heads, page_bytes]
  const int* block_table;   // [batch, table_stride]
  const int* positions;     // [batch]
  const int* counts;        // [batch]
  const int* ends;          // [batch] or null
  const void* rotation;     // [DIM, DIM] or null
  const float* k_codebook;  // [2^KBITS]
  const float* v_codebook;
  const float* sinks;       // [heads] or null
  float* partial;           // [ring_at + those of the rings, ROWS, DIM]
  float2* sums;             // the same, [ROWS]: reference, sum
  int2* work;               // [batch]: first item, splits
  void* out;                // [batch, length, heads, DIM]
  float* lse;               // [batch, length, heads] or null
  const void* ring;         // [rings, ring_size, 2, kv_heads, DIM] of exact keys and values, or null
  const int* slots;         // [batch]: whose ring
  // With WRITES, what a token is made of; see ops/turboquant.py.
  const u16* q_norm;        // [DIM] or null
  const u16* k_norm;
  const float* cos;         // [max_position + 1, DIM / 2] or null
  const float* sin;
  const u16* turn;          // [DIM, DIM]
  int batch, length, kv_heads, group, table_stride, reach, pages, window;
  int row_tiles;            // of ROWS queries
  int limit;                // items that the splits may make
  int least;                // tiles that a split has at least
  int recent;               // tokens before a query that are not read from codes: the window of the ring
  int spare, near_limit;    // see ops/recent_attention.py
  int ring_size;
  int ring_tiles;           // of 16 places of a ring; 0 without one
  int ring_at;              // where the results of the rings' tiles begin
  int ahead;                // whether what earlier steps wrote may be read before the wait
  int cluster;              // blocks of a cluster, the splits of every sequence; 0 where they follow from the lengths
  int max_position;         // with WRITES, as `early` and `eps`
  int early;                // let the next launch go in the first line, as EARLY of decode_attention.cu
  float scale;              // of the scores, times log2(e)
  float back;               // of the rotation
  float eps;
};

extern __shared__ __align__(128) u8 smem[];

constexpr int TILE = 32;                                 // tokens

// What a sequence's queries can see: tokens [first, end) in tiles, from `tile` on.
struct Span {
  int last, end, tile, tiles;
  int old;                                               // tokens that earlier steps have written
};
__device__ __forceinline__ Span span_of(const Arguments& p, int b) {
  Span s;
  const int count = min(p.counts[b], p.length);
  s.last = min(p.positions[b] - p.recent, p.reach - 1);  // may be negative: before the first key
  s.end = min(s.last + count, p.reach);
  if (p.ends) s.end = min(s.end, p.ends[b]);
  s.tile = p.window > 0 ? max(s.last - p.window + 1, 0) / TILE : 0;
  s.old = p.positions[b];
  const bool far = !p.ring_tiles || s.old + count > p.recent + p.spare;  // else the ring holds all
  s.tiles = count > 0 && far ? max((s.end + TILE - 1) / TILE - s.tile, 0) : 0;
  return s;
}

// a / b of a >= 0, b > 0: by the float unit while that is exact, in half the time.
__device__ __forceinline__ int over(int a, int b) {
  return a < 1 << 20 ? (int)__fdividef((float)a + 0.5f, (float)b) : (int)((u32)a / (u32)b);
}

// The `row`-th query of a kv head, token by token: of which token, and which of all queries.
__device__ __forceinline__ int step_of(const Arguments& p, int row) {
  return WRITES || (p.length == 1 && row < p.group) ? 0 : over(row, p.group);
}
__device__ __forceinline__ size_t query_at(const Arguments& p, int b, int head, int row) {
  const int step = step_of(p, row);
  return ((size_t)b * p.length + step) * p.kv_heads * p.group + head * p.group + row - step * p.group;
}

// Splits: the least share of tiles with which the items of all sequences stay within the limit. One warp.
__device__ __forceinline__ void plan(const Arguments& p, const Span* spans, int2* work, int& items, int lane) {
  const int heads = p.kv_heads * p.row_tiles;
  int total = 0, most = 1;
  for (int b = lane; b < p.batch; b += 32) total += spans[b].tiles, most = max(most, spans[b].tiles);
  total = __reduce_add_sync(~0u, total), most = __reduce_max_sync(~0u, (u32)most);
  int share = most;
  if (p.batch * heads < p.limit) {  // lane by lane from an even share of all tiles to 4.75 times that
    const float even = (float)total * heads / p.limit;
    const int mine = max(p.least, (int)ceilf(even * (1.f + lane * lane / 256.f)));
    const float inverse = 1.f / mine;
    int needed = 0;
    for (int b = 0; b < p.batch; b++) needed += (int)ceilf(spans[b].tiles * inverse - 1e-4f);
    const u32 fits = __ballot_sync(~0u, needed * heads <= p.limit);
    if (fits) share = __shfl_sync(~0u, mine, __ffs(fits) - 1);
  }
  const float inverse = 1.f / share;
  int before = 0;
  for (int start = 0; start < p.batch; start += 32) {
    const int b = start + lane;
    const int splits = b < p.batch ? (int)ceilf(spans[b].tiles * inverse - 1e-4f) : 0;
    int sum = splits * heads;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int v = __shfl_up_sync(~0u, sum, o);
      if (lane >= o) sum += v;
    }
    if (b < p.batch) work[b] = make_int2(before + sum - splits * heads, splits);
    before += __shfl_sync(~0u, sum, 31);
  }
  items = before;
}
