#include "checks.h"

#include "layout.h"

namespace castline {
namespace {

// -1 in *wanted* matches any size.
std::string check_shape(const Tensor (&inputs)[kInputs], Input index, std::initializer_list<int64_t> wanted) {
  return check_shape(kInputNames[index], inputs[index], wanted);
}

std::string check_query_lens(const Step& s) {
  if (s.cu_query_lens[0] != 0) return join("cu_query_lens[0] is ", s.cu_query_lens[0], ", wanted 0");
  for (int64_t b = 0; b < s.num_sequences; ++b) {
    if (s.cu_query_lens[b + 1] < s.cu_query_lens[b]) {
      return join("cu_query_lens[", b + 1, "] is ", s.cu_query_lens[b + 1], ", less than the one before");
    }
  }
  const int32_t last = s.cu_query_lens[s.num_sequences];
  return last == s.num_tokens ? "" : join("cu_query_lens ends at ", last, ", the step has ", s.num_tokens, " tokens");
}

}  // namespace

std::string check_attributes(const Attributes& a) {
  if (a.num_heads < 1 || a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads != 0) {
    return join("num_heads ", a.num_heads, " is not a multiple of num_kv_heads ", a.num_kv_heads);
  }
  if (a.head_dim < 8 || a.head_dim > kMaxHeadDim || a.head_dim % 8 != 0) {
    return join("head_dim ", a.head_dim, " is not a multiple of 8 from 8 to ", kMaxHeadDim);
  }
  if (a.block_size < 16 || a.block_size > kKeyTile || kKeyTile % a.block_size != 0) {
    return join("block_size ", a.block_size, " is not 16, 32, 64, 128 or 256");
  }
  if (a.kv_dtype < kFp32 || a.kv_dtype > kFp8) return join("kv_dtype ", static_cast<int>(a.kv_dtype), " is unknown");
  if (a.qk_norm < kNoNorm || a.qk_norm > kNormFull) return join("qk_norm ", static_cast<int>(a.qk_norm), " is unknown");
  if (a.rotary_dim < 0 || a.rotary_dim > a.head_dim || a.rotary_dim % 2 != 0) {
    return join("rotary_dim ", a.rotary_dim, " is not an even number from 0 to head_dim ", a.head_dim);
  }
  if (a.window < 0 || a.query_tile < 0 || a.kv_split < 0) return "window, query_tile and kv_split must not be negative";
  if (!(a.softcap >= 0.0f)) return join("softcap ", a.softcap, " is negative");
  if (!(a.norm_eps >= 0.0f)) return join("norm_eps ", a.norm_eps, " is negative");
  return "";
}

std::string check_shapes(const Attributes& a, const Tensor (&inputs)[kInputs]) {
  const int64_t width = static_cast<int64_t>(a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
  std::string error = check_shape(inputs, kQkv, {-1, width});
  const int64_t tokens = inputs[kQkv].dims[0];
  const auto check = [&](Input index, std::initializer_list<int64_t> wanted) {
    if (error.empty()) error = check_shape(inputs, index, wanted);
  };
  if (a.rotary_dim > 0) {
    check(kCos, {tokens, a.rotary_dim / 2});
    check(kSin, {tokens, a.rotary_dim / 2});
  }
  if (a.qk_norm != kNoNorm) {
    const bool full = a.qk_norm == kNormFull;
    check(kQNormWeight, {full ? a.num_heads * a.head_dim : a.head_dim});
    check(kKNormWeight, {full ? a.num_kv_heads * a.head_dim : a.head_dim});
  }
  check(kKvPool, {-1, block_bytes(a)});
  check(kSlotMapping, {tokens});
  check(kKvLens, {-1});
  const int64_t sequences = inputs[kKvLens].dims[0];
  check(kCuQueryLens, {sequences + 1});
  check(kBlockTable, {sequences, -1});
  if (error.empty() && tokens > INT32_MAX / a.num_heads / a.head_dim) {
    error = join("qkv has ", tokens, " rows: too many");
  }
  return error;
}

std::string check_values(const Attributes& a, const Step& s) {
  const int64_t slots = s.num_blocks * a.block_size;
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    if (s.slot_mapping[t] < -1 || s.slot_mapping[t] >= slots) {
      return join("slot_mapping[", t, "] is ", s.slot_mapping[t], ", the pool has ", slots, " slots");
    }
  }
  const std::string error = check_query_lens(s);
  if (!error.empty()) return error;
  for (int64_t b = 0; b < s.num_sequences; ++b) {
    const int64_t queries = static_cast<int64_t>(s.cu_query_lens[b + 1]) - s.cu_query_lens[b];
    if (s.kv_lens[b] < queries) return join("kv_lens[", b, "] is ", s.kv_lens[b], ", the step alone has ", queries);
    if (queries == 0) continue;
    const int64_t blocks = (static_cast<int64_t>(s.kv_lens[b]) + a.block_size - 1) / a.block_size;
    if (blocks > s.table_width) {
      return join("block_table has ", s.table_width, " columns, kv_lens[", b, "] = ", s.kv_lens[b], " needs ", blocks);
    }
    const int32_t* row = s.block_table + b * s.table_width;
    for (int64_t i = 0; i < blocks; ++i) {
      if (row[i] < 0 || row[i] >= s.num_blocks) {
        return join("block_table[", b, ", ", i, "] is ", row[i], ", the pool has ", s.num_blocks, " blocks");
      }
    }
  }
  return "";
}

}  // namespace castline
