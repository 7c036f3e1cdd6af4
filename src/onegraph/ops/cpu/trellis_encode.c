// The trellis path nearest to each tile of a matrix, on a CPU: Viterbi's algorithm over all 65,536 states.
//
// A state is (c, mid, h): the BITS newest bits, 16 - 2 BITS bits, and the BITS oldest. Those that follow it share its 16 - BITS
// newest bits, (c, mid), which are the low bits (mid, h) of the next one. So a step takes for each (c, mid) the least over h
// of what (mid, h) has cost so far and what the weight loses with the state's value:
//
//     new[(c, mid)] = min over h of old[(mid, h)] + weight (value[(c, mid, h)] - x)^2
//
// The vectors of a loop lie along mid where that has more values (BITS up to 3), else along c; `table` and the costs are laid
// out for it.
//
// The string is a ring. What a first pass over the weights around its ends has in common there, the second one, over all,
// begins and ends with.
//
// Set when compiled: BITS.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define C (1 << BITS)
#define OVERLAPS (65536 / C)
#define MIDS (OVERLAPS / C)
#define WEIGHTS 256
#define ALONG_MID (BITS <= 3)
// As many as a register holds: of wider vectors compilers move single numbers wherever one is shuffled.
#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define AT_ONCE (ALONG_MID ? C : C < 64 ? C / LANES : 4)  // vectors

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

typedef struct {
  Floats costs[2][OVERLAPS / LANES];
  uint8_t from[WEIGHTS][OVERLAPS];  // h, by place
  float *old, *new;                 // the costs in turn
} Scratch;

static inline Bytes bytes(Ints v) {
#if LANES == 16
  return __builtin_convertvector(v, Bytes);
#else  // which would take single numbers
  typedef uint8_t Whole __attribute__((vector_size(4 * LANES)));
  const Whole low = {0, 4, 8, 12, 16, 20, 24, 28};
  const Whole moved = __builtin_shuffle((Whole)v, low);
  Bytes found;
  memcpy(&found, &moved, sizeof found);
  return found;
#endif
}

// Where the costs of an overlap lie: [h][mid], its bits being (mid, h), or [mid][c] as the step before has made them.
static inline int place(int overlap) {
  return ALONG_MID ? overlap % C * MIDS + overlap / C : overlap % MIDS * C + overlap / MIDS;
}
// Where a step leaves what it came from: [c][mid] or [mid][c].
static inline int left(int overlap) { return ALONG_MID ? overlap : overlap % MIDS * C + overlap / MIDS; }

#if ALONG_MID
// Vector h gets every C-th number from h on: each turn moves the lowest bit of a number's place in front of the highest.
static inline void part(Floats* v) {
#if LANES == 16
  const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1;
#elif LANES == 8
  const Ints even = {0, 2, 4, 6, 8, 10, 12, 14}, odd = even + 1;
#else
  const Ints even = {0, 2, 4, 6}, odd = even + 1;
#endif
#pragma GCC unroll 3
  for (int turn = 0; turn < BITS; turn++) {
    Floats to[C];
#pragma GCC unroll 4
    for (int i = 0; i < C / 2; i++) {
      to[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even);
      to[i + C / 2] = __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
    }
    memcpy(v, to, sizeof to);
  }
}
#endif

