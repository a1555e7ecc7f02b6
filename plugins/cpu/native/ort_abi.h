// The part of ONNX Runtime's C interface that the plugin uses, declared by ourselves.
//
// OrtApi is a table of function pointers to which releases only append, so a slot number and its signature never change
// within an API version and the versions after it. Version 18 (ONNX Runtime 1.18) has every slot used here.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi;
struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

namespace castline::ort {

constexpr uint32_t kApiVersion = 18;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kFloat16 = 10 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };

// Calls slot *Slot* of the table. The argument types given must be the slot's exactly.
template <int Slot, class Result = OrtStatus*, class... Args>
Result call(const OrtApi* api, Args... args) {
  return reinterpret_cast<Result (*const*)(Args...)>(api)[Slot](args...);
}

inline OrtStatus* create_status(const OrtApi* api, ErrorCode code, const char* message) {
  return call<0>(api, static_cast<int>(code), message);
}
inline OrtStatus* create_domain(const OrtApi* api, const char* name, OrtCustomOpDomain** out) {
  return call<26>(api, name, out);
}
inline OrtStatus* domain_add(const OrtApi* api, OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  return call<27>(api, domain, op);
}
inline OrtStatus* add_domain(const OrtApi* api, OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  return call<28>(api, options, domain);
}
inline OrtStatus* mutable_data(const OrtApi* api, OrtValue* value, void** out) { return call<51>(api, value, out); }
inline OrtStatus* dimension_count(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  return call<61>(api, info, out);
}
inline OrtStatus* dimensions(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) {
  return call<62>(api, info, out, count);
}
inline OrtStatus* element_count(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  return call<64>(api, info, out);
}
inline OrtStatus* type_and_shape(const OrtApi* api, const OrtValue* value, OrtTensorTypeAndShapeInfo** out) {
  return call<65>(api, value, out);
}
inline OrtStatus* attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, float* out) {
  return call<85>(api, info, name, out);
}
inline OrtStatus* attribute(const OrtApi* api, const OrtKernelInfo* info, const char* name, int64_t* out) {
  return call<86>(api, info, name, out);
}
inline OrtStatus* input(const OrtApi* api, const OrtKernelContext* context, size_t index, const OrtValue** out) {
  return call<90>(api, context, index, out);
}
inline OrtStatus* output(const OrtApi* api, OrtKernelContext* context, size_t index, const int64_t* dims, size_t rank,
                         OrtValue** out) {
  return call<91>(api, context, index, dims, rank, out);
}
inline void release_status(const OrtApi* api, OrtStatus* status) { call<93, void>(api, status); }
inline void release_shape(const OrtApi* api, OrtTensorTypeAndShapeInfo* info) { call<99, void>(api, info); }
// Whether an entry of the session's configuration is set, and its value: *size* is that of *out* with the last zero.
inline OrtStatus* has_config(const OrtApi* api, const OrtSessionOptions* options, const char* key, int* out) {
  return call<237>(api, options, key, out);
}
inline OrtStatus* config(const OrtApi* api, const OrtSessionOptions* options, const char* key, char* out, size_t* size) {
  return call<238>(api, options, key, out, size);
}
// An initializer of the graph, where the input is one: *is_constant* is 1 and *out* lives as long as the session.
inline OrtStatus* constant_input(const OrtApi* api, const OrtKernelInfo* info, size_t index, int* is_constant,
                                 const OrtValue** out) {
  return call<249>(api, info, index, is_constant, out);
}
// Runs function(data, 0 .. total - 1) on the session's own threads; num_batch = total hands the indices out one by one.
inline OrtStatus* parallel_for(const OrtApi* api, const OrtKernelContext* context, void (*function)(void*, size_t),
                               size_t total, size_t num_batch, void* data) {
  return call<274>(api, context, function, total, num_batch, data);
}

}  // namespace castline::ort
