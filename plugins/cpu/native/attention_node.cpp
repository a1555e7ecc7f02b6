#include "attention_node.h"

namespace castline {

OrtStatus* read_attributes(const OrtApi* api, const OrtKernelInfo* info, Attributes* out) {
  AttributeReader read(api, info);
  Attributes a = {};
  a.layer = read.integer("layer");
  a.num_heads = read.integer("num_heads");
  a.num_kv_heads = read.integer("num_kv_heads");
  a.head_dim = read.integer("head_dim");
  a.scale = read.number("scale");
  a.block_size = read.integer("block_size");
  a.kv_dtype = static_cast<KvDtype>(read.integer("kv_dtype"));
  a.window = read.integer("window", 0);
  a.softcap = read.number("softcap", 0.0f);
  a.rotary_dim = read.integer("rotary_dim", 0);
  a.rope_interleaved = read.integer("rope_interleaved", 0);
  a.qk_norm = static_cast<QkNorm>(read.integer("qk_norm", 0));
  a.norm_eps = read.number("norm_eps", 1e-6f);
  a.query_tile = read.integer("query_tile", 0);
  a.kv_split = read.integer("kv_split", 0);
  *out = a;
  return read.status();
}

OrtStatus* read_inputs(const OrtApi* api, const OrtKernelContext* context, Tensor (&out)[kInputs]) {
  for (int i = 0; i < kInputs; ++i) {
    if (OrtStatus* status = read_tensor(api, context, i, &out[i])) return status;
  }
  return nullptr;
}

Step make_step(const Tensor (&in)[kInputs]) {
  const auto floats = [&](Input i) { return static_cast<const float*>(in[i].data); };
  const auto ints = [&](Input i) { return static_cast<const int32_t*>(in[i].data); };
  Step s = {};
  s.num_tokens = in[kQkv].dims[0];
  s.num_sequences = in[kKvLens].dims[0];
  s.table_width = in[kBlockTable].dims[1];
  s.num_blocks = in[kKvPool].dims[0];
  s.qkv = floats(kQkv);
  s.cos = floats(kCos);
  s.sin = floats(kSin);
  s.q_norm_weight = floats(kQNormWeight);
  s.k_norm_weight = floats(kKNormWeight);
  s.pool = static_cast<uint8_t*>(in[kKvPool].data);
  s.slot_mapping = ints(kSlotMapping);
  s.cu_query_lens = ints(kCuQueryLens);
  s.kv_lens = ints(kKvLens);
  s.block_table = ints(kBlockTable);
  return s;
}

}  // namespace castline
