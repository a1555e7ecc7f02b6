// The wide kernels of the linear operator, on tile registers.
#define CASTLINE_ISA amx
#define CASTLINE_ISA_AVX512
#include "linear_amx_bf16.h"
#include "linear_amx_int8.h"

namespace castline {
namespace amx {
namespace {

// One scale a column: weights are multiplied as they are stored, by activations of two bytes.
bool whole_columns(const LinearAttributes& a) { return a.format == kW8 && a.group == 0; }

size_t prepared_bytes(const LinearAttributes& a, int64_t rows) {
  return whole_columns(a) ? prepared_bytes_int8(a, rows) : prepared_bytes_bf16(a, rows);
}

void prepare(const LinearAttributes& a, const LinearStep& s, int64_t first, int64_t last, uint8_t* prepared) {
  if (whole_columns(a)) return prepare_int8(a, s, first, last, prepared);
  switch (a.format) {
    case kW4Dm: return prepare_bf16<WeightsW4Dm>(a, s, first, last, prepared);
    case kW4: return prepare_bf16<WeightsW4>(a, s, first, last, prepared);
    case kW8: return prepare_bf16<WeightsW8>(a, s, first, last, prepared);
  }
}

void compute(const LinearAttributes& a, const LinearStep& s, int first, int last, const uint8_t* prepared) {
  if (whole_columns(a)) return compute_int8(a, s, first, last, prepared);
  switch (a.format) {
    case kW4Dm: return compute_bf16<WeightsW4Dm>(a, s, first, last, prepared);
    case kW4: return compute_bf16<WeightsW4>(a, s, first, last, prepared);
    case kW8: return compute_bf16<WeightsW8>(a, s, first, last, prepared);
  }
}

}  // namespace
}  // namespace amx

extern const LinearKernels kAmxLinear;
const LinearKernels kAmxLinear = {Isa::kAmx, amx::prepared_bytes, amx::prepare, amx::compute};

}  // namespace castline
