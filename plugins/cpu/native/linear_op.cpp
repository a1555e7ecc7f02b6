// The operator castline::Linear: which kernels, and which thread does what.
#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#include "custom_op.h"
#include "linear_kernels.h"
#include "linear_node.h"
#include "operators.h"
#include "parallel.h"
#include "rehearsal.h"
#include "resident.h"
#include "sampling.h"

namespace castline {
namespace {

struct LinearNode {
  LinearAttributes attributes;
  LinearChoice kernels;
  const SamplingKernels* maxima;
  int workers;  // threads of the session
  Resident weight, scales;
};

// Rows from which matrix units beat the narrow kernels, where the node does not say. They take weights with a scale a
// column as they are; others are unpacked first.
constexpr int kWideRows = 9;
constexpr int kWideRowsPerColumn = 3;
// Prepared rows that are multiplied together stay in the second-level cache beside the strips in use.
constexpr size_t kBlockBytes = 1 << 20;
constexpr int64_t kRowStep = 64;
// Elements up to which every thread prepares all rows for itself: cheaper than handing them out and gathering them.
constexpr int64_t kSelfPrepared = 4096;
constexpr int kChunksPerWorker = 4;
constexpr int64_t kUnitStep = 2;  // chunks are whole register tiles of strips
constexpr int64_t kUnitsPerBlock = kTokenBlock / kStrip;  // and whole blocks of the maxima

thread_local Buffer prepared_rows;  // of the thread that runs the step

// Rows that a thread prepared for itself, and for which step.
struct OwnRows {
  Buffer memory;
  uint64_t step = 0;
};
thread_local OwnRows own_rows;
std::atomic<uint64_t> last_step{0};

std::string describe(const LinearAttributes& a, const std::string& problem) {
  return join("Linear ", a.k, " x ", a.n, ": ", problem);
}

const LinearKernels& kernels_for(const LinearNode& node, int64_t rows) {
  const LinearAttributes& a = node.attributes;
  const int wide_rows = a.wide_rows != 0 ? a.wide_rows : a.group == 0 ? kWideRowsPerColumn : kWideRows;
  const bool wide = node.kernels.wide != nullptr && wide_rows > 0 && rows >= wide_rows;
  return wide ? *node.kernels.wide : *node.kernels.narrow;
}

// Whether rows are prepared in a dispatch of their own.
bool prepares_apart(const LinearAttributes& a, int64_t rows) { return rows * a.k > kSelfPrepared; }

double multiply_adds(const LinearAttributes& a, int64_t rows) {
  return static_cast<double>(rows) * a.k * a.n * strips_per_unit(a);
}

// The units of a step in chunks, a few for each thread, so that one that comes late costs little.
struct Chunks {
  Chunks(const LinearNode& node, bool with_maxima) : units(castline::units(node.attributes)) {
    const int64_t wanted = static_cast<int64_t>(kChunksPerWorker) * node.workers;
    const int64_t step = with_maxima ? kUnitsPerBlock : kUnitStep;
    size = (units + wanted - 1) / wanted;
    if (size > 1 || with_maxima) size = (size + step - 1) / step * step;
    count = (units + size - 1) / size;
  }
  int first(int64_t chunk) const { return static_cast<int>(chunk * size); }
  int last(int64_t chunk) const { return static_cast<int>(std::min(units, (chunk + 1) * size)); }

  int64_t units, size, count;
};

// The maxima of the units first .. last, while these are in the cache of the thread that computed them.
void find_maxima(const LinearAttributes& a, const LinearStep& s, const SamplingKernels& kernels, int first, int last) {
  if (s.maxima == nullptr) return;
  const int64_t blocks = (a.n + kTokenBlock - 1) / kTokenBlock, column = static_cast<int64_t>(first) * kStrip;
  const int count = std::min(a.n, last * kStrip) - static_cast<int>(column);
  for (int64_t row = 0; row < s.rows; ++row) {
    kernels.block_maxima(s.output + row * a.n + column, count, s.maxima + row * blocks + column / kTokenBlock);
  }
}

// One dispatch, in which each thread prepares all rows for itself.
OrtStatus* run_few_rows(const OrtApi* api, const LinearNode& node, const LinearKernels& kernels,
                        const OrtKernelContext* context, const LinearStep& s) {
  const LinearAttributes& a = node.attributes;
  const Chunks chunks(node, s.maxima != nullptr);
  const size_t bytes = kernels.prepared_bytes(a, s.rows);
  const uint64_t step = ++last_step;
  std::atomic<bool> out_of_memory{false};
  OrtStatus* status = for_each(api, context, chunks.count, multiply_adds(a, s.rows), [&](size_t i) {
    OwnRows& own = own_rows;
    uint8_t* prepared = own.memory.get<uint8_t>(bytes);
    if (prepared == nullptr) {
      out_of_memory = true;
      return;
    }
    if (own.step != step) kernels.prepare(a, s, 0, s.rows, prepared);
    own.step = step;
    kernels.compute(a, s, chunks.first(i), chunks.last(i), prepared);
    find_maxima(a, s, *node.maxima, chunks.first(i), chunks.last(i));
  });
  if (status == nullptr && out_of_memory) throw std::bad_alloc();
  return status;
}

// A step's rows in blocks that are prepared and multiplied as steps of their own.
struct RowBlocks {
  RowBlocks(const LinearAttributes& a, const LinearKernels& kernels, int64_t rows) : rows(rows) {
    const size_t step_bytes = kernels.prepared_bytes(a, kRowStep);
    size = std::max<int64_t>(1, kBlockBytes / step_bytes) * kRowStep;
    bytes = (kernels.prepared_bytes(a, std::min(size, rows)) + 63) / 64 * 64;
    count = (rows + size - 1) / size;
  }
  LinearStep at(const LinearAttributes& a, const LinearStep& s, int64_t block) const {
    const int64_t first = block * size;
    LinearStep part = s;
    part.rows = std::min(size, rows - first);
    part.x += first * a.k;
    part.output += first * a.n;
    if (part.residual != nullptr) part.residual += first * a.n;
    if (part.maxima != nullptr) part.maxima += first * ((a.n + kTokenBlock - 1) / kTokenBlock);
    return part;
  }

