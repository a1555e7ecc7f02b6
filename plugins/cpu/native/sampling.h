// What the sampler and its kernels share. Rows are float logits [vocabulary].
#pragma once

#include <cstdint>

#include "isa.h"

namespace castline {

// Tokens of a block. A row's blocks are its maxima's and weights' unit; the last may be short.
constexpr int kTokenBlock = 64;
constexpr int kCollectSlack = 16;

// How the token of one row is chosen; castline.plugins.cpu.sampling.CHOICE is its pair. temperature 0 takes the best
// token (of equal ones the lowest id); top_k 0, top_p 1 and min_p 0 truncate nothing; uniform, in [0, 1), chooses.
struct Choice {
  int64_t row;
  double temperature;
  int64_t top_k;
  double top_p, min_p, uniform;
};

// Of some tokens.
struct Sum {
  double weight;
  int count;
};

inline Sum operator+(Sum a, Sum b) { return {a.weight + b.weight, a.count + b.count}; }

// The kernels of one instruction set.
struct SamplingKernels {
  Isa isa;
  // The largest of each block of *count* logits, of which the first begins a block. -infinity counts as -FLT_MAX; where
  // one is NaN or +infinity, all maxima are NaN.
  void (*block_maxima)(const float* logits, int count, float* maxima);
  // The largest of a row's maxima: NaN where one is NaN.
  float (*peak)(const float* maxima, int blocks);
  // exp((x - peak) * inverse_temperature) of each token, where *tokens* is not nullptr, and its sum over each block;
  // returns the sum of all.
  double (*block_weights)(const float* row, int vocab, float peak, float inverse_temperature, double* blocks,
                          float* tokens);
  // The sum of those of *values* that are below *bound*.
  double (*sum_below)(const float* values, int count, float bound);
  // Of the tokens whose logit is at least *bound*, which is finite. It never grows with the bound, to the bit.
  Sum (*sum_from)(const float* logits, const float* weights, int count, float bound);
  // Writes the ids first .. last of *row*'s logits low <= x < high to *ids*, ascending; returns how many. May write up to
  // kCollectSlack ids more.
  int (*collect)(const float* row, int first, int last, float low, float high, int32_t* ids);
};

// Of the selected instruction set; nullptr where CASTLINE_ISA is refused.
const SamplingKernels* select_sampling();

// The logits of one sequence, with the maxima of their blocks and the peak of these, which is finite.
struct Row {
  const SamplingKernels* kernels;
  const float *logits, *maxima;
  int vocab;
  float peak;

  int blocks() const { return (vocab + kTokenBlock - 1) / kTokenBlock; }
  int block_end(int block) const { return vocab < (block + 1) * kTokenBlock ? vocab : (block + 1) * kTokenBlock; }
};

}  // namespace castline
