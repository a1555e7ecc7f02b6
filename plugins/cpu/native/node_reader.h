// Reads attributes and tensors of any node out of ONNX Runtime. A status that is not nullptr is the caller's to return.
#pragma once

#include <initializer_list>
#include <sstream>
#include <string>

#include "ort_abi.h"

namespace castline {

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

inline OrtStatus* invalid_argument(const OrtApi* api, const std::string& message) {
  return ort::create_status(api, ort::kInvalidArgument, message.c_str());
}

// Reads attributes one by one. Without a default an attribute is required, and the first that is missing is kept as the
// status.
class AttributeReader {
 public:
  AttributeReader(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int integer(const char* name);
  int integer(const char* name, int64_t otherwise);
  float number(const char* name);
  float number(const char* name, float otherwise);
  OrtStatus* status() const { return status_; }

 private:
  void require(OrtStatus* status);
  bool absent(OrtStatus* status);

  const OrtApi* api_;
  const OrtKernelInfo* info_;
  OrtStatus* status_ = nullptr;
};

constexpr int kMaxRank = 4;

struct Tensor {
  bool present = false;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};
  void* data = nullptr;
};

OrtStatus* read_tensor(const OrtApi* api, const OrtKernelContext* context, int index, Tensor* out);

// Empty where the tensor has the shape *wanted*, of which -1 matches any size; else what is wrong, after *name*.
std::string check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> wanted);

// The node's float output *index* of a shape, and where its elements go: nullptr where the node leaves it out.
OrtStatus* make_output(const OrtApi* api, OrtKernelContext* context, size_t index, std::initializer_list<int64_t> shape,
                       float** out);

}  // namespace castline
