// Nearest E8P codes of vectors, one or two stages: what `quant/e8p.py` does for all columns at once in torch's calls,
// here a column at a time, in registers. The method, its proofs and its names are told there.
//
// BITS is set when this is compiled: 2, 3 or 4.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ORBITS 7
#define EXPLICIT 29
#define FIRST_EXPLICIT 227
#define MOST 8  // candidates of a first stage

static const uint8_t EXCESS[ORBITS][4] = {{0, 0, 0, 0}, {1, 0, 0, 0}, {1, 1, 0, 0}, {1, 1, 1, 0},
                                          {2, 0, 0, 0}, {1, 1, 1, 1}, {2, 1, 0, 0}};
static const uint8_t ORBIT_ODD[ORBITS] = {0, 1, 0, 1, 0, 0, 1};
static const float ORBIT_COST[ORBITS] = {0, 1, 2, 3, 3, 4, 4};  // |s|^2 / 2 less what all share

typedef struct {
  const int32_t* index;     // [4^8]: base-4 digits of |v| - 1/2 -> row of the codebook, -1 where it has none
  const int32_t* odd;       // [256]: whether a row has an odd number of negatives
  const float* absolute;    // [256, 8]: |v|
  const int32_t* halves;    // [29, 3]: where the explicit vectors of norm 12 have a half
  const int32_t* half_row;  // [256]: sign bits -> row of E81B
  const float* e81b;        // [256, 8]
} Tables;

typedef struct {
  float v[8];
  int32_t row, signs;
} Point;

static inline int32_t key_of(float x, int lane) {  // sorts like |x|, and tells the coordinate
  int32_t bits;
  memcpy(&bits, &x, 4);
  return (bits & 0x7FFFFFF8) | lane;
}
static inline float magnitude(int32_t key) {
  float x;
  memcpy(&x, &key, 4);
  return x;
}
static inline int32_t place(const float* v, int32_t* signs) {  // of |v| in the index
  int32_t at = 0, negative = 0;
  for (int i = 0; i < 8; i++) {
    const float digit = fminf(fabsf(v[i]) - 0.5f, 3.f);
    at += (int32_t)digit << 2 * i;
    negative |= (v[i] < 0) << i;
  }
  *signs = negative;
  return at;
}

// The point of all of D8^ that is nearest to y: rounds, and moves the worst coordinate where the parity is wrong.
static inline void rounded(Point* to, const float* y, const Tables* t) {
  float error[8], sum = 0;
  int32_t worst = 0;
  for (int i = 0; i < 8; i++) {
    to->v[i] = floorf(y[i]) + 0.5f;
    error[i] = y[i] - to->v[i];
    sum += to->v[i];
  }
  for (int i = 0; i < 8; i++) {
    const int32_t key = key_of(error[i], i);
    worst = key > worst ? key : worst;
  }
  if ((int32_t)sum & 1) to->v[worst & 7] += error[worst & 7] < 0 ? -1.f : 1.f;
  to->row = t->index[place(to->v, &to->signs)];
}