static void step(Scratch* s, uint8_t* from, const float* restrict table, float x, float weight) {
  const float root = sqrtf(weight), goal = root * x;
  const float* const restrict old = s->old;
  float* const restrict new = s->new;
  for (int outer = 0; outer < OVERLAPS / (AT_ONCE * LANES); outer++) {
#if ALONG_MID
    const int c = outer % C, mid = outer / C * AT_ONCE * LANES;  // all c beside each other: they read the same costs
#else
    const int mid = outer / (C / (AT_ONCE * LANES)), c = outer % (C / (AT_ONCE * LANES)) * AT_ONCE * LANES;
#endif
    Floats best[AT_ONCE];
    Ints which[AT_ONCE];
#pragma GCC unroll 8
    for (int i = 0; i < AT_ONCE; i++) best[i] = (Floats){} + INFINITY, which[i] = (Ints){};
    for (int h = 0; h < C; h++) {
#if ALONG_MID
      const Floats* v = (const Floats*)(table + (c * C + h) * MIDS + mid);
#else
      const Floats* v = (const Floats*)(table + (mid * C + h) * C + c);
#endif
#pragma GCC unroll 8
      for (int i = 0; i < AT_ONCE; i++) {
        const Floats d = v[i] * root - goal;
#if ALONG_MID
        const Floats cost = ((const Floats*)(old + h * MIDS + mid))[i] + d * d;
#else
        const Floats cost = old[place(mid * C + h)] + d * d;
#endif
        const Ints less = cost < best[i];
        which[i] = (less & h) | (~less & which[i]);
        best[i] = (Floats)((less & (Ints)cost) | (~less & (Ints)best[i]));
      }
    }
    Bytes* to = (Bytes*)(from + (ALONG_MID ? c * MIDS + mid : mid * C + c));
#pragma GCC unroll 8
    for (int i = 0; i < AT_ONCE; i++) to[i] = bytes(which[i]);
#if ALONG_MID
    part(best);
#pragma GCC unroll 8
    for (int h = 0; h < C; h++)  // the next one's (mid, h) are this one's (c, mid)
      *(Floats*)(new + h * MIDS + c * (MIDS / C) + mid / C) = best[h];
#else
    memcpy(new + mid * C + c, best, sizeof best);
#endif
  }
  s->old = new, s->new = (float*)old;
}

// Costs of all overlaps in front of the first weight: none, or all but `overlap` out of reach.
static void begin(Scratch* s, int overlap) {
  for (int i = 0; i < OVERLAPS; i++) s->old[i] = overlap < 0 ? 0.f : 1e30f;
  if (overlap >= 0) s->old[place(overlap)] = 0.f;
}

static inline int output_of(int p) { return p / 32 + p % 8 / 4 * 8; }
static inline int input_of(int p) { return p / 8 % 4 * 4 + p % 4; }

// Tiles [begin, end) of x [16, 16 tiles], `stride` floats from input to input, as of value. weights: of squared errors, by
// input, [parts, 16] of `part` tiles each; outer: likewise by output, or null. around: weights on either side of the ends
// that the first pass takes. codes: [BITS, 16 tiles], word i of a tile at [i / 16, 16 tile + i % 16]. levels: value of a state.
// Returns 0, or -1 where there is no memory.
int trellis_encode(const float* table, const float* levels, const float* x, const float* weights, const float* outer,
                   int64_t part, int64_t stride, int64_t first, int64_t end, int32_t around, int32_t* codes, float* value) {
  Scratch* s = aligned_alloc(64, (sizeof(Scratch) + 63) / 64 * 64);
  if (!s) return -1;
  s->old = (float*)s->costs[0], s->new = (float*)s->costs[1];
  for (int64_t tile = first; tile < end; tile++) {
    float given[WEIGHTS], weight[WEIGHTS];
    for (int p = 0; p < WEIGHTS; p++) {
      given[p] = x[input_of(p) * stride + tile * 16 + output_of(p)];
      weight[p] = weights[tile / part * 16 + input_of(p)];
      if (outer) weight[p] *= outer[tile / part * 16 + output_of(p)];
    }
    begin(s, -1);
    for (int i = 0; i < 2 * around; i++) {
      const int p = (WEIGHTS - around + i) % WEIGHTS;
      step(s, s->from[i], table, given[p], weight[p]);
    }
    int overlap = 0;
    for (int i = 1; i < OVERLAPS; i++)
      if (s->old[place(i)] < s->old[place(overlap)]) overlap = i;
    for (int i = 2 * around - 1; i >= around; i--)
      overlap = (overlap * C + s->from[i][left(overlap)]) % OVERLAPS;
    begin(s, overlap);
    for (int p = 0; p < WEIGHTS; p++) step(s, s->from[p], table, given[p], weight[p]);
    uint16_t words[16 * BITS];
    memset(words, 0, sizeof words);
    for (int p = WEIGHTS - 1; p >= 0; p--) {
      const int state = overlap * C + s->from[p][left(overlap)];
      value[input_of(p) * stride + tile * 16 + output_of(p)] = levels[state];
      for (int b = 0; b < BITS; b++) words[(p * BITS + b) / 16] |= (state >> b & 1) << (p * BITS + b) % 16;
      overlap = state % OVERLAPS;
    }
    for (int i = 0; i < 16 * BITS; i++) codes[i / 16 * stride + tile * 16 + i % 16] = words[i];
  }
  free(s);
  return 0;
}
