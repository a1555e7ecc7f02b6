#include <atomic>
#include <memory>
#include <new>
#include <string>

#include "attention_kernels.h"
#include "attention_node.h"
#include "checks.h"
#include "custom_op.h"
#include "operators.h"
#include "parallel.h"
#include "partition.h"
#include "rehearsal.h"

namespace castline {
namespace {

struct Kernel {
  Attributes attributes;
  const Kernels* kernels;
  int workers;  // threads of the session
};

thread_local Buffer scratch_buffer;   // of the thread that runs an item
thread_local Buffer partial_buffer;   // of the thread that runs the step
thread_local Partition partition_memory;

OrtStatus* invalid(const OrtApi* api, const Kernel& k, const std::string& problem) {
  return invalid_argument(api, join("PagedAttention of layer ", k.attributes.layer, ": ", problem));
}

OrtStatus* append_all(const OrtApi* api, const Kernel& k, const OrtKernelContext* context, const Step& s) {
  const Attributes& a = k.attributes;
  constexpr int64_t kTokens = 8;  // of one item: neighbours share cache lines of a block
  const size_t items = (s.num_tokens + kTokens - 1) / kTokens;
  const double cost = 8.0 * s.num_tokens * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
  return for_each(api, context, items, cost, [&](size_t i) {
    const int64_t first = i * kTokens, last = first + kTokens < s.num_tokens ? first + kTokens : s.num_tokens;
    for (int64_t t = first; t < last; ++t) k.kernels->append(a, s, t);
  });
}

OrtStatus* attend_all(const OrtApi* api, const Kernel& k, const OrtKernelContext* context, const Step& s) {
  const Attributes& a = k.attributes;
  Partition& p = partition_memory;
  make_partition(a, s, k.kernels->item_rows, k.workers, &p);

  const size_t units = p.units.size();
  float* const partials = units ? partial_buffer.get<float>(p.partial_floats) : nullptr;
  std::unique_ptr<std::atomic<int>[]> pending(units ? new std::atomic<int>[units] : nullptr);
  for (size_t u = 0; u < units; ++u) pending[u].store(p.pending[u], std::memory_order_relaxed);
  if (units && partials == nullptr) throw std::bad_alloc();

  const size_t scratch_size = k.kernels->scratch_floats(a, p.max_rows);
  const int group = a.num_heads / a.num_kv_heads;
  std::atomic<bool> out_of_memory{false};
  OrtStatus* status = for_each(api, context, p.items.size(), p.cost, [&](size_t i) {
    const WorkItem& item = p.items[i];
    const WorkItem* const next = i + 1 < p.items.size() ? &item + 1 : nullptr;  // most often this thread's too
    float* scratch = scratch_buffer.get<float>(scratch_size);
    if (scratch == nullptr) {
      out_of_memory = true;
      return;
    }
    if (item.unit < 0) return k.kernels->attend(a, s, item, next, scratch, nullptr);
    const WorkItem& unit = p.units[item.unit];
    const size_t tile_floats = static_cast<size_t>(unit.last_query - unit.first_query) * group * (a.head_dim + 2);
    float* const partial = partials + p.partial_offset[item.unit];
    k.kernels->attend(a, s, item, next, scratch, partial + (item.first_tile - unit.first_tile) * tile_floats);
    // The last item to finish sees every other's partial results, and merges.
    if (pending[item.unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      k.kernels->merge(a, s, unit, scratch, partial);
    }
  });
  if (status == nullptr && out_of_memory) throw std::bad_alloc();
  return status;
}

// The memory of a step, and no more.
OrtStatus* rehearse(const OrtApi* api, const Kernel& k, const OrtKernelContext* context, const Step& s) {
  const Attributes& a = k.attributes;
  touch(s.output, s.num_tokens * a.num_heads * a.head_dim);
  Partition& p = partition_memory;
  make_partition(a, s, k.kernels->item_rows, k.workers, &p);
  const size_t scratch_size = k.kernels->scratch_floats(a, p.max_rows);
  if (p.partial_floats != 0) {
    float* const partials = partial_buffer.get<float>(p.partial_floats);
    if (partials == nullptr) throw std::bad_alloc();
    touch(partials, p.partial_floats);
  }
  std::atomic<bool> out_of_memory{false};
  OrtStatus* status = for_each(api, context, k.workers, p.cost, [&](size_t) {
    float* const scratch = scratch_buffer.get<float>(scratch_size);
    if (scratch == nullptr) {
      out_of_memory = true;
    } else {
      touch(scratch, scratch_size);
    }
  });
  if (status == nullptr && out_of_memory) throw std::bad_alloc();
  return status;
}

OrtStatus* compute_step(const OrtApi* api, const Kernel& k, OrtKernelContext* context) {
  const Attributes& a = k.attributes;
  Tensor inputs[kInputs];
  if (OrtStatus* status = read_inputs(api, context, inputs)) return status;
  std::string problem = check_shapes(a, inputs);
  if (!problem.empty()) return invalid(api, k, problem);
  Step s = make_step(inputs);
  problem = check_values(a, s);
  if (!problem.empty()) return invalid(api, k, problem);

  const int64_t width = static_cast<int64_t>(a.num_heads) * a.head_dim;
  if (OrtStatus* status = make_output(api, context, 0, {s.num_tokens, width}, &s.output)) return status;
  if (s.num_tokens == 0) return nullptr;
  if (rehearsing()) return rehearse(api, k, context, s);
  if (OrtStatus* status = append_all(api, k, context, s)) return status;
  return attend_all(api, k, context, s);
}

struct PagedAttention {
  static constexpr const char* kName = "PagedAttention";
  static constexpr int kInputs = castline::kInputs, kOutputs = 1;
  using Kernel = castline::Kernel;

  static int input_type(int i) { return i < kKvPool ? ort::kFloat : i == kKvPool ? ort::kUint8 : ort::kInt32; }
  static bool is_optional(int i) { return i >= kCos && i <= kKNormWeight; }

  static OrtStatus* create(const OrtApi* api, const OrtKernelInfo* info, int workers, Kernel* k) {
    k->workers = workers;
    if (OrtStatus* status = read_attributes(api, info, &k->attributes)) return status;
    std::string problem = check_attributes(k->attributes);
    if (problem.empty()) k->kernels = select_kernels(k->attributes.head_dim, &problem);
    return problem.empty() ? nullptr : invalid(api, *k, problem);
  }

  static OrtStatus* compute(const OrtApi* api, const Kernel& k, OrtKernelContext* context) {
    return compute_step(api, k, context);
  }
};

}  // namespace

const OrtCustomOp* paged_attention_op(const OrtApi* api, int workers) { return custom_op<PagedAttention>(api, workers); }

}  // namespace castline
