// TurboQuant's codes to bytes in registers, and where they lie in a block of 16 tokens; see formats/turboquant_layout.py.
//
// A code selects one of at most 16 bytes u, whose level is (u - 127.5) / 127.5 times the largest. The byte
// permute looks up eight bytes by nibbles: four codes an instruction for up to 3 bits. Its fourth selector bit puts out
// the sign of the byte looked up, so with 4 bits  T[c & 7] ^ D[c]  is u for 16 codes if the tables are
// T[i] = u[i + 8], D[i] = u[i] ^ u[i + 8]: codes 8 apart have the same sign, so D has no sign bit and codes above 7 take
// D as 0. Two permutes, one XOR and some masking and shifting for four codes.
// Keys need no XOR: the tensor cores add the two parts, u = T + D. T as signed and D as unsigned bytes, where D's sign is
// to stand for 255:  T[i] = u[i + 8] - 255, D[i] = u[i] - u[i + 8] + 255  where u[i + 8] > 127, both without 255 elsewhere.

constexpr int BLOCK = 16;                                // tokens
constexpr int KW = KBITS == 3 ? 2 : KBITS, VW = VBITS == 3 ? 2 : VBITS;  // width of the first plane
constexpr int K_HIGH = BLOCK * DIM * KW / 8;             // offsets in a block: K's high bits (3 bits), V, V's high bits
constexpr int V_AT = BLOCK * DIM * KBITS / 8;
constexpr int V_HIGH = V_AT + BLOCK * DIM * VW / 8;
constexpr int NORMS = BLOCK * DIM * (KBITS + VBITS) / 8;
constexpr int BLOCK_BYTES = NORMS + BLOCK * 4;
constexpr int V_ROW = DIM * VW / 4;                      // bytes of a pair of tokens, and apart in shared memory
constexpr int V_STRIDE = V_ROW % 64 == 0 ? V_ROW + 32 : V_ROW;
constexpr int MOVED = 8 * (V_STRIDE - V_ROW);            // what stands behind V in a block stands that much further
constexpr int BLOCK_SHARED = (BLOCK_BYTES + MOVED + 15) / 16 * 16;
constexpr int CHUNKS = BLOCK_BYTES / 16, PER_LANE = (CHUNKS + 31) / 32;

constexpr int K_WORDS = (DIM * KW + 31) / 32, K_LANE = (K_WORDS + 3) / 4;  // words of a token, of a lane
constexpr int K_STEPS = K_LANE * 4 / KW;                 // products along the dimensions
constexpr bool K_RUN = K_WORDS % 4 == 0 && DIM * KW % 32 == 0;  // a lane's words lie side by side
constexpr int V_WORDS = DIM * VW / 16, V_LANE = (V_WORDS + 7) / 8;
constexpr bool V_RUN = V_WORDS % 8 == 0;
constexpr int V_TILES = V_LANE * 8 / VW;                 // row tiles of 16 dimensions

template <int N> __device__ __forceinline__ void load_words(u32 (&v)[N], const u8* p) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) *(uint4*)(v + i) = *(const uint4*)(p + 4 * i);
  } else if (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) *(uint2*)(v + i) = *(const uint2*)(p + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = *(const u32*)(p + 4 * i);
  }
}

struct Table {
  u32 t0, t1, d0, d1;
};
// Four codes of a word of eight nibbles each to four bytes u.
template <int BITS> __device__ __forceinline__ void look_up(u32& low, u32& high, u32 word, const Table& t) {
  if (BITS == 4) {
    const u32 index = word & 0x77777777u;
    low = prmt(t.t0, t.t1, index) ^ prmt(t.d0, t.d1, word);
    high = prmt(t.t0, t.t1, index >> 16) ^ prmt(t.d0, t.d1, word >> 16);
  } else {
    low = prmt(t.t0, t.t1, word);
    high = prmt(t.t0, t.t1, word >> 16);
  }
}
// The same of 4-bit codes as the two parts that a product adds.
__device__ __forceinline__ void look_up_parts(u32& low, u32& high, u32& more_low, u32& more_high, u32 word, const Table& t) {
  const u32 index = word & 0x77777777u;
  low = prmt(t.t0, t.t1, index), high = prmt(t.t0, t.t1, index >> 16);
  more_low = prmt(t.d0, t.d1, word), more_high = prmt(t.d0, t.d1, word >> 16);
}
// The S-th word of nibbles of a word of a plane; `high`: the high bits of 3-bit codes, at bit 2 for S = 0.
template <int BITS> __device__ __forceinline__ u32 nibbles(u32 word, u32 high, int s) {
  if (BITS == 4) return word;
  if (BITS == 3) return ((word >> 2 * s) & 0x33333333u) | ((high >> s) & 0x44444444u);
  if (BITS == 2) return (word >> 2 * s) & 0x33333333u;
  return (word >> s) & 0x11111111u;
}
// Bytes u of the codes of a codebook, into 16 bytes of shared memory: the table T, then D; APART to be added, not XORed.
template <int BITS, bool APART> __device__ __forceinline__ void make_table(u32* to, const float* codebook, int lane) {
  const float c = lane < 1 << BITS ? fabsf(codebook[lane]) : 0.f;
  float most = c;
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  int m = (int)rintf(__fsub_rn(__fmul_rn(c / most, 127.5f), 0.5f));
  m = min(max(m, 0), 127);
  const u32 u = lane & 1 ? 127 - m : 128 + m;
  const u32 far = __shfl_down_sync(~0u, u, 8);
  if (lane < 8) {
    const u32 turn = far > 127 ? 255 : 0;
    ((u8*)to)[lane] = BITS != 4 ? u : APART ? far - turn : far;
    ((u8*)to)[8 + lane] = APART ? u - far + turn : u ^ far;
  }
  if (lane == 0) ((float*)to)[4] = most / 127.5f;
}

// dimension of byte `i` of half `half` of step `step` of a lane's operand of the scores
__device__ __forceinline__ int k_dimension(int step, int half, int i, int t) {
  const int spread = 4 / KW, j = step / spread, s = step % spread, word = K_RUN ? t * K_LANE + j : j * 4 + t;
  const int nibble = half * 4 + i, b = nibble / 2, n = nibble % 2;
  if (KW == 4) return word * 8 + nibble;
  if (KW == 2) return word * 16 + 2 * (2 * b + s) + n;
  return word * 32 + 16 * (b / 2) + 2 * (4 * (s / 2) + 2 * (b % 2) + s % 2) + n;
}
// dimension of row g (n = 0) or g + 8 (n = 1) of the m-th row tile of the values
__device__ __forceinline__ int v_dimension(int m, int n, int g) {
  const int spread = 4 / VW, j = m / 2 / spread, s = m / 2 % spread, half = m % 2;
  const int word = V_RUN ? g * V_LANE + j : j * 8 + g;
  if (VW == 4) return 4 * word + 2 * half + n;
  if (VW == 2) return 4 * (2 * word + half) + 2 * s + n;
  return 16 * word + 2 * (4 * (s / 2) + 2 * half + s % 2) + n;
}
