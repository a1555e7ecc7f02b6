// One token from each row of logits: castline.runtime.draw's mathematics, a row at a time, in passes that stay in cache.
//
// Nothing is sorted but a short head. Its bound comes from the blocks' maxima: where k blocks reach a value, at least k
// tokens do. The k-th value itself is not looked for: a histogram gives one a little below. Where top-p or min-p keep
// more than a short head, the token is found without the order of the others (sampling_order.h).
#include "sampling.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "sampling_order.h"

namespace castline {

extern const SamplingKernels kPortableSampling;
#if defined(__x86_64__)
extern const SamplingKernels kAvx2Sampling;
extern const SamplingKernels kAvx512Sampling;
#endif

const SamplingKernels* select_sampling() {
  Isa selected;
  std::string error;
  if (!selected_isa(&selected, &error)) return nullptr;
#if defined(__x86_64__)
  if (runs_on(Isa::kAvx512, selected)) return &kAvx512Sampling;
  if (runs_on(Isa::kAvx2, selected)) return &kAvx2Sampling;
#endif
  return &kPortableSampling;
}

namespace {

constexpr int kFirstHead = 64;
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

class Drawer {
 public:
  void start(const SamplingKernels* kernels, int vocab) {
    kernels_ = kernels;
    vocab_ = vocab;
    blocks_ = (vocab + kTokenBlock - 1) / kTokenBlock;
  }

  int blocks() const { return blocks_; }

  // The token, or -1 where the row has none to choose: a NaN, a +infinity, or nothing above -infinity. *maxima* are the
  // row's, or nullptr.
  int32_t draw(const float* row, const float* maxima, const Choice& choice) {
    row_ = row;
    if (maxima == nullptr) {
      own_maxima_.resize(blocks_);
      kernels_->block_maxima(row, vocab_, own_maxima_.data());
      maxima = own_maxima_.data();
    }
    maxima_ = maxima;
    peak_ = kernels_->peak(maxima_, blocks_);
    if (!std::isfinite(peak_)) return -1;
    const int32_t best = first_best();
    if (best < 0 || choice.temperature == 0) return best;
    const bool truncated = choice.top_k > 0 || choice.top_p < 1 || choice.min_p > 0;
    return truncated ? draw_truncated(choice) : draw_full(choice);
  }

 private:
  int block_end(int block) const { return std::min(vocab_, (block + 1) * kTokenBlock); }

  int32_t first_best() const {
    const auto block = static_cast<int>(std::find(maxima_, maxima_ + blocks_, peak_) - maxima_);
    const float* end = row_ + block_end(block);
    const float* at = std::find(row_ + block * kTokenBlock, end, peak_);
    return at == end ? -1 : static_cast<int32_t>(at - row_);  // all are -infinity, which the maxima show as -FLT_MAX
  }

  double weight_all(const Choice& choice) {
    weights_.resize(blocks_);
    token_weights_.resize(vocab_);
    const auto inverse = static_cast<float>(1 / choice.temperature);
    return kernels_->block_weights(row_, vocab_, peak_, inverse, weights_.data(), token_weights_.data());
  }

  int32_t draw_full(const Choice& choice) {
    double target = choice.uniform * weight_all(choice);
    int block = 0;
    while (block + 1 < blocks_ && target >= weights_[block]) target -= weights_[block++];
    while (weights_[block] == 0) --block;  // rounding led past the last block with weight
    int32_t last = -1;
    for (int32_t i = block * kTokenBlock; i < block_end(block); ++i) {
      const double weight = expf((row_[i] - peak_) * static_cast<float>(1 / choice.temperature));
      if (weight == 0) continue;
      last = i;
      if (target < weight) break;
      target -= weight;
    }
    return last;
  }

  int32_t draw_truncated(const Choice& choice) {
    if (choice.top_k > 0) {
      const double total = find_head(choice, std::min<int64_t>(choice.top_k, vocab_));
      return pick(choice, choice.top_p * total);
    }
    const double line = choice.top_p < 1 ? choice.top_p * weight_all(choice) : INFINITY;
    const int width = std::min(kFirstHead, vocab_);
    if (line <= width || choice.min_p > 0) {  // no token weighs more than 1
      const double total = find_head(choice, width);
      if (total >= line || head_weights_.back() < choice.min_p || width == vocab_) return pick(choice, line);
    }
    if (choice.top_p >= 1) weight_all(choice);
    return draw_wide(choice, line);
  }

