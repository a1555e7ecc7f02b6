// The layout of one KV block; nothing else knows it. H kv heads, N = block_size tokens, D = head_dim.
//
//   K    [H] tiles       fp32       [D][N]         one dimension of N keys is contiguous: lanes are keys
//                        bf16, fp8  [D/2][N][2]    two dimensions of a key side by side
//                        int8       [D/4][N][4]    four dimensions of a key side by side
//   V    [H] tiles       fp32       [N][D]         lanes are dimensions
//                        bf16, fp8  [N/2][D][2]    two keys side by side
//                        int8       [N/4][D][4]    four keys side by side
//   int8 only: K scales [H][N], then V scales [H][N], fp32
//
// fp8: e4m3's codes, which the matrix kernels replace by codes of their own (fp8_bf16.h).
//
// A word of 32 bits then holds what one lane of a dot-product instruction adds up (bf16, int8), and these are the right
// operands of a matrix instruction as they stand.
//
// The size is castline.engines.capacity.kv_block_bytes; every tile begins at a multiple of 64 bytes of the pool.
#pragma once

#include "attention.h"

namespace castline {

constexpr int element_bytes(KvDtype dtype) { return dtype == kFp32 ? 4 : dtype == kBf16 ? 2 : 1; }

// Elements that lie side by side: dimensions of a key in K, keys of a dimension in V.
constexpr int side_by_side(KvDtype dtype) { return dtype == kFp32 ? 1 : dtype == kInt8 ? 4 : 2; }

static inline int64_t block_bytes(const Attributes& a) {
  const int64_t per_token = a.head_dim * element_bytes(a.kv_dtype) + (a.kv_dtype == kInt8 ? 4 : 0);
  return 2 * static_cast<int64_t>(a.num_kv_heads) * a.block_size * per_token;
}

// Where the tiles and scales of one kv head of one block are.
struct HeadBlock {
  uint8_t* k;
  uint8_t* v;
  float* k_scale;
  float* v_scale;
};

static inline HeadBlock head_block(const Attributes& a, uint8_t* pool, int64_t block, int kv_head) {
  uint8_t* base = pool + block * block_bytes(a);
  const int64_t tile = static_cast<int64_t>(a.block_size) * a.head_dim * element_bytes(a.kv_dtype);
  const int64_t heads = a.num_kv_heads;
  float* scales = reinterpret_cast<float*>(base + 2 * heads * tile);
  return {base + kv_head * tile, base + (heads + kv_head) * tile, scales + kv_head * a.block_size,
          scales + (heads + kv_head) * a.block_size};
}

}  // namespace castline
