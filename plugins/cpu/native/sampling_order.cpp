#include "sampling_order.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <functional>

namespace castline {
namespace {

constexpr int kSampledBlocks = 16;     // one block of so many is in the sample
constexpr int kFewestToSample = 8192;  // tokens
constexpr int kGuesses = 4;
constexpr int kGuessSteps = 10;
constexpr double kMargin = 0.004;      // of a guess, as a share of the weight of all
constexpr int kFirstSplits = 16;       // of the range of all tokens, at most
constexpr int kMostAside = 2048;       // tokens
constexpr int kFew = 64;               // tokens that are sorted
constexpr int kSplits = 6;             // of a range, before the tokens outside it are put aside
constexpr double kLeastLog2 = -63.99;  // of a weight: less counts as none, as it does in the sums

float middle(float low, float high) { return static_cast<float>((static_cast<double>(low) + high) / 2); }

}  // namespace

// Replaces an end by *bound*; *from* are the tokens from it on upwards.
void LikelihoodOrder::Range::narrow(double line, float bound, Sum from) {
  if (from.weight >= line) {
    low = bound;
    from_low = from;
  } else {
    high = bound;
    above = from;
  }
}

void LikelihoodOrder::start(const SamplingKernels* kernels, const float* row, const float* weights, int vocab,
                            float peak, const Choice& choice) {
  kernels_ = kernels;
  all_ = {row, weights, vocab};
  peak_ = peak;
  const double least = std::max(kLeastLog2 * M_LN2, log(choice.min_p));  // log(0) is -infinity
  lowest_ = static_cast<float>(std::max<double>(-FLT_MAX, peak + choice.temperature * least));
  total_ = sum_from(all_, lowest_);
  sample();
}

Place LikelihoodOrder::reaching(double line) {
  line = std::min(line, total_.weight);
  Range range = first_range(line);
  gather(all_, range);
  bool equal = false;
  while (band_.count > kFew && !equal) {
    const Sum above = range.above;
    line = std::min(line, above.weight + sum_from(band_, range.low).weight);  // another order rounds otherwise
    for (int i = 0; i < kSplits && !equal; ++i) {
      const float bound = middle(range.low, range.high);
      equal = bound <= range.low || bound >= range.high;
      if (!equal) range.narrow(line, bound, above + sum_from(band_, bound));
    }
    gather(band_, range);
  }
  keys_.resize(band_.count);
  for (int i = 0; i < band_.count; ++i) keys_[i] = sort_key(band_.logits[i], ids_[i]);
  if (!equal) std::sort(keys_.begin(), keys_.end(), std::greater<>());  // equal ones are in order of their ids
  Place place{0, range.above.weight};
  for (const uint64_t key : keys_) {
    place = {key, place.weight + all_.weights[id_of(key)]};
    if (place.weight >= line) break;
  }
  return place;
}

Sum LikelihoodOrder::sum_from(const Tokens& tokens, float bound) const {
  return kernels_->sum_from(tokens.logits, tokens.weights, tokens.count, bound);
}

void LikelihoodOrder::sample() {
  sampled_logits_.clear();
  sampled_weights_.clear();
  if (all_.count >= kFewestToSample) {
    for (int i = 0; i + kTokenBlock <= all_.count; i += kSampledBlocks * kTokenBlock) {
      sampled_logits_.insert(sampled_logits_.end(), all_.logits + i, all_.logits + i + kTokenBlock);
      sampled_weights_.insert(sampled_weights_.end(), all_.weights + i, all_.weights + i + kTokenBlock);
    }
  }
  sampled_ = {sampled_logits_.data(), sampled_weights_.data(), static_cast<int>(sampled_logits_.size())};
  share_ = sum_from(sampled_, lowest_).weight / total_.weight;
}

// A range of few enough tokens to be put aside. Its bounds are guessed from the sample: by how much that is wrong is
// known from the guess before, and no guess is far from the next. Where it knows too little, the range is halved.
LikelihoodOrder::Range LikelihoodOrder::first_range(double line) const {
  const float top = nextafterf(peak_, INFINITY);
  Range range{lowest_, top, {0, 0}, total_};
  double error = 0, margin = 0;
  for (int i = 0; range.count() > kMostAside && i < kFirstSplits; ++i) {
    float bound = middle(range.low, range.high);
    if (i < kGuesses && sampled_.count > 0) {
      const double aim = range.high == top ? line - margin : line + margin;
      const float guessed = guess(aim * share_ + error, range);
      if (guessed > range.low) bound = guessed;
      margin = std::max(2 * margin, kMargin * total_.weight);
    }
    if (bound <= range.low || bound >= range.high) break;
    const Sum from = sum_from(all_, bound);
    range.narrow(line, bound, from);
    error = sum_from(sampled_, bound).weight - from.weight * share_;
  }
  return range;
}

// The bound from which on upwards the sample weighs *line*, about, within *range*.
float LikelihoodOrder::guess(double line, Range range) const {
  for (int i = 0; i < kGuessSteps; ++i) {
    const float bound = middle(range.low, range.high);
    range.narrow(line, bound, sum_from(sampled_, bound));
  }
  return range.low;
}

// Makes band_ of those of *tokens*, all of them or band_ itself, that lie in *range*.
void LikelihoodOrder::gather(const Tokens& tokens, const Range& range) {
  const bool first = tokens.logits == all_.logits;
  if (first) places_.resize(std::max<size_t>(places_.size(), tokens.count + kCollectSlack));
  const int count = kernels_->collect(tokens.logits, 0, tokens.count, range.low, range.high, places_.data());
  if (first && count > static_cast<int>(ids_.size())) {
    ids_.resize(count);
    logits_.resize(count);
    weights_.resize(count);
  }
  for (int i = 0; i < count; ++i) {
    const int32_t place = places_[i];
    ids_[i] = first ? place : ids_[place];
    logits_[i] = tokens.logits[place];
    weights_[i] = tokens.weights[place];
  }
  band_ = {logits_.data(), weights_.data(), count};
}

}  // namespace castline
