// The kernels, compiled for amx: matrix instructions for all pools but fp32 ones, which keep the vector kernels.
#define CASTLINE_ISA amx
#define CASTLINE_ISA_AVX512
#define CASTLINE_FP8_BF16
#include "tile_attend.h"

namespace castline {
namespace amx {
namespace {

void attend_tiles(const Attributes& a, const Step& s, const WorkItem& item, const WorkItem* next, float* scratch,
                  float* partial) {
  switch (a.kv_dtype) {
    case kFp32: return attend_item<kFp32>(a, s, item, next, scratch, partial);
    case kBf16: return attend_with_tiles<kBf16>(a, s, item, next, scratch, partial);
    case kInt8: return attend_with_tiles<kInt8>(a, s, item, next, scratch, partial);
    case kFp8: return attend_with_tiles<kFp8>(a, s, item, next, scratch, partial);
  }
}

size_t tiles_scratch_floats(const Attributes& a, int rows) {
  switch (a.kv_dtype) {
    case kFp32: break;
    case kBf16: return tile_scratch_floats<kBf16>(a, rows);
    case kInt8: return tile_scratch_floats<kInt8>(a, rows);
    case kFp8: return tile_scratch_floats<kFp8>(a, rows);
  }
  return scratch_floats(a, rows);
}

}  // namespace
}  // namespace amx

extern const Kernels kAmxKernels;
const Kernels kAmxKernels = {Isa::kAmx, 32, 192, amx::tiles_scratch_floats, amx::append, amx::attend_tiles, amx::merge};
}  // namespace castline
