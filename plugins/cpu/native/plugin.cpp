// What the library exports: the registration that ONNX Runtime calls, and what castline.plugins.cpu.library asks.
#include <initializer_list>
#include <new>
#include <string>

#include "isa.h"
#include "operators.h"
#include "resident.h"

#define CASTLINE_EXPORT extern "C" __attribute__((visibility("default")))

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

CASTLINE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace castline::ort;
  // A runtime too old for this version answers nullptr and offers no table to report through; Python has checked first.
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) return nullptr;
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = create_domain(api, "castline", &domain)) return status;
  for (const auto op : {castline::paged_attention_op, castline::linear_op, castline::embedding_op}) {
    if (OrtStatus* status = domain_add(api, domain, op(api))) return status;
  }
  return add_domain(api, options, domain);
}
