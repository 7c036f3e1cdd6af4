// Nearest E8P codes of a vector of eight numbers, one or two stages, as C++ for a GPU and C for a CPU. The method, its proofs
// and its names are told in `quant/e8p.py`, which does the same for all vectors at once in torch's calls.
//
// BITS is set when this is compiled: 2, 3 or 4.

#ifdef __CUDACC__
#define FUNCTION __device__ __forceinline__
#define SELDOM __device__ __noinline__
#define CONSTANT __device__ const
#define POPCOUNT __popc
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define FUNCTION static inline
#define SELDOM static
#define CONSTANT static const
#define POPCOUNT __builtin_popcount
#endif

#define ORBITS 7
#define EXPLICIT 29
#define FIRST_EXPLICIT 227

CONSTANT unsigned char EXCESS[ORBITS][4] = {{0, 0, 0, 0}, {1, 0, 0, 0}, {1, 1, 0, 0}, {1, 1, 1, 0},
                                          {2, 0, 0, 0}, {1, 1, 1, 1}, {2, 1, 0, 0}};
CONSTANT unsigned char ORBIT_ODD[ORBITS] = {0, 1, 0, 1, 0, 0, 1};
CONSTANT float ORBIT_COST[ORBITS] = {0, 1, 2, 3, 3, 4, 4};  // |s|^2 / 2 less what all share

typedef struct {
  const int* index;       // [4^8]: base-4 digits of |v| - 1/2 -> row of the codebook, -1 where it has none
  const int* odd;         // [256]: whether a row has an odd number of negatives
  const float* absolute;  // [256, 8]: |v|
  const int* halves;      // [29, 3]: where the explicit vectors of norm 12 have a half
  const int* half_row;    // [256]: sign bits -> row of E81B
  const float* e81b;      // [256, 8]
} Tables;

typedef struct {
  float v[8];
  int row, signs;
} Point;

FUNCTION int key_of(float x, int lane) {  // sorts like |x|, and tells the coordinate
  int bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7FFFFFF8) | lane;
}
FUNCTION float magnitude(int key) {
  float x;
  memcpy(&x, &key, 4);
  return x;
}
FUNCTION int place(const float* v, int* signs) {  // of |v| in the index
  int at = 0, negative = 0;
  for (int i = 0; i < 8; i++) {
    const float digit = fminf(fabsf(v[i]) - 0.5f, 3.f);
    at += (int)digit << 2 * i;
    negative |= (v[i] < 0) << i;
  }
  *signs = negative;
  return at;
}

// The point of all of D8^ that is nearest to y: rounds, and moves the worst coordinate where the parity is wrong.
FUNCTION void rounded(Point* to, const float* y, const Tables* t) {
  float error[8], sum = 0;
  int worst = 0;
  for (int i = 0; i < 8; i++) {
    to->v[i] = floorf(y[i]) + 0.5f;
    error[i] = y[i] - to->v[i];
    sum += to->v[i];
  }
  for (int i = 0; i < 8; i++) {
    const int key = key_of(error[i], i);
    worst = key > worst ? key : worst;
  }
  if ((int)sum & 1) to->v[worst & 7] += error[worst & 7] < 0 ? -1.f : 1.f;
  to->row = t->index[place(to->v, &to->signs)];
}

