// One token from each row of logits: castline.runtime.draw's mathematics, a row at a time, in passes that stay in cache.
//
// Nothing is sorted but a short head. Its bound comes from the blocks' maxima: where k blocks reach a value, at least k
// tokens do. The k-th value itself is not looked for: a histogram gives one a little below. Where top-p or min-p keep
// more than a short head, the token is found without the order of the others (sampling_order.h).
#include "sampling.h"

#include <math.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "sampling_head.h"
#include "sampling_order.h"
#include "sampling_threads.h"
#include "sampling_weights.h"

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

// What must be left to do for another thread to be woken: with less, that costs more than it saves.
constexpr std::chrono::microseconds kWorthHelp(250);
constexpr int64_t kRowsTried = 4;  // one row takes up to fifty times what another takes
constexpr int64_t kRowsAhead = 2;  // whose maxima are fetched
constexpr int kFirstHead = 64;
// Weights of tokens, the likeliest of a row being 1: blocks with none above are not looked at, and then fewer of them.
constexpr float kFirstBound = 1.0f / 1024, kNextBound = 1.0f / 16, kLastBound = 1e-8f;
constexpr double kRounding = 1e-5;  // of sums, more than there is

class Drawer {
 public:
  // The token, or -1 where the row has none to choose: a NaN, a +infinity, or nothing above -infinity. *maxima* are the
  // row's, or nullptr.
  int32_t draw(const SamplingKernels* kernels, const float* logits, int vocab, const float* maxima,
               const Choice& choice) {
    row_ = {kernels, logits, maxima, vocab, 0};
    if (maxima == nullptr) {
      own_maxima_.resize(row_.blocks());
      kernels->block_maxima(logits, vocab, own_maxima_.data());
      row_.maxima = own_maxima_.data();
    }
    row_.peak = kernels->peak(row_.maxima, row_.blocks());
    if (!std::isfinite(row_.peak)) return -1;
    const int32_t best = first_best();
    if (best < 0 || choice.temperature == 0) return best;
    if (choice.top_k > 0) return draw_top_k(choice);
    if (choice.top_p < 1) return draw_top_p(choice, best);
    return choice.min_p > 0 ? draw_min_p(choice) : draw_full(choice);
  }

 private:
  int32_t first_best() const {
    const auto block = static_cast<int>(std::find(row_.maxima, row_.maxima + row_.blocks(), row_.peak) - row_.maxima);
    const float* end = row_.logits + row_.block_end(block);
    const float* at = std::find(row_.logits + block * kTokenBlock, end, row_.peak);
    return at == end ? -1 : static_cast<int32_t>(at - row_.logits);  // all are -infinity, shown by maxima as -FLT_MAX
  }

  int32_t draw_full(const Choice& choice) {
    weights_.start(row_, choice.temperature);
    double target = choice.uniform * weights_.weigh_all();
    const double* blocks = weights_.blocks();
    int block = 0;
    while (block + 1 < row_.blocks() && target >= blocks[block]) target -= blocks[block++];
    while (blocks[block] == 0) --block;  // rounding led past the last block with weight
    int32_t last = -1;
    for (int32_t i = block * kTokenBlock; i < row_.block_end(block); ++i) {
      const double weight = expf((row_.logits[i] - row_.peak) * static_cast<float>(1 / choice.temperature));
      if (weight == 0) continue;
      last = i;
      if (target < weight) break;
      target -= weight;
    }
    return last;
  }

  int32_t draw_top_k(const Choice& choice) {
    const double weight = head_.find(row_, choice.temperature, std::min<int64_t>(choice.top_k, row_.vocab));
    return head_.pick(choice, head_.kept(choice, choice.top_p * weight));
  }

  int32_t draw_min_p(const Choice& choice) {
    head_.find(row_, choice.temperature, std::min(kFirstHead, row_.vocab));
    if (head_.is_complete(choice, INFINITY)) return head_.pick(choice, head_.kept(choice, INFINITY));
    weights_.start(row_, choice.temperature);
    return draw_wide(choice, INFINITY);
  }

