// The passes over the vocabulary, once, compiled for each instruction set by the sampling_*.cpp units.
#pragma once

#include <float.h>
#include <math.h>

#include "sampling.h"
#include "sampling_collect.h"
#include "simd.h"

namespace castline::CASTLINE_ISA {
namespace {

// -infinity becomes -FLT_MAX and so stays finite; NaN stays NaN (the order of the operands matters), as does +infinity.
CASTLINE_INLINE Vec bounded_below(Vec x) { return max(broadcast(-FLT_MAX), x); }

CASTLINE_INLINE Vec load_part(const float* p, int count) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : -INFINITY;
  return load(lanes);
}

void block_maxima(const float* logits, int count, float* maxima) {
  constexpr int kChains = 4;  // sums that do not wait for each other
  Vec unsound[kChains];       // become NaN where x * 0 is not 0
  for (Vec& chain : unsound) chain = broadcast(0.0f);
  int block = 0;
  for (; (block + 1) * kTokenBlock <= count; ++block) {
    Vec top[kChains];
    for (Vec& chain : top) chain = broadcast(-FLT_MAX);
    for (int i = 0; i < kTokenBlock; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const Vec x = bounded_below(load(logits + block * kTokenBlock + i + chain * kLanes));
        unsound[chain] = fma(x, broadcast(0.0f), unsound[chain]);
        top[chain] = max(top[chain], x);
      }
    }
    maxima[block] = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
  }
  if (block * kTokenBlock < count) {
    maxima[block] = -FLT_MAX;
    for (int i = block * kTokenBlock; i < count; i += kLanes) {
      const Vec x = bounded_below(load_part(logits + i, count - i));
      unsound[0] = fma(x, broadcast(0.0f), unsound[0]);
      const float top = reduce_max(x);
      maxima[block] = top > maxima[block] ? top : maxima[block];
    }
    ++block;
  }
  const float sound = reduce_add(add(add(unsound[0], unsound[1]), add(unsound[2], unsound[3])));
  for (int i = 0; sound != 0.0f && i < block; ++i) maxima[i] = NAN;
}

float peak(const float* maxima, int blocks) {
  Vec top = broadcast(-FLT_MAX), unsound = broadcast(0.0f);
  int i = 0;
  for (; i + kLanes <= blocks; i += kLanes) {
    const Vec x = load(maxima + i);
    unsound = fma(x, broadcast(0.0f), unsound);
    top = max(top, x);
  }
  if (i < blocks) {
    const Vec x = bounded_below(load_part(maxima + i, blocks - i));
    unsound = fma(x, broadcast(0.0f), unsound);
    top = max(top, x);
  }
  return reduce_max(top) + reduce_add(unsound);
}

template <bool Tokens>
double weigh_blocks(const float* row, int vocab, float peak, float inverse_temperature, double* blocks, float* tokens) {
  const Vec minus_peak = broadcast(-peak), scale = broadcast(inverse_temperature * kLog2E);
  double total = 0;
  for (int first = 0, block = 0; first < vocab; first += kTokenBlock, ++block) {
    Vec sum = broadcast(0.0f);
    const int last = first + kTokenBlock < vocab ? first + kTokenBlock : vocab;
    int i = first;
    for (; i + kLanes <= last; i += kLanes) {
      const Vec weight = exp2(mul(add(load(row + i), minus_peak), scale));
      if constexpr (Tokens) store(tokens + i, weight);
      sum = add(sum, weight);
    }
    if (i < last) {
      const Vec weight = exp2(mul(add(load_part(row + i, last - i), minus_peak), scale));
      if constexpr (Tokens) store_first(tokens + i, last - i, weight);
      sum = add(sum, weight);
    }
    blocks[block] = reduce_add(sum);
    total += blocks[block];
  }
  return total;
}

double block_weights(const float* row, int vocab, float peak, float inverse_temperature, double* blocks, float* tokens) {
  if (tokens == nullptr) return weigh_blocks<false>(row, vocab, peak, inverse_temperature, blocks, nullptr);
  return weigh_blocks<true>(row, vocab, peak, inverse_temperature, blocks, tokens);
}

double sum_below(const float* values, int count, float bound) {
  const Vec zero = broadcast(0.0f);
  Vec sum = zero;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec x = load(values + i);
    sum = add(sum, keep_above(x, sub(zero, x), -bound, zero));
  }
  double total = reduce_add(sum);
  for (; i < count; ++i) total += values[i] < bound ? values[i] : 0.0f;
  return total;
}

Sum sum_from(const float* logits, const float* weights, int count, float bound) {
  constexpr int kChains = 4;                    // sums that do not wait for each other
  constexpr int kPart = 64 * kChains * kLanes;  // summed in float
  const Vec zero = broadcast(0.0f), one = broadcast(1.0f);
  Sum total{0, 0};
  int i = 0;
  while (i + kChains * kLanes <= count) {
    Vec weight[kChains] = {zero, zero, zero, zero}, number = zero;
    const int end = i + kPart < count ? i + kPart : count;
    for (; i + kChains * kLanes <= end; i += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const int at = i + chain * kLanes;
        const Vec negative = sub(zero, load(logits + at));
        weight[chain] = add(weight[chain], keep_above(zero, negative, -bound, load(weights + at)));
        number = add(number, keep_above(zero, negative, -bound, one));
      }
    }
    total.weight += reduce_add(add(add(weight[0], weight[1]), add(weight[2], weight[3])));
    total.count += static_cast<int>(reduce_add(number));
  }
  for (; i < count; ++i) total = total + Sum{logits[i] >= bound ? weights[i] : 0.0f, logits[i] >= bound};
  return total;
}

int collect(const float* row, int first, int last, float low, float high, int32_t* ids) {
  int count = 0, i = first;
  for (; i + kLanes <= last; i += kLanes) count += collect_lanes(load(row + i), low, high, i, ids + count);
  for (; i < last; ++i) {
    ids[count] = i;
    count += (row[i] >= low) & (row[i] < high);
  }
  return count;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