// The codebook's nearest to y where D8^'s is not in it: by orbits, and the explicit vectors of norm 12.
SELDOM void far_away(Point* to, const float* y, const Tables* t) {
  float a[8], top[8], total = 0;
  int order[8], odd = 0;
  int signs = 0;
  for (int i = 0; i < 8; i++) {
    a[i] = fabsf(y[i]);
    total += a[i];
    signs |= (y[i] < 0) << i;
    odd ^= y[i] < 0;
    int at = i;
    for (; at && top[at - 1] < a[i]; at--) top[at] = top[at - 1], order[at] = order[at - 1];
    top[at] = a[i], order[at] = i;
  }
  const float smallest = top[7], two = top[0] + top[1], three = two + top[2];
  const float gain[ORBITS] = {0, top[0], two, three, 2 * top[0], three + top[3], two + top[0]};
  float best = -1e30f;
  int orbit = 0;
  for (int o = 0; o < ORBITS; o++) {
    const float score = gain[o] - (ORBIT_COST[o] + (ORBIT_ODD[o] != odd ? smallest : 0.f));
    if (score > best) best = score, orbit = o;
  }
  int key = 0;
  for (int i = 0; i < 4; i++) key += EXCESS[orbit][i] << 2 * order[i];
  int row = t->index[key], flip = order[7];
  if (total - 5.f - (top[5] + top[6] + top[7]) - (odd ? 0.f : smallest) > best) {
    for (int j = 0; j < EXPLICIT; j++) {
      const int* half = t->halves + 3 * j;
      const float p = a[half[0]], q = a[half[1]], r = a[half[2]], least = fminf(fminf(p, q), r);
      const float score = total - 5.f - (p + q + r) - (odd ? 0.f : fminf(least, 3 * smallest));
      if (score > best) {
        best = score, row = FIRST_EXPLICIT + j;
        flip = least > 3 * smallest ? order[7] : least == p ? half[0] : least == q ? half[1] : half[2];
      }
    }
  }
  if (t->odd[row] != odd) signs ^= 1 << flip;
  for (int i = 0; i < 8; i++) {
    const float v = t->absolute[8 * row + i];
    to->v[i] = signs >> i & 1 ? -v : v;
  }
  to->row = row, to->signs = signs;
}

