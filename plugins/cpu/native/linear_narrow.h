// The narrow linear kernels, once for every instruction set: each includes this in a unit of its own.
//
// A tile is some rows by some strips, whose integer sums fit the registers. Strips are the outer loop and row tiles the
// inner one, so that weights are streamed once; while a tile is multiplied, the strips after it are fetched. Every sum
// over K is taken group by group in order, whatever the tile, so that a row's bits depend on the row alone.
#pragma once

#include "linear_dot.h"
#include "linear_epilogue.h"
#include "linear_prologue.h"

namespace castline::CASTLINE_ISA {
namespace {

// What a tile of rows knows of one group of K.
struct RowGroup {
  int8_t q[kActivationGroup];
  float scale;
  union {
    int32_t offset;      // W4, W8: the zero point's share of the integer sum
    float weighted_sum;  // W4_DM: what the minimum is multiplied by
  };
};

// Rows in tiles of nearly equal size, prepared as [tile][group][row of the tile].
struct RowTiles {
  explicit RowTiles(int64_t rows) : rows(rows), count((rows + kTileRows - 1) / kTileRows) {}
  int64_t first(int64_t tile) const { return tile * (rows / count) + (tile < rows % count ? tile : rows % count); }
  int size(int64_t tile) const { return static_cast<int>(rows / count + (tile < rows % count)); }
  int64_t of(int64_t row) const {
    const int64_t longer = rows % count * (rows / count + 1);  // rows of the tiles that have one more
    return row < longer ? row / (rows / count + 1) : rows % count + (row - longer) / (rows / count);
  }

  int64_t rows, count;
};

inline int activation_groups(const LinearAttributes& a) { return padded_k(a) / kActivationGroup; }

size_t prepared_bytes(const LinearAttributes& a, int64_t rows) {
  return sizeof(RowGroup) * static_cast<size_t>(activation_groups(a)) * rows;
}

void prepare(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last, uint8_t* prepared) {
  const RowTiles tiles(s.rows);
  const int groups = activation_groups(a);
  alignas(64) float h[kActivationGroup];
  for (int64_t row = first; row < last; ++row) {
    const int64_t tile = tiles.of(row);
    const int size = tiles.size(tile);
    RowGroup* out = reinterpret_cast<RowGroup*>(prepared) + tiles.first(tile) * groups + (row - tiles.first(tile));
    const float factor = row_factor(a, s, row);
    for (int g = 0; g < groups; ++g, out += size) {
      norm_group(a, s, row, factor, g, h);
      const RoundedGroup rounded = round_group(h, out->q);
      out->scale = rounded.scale;
      if (a.format == kW4Dm) {
        out->weighted_sum = rounded.scale * static_cast<float>(rounded.sum);
      } else {
        out->offset = -(a.format == kW4 ? 8 : 128) * rounded.sum;
      }
    }
  }
}

// Fetching some memory while tiles are multiplied: a few lines with every group.
struct Fetch {
  // Spread over *calls* tiles of *groups* groups.
  Fetch(const void* from, size_t bytes, int64_t calls, int groups)
      : at(static_cast<const char*>(from)), groups(groups) {
    const int64_t lines_wanted = static_cast<int64_t>(bytes + 63) / 64, slots = calls * groups;
    end = at + bytes;
    lines = static_cast<int>((lines_wanted + slots - 1) / slots);
  }
  // After a tile.
  void advance() {
    at += static_cast<ptrdiff_t>(lines) * groups * 64;
    if (at >= end) lines = 0;
  }