  int64_t rows, size, count;
  size_t bytes;  // prepared, of one block
};

OrtStatus* run_many_rows(const OrtApi* api, const LinearNode& node, const LinearKernels& kernels,
                         const OrtKernelContext* context, const LinearStep& s) {
  const LinearAttributes& a = node.attributes;
  const RowBlocks blocks(a, kernels, s.rows);
  uint8_t* const prepared = prepared_rows.get<uint8_t>(blocks.bytes * blocks.count);
  if (prepared == nullptr) throw std::bad_alloc();
  const auto clamp = [](int64_t x, int64_t low, int64_t high) { return std::min(std::max(x, low), high); };
  const int64_t share = clamp(s.rows / (2 * node.workers), 1, kRowStep / 2);  // rows that a thread takes at once
  const int64_t shares = (std::min(blocks.size, s.rows) + share - 1) / share;  // of a block
  const double cost = 8.0 * s.rows * a.k;
  OrtStatus* status = for_each(api, context, blocks.count * shares, cost, [&](size_t i) {
    const int64_t block = i / shares, first = i % shares * share;
    const LinearStep part = blocks.at(a, s, block);
    if (first >= part.rows) return;
    kernels.prepare(a, part, first, std::min(first + share, part.rows), prepared + block * blocks.bytes);
  });
  if (status != nullptr) return status;
  const Chunks chunks(node, s.maxima != nullptr);
  return for_each(api, context, blocks.count * chunks.count, multiply_adds(a, s.rows), [&](size_t i) {
    const int64_t block = i / chunks.count, chunk = i % chunks.count;
    const LinearStep part = blocks.at(a, s, block);
    const int first = chunks.first(chunk), last = chunks.last(chunk);
    kernels.compute(a, part, first, last, prepared + block * blocks.bytes);
    find_maxima(a, part, *node.maxima, first, last);
  });
}

// The memory of a step, and no more.
void rehearse(const LinearNode& node, const LinearKernels& kernels, const LinearStep& s, int64_t blocks) {
  const LinearAttributes& a = node.attributes;
  touch(s.output, s.rows * a.n);
  if (s.maxima != nullptr) touch(s.maxima, s.rows * blocks);
  if (prepares_apart(a, s.rows)) {
    const RowBlocks rows(a, kernels, s.rows);
    uint8_t* const prepared = prepared_rows.get<uint8_t>(rows.bytes * rows.count);
    if (prepared == nullptr) throw std::bad_alloc();
    touch(prepared, rows.bytes * rows.count);
  }
}

struct Linear {
  static constexpr const char* kName = "Linear";
  static constexpr int kInputs = kLinearInputs, kOutputs = 2;
  using Kernel = LinearNode;

  static int input_type(int i) { return i == 1 ? ort::kUint8 : i == 2 ? ort::kFloat16 : ort::kFloat; }
  static bool is_optional(int i) { return i >= 3; }

  static OrtStatus* create(const OrtApi* api, const OrtKernelInfo* info, int workers, LinearNode* node) {
    node->workers = workers;
    if (OrtStatus* status = read_linear_attributes(api, info, &node->attributes)) return status;
    std::string problem = check_attributes(node->attributes);
    if (problem.empty() && select_linear_kernels(&node->kernels, &problem)) node->maxima = select_sampling();
    if (!problem.empty()) return invalid_argument(api, describe(node->attributes, problem));
    if (OrtStatus* status = node->weight.watch(api, info, 1, sizeof(uint8_t), true)) return status;
    return node->scales.watch(api, info, 2, sizeof(uint16_t), true);
  }

  static OrtStatus* compute(const OrtApi* api, const LinearNode& node, OrtKernelContext* context) {
    const LinearAttributes& a = node.attributes;
    LinearStep s = {};
    std::string problem;
    if (OrtStatus* status = read_linear_step(api, context, a, &s, &problem)) return status;
    if (!problem.empty()) return invalid_argument(api, describe(a, problem));
    if (OrtStatus* status = make_output(api, context, 0, {s.rows, a.n}, &s.output)) return status;
    const int64_t blocks = (a.n + kTokenBlock - 1) / kTokenBlock;
    if (OrtStatus* status = make_output(api, context, 1, {s.rows, blocks}, &s.maxima)) return status;
    if (s.rows == 0) return nullptr;
    s.weight = node.weight.at<uint8_t>(s.weight);
    s.scales = node.scales.at<uint16_t>(s.scales);
    const LinearKernels& kernels = kernels_for(node, s.rows);
    if (rehearsing()) {
      rehearse(node, kernels, s, blocks);
      return nullptr;
    }
    const auto run = prepares_apart(a, s.rows) ? run_many_rows : run_few_rows;
    return run(api, node, kernels, context, s);
  }
};

}  // namespace

const OrtCustomOp* linear_op(const OrtApi* api, int workers) { return custom_op<Linear>(api, workers); }

}  // namespace castline
