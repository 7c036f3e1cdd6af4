// One call of a kernel of ops/cpu in a program of its own: arguments on stdin, results on stdout. Each is a length in
// bytes (int64) and as many bytes; structs and numbers are alike on all 64-bit little-endian targets.

#include <stdio.h>
#include SOURCE

static int64_t length;

static void *take(void) {
  if (fread(&length, 8, 1, stdin) != 1) exit(2);
  void *at = aligned_alloc(64, (length + 127) / 64 * 64);
  if (!at || fread(at, 1, length, stdin) != (size_t)length) exit(3);
  return at;
}

static void give(const void *at, int64_t bytes) {
  fwrite(&bytes, 8, 1, stdout);
  fwrite(at, 1, bytes, stdout);
}

#ifdef BITS
#include <stdlib.h>
int main(void) {
  const void *tables[6];
  for (int i = 0; i < 6; i++) tables[i] = take();
  float *x = take(), *metric = take();
  if (!length) metric = 0;
  int64_t *numbers = take(), count = numbers[0];  // columns, those of a part, candidates
  int32_t *codes = malloc(4 * count), *residual = malloc(4 * count);
  float *value = malloc(32 * count);
  e8p_encode((const Tables *)tables, x, metric, numbers[1], count, 0, count, numbers[2], codes, residual, value);
  give(codes, 4 * count), give(residual, 4 * count), give(value, 32 * count);
}
#else
int main(void) {
  Common *common = take();
  common->back = take();
  Row *row = take();
  row->pages = take();
  float *vectors = take(), *ring = take();
  int64_t ring_bytes = length;
  uint8_t *cache = take();
  int64_t cache_bytes = length, out_bytes = 4 * DIM * GROUP * common->kv_heads;
  float *out = aligned_alloc(64, (out_bytes + 63) / 64 * 64);
  if (turboquant_decode(common, row, vectors, ring, cache, out)) return 4;
  give(ring, ring_bytes), give(cache, cache_bytes), give(out, out_bytes);
}
#endif
