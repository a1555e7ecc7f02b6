#include "sampling_weights.h"

#include <math.h>

namespace castline {
namespace {

// Blocks that are fetched before one is weighed: no processor foresees where the next one is.
constexpr int kBlocksAhead = 16;
constexpr int kMostAtOnce = 8;  // blocks that are weighed before others are fetched

}  // namespace

void RowWeights::start(const Row& row, double temperature) {
  row_ = row;
  inverse_temperature_ = static_cast<float>(1 / temperature);
  const int count = row.blocks();
  tops_.resize(count);
  top_sums_.resize((count + kTokenBlock - 1) / kTokenBlock);
  blocks_.assign(count, -1.0);
  chosen_.resize(count + kCollectSlack);
  row.kernels->block_weights(row.maxima, count, row.peak, inverse_temperature_, top_sums_.data(), tops_.data());
}

RowWeights::Bounds RowWeights::weigh_from(float bound) {
  const int count = row_.blocks();
  const int chosen = row_.kernels->collect(tops_.data(), 0, count, bound, INFINITY, chosen_.data());
  double weighed = 0;
  for (int i = 0, fetched = 0; i < chosen; ++i) {
    for (; fetched < chosen && fetched <= i + kBlocksAhead; ++fetched) fetch_block(chosen_[fetched]);
    const int block = chosen_[i];
    int run = 0;  // of blocks side by side that are weighed at once
    while (run < kMostAtOnce && i + run < chosen && chosen_[i + run] == block + run && blocks_[block + run] < 0) ++run;
    if (run > 0) weigh(block, block + run, nullptr);
    weighed += blocks_[block];
  }
  const double rest = row_.kernels->sum_below(tops_.data(), count, bound);
  return {weighed + rest, weighed + kTokenBlock * rest};
}

const float* RowWeights::weigh_tokens() {
  tokens_.resize(row_.vocab);
  weigh(0, row_.blocks(), tokens_.data());
  return tokens_.data();
}

void RowWeights::fetch_block(int block) const {
  if (blocks_[block] >= 0) return;
  constexpr int kLine = 64 / sizeof(float);
  for (int i = block * kTokenBlock; i < row_.block_end(block); i += kLine) __builtin_prefetch(row_.logits + i);
}

void RowWeights::weigh(int first, int last, float* tokens) {
  const int begin = first * kTokenBlock, end = row_.block_end(last - 1);
  row_.kernels->block_weights(row_.logits + begin, end - begin, row_.peak, inverse_temperature_, &blocks_[first],
                              tokens);
}

}  // namespace castline
