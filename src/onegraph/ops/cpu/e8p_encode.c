// Nearest E8P codes of the columns of a matrix on a CPU.

#include "../cuda/e8p_nearest.cuh"

#define MOST 8  // candidates

// Columns [begin, end) of x [8, count], `stride` floats from coordinate to coordinate, as of value. candidates: 2 or 8.
// metric: transposed factors [parts, 8, 8], each of `part` columns; null: the Euclidean one.
void e8p_encode(const Tables* t, const float* x, const float* metric, int64_t part, int64_t stride, int64_t begin,
                int64_t end, int32_t candidates, int32_t* codes, int32_t* residual, float* value) {
  for (int64_t c = begin; c < end; c++) {
    float of[8];
    Point closest[2], first;
    Rounding rounded_x[2];
    Candidate of_k[MOST];
    int best[MOST];
    for (int i = 0; i < 8; i++) of[i] = x[i * stride + c];
    for (int shift = 0; shift < 2; shift++) {
      nearest(&closest[shift], of, shift, t);
      if (candidates > 2) rounding(&rounded_x[shift], of, shift);
    }
    for (int k = 0; k < candidates; k++) {
      const int shift = k & 1;
      if (k < 2 || !neighbour(&first, &rounded_x[shift], (k >> 1) - 1, t)) first = closest[shift];
      candidate(&of_k[k], &first, of, shift, metric ? metric + 64 * (c / part) : 0, t);
      best[k] = k;
    }
    for (int half = candidates / 2; half; half /= 2)  // halves against halves: equals are told apart as torch's form does
      for (int k = 0; k < half; k++)
        if (of_k[best[k + half]].far < of_k[best[k]].far) best[k] = best[k + half];
    const Candidate* found = &of_k[best[0]];
    codes[c] = found->code, residual[c] = found->rest;
    for (int i = 0; i < 8; i++) value[i * stride + c] = found->value[i];
  }
}
