/* A decode step of one row from 4-bit TurboQuant codes: writes keys and values to the ring and their codes to a page,
 * and attends to both, one softmax. What the bytes mean stands in formats/turboquant_layout.py, what is computed in
 * ops/turboquant_decode.py. Vectors are GCC's and clang's, so that any CPU has its own instructions for them.
 *
 * A byte holds two neighbouring dimensions, so that of 16 bytes the low nibbles are the even ones of 32 dimensions:
 * queries are read as all even dimensions, then all odd ones. A level is unit * (2 m + 1), m in 8 bits.
 *
 * To be compiled with DIM, of heads, a multiple of 32, and GROUP, query heads on a kv head.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#define LANES 16
#define BLOCK 16
#define HALF (DIM / 2)               /* bytes of a token's codes */
#define TOKEN (DIM + 4)              /* bytes of a token */
#define EACH for (int g = 0; g < GROUP; g++)

typedef float F __attribute__((vector_size(64), aligned(4)));
typedef float F8 __attribute__((vector_size(32), aligned(4)));
typedef float F4 __attribute__((vector_size(16), aligned(4)));
typedef int32_t I __attribute__((vector_size(64), aligned(4)));
typedef int16_t S __attribute__((vector_size(32), aligned(2)));
typedef int8_t B __attribute__((vector_size(16), aligned(1)));
typedef uint8_t U __attribute__((vector_size(16), aligned(1)));
typedef int64_t L __attribute__((vector_size(64), aligned(8)));

typedef struct {
    const float *back; /* [DIM, DIM] */
    int32_t kv_heads, ring_size, page_size, kind; /* kind: 0 norm, 1 matched, 2 unbiased */
    float scale, unit;
    float edges[15], levels[16];  /* between ranks; what a rank means */
    int8_t table[16];             /* m of a code */
    uint8_t codes[16];            /* the code of a rank */
} Common;

typedef struct {
    const int32_t *pages;           /* of the sequence */
    int32_t slot, at, first, older; /* it sees tokens from `first` to `at`, those before `older` from codes */
} Row;

