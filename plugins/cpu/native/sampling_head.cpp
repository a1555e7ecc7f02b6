#include "sampling_head.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <functional>

#include "sampling_order.h"

namespace castline {
namespace {

constexpr int kLevels = 512;
// Of the levels below a peak: what lies lower (a forbidden token is at -infinity) shares the last level.
constexpr float kWidestRange = 1000.0f;
constexpr float kNarrowestRange = 1e-30f;  // the levels of a smaller one would be too many for a float

// Cuts the range of some values below a peak into levels of equal depth, the highest first. What lies deep below (a
// forbidden token is at -infinity) shares the last one.
class Levels {
 public:
  Levels(const float* values, int count, float peak) : peak_(peak) {
    float lowest = peak;
    for (int i = 0; i < count; ++i) lowest = values[i] < lowest ? values[i] : lowest;
    range_ = std::min(std::max(peak - lowest, kNarrowestRange), kWidestRange);
    scale_ = kLevels / range_;
  }

  int of(float value) const { return static_cast<int>(std::min((peak_ - value) * scale_, kLevels - 1.0f)); }

 private:
  float peak_, range_, scale_;
};

// A value that at least *wanted* of *values* reach, and seldom many more. No value is above *peak*.
float bound_of(const float* values, int count, int64_t wanted, float peak) {
  const Levels level(values, count, peak);
  int levels[kLevels] = {};
  for (int i = 0; i < count; ++i) ++levels[level.of(values[i])];
  int last = 0;
  for (int64_t reached = levels[0]; reached < wanted; reached += levels[++last]) {
  }
  float bound = peak;
  for (int i = 0; i < count; ++i) {
    if (level.of(values[i]) <= last) bound = values[i] < bound ? values[i] : bound;
  }
  return bound;
}

}  // namespace

double Head::find(const Row& row, double temperature, int64_t width) {
  const int blocks = row.blocks();
  const bool few = width * 2 <= blocks;
  float bound = few ? bound_of(row.maxima, blocks, width, row.peak) : bound_of(row.logits, row.vocab, width, row.peak);
  if (bound <= -FLT_MAX) bound = -INFINITY;  // the maxima show -infinity so
  order(row, temperature, collect(row, bound), static_cast<int>(width));
  least_ = weights_.back();
  return weight_;
}

bool Head::take(const Row& row, double temperature, float bound) {
  const float lowest = row.peak + static_cast<float>(temperature * log(bound));
  const int count = collect(row, lowest);
  if (count > kMostTaken) return false;
  order(row, temperature, count, count);
  least_ = exp((static_cast<double>(lowest) - row.peak) / temperature);
  return true;
}

int Head::collect(const Row& row, float bound) {
  ids_.resize(row.vocab + kCollectSlack);
  blocks_.resize(row.blocks() + kCollectSlack);
  const int blocks = row.kernels->collect(row.maxima, 0, row.blocks(), bound, INFINITY, blocks_.data());
  int count = 0;
  for (int i = 0; i < blocks; ++i) {
    count += row.kernels->collect(row.logits, blocks_[i] * kTokenBlock, row.block_end(blocks_[i]), bound, INFINITY,
                                  ids_.data() + count);
  }
  return count;
}

void Head::order(const Row& row, double temperature, int count, int width) {
  keys_.resize(count);
  for (int i = 0; i < count; ++i) keys_[i] = sort_key(row.logits[ids_[i]], ids_[i]);
  if (width < count) std::nth_element(keys_.begin(), keys_.begin() + width, keys_.end(), std::greater<>());
  keys_.resize(width);
  std::sort(keys_.begin(), keys_.end(), std::greater<>());
  weights_.resize(width);
  weight_ = 0;
  for (int i = 0; i < width; ++i) {
    weight_ += weights_[i] = exp(static_cast<double>(row.logits[id_of(keys_[i])] - row.peak) / temperature);
  }
  complete_row_ = width == row.vocab;
}

int64_t Head::kept(const Choice& choice, double line) const {
  size_t count = 0;
  double sum = 0;
  while (count < weights_.size() && sum < line && weights_[count] >= choice.min_p) sum += weights_[count++];
  return count;
}

double Head::weight_of(int64_t count) const {
  double sum = 0;
  for (int64_t place = 0; place < count; ++place) sum += weights_[place];
  return sum;
}

int64_t Head::place_of(double target, int64_t count) const {
  double below = 0;
  int64_t last = 0;
  for (int64_t place = 0; place < count && below <= target; ++place) {
    if (weights_[place] > 0) last = place;
    below += weights_[place];
  }
  return last;
}

int32_t Head::pick(const Choice& choice, int64_t count) const {
  return id_of(keys_[place_of(choice.uniform * weight_of(count), count)]);
}

int32_t Head::pick_between(const Choice& choice, double lowest, double highest) const {
  const int64_t fewest = kept(choice, lowest), most = kept(choice, highest);
  const bool complete = is_complete(choice, highest);
  if (complete && fewest == most) return pick(choice, fewest);
  // The last token that is kept passes the line by no more than its own weight.
  const double heaviest = complete ? weight_of(most) : highest + least_;
  if (!reaches(choice, heaviest)) return -1;
  // Where not even these reach the line, others are kept: up to the line, but for min-p.
  const double lightest = std::max(weight_of(fewest), choice.min_p > 0 ? 0.0 : lowest);
  const auto taken = static_cast<int64_t>(weights_.size());
  const int64_t place = place_of(choice.uniform * lightest, taken);
  return place == place_of(choice.uniform * heaviest, taken) ? id_of(keys_[place]) : -1;
}

}  // namespace castline
