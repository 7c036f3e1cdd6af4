// Trellis codes to float16, as lanes of m16n8k16 have a tile of 16 x 16. trellis_portable.cu tells how.
//
// CODE is that of formats/trellis.py: 0 is OWN, integers; 1 to 3 are exllamav3's, float16 numbers for other inputs of a lane.
#pragma once

constexpr int FIRST = BITS <= 4 ? 1 : 2;  // words of a lane and tile that come from memory
constexpr int TILE_BYTES = 32 * BITS;

// Where a lane's words begin in a tile.
__device__ __forceinline__ int lane_bytes(int lane) { return lane * BITS / 4 * 4; }
// The lane that has the word behind a lane's own, as its first one, or its second.
__device__ __forceinline__ int lane_behind(u32 lane) {
  const u32 next = BITS == 1   ? lane / 4 * 4 + 4
                   : BITS == 2 ? lane / 2 * 2 + 2
                   : BITS == 3 ? lane + 1 + (lane % 4 == 0)
                               : lane + 1;
  return next % 32;
}

// Bits AT to AT + 15 of two words: shifted to whole bytes, which are picked. Where no windows share a shift over two words, it
// is to the left within one: the compiler makes some of them products, which balances the pipes.
template <int AT> __device__ __forceinline__ u32 window(u32 lo, u32 hi) {
  constexpr bool LEFT = BITS % 4 && AT <= 16;
  constexpr int SHIFT = LEFT ? (24 - AT) % 8 : AT % 8, BYTE = LEFT ? (AT + SHIFT) / 8 : AT / 8;
  if (BYTE == 3) return __funnelshift_r(lo, hi, AT) & 0xFFFFu;
  const u32 shifted = LEFT ? lo << SHIFT : SHIFT ? __funnelshift_r(lo, hi, SHIFT) : lo;
  return prmt(shifted, 0, BYTE == 0 ? 0x4410 : BYTE == 1 ? 0x4421 : 0x4432);
}
__device__ __forceinline__ u32 four_bytes(u32 state) { return state * 0x83DCD12Du; }
__device__ __forceinline__ u32 sum_of_bytes(u32 state) { return __dp4a(four_bytes(state), 0x01010101u, 0x6400u); }
template <int E> __device__ __forceinline__ u32 state(u32 lo, u32 mid, u32 hi) {
  constexpr int AT = E * BITS;
  return AT < 32 ? window<AT % 32>(lo, mid) : window<AT % 32>(mid, hi);
}
__device__ __forceinline__ u32 two_halves(u32 state) {  // whose sum is the value, in codes 1 and 2
  const u32 product = CODE == 1 ? state * 89226354u + 64248484u : state * 0xCBAC1FEDu;
  return (product & 0x8FFF8FFFu) ^ 0x3B603B60u;
}
template <int E> __device__ __forceinline__ u32 two_values(u32 lo, u32 mid, u32 hi) {
  const u32 a = state<E>(lo, mid, hi), b = state<E + 1>(lo, mid, hi);
  if (CODE == 1 || CODE == 2) {
    const u32 v = two_halves(a), w = two_halves(b);
    return subtract_f16(prmt(v, w, 0x5410), prmt(v, w, 0x7632) ^ 0x80008000u);
  }
  const u32 sums = prmt(sum_of_bytes(a), sum_of_bytes(b), 0x5410);  // and 1024 each
  return CODE == 3 ? fma_f16(sums, 0x1EEE1EEEu, 0xC931C931u) : sums;
}
constexpr float OFFSET = CODE ? 0.f : 1534.f;  // of all values: 1024 and 510
__device__ __forceinline__ u32 without_offset(u32 two) { return CODE ? two : subtract_f16(two, 0x65FE65FEu); }
// Inputs of a lane: two from IN t on, two from IN t + NEXT on.
constexpr int IN = CODE ? 2 : 4, NEXT = CODE ? 8 : 2;

// A lane's bits of a tile, from its first weight's on, of its words. All lanes together.
struct Bits {
  u32 lo, mid, hi;
  __device__ __forceinline__ Bits(const u32 (&word)[FIRST], u32 lane) {
    const int from = lane_behind(lane), shift = lane * 8 * BITS % 32;
    const u32 first = word[0];
    u32 second, third = 0;
    if (FIRST == 1) {
      second = __shfl_sync(~0u, first, from);
    } else {
      second = word[FIRST - 1];
      // The next lane's first word is this one's second or third.
      const u32 a = __shfl_sync(~0u, first, from), b = __shfl_sync(~0u, second, from);
      third = (lane + 1) * BITS / 4 - lane * BITS / 4 == 2 ? a : b;
    }
    lo = BITS % 4 ? __funnelshift_r(first, second, shift) : first;
    mid = BITS % 4 ? __funnelshift_r(second, third, shift) : second;
    hi = BITS % 4 ? third >> shift : third;
  }
  template <int E> __device__ __forceinline__ u32 bytes() const { return four_bytes(state<E>(lo, mid, hi)); }
};

// Values plus OFFSET: outputs g and g + 8 at the first two inputs, then both at the next two.
__device__ __forceinline__ uint4 decode(const u32 (&word)[FIRST], u32 lane) {
  const Bits bits(word, lane);
  uint4 v;
  v.x = two_values<0>(bits.lo, bits.mid, bits.hi), v.z = two_values<2>(bits.lo, bits.mid, bits.hi);
  v.y = two_values<4>(bits.lo, bits.mid, bits.hi), v.w = two_values<6>(bits.lo, bits.mid, bits.hi);
  return v;
}
