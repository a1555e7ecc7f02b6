#include "sampling_weights.h"

#include <algorithm>

namespace castline {

void RowWeights::start(const Row& row, double temperature) {
  row_ = row;
  inverse_temperature_ = static_cast<float>(1 / temperature);
  const int count = row.blocks();
  tops_.resize(count);
  top_sums_.resize((count + kTokenBlock - 1) / kTokenBlock);
  blocks_.assign(count, -1.0);
  tokens_.resize(row.vocab);
  row.kernels->block_weights(row.maxima, count, row.peak, inverse_temperature_, top_sums_.data(), tops_.data());
}

RowWeights::Bounds RowWeights::weigh_from(float bound) {
  const int count = row_.blocks();
  double weighed = 0, rest = 0;
  for (int block = 0; block < count; ++block) {
    if (tops_[block] < bound) {
      rest += tops_[block];
      continue;
    }
    int last = block;  // of a run of blocks that are weighed at once
    while (last < count && tops_[last] >= bound && blocks_[last] < 0) ++last;
    if (last > block) weigh(block, last);
    weighed += blocks_[block];
  }
  return {weighed + rest, weighed + kTokenBlock * rest};
}

void RowWeights::weigh(int first, int last) {
  const int begin = first * kTokenBlock, end = row_.block_end(last - 1);
  row_.kernels->block_weights(row_.logits + begin, end - begin, row_.peak, inverse_temperature_, &blocks_[first],
                              &tokens_[begin]);
}

}  // namespace castline
