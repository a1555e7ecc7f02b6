#include "node_reader.h"

#include <climits>
#include <string>

namespace castline {
namespace {

// Reads attributes one by one; the first that a required one lacks is kept as the status.
class AttributeReader {
 public:
  AttributeReader(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int integer(const char* name) {
    int64_t value = 0;
    require(ort::attribute(api_, info_, name, &value));
    return clamp(value);
  }
  int integer(const char* name, int64_t otherwise) {
    int64_t value = otherwise;
    return absent(ort::attribute(api_, info_, name, &value)) ? clamp(otherwise) : clamp(value);
  }
  float number(const char* name) {
    float value = 0;
    require(ort::attribute(api_, info_, name, &value));
    return value;
  }
  float number(const char* name, float otherwise) {
    float value = otherwise;
    return absent(ort::attribute(api_, info_, name, &value)) ? otherwise : value;
  }
  OrtStatus* status() const { return status_; }

 private:
  static int clamp(int64_t value) { return static_cast<int>(value > INT_MAX ? INT_MAX : value < -1 ? -1 : value); }
  void require(OrtStatus* status) {
    if (status != nullptr && status_ != nullptr) ort::release_status(api_, status);
    if (status_ == nullptr) status_ = status;
  }
  bool absent(OrtStatus* status) {
    if (status != nullptr) ort::release_status(api_, status);
    return status != nullptr;
  }

  const OrtApi* api_;
  const OrtKernelInfo* info_;
  OrtStatus* status_ = nullptr;
};

OrtStatus* read_tensor(const OrtApi* api, const OrtKernelContext* context, int index, Tensor* out) {
  const OrtValue* value = nullptr;
  if (OrtStatus* status = ort::input(api, context, index, &value)) return status;
  if (value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (OrtStatus* status = ort::type_and_shape(api, value, &info)) return status;
  OrtStatus* status = ort::dimension_count(api, info, &out->rank);
  // Only the first kMaxRank dimensions are kept: no input has as many, so check_shapes refuses the rank.
  const size_t kept = out->rank < kMaxRank ? out->rank : kMaxRank;
  if (status == nullptr) status = ort::dimensions(api, info, out->dims, kept);
  ort::release_shape(api, info);
  if (status != nullptr) return status;
  out->present = true;
  return ort::mutable_data(api, const_cast<OrtValue*>(value), &out->data);
}

}  // namespace

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
