#include "sampling_order.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <functional>

namespace castline {
namespace {

constexpr int kSampledBlocks = 8;      // one block of so many is in the sample
constexpr int kFewestToSample = 8192;  // tokens
constexpr int kGuessSteps = 14;
constexpr double kMargin = 0.02;  // by which the weight of the sample may be wrong, as a share of all
constexpr int kFew = 64;          // tokens that are sorted
constexpr int kSplits = 6;        // of a range, before the tokens outside it are put aside
constexpr double kLeastLog2 = -63.99;  // of a weight: less counts as none, as it does in the sums

float middle(float low, float high) { return static_cast<float>((static_cast<double>(low) + high) / 2); }

}  // namespace

void LikelihoodOrder::start(const SamplingKernels* kernels, const float* row, const float* weights, int vocab,
                            float peak, const Choice& choice) {
  kernels_ = kernels;
  all_ = {row, weights, vocab};
  peak_ = peak;
  const double least = choice.min_p > 0 ? std::max(kLeastLog2 * M_LN2, log(choice.min_p)) : kLeastLog2 * M_LN2;
  lowest_ = static_cast<float>(std::max<double>(-FLT_MAX, peak + choice.temperature * least));
  total_ = weight_from(all_, lowest_);
  sample();
}

Place LikelihoodOrder::reaching(double line) {
  line = std::min(line, total_);
  Range range = first_range(line);
  gather(all_, range);
  bool narrower = true;
  while (narrower && band_.count > kFew) {
    const double above = range.above;
    line = std::min(line, above + weight_from(band_, range.low));  // sums in another order round otherwise
    for (int i = 0; narrower && i < kSplits; ++i) {
      narrower = split(band_, line, middle(range.low, range.high), above, &range);
    }
    gather(band_, range);
  }
  keys_.resize(band_.count);
  for (int i = 0; i < band_.count; ++i) keys_[i] = sort_key(band_.logits[i], ids_[i]);
  if (narrower) std::sort(keys_.begin(), keys_.end(), std::greater<>());  // else all are equal, and in order of their ids
  Place place{0, range.above};
  for (const uint64_t key : keys_) {
    place = {key, place.weight + all_.weights[id_of(key)]};
    if (place.weight >= line) break;
  }
  return place;
}

double LikelihoodOrder::weight_from(const Tokens& tokens, float bound) const {
  return kernels_->weight_from(tokens.logits, tokens.weights, tokens.count, bound);
}

void LikelihoodOrder::sample() {
  sampled_logits_.clear();
  sampled_weights_.clear();
  if (all_.count < kFewestToSample) return;
  for (int i = 0; i + kTokenBlock <= all_.count; i += kSampledBlocks * kTokenBlock) {
    sampled_logits_.insert(sampled_logits_.end(), all_.logits + i, all_.logits + i + kTokenBlock);
    sampled_weights_.insert(sampled_weights_.end(), all_.weights + i, all_.weights + i + kTokenBlock);
  }
  const int count = static_cast<int>(sampled_logits_.size());
  sample_share_ = weight_from({sampled_logits_.data(), sampled_weights_.data(), count}, lowest_) / total_;
}

// A bound from which on upwards the tokens weigh about *line*.
float LikelihoodOrder::guess(double line) const {
  const int count = static_cast<int>(sampled_logits_.size());
  const Tokens sampled{sampled_logits_.data(), sampled_weights_.data(), count};
  Range range{lowest_, peak_, 0};
  for (int i = 0; i < kGuessSteps; ++i) {
    if (!split(sampled, line * sample_share_, middle(range.low, range.high), 0, &range)) break;
  }
  return range.low;
}

// Replaces an end of *range* by *bound*, which must lie inside. *above* weighs what is not in *tokens*, and lies above.
bool LikelihoodOrder::split(const Tokens& tokens, double line, float bound, double above, Range* range) const {
  if (!(range->low < bound && bound < range->high)) return false;
  const double weight = above + weight_from(tokens, bound);
  if (weight >= line) {
    range->low = bound;
  } else {
    range->high = bound;
    range->above = weight;
  }
  return true;
}

LikelihoodOrder::Range LikelihoodOrder::first_range(double line) const {
  Range range{lowest_, nextafterf(peak_, INFINITY), 0};
  if (!sampled_logits_.empty()) {
    const double margin = kMargin * total_;
    if (line > margin) split(all_, line, guess(line - margin), 0, &range);
    if (line + margin < total_) split(all_, line, guess(line + margin), 0, &range);
  }
  return range;
}

// Makes band_ of those of *tokens*, all of them or band_ itself, that lie in *range*.
void LikelihoodOrder::gather(const Tokens& tokens, const Range& range) {
  const bool first = tokens.logits == all_.logits;
  places_.resize(tokens.count + kCollectSlack);
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