  // As pick, of all tokens.
  int32_t draw_wide(const Choice& choice, double line) {
    order_.start(kernels_, row_, token_weights_.data(), vocab_, peak_, choice);
    const Place end = order_.reaching(line);
    const Place drawn = order_.reaching(nextafter(choice.uniform * end.weight, INFINITY));
    return id_of(std::max(drawn.key, end.key));  // rounding may lead past the end
  }

  // Of the head's tokens that top-p (those before them weigh less than *line*) and min-p keep, the one in which uniform
  // times their weight falls.
  int32_t pick(const Choice& choice, double line) const {
    size_t kept = 0;
    double sum = 0;
    while (kept < head_weights_.size() && sum < line && head_weights_[kept] >= choice.min_p) sum += head_weights_[kept++];
    const double target = choice.uniform * sum;
    double below = 0;
    size_t last = 0;
    for (size_t place = 0; place < kept && below <= target; ++place) {
      if (head_weights_[place] > 0) last = place;
      below += head_weights_[place];
    }
    return id_of(head_[last]);
  }

  // The first *width* tokens, in order, into head_, and their weights; returns the sum of these.
  double find_head(const Choice& choice, int64_t width) {
    ids_.resize(vocab_ + kCollectSlack);
    const bool few = width * 2 <= blocks_;
    float bound = few ? bound_of(maxima_, blocks_, width, peak_) : bound_of(row_, vocab_, width, peak_);
    if (bound <= -FLT_MAX) bound = -INFINITY;  // the maxima show -infinity so
    int count = 0;
    for (int block = 0; block < blocks_; ++block) {
      if (maxima_[block] >= bound) {
        count += kernels_->collect(row_, block * kTokenBlock, block_end(block), bound, INFINITY, ids_.data() + count);
      }
    }
    head_.resize(count);
    for (int i = 0; i < count; ++i) head_[i] = sort_key(row_[ids_[i]], ids_[i]);
    if (width < count) std::nth_element(head_.begin(), head_.begin() + width, head_.end(), std::greater<>());
    head_.resize(width);
    std::sort(head_.begin(), head_.end(), std::greater<>());
    head_weights_.resize(width);
    double total = 0;
    for (int64_t i = 0; i < width; ++i) {
      total += head_weights_[i] = exp(static_cast<double>(row_[id_of(head_[i])] - peak_) / choice.temperature);
    }
    return total;
  }

  const SamplingKernels* kernels_ = nullptr;
  int vocab_ = 0, blocks_ = 0;
  const float *row_ = nullptr, *maxima_ = nullptr;
  float peak_ = 0;
  std::vector<float> own_maxima_, token_weights_;
  std::vector<double> weights_, head_weights_;
  std::vector<int32_t> ids_;
  std::vector<uint64_t> head_;
  LikelihoodOrder order_;
};

}  // namespace
}  // namespace castline

// Chooses tokens[i] from row choices[i].row of *logits*, a C-contiguous [.., vocab] array; -1 where that row has no token
// to choose. *maxima* are block_maxima of each row, or nullptr. Returns 0, or 1 where CASTLINE_ISA is refused.
extern "C" __attribute__((visibility("default"))) int castline_draw(const float* logits, const float* maxima,
                                                                    int64_t vocab, int64_t count,
                                                                    const castline::Choice* choices, int64_t* tokens) {
  using namespace castline;
  const SamplingKernels* kernels = select_sampling();
  if (kernels == nullptr) return 1;
  thread_local Drawer drawer;  // its scratch is as large as the rows
  drawer.start(kernels, static_cast<int>(vocab));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = choices[i].row;
    const float* of_row = maxima == nullptr ? nullptr : maxima + row * drawer.blocks();
    tokens[i] = drawer.draw(logits + row * vocab, of_row, choices[i]);
  }
  return 0;
}
