#include "node_reader.h"

#include <climits>

namespace castline {
namespace {

int clamp(int64_t value) { return static_cast<int>(value > INT_MAX ? INT_MAX : value < -1 ? -1 : value); }

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (size_t i = 0; i < t.rank && i < kMaxRank; ++i) text += (i ? ", " : "") + std::to_string(t.dims[i]);
  return text + "]";
}

}  // namespace

int AttributeReader::integer(const char* name) {
  int64_t value = 0;
  require(ort::attribute(api_, info_, name, &value));
  return clamp(value);
}

int AttributeReader::integer(const char* name, int64_t otherwise) {
  int64_t value = otherwise;
  return absent(ort::attribute(api_, info_, name, &value)) ? clamp(otherwise) : clamp(value);
}

float AttributeReader::number(const char* name) {
  float value = 0;
  require(ort::attribute(api_, info_, name, &value));
  return value;
}

float AttributeReader::number(const char* name, float otherwise) {
  float value = otherwise;
  return absent(ort::attribute(api_, info_, name, &value)) ? otherwise : value;
}

void AttributeReader::require(OrtStatus* status) {
  if (status != nullptr && status_ != nullptr) ort::release_status(api_, status);
  if (status_ == nullptr) status_ = status;
}

bool AttributeReader::absent(OrtStatus* status) {
  if (status != nullptr) ort::release_status(api_, status);
  return status != nullptr;
}

OrtStatus* read_tensor(const OrtApi* api, const OrtKernelContext* context, int index, Tensor* out) {
  const OrtValue* value = nullptr;
  if (OrtStatus* status = ort::input(api, context, index, &value)) return status;
  if (value == nullptr) return nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (OrtStatus* status = ort::type_and_shape(api, value, &info)) return status;
  OrtStatus* status = ort::dimension_count(api, info, &out->rank);
  // Only the first kMaxRank dimensions are kept: no input has as many, so check_shape refuses the rank.
  const size_t kept = out->rank < kMaxRank ? out->rank : kMaxRank;
  if (status == nullptr) status = ort::dimensions(api, info, out->dims, kept);
  ort::release_shape(api, info);
  if (status != nullptr) return status;
  out->present = true;
  return ort::mutable_data(api, const_cast<OrtValue*>(value), &out->data);
}

std::string check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> wanted) {
  if (!tensor.present) return join(name, " is absent, but the node's attributes call for it");
  bool fits = tensor.rank == wanted.size();
  size_t i = 0;
  std::string text = "[";
  for (int64_t size : wanted) {
    text += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
    fits = fits && (size < 0 || tensor.dims[i] == size);
    ++i;
  }
  return fits ? "" : join(name, " has shape ", shape_text(tensor), ", wanted ", text, "]");
}

OrtStatus* make_output(const OrtApi* api, OrtKernelContext* context, size_t index, std::initializer_list<int64_t> shape,
                       float** out) {
  OrtValue* value = nullptr;
  if (OrtStatus* status = ort::output(api, context, index, shape.begin(), shape.size(), &value)) return status;
  *out = nullptr;
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  OrtStatus* status = ort::mutable_data(api, value, &data);
  *out = static_cast<float*>(data);
  return status;
}

}  // namespace castline