FUNCTION int code_of(const Point* p, int shift, const Tables* t) {
  return p->row << 8 | (p->signs ^ t->odd[p->row] ^ shift);  // the shift rides on the parity of the sign byte
}
FUNCTION float shift_of(int shift) { return shift ? -0.25f : 0.25f; }
FUNCTION void shifted(float* y, const float* x, int shift) {
  for (int i = 0; i < 8; i++) y[i] = x[i] - shift_of(shift);
}
FUNCTION float distance(const float* a, const float* b) {
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// The nearest to x within a shift; its value is p->v and the shift.
FUNCTION void nearest(Point* p, const float* x, int shift, const Tables* t) {
  float y[8];
  shifted(y, x, shift);
  rounded(p, y, t);
  if (p->row < 0) far_away(p, y, t);
}

// The nearest over both shifts. Where the closer point of the two lattices is in the codebook nothing beats it.
FUNCTION int nearest_of_both(float* value, const float* x, const Tables* t) {
  Point p[2];
  float y[8], far[2];
  for (int s = 0; s < 2; s++) {
    shifted(y, x, s);
    rounded(&p[s], y, t);
    far[s] = distance(y, p[s].v);
  }
  int shift = far[0] > far[1];
  if (p[shift].row < 0) {
    for (int s = 0; s < 2; s++) {
      shifted(y, x, s);
      if (p[s].row < 0) far_away(&p[s], y, t);
      far[s] = distance(y, p[s].v);
    }
    shift = far[0] > far[1];
  }
  for (int i = 0; i < 8; i++) value[i] = p[shift].v[i] + shift_of(shift);
  return code_of(&p[shift], shift, t);
}

// The nearest of E81B, counted from the codebook's row 256.
FUNCTION int nearest_e81b(float* value, const float* x, const Tables* t) {
  int first = 0, second = 0, low = 0x7FFFFFFF, signs = 0;
  float total = 0;
  for (int i = 0; i < 8; i++) {
    const int key = key_of(x[i], i);
    second = key > first ? first : key > second ? key : second;
    first = key > first ? key : first;
    low = key < low ? key : low;
    signs |= (x[i] < 0) << i;
    total += fabsf(x[i]);
  }
  const int i = first & 7, j = second & 7, odd = POPCOUNT(signs) & 1;
  const float one = magnitude(first), pair = one + magnitude(second) - 1.f;
  const float half = 0.5f * total - (odd ? magnitude(low) : 0.f) - 1.f;
  const float both = i == 7 && signs >= 128 ? -1.f : 2 * one - 2.f;  // -2 e_7 is the one that was left out
  const int lower = i < j ? i : j, higher = i < j ? j : i;
  int row = 1 + 4 * (lower * (15 - lower) / 2 + higher - lower - 1) + 2 * (signs >> lower & 1) + (signs >> higher & 1);
  if (half > pair) row = t->half_row[signs ^ (odd ? 1 << (low & 7) : 0)];
  const float best = half > pair ? half : pair;
  if (both > best) row = 241 + 2 * i + (signs >> i & 1);
  if (fmaxf(best, both) <= 0) row = 0;
  memcpy(value, t->e81b + 8 * row, 32);
  return row;
}

// x rounded within a shift, and which three coordinates are worst so.
typedef struct {
  float v[8], step[8];  // to each one's second choice
  int worst[3], odd;    // a bit of each of the three
} Rounding;
FUNCTION void rounding(Rounding* to, const float* x, int shift) {
  float y[8], sum = 0;
  int key[8];
  shifted(y, x, shift);
  for (int i = 0; i < 8; i++) {
    to->v[i] = floorf(y[i]) + 0.5f;
    sum += to->v[i];
    const float error = y[i] - to->v[i];
    to->step[i] = error < 0 ? -1.f : 1.f;
    key[i] = key_of(error, i);
  }
  to->odd = (int)sum & 1;
  for (int m = 0; m < 3; m++) {
    int worst = 0;
    for (int i = 0; i < 8; i++) worst = key[i] > worst ? key[i] : worst;
    to->worst[m] = 1 << (worst & 7);
    for (int i = 0; i < 8; i++) key[i] = key[i] == worst ? -1 : key[i];
  }
}

// The n-th of three neighbours: some of the worst coordinates moved to their second choice, as the parity asks. Whether the
// codebook has it.
FUNCTION int neighbour(Point* to, const Rounding* from, int n, const Tables* t) {
  // by parity: both but one of the three, or one of the others or all
  const int moved = from->odd ? (n == 0 ? 2 : n == 1 ? 4 : 7) : (n == 0 ? 3 : n == 1 ? 5 : 6);
  int moves = 0;
  for (int m = 0; m < 3; m++) moves |= moved >> m & 1 ? from->worst[m] : 0;
  for (int i = 0; i < 8; i++) to->v[i] = from->v[i] + (moves >> i & 1 ? from->step[i] : 0.f);
  to->row = t->index[place(to->v, &to->signs)];
  return to->row >= 0;
}

typedef struct {
  float value[8], far;
  int code, rest;
} Candidate;

// What the second stage makes of a first one. How far it is |C (x - value)|^2, `factor` the transposed C, null: the Euclidean
// distance. First stages are, of one shift and the other in turn, the nearest, then neighbours, the nearest again for one that
// the codebook lacks.
FUNCTION void candidate(Candidate* to, const Point* p, const float* x, int shift, const float* factor, const Tables* t) {
  to->code = code_of(p, shift, t), to->rest = 0;
  for (int i = 0; i < 8; i++) to->value[i] = p->v[i] + shift_of(shift);
  if (BITS > 2) {
    const float ratio = BITS == 3 ? 2.f : 4.f;
    float left[8], fine[8];
    for (int i = 0; i < 8; i++) left[i] = (x[i] - to->value[i]) * ratio;
    to->rest = BITS == 3 ? nearest_e81b(fine, left, t) : nearest_of_both(fine, left, t);
    for (int i = 0; i < 8; i++) to->value[i] += fine[i] / ratio;
  }
  float sums[8] = {0};
  for (int i = 0; i < 8; i++) {
    const float error = x[i] - to->value[i];
    for (int j = 0; j < 8; j++) sums[j] += factor ? factor[8 * i + j] * error : (i == j) * error;
  }
  to->far = 0;
  for (int j = 0; j < 8; j++) to->far += sums[j] * sums[j];
}
