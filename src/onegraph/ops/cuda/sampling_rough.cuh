// Weights and races in float32, near enough to tell who cannot win. Cards for games run float64 at a 64th of the rate, so it
// is left to those few whom this does not tell apart, and nothing is decided within DOUBT or MARGIN of what it says.
//
// A place is how far a logit lies below the largest, in bins, 0 to BINS: it never falls as the logit falls, so what top-k
// and top-p keep is all of some bins, a part of one, and nothing of the rest.
#pragma once

#include "sampling_row.cuh"

constexpr float DEPTH = 28.f;                      // e^-28: less than a unit of mass, 2^-40
constexpr float LOG2E = 1.44269504f;
constexpr float FAR = 64.f;                        // log2 of a weight that loses any race against the largest's
constexpr float BASE = 128.f;                      // makes every race positive, so that its bits are in order
constexpr float MARGIN = 0x1p-8f;                  // of log2 of two races: four times their errors
constexpr float DOUBT = 0x1p-15f;                  // of a sum of weights, relative: twice its error, less the bins' units

__device__ __forceinline__ Rough rough_of(const Wish& wish, float low, u64 stream) {
  const float half = wish.temperature > 1.f ? .5f : 1.f;  // no difference that counts is infinite
  const float high = logit_of(wish.top) * half, temperature = wish.temperature * half;
  const float by = min((float)BINS / min(DEPTH * temperature, high - low * half), 3e38f);
  return {stream, half, high, by, max(LOG2E / (temperature * by), 1e-37f)};
}
// BASE and log2 of weight / Exp(1) but for a constant; 0 where the weight is too little.
__device__ __forceinline__ float Rough::race(float x, int index) const {
  const float lost = place(x) * fall;
  if (!(lost < FAR)) return 0.f;
  const u64 number = number_of(index, stream);
  const u32 upper = number >> 32;
  float uniform = (float)upper * 0x1p-32f + 0x1p-33f, rest = (float)~upper * 0x1p-32f + 0x1p-33f;  // rest: 1 - uniform
  if (upper + 1024u < 2048u)                       // near 0 or 1 these bits are too few
    uniform = ((float)(number >> 12) + .5f) * 0x1p-52f, rest = ((float)(~number >> 12) + .5f) * 0x1p-52f;
  const float waits = rest < 0x1p-8f ? (rest + .5f * rest * rest) * LOG2E : -log2_fast(uniform);
  return BASE - lost - log2_fast(waits);
}
// Bits behind the point of a bin's masses in a block, whose sum 32 bits hold.
__device__ __forceinline__ int mass_bits(const Arguments& p) { return __clz(p.part - 1) - 1; }
// What is added to a sum of weights, or taken from it, where another one is compared with it.
__device__ __forceinline__ float doubt(const Arguments& p, float whole) {
  return whole * (DOUBT + 4.f / (float)(1u << mass_bits(p))) + (float)p.width * 0x1p-39f;
}
