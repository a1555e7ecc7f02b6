// What makes an OrtCustomOp of a definition: a struct with
//
//   kName, kInputs, kOutputs                the operator's name, its number of inputs and of float outputs, of which a
//                                           node may leave out all but the first
//   input_type(i), is_optional(i)           an ort::ElementType; whether the node may leave input i out
//   Kernel                                  what a node keeps, made by
//   create(api, info, workers, Kernel*)     a status, nullptr where all is well; *workers*: threads of the session, for
//                                           which a node cuts its work
//   compute(api, const Kernel&, context)    the same, of one call
#pragma once

#include <climits>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "ort_abi.h"

namespace castline {

struct CustomOp : OrtCustomOp {
  const OrtApi* api;
  int workers;
};

// No exception may pass through the C interface.
template <class Function>
OrtStatus* guarded(const OrtApi* api, Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    return ort::create_status(api, ort::kFail, error.what());
  }
}

// A kernel with the interface that its runtime gave.
template <class Definition>
struct KernelOf {
  const OrtApi* api;
  typename Definition::Kernel kernel;
};

template <class Definition>
OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** out) {
  const auto& custom = *static_cast<const CustomOp*>(op);
  const OrtApi* api = custom.api;
  return guarded(api, [&]() -> OrtStatus* {
    std::unique_ptr<KernelOf<Definition>> kernel(new KernelOf<Definition>{api, {}});
    if (OrtStatus* status = Definition::create(api, info, custom.workers, &kernel->kernel)) return status;
    *out = kernel.release();
    return nullptr;
  });
}

template <class Definition>
OrtStatus* compute_kernel(void* data, OrtKernelContext* context) {
  const auto* k = static_cast<const KernelOf<Definition>*>(data);
  return guarded(k->api, [&] { return Definition::compute(k->api, k->kernel, context); });
}

template <class Definition>
CustomOp make_custom_op(const OrtApi* api, int workers) {
  CustomOp op = {};
  op.api = api;
  op.workers = workers;
  op.version = ort::kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return Definition::kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t i) -> int { return Definition::input_type(static_cast<int>(i)); };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return Definition::kInputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return ort::kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return Definition::kOutputs; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<KernelOf<Definition>*>(kernel); };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return Definition::is_optional(static_cast<int>(i)) ? ort::kOptional : ort::kRequired;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int { return i == 0 ? ort::kRequired : ort::kOptional; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = create_kernel<Definition>;
  op.KernelComputeV2 = compute_kernel<Definition>;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT_MAX; };
  return op;
}

// One operator for all sessions of a runtime that have as many threads. A node learns their number from its operator: it
// belongs to the options that a session is opened with, whichever thread opens others meanwhile.
template <class Definition>
const OrtCustomOp* custom_op(const OrtApi* api, int workers) {
  static std::mutex mutex;
  static auto& made = *new std::map<std::pair<const OrtApi*, int>, CustomOp>;  // never destroyed: sessions may outlive it
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = made.find({api, workers});
  if (place != made.end()) return &place->second;
  return &made.emplace(std::make_pair(api, workers), make_custom_op<Definition>(api, workers)).first->second;
}

}  // namespace castline
