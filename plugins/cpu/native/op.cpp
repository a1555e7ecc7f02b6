#include "op.h"

#include <atomic>
#include <climits>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "checks.h"
#include "attention_kernels.h"
#include "node_reader.h"
#include "partition.h"

namespace castline {
namespace {

struct Op : OrtCustomOp {
  const OrtApi* api;
};

struct Kernel {
  const OrtApi* api;
  Attributes attributes;
  const Kernels* kernels;
};

// 64-byte aligned memory that only grows, one a thread. get() returns nullptr where there is no memory.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  float* get(size_t floats) {
    if (floats > capacity_) {
      std::free(data_);
      capacity_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
      if (data_ != nullptr) capacity_ = floats;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

thread_local Buffer scratch_buffer;   // of the thread that runs an item
thread_local Buffer partial_buffer;   // of the thread that runs the step
thread_local Partition partition_memory;

OrtStatus* invalid(const Kernel& k, const std::string& problem) {
  const std::string message = "PagedAttention of layer " + std::to_string(k.attributes.layer) + ": " + problem;
  return ort::create_status(k.api, ort::kInvalidArgument, message.c_str());
}

OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** out) {
  const OrtApi* api = static_cast<const Op*>(op)->api;
  auto kernel = std::make_unique<Kernel>(Kernel{api, {}, nullptr});
  if (OrtStatus* status = read_attributes(api, info, &kernel->attributes)) return status;
  std::string problem = check_attributes(kernel->attributes);
  if (problem.empty()) kernel->kernels = select_kernels(kernel->attributes.head_dim, &problem);
  if (!problem.empty()) return invalid(*kernel, problem);
  *out = kernel.release();
  return nullptr;
}

// Below this many multiply-adds, handing work to another thread costs more than it saves.
constexpr double kInlineCost = 65536;

// Runs function(0 .. total - 1) on the session's threads, one index at a time, or here where there is little to do.
template <class Function>
OrtStatus* for_each(const Kernel& k, const OrtKernelContext* context, size_t total, double cost, Function function) {
  if (cost < kInlineCost || total < 2) {
    for (size_t i = 0; i < total; ++i) function(i);
    return nullptr;
  }
  const auto run = [](void* data, size_t i) { (*static_cast<Function*>(data))(i); };
  return ort::parallel_for(k.api, context, run, total, total, &function);
}

OrtStatus* append_all(const Kernel& k, const OrtKernelContext* context, const Step& s) {
  const Attributes& a = k.attributes;
  constexpr int64_t kTokens = 8;  // of one item: neighbours share cache lines of a block
  const size_t items = (s.num_tokens + kTokens - 1) / kTokens;
  const double cost = 8.0 * s.num_tokens * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
  return for_each(k, context, items, cost, [&](size_t i) {
    const int64_t first = i * kTokens, last = first + kTokens < s.num_tokens ? first + kTokens : s.num_tokens;
    for (int64_t t = first; t < last; ++t) k.kernels->append(a, s, t);
  });
}

OrtStatus* attend_all(const Kernel& k, const OrtKernelContext* context, const Step& s) {
  static const int workers = static_cast<int>(std::thread::hardware_concurrency());
  const Attributes& a = k.attributes;
  Partition& p = partition_memory;
  make_partition(a, s, k.kernels->item_rows, workers, &p);

  const size_t units = p.units.size();
  float* const partials = units ? partial_buffer.get(p.partial_floats) : nullptr;
  std::unique_ptr<std::atomic<int>[]> pending(units ? new std::atomic<int>[units] : nullptr);
  for (size_t u = 0; u < units; ++u) pending[u].store(p.pending[u], std::memory_order_relaxed);
  if (units && partials == nullptr) throw std::bad_alloc();

  const size_t scratch_size = k.kernels->scratch_floats(a, p.max_rows);
  const int group = a.num_heads / a.num_kv_heads;
  std::atomic<bool> out_of_memory{false};
  OrtStatus* status = for_each(k, context, p.items.size(), p.cost, [&](size_t i) {
    const WorkItem& item = p.items[i];
    float* scratch = scratch_buffer.get(scratch_size);
    if (scratch == nullptr) {
      out_of_memory = true;
      return;
    }
    if (item.unit < 0) return k.kernels->attend(a, s, item, scratch, nullptr);
    const WorkItem& unit = p.units[item.unit];
    const size_t tile_floats = static_cast<size_t>(unit.last_query - unit.first_query) * group * (a.head_dim + 2);
    float* const partial = partials + p.partial_offset[item.unit];
    k.kernels->attend(a, s, item, scratch, partial + (item.first_tile - unit.first_tile) * tile_floats);
    // The last item to finish sees every other's partial results, and merges.
    if (pending[item.unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      k.kernels->merge(a, s, unit, scratch, partial);
    }
  });
  if (status == nullptr && out_of_memory) throw std::bad_alloc();
  return status;
}

OrtStatus* compute_step(const Kernel& k, OrtKernelContext* context) {
  const Attributes& a = k.attributes;
  Tensor inputs[kInputs];
  if (OrtStatus* status = read_inputs(k.api, context, inputs)) return status;
  std::string problem = check_shapes(a, inputs);
  if (!problem.empty()) return invalid(k, problem);
  Step s = make_step(inputs);
  problem = check_values(a, s);
  if (!problem.empty()) return invalid(k, problem);

  const int64_t shape[2] = {s.num_tokens, static_cast<int64_t>(a.num_heads) * a.head_dim};
  OrtValue* output = nullptr;
  if (OrtStatus* status = ort::output(k.api, context, 0, shape, 2, &output)) return status;
  if (s.num_tokens == 0) return nullptr;
  void* data = nullptr;
  if (OrtStatus* status = ort::mutable_data(k.api, output, &data)) return status;
  s.output = static_cast<float*>(data);
  if (OrtStatus* status = append_all(k, context, s)) return status;
  return attend_all(k, context, s);
}

// No exception may pass through the C interface.
OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Kernel& k = *static_cast<const Kernel*>(kernel);
  try {
    return compute_step(k, context);
  } catch (const std::exception& error) {
    return ort::create_status(k.api, ort::kFail, error.what());
  }
}

OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  try {
    return create_kernel(op, api, info, out);
  } catch (const std::exception& error) {
    return ort::create_status(static_cast<const Op*>(op)->api, ort::kFail, error.what());
  }
}

int input_type(const OrtCustomOp*, size_t i) {
  return i < kKvPool ? ort::kFloat : i == kKvPool ? ort::kUint8 : ort::kInt32;
}

int input_characteristic(const OrtCustomOp*, size_t i) {
  return i >= kCos && i <= kKNormWeight ? ort::kOptional : ort::kRequired;
}

Op make_op(const OrtApi* api) {
  Op op = {};
  op.api = api;
  op.version = ort::kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return "PagedAttention"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return ort::kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetInputCharacteristic = input_characteristic;
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return ort::kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT_MAX; };
  return op;
}

}  // namespace

const OrtCustomOp* paged_attention_op(const OrtApi* api) {
  static const Op op = make_op(api);
  return &op;
}

}  // namespace castline