// The codebook's nearest to y where D8^'s is not in it: by orbits, and the explicit vectors of norm 12.
static void far_away(Point* to, const float* y, const Tables* t) {
  float a[8], top[8], total = 0;
  int order[8], odd = 0;
  int32_t signs = 0;
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
  float best = -INFINITY;
  int orbit = 0;
  for (int o = 0; o < ORBITS; o++) {
    const float score = gain[o] - (ORBIT_COST[o] + (ORBIT_ODD[o] != odd ? smallest : 0.f));
    if (score > best) best = score, orbit = o;
  }
  int32_t key = 0;
  for (int i = 0; i < 4; i++) key += EXCESS[orbit][i] << 2 * order[i];
  int32_t row = t->index[key], flip = order[7];
  if (total - 5.f - (top[5] + top[6] + top[7]) - (odd ? 0.f : smallest) > best) {
    for (int j = 0; j < EXPLICIT; j++) {
      const int32_t* half = t->halves + 3 * j;
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

static inline int32_t code_of(const Point* p, int shift, const Tables* t) {
  return p->row << 8 | (p->signs ^ t->odd[p->row] ^ shift);  // the shift rides on the parity of the sign byte
}
static inline float shift_of(int shift) { return shift ? -0.25f : 0.25f; }
static inline void shifted(float* y, const float* x, int shift) {
  for (int i = 0; i < 8; i++) y[i] = x[i] - shift_of(shift);
}
static inline float distance(const float* a, const float* b) {
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// The nearest to x within a shift; its value is p->v and the shift.
static inline void nearest(Point* p, const float* x, int shift, const Tables* t) {
  float y[8];
  shifted(y, x, shift);
  rounded(p, y, t);
  if (p->row < 0) far_away(p, y, t);
}

// The nearest over both shifts. Where the closer point of the two lattices is in the codebook nothing beats it.
static inline int32_t nearest_of_both(float* value, const float* x, const Tables* t) {
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
static inline int32_t nearest_e81b(float* value, const float* x, const Tables* t) {
  int32_t first = 0, second = 0, low = 0x7FFFFFFF, signs = 0;
  float total = 0;
  for (int i = 0; i < 8; i++) {
    const int32_t key = key_of(x[i], i);
    second = key > first ? first : key > second ? key : second;
    first = key > first ? key : first;
    low = key < low ? key : low;
    signs |= (x[i] < 0) << i;
    total += fabsf(x[i]);
  }
  const int i = first & 7, j = second & 7, odd = __builtin_popcount(signs) & 1;
  const float one = magnitude(first), pair = one + magnitude(second) - 1.f;
  const float half = 0.5f * total - (odd ? magnitude(low) : 0.f) - 1.f;
  const float both = i == 7 && signs >= 128 ? -1.f : 2 * one - 2.f;  // -2 e_7 is the one that was left out
  const int lower = i < j ? i : j, higher = i < j ? j : i;
  int32_t row = 1 + 4 * (lower * (15 - lower) / 2 + higher - lower - 1) + 2 * (signs >> lower & 1) + (signs >> higher & 1);
  if (half > pair) row = t->half_row[signs ^ (odd ? 1 << (low & 7) : 0)];
  const float best = half > pair ? half : pair;
  if (both > best) row = 241 + 2 * i + (signs >> i & 1);
  if (fmaxf(best, both) <= 0) row = 0;
  memcpy(value, t->e81b + 8 * row, 32);
  return row;
}

// Three neighbours of x within a shift: rounded, and the worst coordinates moved to their second choice as the parity
// asks. One that the codebook lacks is replaced by `instead`.
static inline void neighbours(Point* to, const Point* instead, const float* x, int shift, const Tables* t) {
  float y[8], v[8], step[8], sum = 0;
  int32_t key[8], worst[3];
  shifted(y, x, shift);
  for (int i = 0; i < 8; i++) {
    v[i] = floorf(y[i]) + 0.5f;
    sum += v[i];
    step[i] = y[i] - v[i] < 0 ? -1.f : 1.f;
    key[i] = key_of(y[i] - v[i], i);
  }
  for (int n = 0; n < 3; n++) {
    worst[n] = 0;
    for (int i = 0; i < 8; i++) worst[n] = key[i] > worst[n] ? key[i] : worst[n];
    worst[n] &= 7;
    key[worst[n]] = -1;
  }
  static const uint8_t MOVED[2][3] = {{3, 5, 6}, {2, 4, 7}};  // by parity: which of the worst
  const int odd = (int32_t)sum & 1;
  for (int m = 0; m < 3; m++) {
    memcpy(to[m].v, v, 32);
    for (int n = 0; n < 3; n++)
      if (MOVED[odd][m] >> n & 1) to[m].v[worst[n]] += step[worst[n]];
    to[m].row = t->index[place(to[m].v, &to[m].signs)];
    if (to[m].row < 0) to[m] = *instead;
  }
}

// Columns [begin, end) of x [8, count], `stride` floats from coordinate to coordinate, as of value. candidates: 2 or 8.
// metric: transposed factors [parts, 8, 8], each of `part` columns; null: the Euclidean one.
void e8p_encode(const Tables* t, const float* x, const float* metric, int64_t part, int64_t stride, int64_t begin,
                int64_t end, int32_t candidates, int32_t* codes, int32_t* residual, float* value) {
  for (int64_t c = begin; c < end; c++) {
    float of[8], found[MOST][8], far[MOST];
    int32_t code[MOST], rest[MOST] = {0};
    Point p[MOST];  // the nearest of both shifts, then neighbours of one and of the other in turn
    for (int i = 0; i < 8; i++) of[i] = x[i * stride + c];
    for (int s = 0; s < 2; s++) nearest(&p[s], of, s, t);
    if (candidates > 2)
      for (int s = 0; s < 2; s++) {
        Point near[3];
        neighbours(near, &p[s], of, s, t);
        for (int m = 0; m < 3; m++) p[2 + 2 * m + s] = near[m];
      }
    const float* factor = metric ? metric + 64 * (c / part) : 0;
    for (int k = 0; k < candidates; k++) {
      const int shift = k & 1;
      code[k] = code_of(&p[k], shift, t);
      for (int i = 0; i < 8; i++) found[k][i] = p[k].v[i] + shift_of(shift);
      if (BITS > 2) {
        const float ratio = BITS == 3 ? 2.f : 4.f;
        float left[8], fine[8];
        for (int i = 0; i < 8; i++) left[i] = (of[i] - found[k][i]) * ratio;
        rest[k] = BITS == 3 ? nearest_e81b(fine, left, t) : nearest_of_both(fine, left, t);
        for (int i = 0; i < 8; i++) found[k][i] += fine[i] / ratio;
      }
      float sums[8] = {0};
      for (int i = 0; i < 8; i++) {
        const float error = of[i] - found[k][i];
        for (int j = 0; j < 8; j++) sums[j] += factor ? factor[8 * i + j] * error : (i == j) * error;
      }
      far[k] = 0;
      for (int j = 0; j < 8; j++) far[k] += sums[j] * sums[j];
    }
    int best[MOST];
    for (int k = 0; k < candidates; k++) best[k] = k;
    for (int half = candidates / 2; half; half /= 2)  // halves against halves: equals are told apart as torch's form does
      for (int k = 0; k < half; k++)
        if (far[best[k + half]] < far[best[k]]) best[k] = best[k + half];
    codes[c] = code[best[0]], residual[c] = rest[best[0]];
    for (int i = 0; i < 8; i++) value[i * stride + c] = found[best[0]][i];
  }
}