  // The token is known as soon as it is the same for all that the row may weigh: mostly when a few blocks are weighed,
  // and where the best token alone is kept, no other is looked at.
  int32_t draw_top_p(const Choice& choice, int32_t best) {
    weights_.start(row_, choice.temperature);
    bool taken = false, all_taken = false;  // all_taken: no more may be taken
    for (float bound = kFirstBound; bound > kLastBound; bound *= kNextBound) {
      const RowWeights::Bounds weight = weights_.weigh_from(bound);
      const double lowest = choice.top_p * weight.lower * (1 - kRounding);
      const double highest = choice.top_p * weight.upper * (1 + kRounding);
      if (highest <= 1) return best;  // whose weight is 1
      if (bound == kFirstBound) {
        taken = take_first(choice);
        all_taken = !taken;
      } else if (!all_taken && !head_.reaches(choice, highest)) {
        all_taken = !head_.take(row_, choice.temperature, bound);
      }
      const int32_t token = taken ? head_.pick_between(choice, lowest, highest) : -1;
      if (token >= 0) return token;
    }
    const double line = choice.top_p * weights_.weigh_all();
    if (!taken) return draw_wide(choice, line);
    if (head_.is_complete(choice, line)) return head_.pick(choice, head_.kept(choice, line));
    const int32_t token = head_.pick_between(choice, line * (1 - kRounding), line * (1 + kRounding));
    return token >= 0 ? token : draw_wide(choice, line);
  }

  // The likeliest tokens, as far down as may be taken at once. False where more than that weigh nearly as much as the
  // best.
  bool take_first(const Choice& choice) {
    for (float bound = kFirstBound; bound < 1; bound /= kNextBound) {
      if (head_.take(row_, choice.temperature, bound)) return true;
    }
    return false;
  }

  // Of the tokens that top-p (those before them weigh less than *line*) and min-p keep. Every token is weighed.
  int32_t draw_wide(const Choice& choice, double line) {
    order_.start(row_.kernels, row_.logits, weights_.weigh_tokens(), row_.vocab, row_.peak, choice);
    const Place end = order_.reaching(line);
    const Place drawn = order_.reaching(nextafter(choice.uniform * end.weight, INFINITY));
    return id_of(std::max(drawn.key, end.key));  // rounding may lead past the end
  }

  Row row_{};
  std::vector<float> own_maxima_;
  RowWeights weights_;
  Head head_;
  LikelihoodOrder order_;
};

}  // namespace
}  // namespace castline

// Chooses tokens[i] from row choices[i].row of *logits*, a C-contiguous [.., vocab] array; -1 where that row has no token
// to choose. *maxima* are block_maxima of each row, or nullptr. Up to *threads* threads share the rows where the first
// ones take long; the tokens are the same. Returns 0, or 1 where CASTLINE_ISA is refused.
extern "C" __attribute__((visibility("default"))) int castline_draw(const float* logits, const float* maxima,
                                                                    int64_t vocab, int64_t count,
                                                                    const castline::Choice* choices, int64_t* tokens,
                                                                    int64_t threads) {
  using namespace castline;
  const SamplingKernels* kernels = select_sampling();
  if (kernels == nullptr) return 1;
  const int64_t blocks = (vocab + kTokenBlock - 1) / kTokenBlock;
  const auto draw_row = [&](int64_t i) {
    thread_local Drawer drawer;  // its scratch is as large as the rows
    const int64_t row = choices[i].row;
    const float* of_row = maxima == nullptr ? nullptr : maxima + row * blocks;
    if (maxima != nullptr && i + kRowsAhead < count) {
      const float* ahead = maxima + choices[i + kRowsAhead].row * blocks;
      for (int64_t block = 0; block < blocks; block += 16) __builtin_prefetch(ahead + block);
    }
    tokens[i] = drawer.draw(kernels, logits + row * vocab, static_cast<int>(vocab), of_row, choices[i]);
  };
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const int64_t tried = std::min(count, kRowsTried);
  for (int64_t i = 0; i < tried; ++i) draw_row(i);
  const bool helped = tried < count && (Clock::now() - begin) * (count - tried) / tried > kWorthHelp;
  share_out(count - tried, helped ? static_cast<int>(threads - 1) : 0, [&](int64_t i) { draw_row(tried + i); });
  return 0;
}
