#include "sampling_weights.h"

#include <math.h>

namespace castline {
namespace {

// Blocks that are fetched before any is weighed: no processor foresees where the next one is. More are mostly side by
// side.
constexpr int kMostScattered = 64;

// The sum of those of *values*, none of which is negative, that are below *bound*.
double sum_below(const float* values, int count, float bound) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += values[i + lane] < bound ? values[i + lane] : 0.0f;
  }
  double total = 0;
  for (const float sum : sums) total += sum;
  for (; i < count; ++i) total += values[i] < bound ? values[i] : 0.0f;
  return total;
}

}  // namespace

void RowWeights::start(const Row& row, double temperature) {
  row_ = row;
  inverse_temperature_ = static_cast<float>(1 / temperature);
  const int count = row.blocks();
  tops_.resize(count);
  top_sums_.resize((count + kTokenBlock - 1) / kTokenBlock);
  blocks_.assign(count, -1.0);
  chosen_.resize(count + kCollectSlack);
  tokens_.resize(row.vocab);
  row.kernels->block_weights(row.maxima, count, row.peak, inverse_temperature_, top_sums_.data(), tops_.data());
}

RowWeights::Bounds RowWeights::weigh_from(float bound) {
  const int count = row_.blocks();
  const int chosen = row_.kernels->collect(tops_.data(), 0, count, bound, INFINITY, chosen_.data());
  if (chosen <= kMostScattered) {
    for (int i = 0; i < chosen; ++i) fetch_block(chosen_[i]);
  }
  double weighed = 0;
  for (int i = 0; i < chosen; ++i) {
    const int block = chosen_[i];
    int run = 0;  // of blocks side by side that are weighed at once
    while (i + run < chosen && chosen_[i + run] == block + run && blocks_[block + run] < 0) ++run;
    if (run > 0) weigh(block, block + run);
    weighed += blocks_[block];
  }
  const double rest = sum_below(tops_.data(), count, bound);
  return {weighed + rest, weighed + kTokenBlock * rest};
}

void RowWeights::fetch_block(int block) const {
  constexpr int kLine = 64 / sizeof(float);
  for (int i = block * kTokenBlock; i < row_.block_end(block); i += kLine) {
    __builtin_prefetch(row_.logits + i);
    __builtin_prefetch(tokens_.data() + i, 1);
  }
}

void RowWeights::weigh(int first, int last) {
  const int begin = first * kTokenBlock, end = row_.block_end(last - 1);
  row_.kernels->block_weights(row_.logits + begin, end - begin, row_.peak, inverse_temperature_, &blocks_[first],
                              &tokens_[begin]);
}

}  // namespace castline
