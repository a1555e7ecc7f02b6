// What the library exports: the registration that ONNX Runtime calls, and what castline.plugins.cpu.library asks.
#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <string>
#include <thread>

#include "custom_op.h"
#include "isa.h"
#include "node_reader.h"
#include "operators.h"
#include "rehearsal.h"
#include "resident.h"

#define CASTLINE_EXPORT extern "C" __attribute__((visibility("default")))

namespace castline {
namespace {

// What castline.plugins.cpu.session puts into a session's configuration; the C interface does not tell a node how many
// threads run it.
constexpr const char* kThreads = "castline.num_threads";
constexpr long kMostThreads = 1 << 16;

// Threads of a session that is opened with *options*; the host's, where these do not say.
OrtStatus* read_workers(const OrtApi* api, const OrtSessionOptions* options, int* workers) {
  *workers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  int is_set = 0;
  if (OrtStatus* status = ort::has_config(api, options, kThreads, &is_set)) return status;
  if (is_set == 0) return nullptr;
  char text[16];
  size_t size = sizeof text;
  if (OrtStatus* status = ort::config(api, options, kThreads, text, &size)) return status;
  char* end = text;
  const long number = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || number < 1 || number > kMostThreads) {
    return invalid_argument(api, join(kThreads, " is '", text, "', not a number from 1 to ", kMostThreads));
  }
  *workers = static_cast<int>(number);
  return nullptr;
}

OrtStatus* register_operators(const OrtApi* api, OrtSessionOptions* options) {
  int workers = 0;
  if (OrtStatus* status = read_workers(api, options, &workers)) return status;
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = ort::create_domain(api, "castline", &domain)) return status;
  for (const auto op : {paged_attention_op, linear_op, embedding_op}) {
    if (OrtStatus* status = ort::domain_add(api, domain, op(api, workers))) return status;
  }
  return ort::add_domain(api, options, domain);
}

}  // namespace
}  // namespace castline

// Raised with every change of the node's contract or of the block layout; castline.plugins.cpu.library holds its pair.
CASTLINE_EXPORT const char* castline_plugin_version() { return "4"; }

CASTLINE_EXPORT const char* castline_available_isas() { return castline::available_isas().c_str(); }

// The instruction set whose kernels nodes created now use, or nullptr where CASTLINE_ISA is refused.
CASTLINE_EXPORT const char* castline_active_isa() {
  std::string error;
  castline::Isa isa;
  return castline::selected_isa(&isa, &error) ? castline::isa_name(isa) : nullptr;
}

// See resident.h: the weights of the sessions that this thread opens, and where they lie.
CASTLINE_EXPORT uint64_t castline_begin_watching() { return castline::begin_watching(); }
CASTLINE_EXPORT void castline_end_watching() { castline::end_watching(); }
CASTLINE_EXPORT size_t castline_move_weights(uint64_t group, size_t enough) {
  try {
    return castline::move_residents(group, enough);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// See rehearsal.h.
CASTLINE_EXPORT void castline_set_rehearsing(bool on) { castline::set_rehearsing(on); }

CASTLINE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  // A runtime too old for this version answers nullptr and offers no table to report through; Python has checked first.
  const OrtApi* api = base->GetApi(castline::ort::kApiVersion);
  if (api == nullptr) return nullptr;
  return castline::guarded(api, [&] { return castline::register_operators(api, options); });
}