  const char* at;
  const char* end;
  int groups, lines;
};

// The strips of a tile, and what to fetch meanwhile: the strips after them.
struct Panel {
  const uint8_t* weight;
  const uint16_t* scales;
  size_t weight_stride, scales_stride;  // from strip to strip
  int groups;
  int scale_shift;  // activation groups a scale: 2^scale_shift; used where scales are grouped
  Fetch weight_ahead, scales_ahead;
};

// Into the second-level cache: faster than into the first where weights come from memory, whose latency a few lines in
// flight between the two do not hide.
CASTLINE_INLINE const char* fetch(const char* from, int lines) {
  for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
  return from;
}

constexpr int kStripVecs = kStrip / kLanes;
constexpr int kTotalsStrips = kTileStrips > 2 ? kTileStrips : 2;  // of a row of totals: a unit or a tile

template <LinearFormat F, int Rows, int Vecs>
CASTLINE_INLINE void add_group(const uint8_t* weight, size_t stride, const RowGroup* rows, Int (&sum)[Rows][Vecs]) {
  constexpr int kLines = F == kW8 ? 8 : 4;
  constexpr int kLaneBytes = kLanes * 4;
#pragma GCC unroll 8
  for (int line = 0; line < kLines; ++line, weight += 64) {
#pragma GCC unroll 2
    for (int half = 0; half < (F == kW8 ? 1 : 2); ++half) {
      Int codes[Vecs];
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) {
        const uint8_t* p = weight + v / kStripVecs * stride + v % kStripVecs * kLaneBytes;
        codes[v] = F == kW8 ? byte_codes(p) : half ? high_codes(p) : low_codes(p);
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Int q = broadcast_word(rows[r].q + (F == kW8 ? 4 * line : 8 * line + 4 * half));
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) add_dot<F>(sum[r][v], codes[v], q);
      }
    }
  }
}

// Dot products of a tile into totals [Rows][kTotalsStrips][16]. PerColumn: one scale a column, applied at the end.
template <LinearFormat F, bool PerColumn, int Rows, int Strips>
__attribute__((noinline)) void multiply_tile(const Panel& panel, const RowGroup* rows, float* totals) {
  constexpr int kVecs = Strips * kStripVecs;
  constexpr int kParts = F == kW4Dm ? 2 : 1;  // vectors of 16 halves a group
  constexpr bool kInRegisters = Rows * kVecs <= 4;
  const uint8_t* weight = panel.weight;
  const char* weight_ahead = panel.weight_ahead.at;
  const char* scales_ahead = panel.scales_ahead.at;
  const auto scale_of = [&](int group, int part, int v) {
    return load_half(panel.scales + v / kStripVecs * panel.scales_stride + (group * kParts + part) * kStrip +
                     v % kStripVecs * kLanes);
  };
  // Many totals live in memory, which leaves the registers to the integer sums.
  Vec registers[kInRegisters ? Rows : 1][kInRegisters ? kVecs : 1];
  const auto read = [&](int r, int v) {
    if constexpr (kInRegisters) return registers[r][v];
    return load(totals + r * kTotalsStrips * kStrip + v * kLanes);
  };
  const auto write = [&](int r, int v, Vec y) {
    if constexpr (kInRegisters) {
      registers[r][v] = y;
    } else {
      store(totals + r * kTotalsStrips * kStrip + v * kLanes, y);
    }
  };
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVecs; ++v) write(r, v, broadcast(0.0f));
  }
  for (int g = 0; g < panel.groups; ++g, rows += Rows, weight += F == kW8 ? 512 : 256) {
    Int sum[Rows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[r][v] = start<F>(rows[r].offset);
    }
    weight_ahead = fetch(weight_ahead, panel.weight_ahead.lines);
    scales_ahead = fetch(scales_ahead, panel.scales_ahead.lines);
    add_group<F>(weight, panel.weight_stride, rows, sum);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const Vec scale = PerColumn ? broadcast(1.0f) : scale_of(g >> panel.scale_shift, 0, v);
      const Vec minimum = F == kW4Dm ? scale_of(g, 1, v) : scale;
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vec row_scale = broadcast(rows[r].scale);
        const Vec factor = PerColumn ? row_scale : mul(scale, row_scale);
        Vec y = fma(finish<F>(sum[r][v], rows[r].offset), factor, read(r, v));
        if constexpr (F == kW4Dm) y = fma(minimum, broadcast(rows[r].weighted_sum), y);
        write(r, v, y);
      }
    }
  }
  if constexpr (kInRegisters || PerColumn) {
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVecs; ++v) {
        const Vec y = PerColumn ? mul(read(r, v), scale_of(0, 0, v)) : read(r, v);
        store(totals + r * kTotalsStrips * kStrip + v * kLanes, y);
      }
    }
  }
}

