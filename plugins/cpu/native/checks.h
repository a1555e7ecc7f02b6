// Checks of one call: shapes and the values that become addresses. A step that passes cannot make a kernel read or
// write outside its tensors.
#pragma once

#include <string>

#include "attention.h"
#include "node_reader.h"

namespace castline {

constexpr int kInputs = 10;
constexpr const char* kInputNames[kInputs] = {"qkv",           "cos",     "sin",          "q_norm_weight",
                                              "k_norm_weight", "kv_pool", "slot_mapping", "cu_query_lens",
                                              "kv_lens",       "block_table"};
enum Input : int {
  kQkv, kCos, kSin, kQNormWeight, kKNormWeight, kKvPool, kSlotMapping, kCuQueryLens, kKvLens, kBlockTable
};

// Empty where the node's attributes are usable, else what is wrong.
std::string check_attributes(const Attributes& a);

// Empty where shapes fit the attributes and each other, else what is wrong, beginning with the tensor's name.
std::string check_shapes(const Attributes& a, const Tensor (&inputs)[kInputs]);

// Empty where slots, lengths and block ids are in range, else what is wrong, beginning with the tensor's name.
std::string check_values(const Attributes& a, const Step& s);

}  // namespace castline
