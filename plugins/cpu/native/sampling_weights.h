// The weights of a row's tokens, exp((logit - peak) / temperature), a block at a time and only where they are wanted:
// what the other blocks weigh is bounded by their maxima.
#pragma once

#include <vector>

#include "sampling.h"

namespace castline {

class RowWeights {
 public:
  // The weight of the whole row lies between them, but for rounding.
  struct Bounds {
    double lower, upper;
  };

  // Nothing is weighed yet. The row and its maxima stay until the last call.
  void start(const Row& row, double temperature);

  // Weighs the blocks in which a token weighs *bound* or more, and leaves the others.
  Bounds weigh_from(float bound);

  // Weighs what is left; returns the weight of the row. The same bits, whatever was weighed before.
  double weigh_all() { return weigh_from(0).lower; }

  // Of each block, after weigh_all.
  const double* blocks() const { return blocks_.data(); }
  // Of each token. Every one is weighed, whatever was before: few rows want them, and they fill a cache.
  const float* weigh_tokens();

 private:
  void weigh(int first, int last, float* tokens);
  void fetch_block(int block) const;

  Row row_{};
  float inverse_temperature_ = 0;
  std::vector<float> tops_, tokens_;       // tops_: of each block, the weight of its likeliest token
  std::vector<double> top_sums_, blocks_;  // blocks_: negative where it is not weighed
  std::vector<int32_t> chosen_;            // blocks
};

}  // namespace castline