template <LinearFormat F, bool PerColumn, int Strips, int Rows = kTileRows>
void multiply_rows(int rows, const Panel& panel, const RowGroup* prepared, float* totals) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<F, PerColumn, Strips, Rows - 1>(rows, panel, prepared, totals);
  }
  multiply_tile<F, PerColumn, Rows, Strips>(panel, prepared, totals);
}

template <LinearFormat F, bool PerColumn>
void multiply_strips(int strips, int rows, Panel& panel, const RowGroup* prepared, float* totals) {
  if (strips == kTileStrips) {
    multiply_rows<F, PerColumn, kTileStrips>(rows, panel, prepared, totals);
    panel.weight_ahead.advance();
    panel.scales_ahead.advance();
    return;
  }
  for (int i = 0; i < strips; ++i) {
    Panel one = panel;
    one.weight += i * panel.weight_stride;
    one.scales += i * panel.scales_stride;
    multiply_rows<F, PerColumn, 1>(rows, one, prepared, totals + i * kStrip);
    panel.weight_ahead.advance();
    panel.scales_ahead.advance();
  }
}

template <LinearFormat F, bool PerColumn>
void compute_format(const LinearAttributes& a, const LinearStep& s, int first, int last, const uint8_t* prepared) {
  const RowTiles tiles(s.rows);
  const int groups = activation_groups(a), per_unit = strips_per_unit(a), end = last * per_unit;
  const RowGroup* const rows = reinterpret_cast<const RowGroup*>(prepared);
  alignas(64) float totals[kTileRows * kTotalsStrips * kStrip];
  for (int strip = first * per_unit, count; strip < end; strip += count) {
    count = end - strip < kTotalsStrips ? end - strip : kTotalsStrips;
    const uint8_t* const weight = s.weight + strip * strip_bytes(a);
    const uint16_t* const scales = s.scales + strip * strip_scales(a);
    const int after = end - strip - count < count ? end - strip - count : count;  // strips to fetch
    const int64_t calls = tiles.count * (count == kTileStrips ? 1 : count);
    Panel panel = {weight, scales, strip_bytes(a), strip_scales(a), groups, a.group == 2 * kActivationGroup,
                   Fetch(weight + count * strip_bytes(a), after * strip_bytes(a), calls, groups),
                   Fetch(scales + count * strip_scales(a), 2 * after * strip_scales(a), calls, groups)};
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t row = tiles.first(tile);
      const int size = tiles.size(tile);
      multiply_strips<F, PerColumn>(count, size, panel, rows + row * groups, totals);
      for (int r = 0; r < size; ++r) {
        for (int u = 0; u < count / per_unit; ++u) {
          const float* sums = totals + (r * kTotalsStrips + u * per_unit) * kStrip;
          write_unit(a, s, row + r, strip / per_unit + u, sums);
        }
      }
    }
  }
}

void compute(const LinearAttributes& a, const LinearStep& s, int first, int last, const uint8_t* prepared) {
  switch (a.format) {
    case kW4Dm: return compute_format<kW4Dm, false>(a, s, first, last, prepared);
    case kW4: return compute_format<kW4, false>(a, s, first, last, prepared);
    case kW8: break;
  }
  if (a.group == 0) return compute_format<kW8, true>(a, s, first, last, prepared);
  compute_format<kW8, false>(a, s, first, last, prepared);
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
