// The attention of one work item with matrix instructions: the algorithm of kernel.h for bf16, int8 and fp8 pools, rows
// taken in strips of 16. Included by kernel_amx.cpp only.
//
// int8: queries and weights are integers of 16 bits, and sums are exact. bf16: both have 16 bits of mantissa, fp8: both
// are bf16, and products add up in fp32 in the instruction's own order. Every item takes this path, of one row or of
// many, and a row's sums do not depend on its strip: so its bits still depend on its own query and keys alone.
#pragma once

#include "kernel.h"
#include "tile_softmax.h"

namespace castline::CASTLINE_ISA {
namespace {

// Views of an item's scratch (see tile_scratch_bytes).
struct TileScratch {
  uint8_t* queries;  // [strips] of strip_query_bytes
  uint8_t* scores;   // [kStrip] rows of kScoreStride
  uint8_t* weights;  // [kStrip] rows of kWeightStride
  uint8_t* k_panel;
  uint8_t* v_panel;
  uint8_t* products;  // P.V of one strip: [kStrip][group of dimensions][plane][kGroup], 32 bits each
  KeyScales* scales;
  float* multiplier;  // [rows], of the scores
  float* max;         // [rows] running maximum, denominator and numerator
  float* total;
  float* sum;  // [rows][head_dim]
};

template <KvDtype T>
constexpr int product_stride(int head_dim) {
  return round_up(head_dim, kGroup) * 4 * kSumPlanes<T> + 64;
}

// Lays the views out from *base*; returns the bytes that they take.
template <KvDtype T>
size_t tile_scratch_views(const Attributes& a, int rows, uint8_t* base, TileScratch* out) {
  size_t used = 0;
  const auto take = [&](size_t bytes) {
    uint8_t* const at = base + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  const int strips = (rows + kStrip - 1) / kStrip;
  out->queries = take(strips * strip_query_bytes<T>(a.head_dim));
  out->scores = take(kStrip * kScoreStride<T>);
  out->weights = take(kStrip * kWeightStride<T>);
  out->k_panel = take(k_panel_bytes<T>(a.head_dim));
  out->v_panel = take(v_panel_bytes<T>(a.head_dim));
  out->products = take(kStrip * product_stride<T>(a.head_dim));
  out->scales = reinterpret_cast<KeyScales*>(take(T == kInt8 ? sizeof(KeyScales) : 0));
  out->multiplier = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->max = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->total = reinterpret_cast<float*>(take(sizeof(float) * rows));
  out->sum = reinterpret_cast<float*>(take(sizeof(float) * rows * a.head_dim));
  return used;
}

// --- products --------------------------------------------------------------------------------------------------------

// Loads the right operand of group I of those that are summed at once, and adds its products with the left planes.
template <KvDtype T, Product P, int I>
CASTLINE_INLINE void add_group(const uint8_t* right, ptrdiff_t stride) {
  constexpr int kFrom = kRight + I % 2, kSum = I * kSumPlanes<T>;
  tile_load<kFrom>(right, stride);
  tile_product<P, kSum, kLeft, kFrom>();
  if constexpr (kPlanes<T> == 2) tile_product<P, kSum + kSumPlanes<T> - 1, kLeft + 1, kFrom>();
}

CASTLINE_INLINE void clear_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

template <int Count>
CASTLINE_INLINE void store_sums(uint8_t* out, ptrdiff_t stride) {
  tile_store<0>(out, stride);
  if constexpr (Count > 1) tile_store<1>(out + kTileBytes, stride);
  if constexpr (Count > 2) tile_store<2>(out + 2 * kTileBytes, stride);
  if constexpr (Count > 3) tile_store<3>(out + 3 * kTileBytes, stride);
}

// Groups whose sums fill the registers.
template <KvDtype T>
constexpr int kWide = 4 / kSumPlanes<T>;

// Scores of one strip with the groups first .. last of a tile's keys, and with some of their neighbours.
template <KvDtype T>
void strip_scores(const uint8_t* queries, int steps, const RightOperands& right, int first, int last, uint8_t* scores) {
  constexpr Product kProduct = T == kInt8 ? Product::kSigned : Product::kBf16;
  for (int g = first / kWide<T> * kWide<T>; g < last; g += kWide<T>) {
    clear_sums();
    const uint8_t* left = queries;
    for (int s = 0; s < steps; ++s, left += kPlanes<T> * kPlaneBytes) {
      const ptrdiff_t at = s * kDepth * right.k_stride;
      tile_load<kLeft>(left, kTileBytes);
      if constexpr (kPlanes<T> == 2) tile_load<kLeft + 1>(left + kPlaneBytes, kTileBytes);
      add_group<T, kProduct, 0>(right.k[g] + at, right.k_stride);
      add_group<T, kProduct, 1>(right.k[g + 1] + at, right.k_stride);
      if constexpr (kWide<T> == 4) {
        add_group<T, kProduct, 2>(right.k[g + 2] + at, right.k_stride);
        add_group<T, kProduct, 3>(right.k[g + 3] + at, right.k_stride);
      }
    }
    store_sums<4>(scores + g * kSumPlanes<T> * kTileBytes, kScoreStride<T>);
  }
}

// P.V of one strip for Groups groups of dimensions, of which the first is *group*, over the steps first .. last of the
// keys.
template <KvDtype T, int Groups>
void value_groups(const uint8_t* weights, const RightOperands& right, int group, int first, int last, ptrdiff_t stride,
                  uint8_t* out) {
  constexpr Product kProduct = T == kInt8 ? Product::kUnsignedSigned : Product::kBf16;
  clear_sums();
  for (int s = first; s < last; ++s) {
    const uint8_t* left = weights + s * kPlanes<T> * kTileBytes;
    const uint8_t* v = right.v[s] + group * kTileBytes;
    tile_load<kLeft>(left, kWeightStride<T>);
    if constexpr (kPlanes<T> == 2) tile_load<kLeft + 1>(left + kTileBytes, kWeightStride<T>);
    add_group<T, kProduct, 0>(v, right.v_stride);
    if constexpr (Groups > 1) add_group<T, kProduct, 1>(v + kTileBytes, right.v_stride);
    if constexpr (Groups > 2) add_group<T, kProduct, 2>(v + 2 * kTileBytes, right.v_stride);
    if constexpr (Groups > 3) add_group<T, kProduct, 3>(v + 3 * kTileBytes, right.v_stride);
  }
  store_sums<Groups * kSumPlanes<T>>(out + group * kSumPlanes<T> * kTileBytes, stride);
}

template <KvDtype T>
void strip_values(const uint8_t* weights, const RightOperands& right, int head_dim, int first, int last, uint8_t* out) {
  const int groups = (head_dim + kGroup - 1) / kGroup;
  const ptrdiff_t stride = product_stride<T>(head_dim);
  int g = 0;
  for (; g + kWide<T> <= groups; g += kWide<T>) value_groups<T, kWide<T>>(weights, right, g, first, last, stride, out);
  switch (groups - g) {
    case 3: if constexpr (kWide<T> > 3) value_groups<T, 3>(weights, right, g, first, last, stride, out); break;
    case 2: if constexpr (kWide<T> > 2) value_groups<T, 2>(weights, right, g, first, last, stride, out); break;
    case 1: value_groups<T, 1>(weights, right, g, first, last, stride, out); break;
  }
}

// --- one strip -------------------------------------------------------------------------------------------------------

// A row's P.V as floats [head_dim], in place.
template <KvDtype T>
float* product_row(uint8_t* row, int head_dim) {
  float* out = reinterpret_cast<float*>(row);
  for (int g = 0; T == kInt8 && g * kGroup < head_dim; ++g) {
    const Int high = load_words(row + g * 128), low = load_words(row + g * 128 + 64);
    store(out + g * kGroup, to_float(_mm512_add_epi32(shift_left<8>(high), low)));
  }
  return out;
}

// Adds one key tile to the rows first_row .. first_row + kStrip, or writes it to *partial* (see attend_item).
template <KvDtype T>
void attend_strip(const Attributes& a, const Rows& rows, int first_row, int tile_start, const RightOperands& right,
                  const TileScratch& s, float* partial) {
  const int last_row = first_row + kStrip < rows.count ? first_row + kStrip : rows.count;
  const auto position = [&](int row) { return rows.first_position + row / rows.group - tile_start; };
  const auto low_key = [&](int row) { return a.window > 0 ? position(row) + 1 - a.window : 0; };
  const int low = low_key(first_row) > 0 ? low_key(first_row) : 0;
  const int high = position(last_row - 1) + 1 < kKeyTile ? position(last_row - 1) + 1 : kKeyTile;
  const int first_step = low / kStep<T>, last_step = (high + kStep<T> - 1) / kStep<T>;
  constexpr int kGroups = kStep<T> / kGroup;
  if (low < high) {
    const uint8_t* queries = s.queries + first_row / kStrip * strip_query_bytes<T>(a.head_dim);
    const int steps = (a.head_dim + kStep<T> - 1) / kStep<T>;
    strip_scores<T>(queries, steps, right, low / kGroup, (high + kGroup - 1) / kGroup, s.scores);
  }
  RowSoftmax softmax[kStrip];
  for (int r = first_row; r < last_row; ++r) {
    const int i = r - first_row;
    softmax[i] = {kMasked, 0.0f};
    if (low >= high) continue;
    softmax[i] = softmax_row<T>(s.scores + i * kScoreStride<T>, *s.scales, low_key(r), position(r) + 1,
                                first_step * kGroups, last_step * kGroups, s.multiplier[r], a.softcap * kLog2E,
                                s.weights + i * kWeightStride<T>);
  }
  if (low < high) strip_values<T>(s.weights, right, a.head_dim, first_step, last_step, s.products);
  for (int r = first_row; r < last_row; ++r) {
    const RowSoftmax& x = softmax[r - first_row];
    float* product = product_row<T>(s.products + (r - first_row) * product_stride<T>(a.head_dim), a.head_dim);
    if (partial == nullptr) {
      merge_row(a.head_dim, x.max, x.total, product, s.max + r, s.total + r, s.sum + r * a.head_dim);
    } else {
      write_partial(a.head_dim, x.max, x.total, product, partial + r * (a.head_dim + 2));
    }
  }
}

// --- one item --------------------------------------------------------------------------------------------------------

template <KvDtype T>
void attend_with_tiles(const Attributes& a, const Step& s, const WorkItem& item, float* base, float* partial) {
  const Rows rows = rows_of(a, s, item);
  TileScratch scratch;
  tile_scratch_views<T>(a, rows.count, reinterpret_cast<uint8_t*>(base), &scratch);
  for (int r = 0; r < rows.count; ++r) {
    uint8_t* strip = scratch.queries + r / kStrip * strip_query_bytes<T>(a.head_dim);
    const float* q = output_row(a, s, item, rows, r);
    scratch.multiplier[r] = pack_query<T>(q, a.head_dim, a.scale * kLog2E, r % kStrip, strip);
  }
  if (partial == nullptr) clear_rows(a, rows, scratch.max, scratch.total, scratch.sum);
  const TileShapes shapes(rows.count < kStrip ? rows.count : kStrip);
  for (int t = item.first_tile; t < item.last_tile; ++t) {
    const int start = t * kKeyTile;
    const TileBlocks tile = tile_blocks(a, s, item, rows, start);
    RightOperands right;
    make_keys<T>(tile, a.head_dim, scratch.k_panel, &right);
    make_values<T>(tile, a.head_dim, scratch.v_panel, &right);
    if constexpr (T == kInt8) gather_scales(tile, scratch.scales);
    for (int r = 0; r < rows.count; r += kStrip) attend_strip<T>(a, rows, r, start, right, scratch, partial);
    if (partial != nullptr) partial += rows.count * (a.head_dim + 2);
  }
  if (partial == nullptr) write_rows(a, s, item, rows, scratch.total, scratch.sum);
}

template <KvDtype T>
size_t tile_scratch_floats(const Attributes& a, int rows) {
  TileScratch ignored;
  const size_t floats = (tile_scratch_views<T>(a, rows, nullptr, &ignored) + 3) / 4;
  return floats > scratch_floats(a, rows) ? floats : scratch_floats(a, rows);  // merge takes the vector kernels'
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
