// How a step's attention is cut into work items.
#pragma once

#include <vector>

#include "attention.h"

namespace castline {

struct Partition {
  std::vector<WorkItem> items;  // dearest first
  // Query tiles whose keys are split among several items (split-K). Each item of unit u writes its tiles at
  // partial_offset[u] + (tile - units[u].first_tile) * rows * (head_dim + 2) floats.
  std::vector<WorkItem> units;
  std::vector<size_t> partial_offset;
  std::vector<int> pending;  // items of the unit
  size_t partial_floats = 0;
  int max_rows = 0;
  double cost = 0;  // multiply-adds of all items
};

// Fills *out*, reusing its memory. *item_rows*: rows of an item where a.query_tile is 0. *workers*: threads that may
// run at once, a hint.
void make_partition(const Attributes& a, const Step& s, int item_rows, int workers, Partition* out);

}  // namespace castline
