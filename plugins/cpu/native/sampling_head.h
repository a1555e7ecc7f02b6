// The likeliest tokens of a row, in order, and which of them the options keep.
#pragma once

#include <vector>

#include "sampling.h"

namespace castline {

// Nothing is sorted but the head. Its bound comes from the blocks' maxima: where k blocks reach a value, at least k
// tokens do. The k-th value itself is not looked for: a histogram gives one a little below.
class Head {
 public:
  // Takes the first *width* tokens of *row*, at least one; returns what they weigh.
  double find(const Row& row, double temperature, int64_t width);

  // How many of them are kept by top-p (those before each weigh less than *line*) and by min-p.
  int64_t kept(const Choice& choice, double line) const;

  // No token after them would be kept.
  bool is_complete(const Choice& choice, double line) const {
    return weight_ >= line || weights_.back() < choice.min_p || complete_row_;
  }

  // Of the first *count*, the one in which uniform times their weight falls.
  int32_t pick(const Choice& choice, int64_t count) const;

 private:
  std::vector<uint64_t> keys_;
  std::vector<double> weights_;
  double weight_ = 0;  // of all of them
  bool complete_row_ = false;
  std::vector<int32_t> ids_;
};

}  // namespace castline
