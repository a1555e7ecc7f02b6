// The scales of int8 keys over a key tile. Included by kernel.h only.
#pragma once

#include "simd.h"
#include "values.h"

namespace castline::CASTLINE_ISA {
namespace {

struct KeyScales {
  float k[kKeyTile];
  float v[kKeyTile];  // 0 outside the tile's keys: a weight of 0 times a stale scale must be 0
  float v_largest;
};

// Fetches the scales of block b, which are read after all scores.
[[maybe_unused]] void fetch_scales(const TileBlocks& tile, int b) {
  for (int i = 0; i < tile.block_size; i += 16) {
    fetch(reinterpret_cast<const uint8_t*>(tile.block[b].k_scale + i));
    fetch(reinterpret_cast<const uint8_t*>(tile.block[b].v_scale + i));
  }
}

// K's scales come multiplied by *k_factor*.
[[maybe_unused]] void gather_scales(const TileBlocks& tile, float k_factor, KeyScales* out) {
  const int n = tile.block_size;
  Vec largest = broadcast(0.0f);
  for (int i = 0; i < kKeyTile; i += kLanes) {
    Vec v = broadcast(0.0f);
    if (i + kLanes > tile.first_key && i < tile.last_key) {
      const HeadBlock& block = tile.block[i / n];
      store(out->k + i, mul(load(block.k_scale + i % n), broadcast(k_factor)));
      v = keep_range(load(block.v_scale + i % n), tile.first_key - i, tile.last_key - i, v);
    }
    store(out->v + i, v);
    largest = max(largest, v);
  }
  out->v_largest = reduce_max(largest);
}

// The power of two that takes the greatest V scale of the keys [low, high) to between 2^(bits - 1) and 2^bits.
[[maybe_unused]] int weight_exponent(const KeyScales& scales, int low, int high, int bits) {
  float greatest = scales.v_largest;
  if (low > 0 || high < kKeyTile) {
    Vec largest = broadcast(0.0f);
    for (int i = low > 0 ? low / kLanes * kLanes : 0; i < high && i < kKeyTile; i += kLanes) {
      largest = max(largest, keep_range(load(scales.v + i), low - i, high - i, broadcast(0.0f)));
    }
    greatest = reduce_max(largest);
  }
  const int exponent = static_cast<int>(float_bits(greatest) >> 23) - 127;
  return exponent < -45 ? 60 : bits - 1 - exponent;
}

}  // namespace
}  // namespace castline::CASTLINE_ISA
