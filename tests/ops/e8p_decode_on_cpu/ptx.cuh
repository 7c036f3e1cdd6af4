// What ops/cuda/ptx.cuh gives e8p_decode.cu, for a CPU (experts.cuh: e8p_experts_on_cpu/ptx.cuh, with what that includes).
//
// Blocks of a cluster run one after the other, and all of them twice: what they send to each other in the first round is
// there in the second one, where they go on behind `receive`. The copy engine's boxes arrive at once.

#pragma push_macro("WIDE")
#undef WIDE
#define shared every_byte  // the kernel has a name `shared` of its own
#define some_meet meet_of_most
#define TensorMap MapOfOthers
#define floats_to_bf16s floats_to_own
#define wait_barrier wait_for_block
#define expect expect_mail
#define copy copy_at_once
#define at_rank at_rank_of_one
#define send send_to_one
#define receive receive_of_one
#include "experts.cuh"
#undef shared
#undef smem
#define smem every_byte
#undef some_meet
#undef TensorMap
#undef floats_to_bf16s
#undef wait_barrier
#undef expect
#undef copy
#undef at_rank
#undef send
#undef receive
#pragma pop_macro("WIDE")

static float rsqrtf(float v) { return 1.f / sqrtf(v); }
static float larger(float a, float b) { return a != a || b != b ? NAN : max(a, b); }

static float bf16(u32 v) { return as_float(v << 16); }
static u32 to_bf16(float f) {
  const u32 v = as_bits(f);
  return f != f ? 0x7FFF : v + 0x7FFF + (v >> 16 & 1) >> 16;
}
static u32 floats_to_bf16s(float lower, float upper) { return to_bf16(lower) | to_bf16(upper) << 16; }
static u32 fma_bf16(u32 a, u32 b, u32 c) {  // products have 16 bits, so that a sum in double is exact
  const auto one = [](u32 a, u32 b, u32 c) { return to_bf16((double)bf16(a) * bf16(b) + bf16(c)); };
  return one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | one(a >> 16, b >> 16, c >> 16) << 16;
}
static u32 rest_bf16(u32 a, u32 b, u32 c) { return fma_bf16(a, b, c ^ 0x80008000u); }
static u32 multiply_bf16(u32 a, u32 b) { return fma_bf16(a, b, 0x80008000u); }
static void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(fibers[current].fragments, own, sizeof own);
  meet(WARP);
  const int warp = current / 32 * 32, g = current % 32 / 4, t = current % 4;
  const auto element = [&](int lane, int reg, int k) {
    const u32 v = fibers[warp + lane].fragments[reg];
    return (double)bf16(k % 2 ? v >> 16 : v & 0xFFFF);
  };
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, upper = k >= 8;
      sum += element(g * 4 + lane, i / 2 + 2 * upper, k) * element((2 * t + i % 2) * 4 + lane, 4 + upper, k);
    }
    c[i] = sum;
  }
  meet(WARP);
}

struct Meeting { int count, opened; };
static Map<int, Meeting> meetings;
static void some_meet(int barrier, int threads) {
  Meeting& at = meetings[barrier];
  const int before = at.opened;
  if (++at.count == threads) at.count = 0, ++at.opened;
  meet(WARP);
  for (int turn = 0; at.opened == before; ++turn) {
    if (turn > 100000) fail("warps that never meet");
    meet(POLL);
  }
}

// As tests/ops/e8p_decode_on_cpu/host.py writes them.
struct __attribute__((aligned(64))) TensorMap { const u8* from; long long rows, row_bytes, box_bytes, box_rows, slices, unused[10]; };
static Map<u32, int> missing;  // bytes, by barrier
static void expect(u32 barrier, int bytes) { missing[barrier] += bytes; }
static void wait_barrier(u32 barrier, u32) {
  meet(WARP);
  for (int turn = 0; missing[barrier]; ++turn) {
    if (turn > 100000) fail("a barrier that never opens");
    meet(POLL);
  }
}
static void copy(u32 to, const u8* from, int bytes, u32 barrier) {
  copy_at_once(to, from, bytes, barrier);
  missing[barrier] -= bytes;
}
static void copies_ordered() {}
static void barriers_visible() {}
static void slices(u32 to, const TensorMap& m, int row, int slice, u32 barrier, int column = 0) {
  for (int s = 0; s < m.slices; ++s)
    for (int r = 0; r < m.box_rows; ++r)
      for (int i = 0; i < m.box_bytes; ++i) {
        const long long in_row = (slice + s) * m.box_bytes + column + i, at = (row + r) * m.row_bytes + in_row;
        const bool inside = row + r < m.rows && in_row < m.row_bytes;
        if (inside) check_read(m.from + at, 1);
        *shared_at(to + (s * m.box_rows + r) * m.box_bytes + i, 1) = inside ? m.from[at] : 0;
      }
  missing[barrier] -= m.slices * m.box_rows * m.box_bytes;
}
static void box(u32 to, const TensorMap& m, int column, int row, u32 barrier) { slices(to, m, row, 0, barrier, column); }

// The cluster. An address of another block has its rank above bit 20.
struct Mail { u32 to, barrier; float v[4]; int count; };
static List<Mail> sent;
static bool first_round;
static u32 at_rank(u32 local, u32 rank) { return local | rank << 20; }
static u32 at_rank(const void* local, u32 rank) { return at_rank(address(local), rank); }
static void send(u32 to, float v, u32 barrier) {
  if (first_round) sent.push_back({to, barrier, {v}, 1});
}
static void send(u32 to, const float4& v, u32 barrier) {
  if (first_round) sent.push_back({to, barrier, {v.x, v.y, v.z, v.w}, 4});
}
static void receive(u32 barrier) {
  if (first_round) {
    fibers[current].done = true;
    go(fibers[current].place, scheduler);
  }
  meet(WARP);
  int bytes = 0;
  for (const Mail& m : sent) {
    if (m.barrier != at_rank(barrier, rank_now)) continue;
    if (m.to >> 20 != rank_now) fail("sent to one block, told to another");
    bytes += m.count * 4;
    memcpy(shared_at(m.to & 0xFFFFF, 4), m.v, m.count * 4);
  }
  if (bytes != missing[barrier]) fail("not what the cluster was to send");
}
