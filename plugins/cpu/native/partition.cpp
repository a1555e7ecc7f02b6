#include "partition.h"

#include <algorithm>

namespace castline {
namespace {

// Items that the kernel aims at, a worker, when it chooses to split.
constexpr int kItemsPerWorker = 4;

int query_tile(const Attributes& a, int item_rows) {
  if (a.query_tile > 0) return a.query_tile;
  return std::max(1, item_rows / (a.num_heads / a.num_kv_heads));
}

WorkItem make_item(const Attributes& a, const Step& s, int sequence, int kv_head, int first, int last) {
  const int queries = s.cu_query_lens[sequence + 1] - s.cu_query_lens[sequence];
  const int position = s.kv_lens[sequence] - queries + first;
  const int low = a.window > 0 ? std::max(0, position + 1 - a.window) : 0;
  const int high = position + last - first;
  const int rows = (last - first) * (a.num_heads / a.num_kv_heads);
  const float cost = 2.0f * rows * (high - low) * a.head_dim;
  return {sequence, kv_head, first, last, low / kKeyTile, (high + kKeyTile - 1) / kKeyTile, -1, cost};
}

// Key tiles of one item of a sequence whose queries fit one query tile; 0 for no split.
int tiles_per_split(const Attributes& a, const Step& s, int workers, int64_t units) {
  if (a.kv_split > 0) return std::max(1, a.kv_split / kKeyTile);
  const int64_t wanted = static_cast<int64_t>(kItemsPerWorker) * workers;
  if (workers <= 1 || units >= wanted) return 0;
  int64_t tiles = 0;
  for (int64_t b = 0; b < s.num_sequences; ++b) tiles += s.kv_lens[b] / kKeyTile + 1;
  return static_cast<int>(std::max<int64_t>(1, tiles * a.num_kv_heads / wanted));
}

void add_split(const Attributes& a, const WorkItem& item, int tiles, Partition* out) {
  const int rows = (item.last_query - item.first_query) * (a.num_heads / a.num_kv_heads);
  const int count = item.last_tile - item.first_tile;
  WorkItem part = item;
  part.unit = static_cast<int>(out->units.size());
  part.cost = item.cost * tiles / count;
  int parts = 0;
  for (int tile = item.first_tile; tile < item.last_tile; tile += tiles, ++parts) {
    part.first_tile = tile;
    part.last_tile = std::min(item.last_tile, tile + tiles);
    out->items.push_back(part);
  }
  out->units.push_back(item);
  out->pending.push_back(parts);
  out->partial_offset.push_back(out->partial_floats);
  out->partial_floats += static_cast<size_t>(rows) * count * (a.head_dim + 2);
}

}  // namespace

void make_partition(const Attributes& a, const Step& s, int item_rows, int workers, Partition* out) {
  out->items.clear();
  out->units.clear();
  out->partial_offset.clear();
  out->pending.clear();
  out->partial_floats = 0;
  out->max_rows = 0;
  out->cost = 0;

  const int tile = query_tile(a, item_rows), group = a.num_heads / a.num_kv_heads;
  int64_t units = 0;
  for (int64_t b = 0; b < s.num_sequences; ++b) {
    units += (s.cu_query_lens[b + 1] - s.cu_query_lens[b] + tile - 1) / tile * a.num_kv_heads;
  }
  const int split = tiles_per_split(a, s, workers, units);

  for (int b = 0; b < s.num_sequences; ++b) {
    const int queries = s.cu_query_lens[b + 1] - s.cu_query_lens[b];
    for (int first = 0; first < queries; first += tile) {
      const int last = std::min(queries, first + tile);
      out->max_rows = std::max(out->max_rows, (last - first) * group);
      for (int head = 0; head < a.num_kv_heads; ++head) {
        const WorkItem item = make_item(a, s, b, head, first, last);
        out->cost += item.cost;
        if (split > 0 && queries <= tile && item.last_tile - item.first_tile > split) {
          add_split(a, item, split, out);
        } else {
          out->items.push_back(item);
        }
      }
    }
  }
  std::stable_sort(out->items.begin(), out->items.end(),
                   [](const WorkItem& x, const WorkItem& y) { return x.cost > y.cost; });
}

}  // namespace castline