static inline F splat(float x) { return (F){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline float sum(F x) {
    struct { F8 low, high; } half;
    memcpy(&half, &x, sizeof half);
    F8 eight = half.low + half.high;
    struct { F4 low, high; } quarter;
    memcpy(&quarter, &eight, sizeof quarter);
    F4 four = quarter.low + quarter.high;
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* e to the x for x <= 0, 0 below -87. */
static inline F power(F x) {
    F n = x * splat(1.44269504f) + splat(12582912.0f) - splat(12582912.0f); /* the nearest integer */
    F r = x - n * splat(0.693145751953125f) - n * splat(1.42860677e-6f);    /* ln 2 in two parts */
    F p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r * r + r + splat(1.0f);
    I bits = (__builtin_convertvector(n, I) + 127) << 23;
    return (F)((I)(p * (F)bits) & ~(I)(x <= splat(-87.0f))); /* NaN stays */
}

/* In steps that GCC has instructions for. */
static inline F meant(B table, U codes) {
    S wide = __builtin_convertvector(__builtin_shuffle(table, (B)codes), S);
    return __builtin_convertvector(__builtin_convertvector(wide, I), F);
}

static inline float half(const uint8_t *at) {
#ifdef __F16C__
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
#else
    _Float16 found;
    memcpy(&found, at, 2);
    return (float)found;
#endif
}

static inline void put_half(uint8_t *at, float x) {
#ifdef __F16C__
    uint16_t bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
    memcpy(at, &bits, 2);
#else
    _Float16 rounded = (_Float16)x;
    memcpy(at, &rounded, 2);
#endif
}

/* Codes and norm of a vector. Bytes of codes stand `apart` from each other. */
static void code(const Common *c, const float *y, uint8_t *row, int apart, uint8_t *norm_at) {
    float norm, squares = 0, product = 0;
    uint8_t codes[DIM];
    F square = splat(0);
    for (int i = 0; i < DIM; i += LANES) square += *(const F *)(y + i) * *(const F *)(y + i);
    norm = sqrtf(sum(square));
    float size = norm < 1e-30f ? 1e-30f : norm;
    for (int i = 0; i < DIM; i += LANES) {
        F unit = *(const F *)(y + i) / splat(size);
        I rank = {0};
        for (int j = 0; j < 15; j++) rank -= (I)(unit > splat(c->edges[j]));
        for (int k = 0; k < LANES; k++) {
            float level = c->levels[rank[k]];
            codes[i + k] = c->codes[rank[k]];
            squares += level * level;
            product += unit[k] * level;
        }
    }
    if (c->kind == 1) norm /= sqrtf(squares);
    if (c->kind == 2) norm /= product < 1e-3f ? 1e-3f : product;
    put_half(norm_at, norm > 65504.0f ? 65504.0f : norm);
    for (int i = 0; i < HALF; i++) row[i * apart] = codes[2 * i] | codes[2 * i + 1] << 4;
}

/* The block that token t of a sequence is in. */
static inline uint8_t *block_of(const Common *c, const Row *row, uint8_t *cache, int head, int t) {
    int64_t page = (int64_t)row->pages[t / c->page_size] * c->kv_heads + head;
    return cache + (page * c->page_size + t % c->page_size / BLOCK * BLOCK) * TOKEN;
}

/* One kv head: its queries q [GROUP, DIM] -> out [GROUP, DIM], not turned back. ring: the sequence's. */
static void attend(
    const Common *c, const Row *row, const float *q, const float *ring, uint8_t *cache, int head, float *scores,
    float *out
) {
    const int across = 2 * c->kv_heads * DIM, first = row->first, count = row->at + 1 - first;
    const int older = row->older > first ? row->older : first, padded = count / LANES * LANES + 2 * LANES;
    float split[GROUP][DIM], bias[GROUP], total[GROUP];
    F found[GROUP];
    B table;
    memcpy(&table, c->table, sizeof table);
    EACH {
        bias[g] = 0;
        for (int i = 0; i < HALF; i++) {
            split[g][i] = q[g * DIM + 2 * i] * c->scale;
            split[g][HALF + i] = q[g * DIM + 2 * i + 1] * c->scale;
            bias[g] += split[g][i] + split[g][HALF + i];
        }
    }
    for (int start = first / BLOCK * BLOCK; start < older; start += BLOCK) {
        const uint8_t *block = block_of(c, row, cache, head, start);
        const int last = older - start < BLOCK ? older - start : BLOCK;
        for (int t = first > start ? first - start : 0; t < last; t++) {
            const float norm = half(block + BLOCK * DIM + 2 * t) * c->unit;
            EACH found[g] = splat(0);
            for (int i = 0; i < HALF; i += LANES) {
                U both = *(const U *)(block + t * HALF + i);
                F even = meant(table, both & 15), odd = meant(table, both >> 4);
                EACH found[g] += even * *(const F *)(split[g] + i) + odd * *(const F *)(split[g] + HALF + i);
            }
            EACH scores[g * padded + start + t - first] = norm * (2 * sum(found[g]) + bias[g]);
        }
    }
    for (int t = older; t <= row->at; t++) {
        const float *key = ring + (int64_t)(t % c->ring_size) * across + head * DIM;
        EACH found[g] = splat(0);
        for (int i = 0; i < DIM; i += LANES)
            EACH found[g] += *(const F *)(key + i) * *(const F *)(q + g * DIM + i);
        EACH scores[g * padded + t - first] = c->scale * sum(found[g]);
    }
    EACH {
        float *score = scores + g * padded, most = -INFINITY;
        F all = splat(0);
        for (int t = count; t < padded; t++) score[t] = -INFINITY;
        for (int t = 0; t < count; t++) most = score[t] > most ? score[t] : most;
        for (int t = 0; t < padded; t += LANES) {
            F weight = power(*(F *)(score + t) - splat(most));
            *(F *)(score + t) = weight;
            all += weight;
        }
        total[g] = sum(all);
    }

    for (int i = 0; i < DIM; i += LANES) {
        const float *values = ring + across / 2 + head * DIM + i;
        EACH found[g] = splat(0);
        for (int t = older; t <= row->at; t++) {
            F value = *(const F *)(values + (int64_t)(t % c->ring_size) * across);
            EACH found[g] += value * splat(scores[g * padded + t - first]);
        }
        EACH *(F *)(out + g * DIM + i) = found[g];
    }
    if (older > first) {
        float *weights = scores + GROUP * padded; /* times norms, of a block: even tokens and odd ones in turn */
        F even[GROUP][DIM / LANES], odd[GROUP][DIM / LANES];
        EACH bias[g] = 0;
        memset(even, 0, sizeof even);
        memset(odd, 0, sizeof odd);
        for (int start = first / BLOCK * BLOCK; start < older; start += BLOCK) {
            const uint8_t *block = block_of(c, row, cache, head, start);
            for (int t = 0; t < BLOCK; t++) {
                const int seen = start + t >= first && start + t < older;
                const float norm = seen ? half(block + BLOCK * (DIM + 2) + 2 * t) * c->unit : 0;
                EACH bias[g] += weights[g * BLOCK + t] = seen ? norm * scores[g * padded + start + t - first] : 0;
            }
            for (int i = 0; i < DIM / LANES; i++) { /* 16 bytes: 16 dimensions of both tokens */
                F low[GROUP], high[GROUP];
                EACH low[g] = even[g][i], high[g] = odd[g][i];
                for (int p = 0; p < BLOCK / 2; p++) {
                    U both = *(const U *)(block + BLOCK * HALF + p * DIM + i * LANES);
                    F first_ones = meant(table, both & 15), second_ones = meant(table, both >> 4);
                    EACH {
                        int64_t two;
                        memcpy(&two, weights + g * BLOCK + 2 * p, sizeof two);
                        F weight = (F)(L){two, two, two, two, two, two, two, two};
                        low[g] += first_ones * weight;
                        high[g] += second_ones * weight;
                    }
                }
                EACH even[g][i] = low[g], odd[g][i] = high[g];
            }
        }
        EACH for (int i = 0; i < DIM; i += 2) {
            F low = even[g][i / LANES], high = odd[g][i / LANES];
            out[g * DIM + i] += 2 * (low[i % LANES] + low[i % LANES + 1]) + bias[g];
            out[g * DIM + i + 1] += 2 * (high[i % LANES] + high[i % LANES + 1]) + bias[g];
        }
    }
    EACH for (int i = 0; i < DIM; i += LANES) *(F *)(out + g * DIM + i) /= splat(total[g]);
}

/* vectors: [heads + 2 kv_heads, DIM], a row's queries, keys and values, turned; ring: [rings, ring_size, 2, kv_heads,
 * DIM]; cache: all pages; out: [heads, DIM], turned back. 1 where there is no memory for scores, else 0. */
int turboquant_decode(
    const Common *c, const Row *row, const float *vectors, float *ring, uint8_t *cache, float *out
) {
    const int across = 2 * c->kv_heads * DIM, place = row->at % BLOCK;
    const float *new = vectors + GROUP * c->kv_heads * DIM;
    float *scores = malloc(sizeof(float) * GROUP * (row->at + 1 - row->first + 2 * LANES + BLOCK));
    if (!scores) return 1;
    ring += (int64_t)row->slot * c->ring_size * across;
    memcpy(ring + (int64_t)(row->at % c->ring_size) * across, new, across * sizeof(float));
    for (int head = 0; head < c->kv_heads; head++) {
        uint8_t *block = block_of(c, row, cache, head, row->at), *norms = block + BLOCK * DIM + 2 * place;
        code(c, new + head * DIM, block + place * HALF, 1, norms);
        uint8_t *values = block + BLOCK * HALF + place / 2 * DIM + place % 2;
        code(c, new + across / 2 + head * DIM, values, 2, norms + 2 * BLOCK);

        float found[GROUP * DIM];
        attend(c, row, vectors + head * GROUP * DIM, ring, cache, head, scores, found);
        for (int i = 0; i < DIM; i += LANES) {
            F turned[GROUP];
            EACH turned[g] = splat(0);
            for (int j = 0; j < DIM; j++) {
                F back = *(const F *)(c->back + j * DIM + i);
                EACH turned[g] += splat(found[g * DIM + j]) * back;
            }
            EACH *(F *)(out + (head * GROUP + g) * DIM + i) = turned[g];
        }
    }
    free(scores);
    return 0;
}
