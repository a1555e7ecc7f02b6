// The likeliest tokens of a row, in order, and which of them the options keep.
#pragma once

#include <vector>

#include "sampling.h"

namespace castline {

// Nothing is sorted but the head. Where it is to have a number of tokens, its bound comes from the blocks' maxima: where k
// blocks reach a value, at least k tokens do. The k-th value itself is not looked for: a histogram gives one a little
// below.
class Head {
 public:
  static constexpr int kMostTaken = 256;

  // Takes all tokens of *row* that weigh *bound* or a little more, 1 being the likeliest's weight. False, and those of
  // the last call stay, where they are more than kMostTaken.
  bool take(const Row& row, double temperature, float bound);

  // Takes the first *width* tokens of *row*, at least one; returns what they weigh.
  double find(const Row& row, double temperature, int64_t width);

  // How many of them are kept by top-p (those before each weigh less than *line*) and by min-p.
  int64_t kept(const Choice& choice, double line) const;

  // No token after them would be kept.
  bool is_complete(const Choice& choice, double line) const {
    return weight_ >= line || least_ < choice.min_p || complete_row_;
  }

  // Of the first *count*, the one in which uniform times their weight falls.
  int32_t pick(const Choice& choice, int64_t count) const;

  // The token that is drawn whichever line between *lowest* and *highest* ends what is kept; -1 where that makes a
  // difference, or it is none of the tokens taken. What is kept need not be known for it, only what it may weigh.
  int32_t pick_between(const Choice& choice, double lowest, double highest) const;

  // Tokens after them are not drawn while what is kept weighs no more than *weight*.
  bool reaches(const Choice& choice, double weight) const { return complete_row_ || choice.uniform * weight < weight_; }

 private:
  double weight_of(int64_t count) const;
  // Of the first *count*, the place of the one in which *target* falls.
  int64_t place_of(double target, int64_t count) const;
  // Fills ids_ with the tokens that reach *bound*; returns how many.
  int collect(const Row& row, float bound);
  // Of the first *count* of ids_, the likeliest *width*, in order.
  void order(const Row& row, double temperature, int count, int width);

  std::vector<uint64_t> keys_;
  std::vector<double> weights_;
  double weight_ = 0;  // of all of them
  double least_ = 0;   // no token after them weighs more
  bool complete_row_ = false;
  std::vector<int32_t> ids_, blocks_;
};

}  // namespace castline
