#include "rehearsal.h"

namespace castline {
namespace {

thread_local bool is_rehearsing = false;

}  // namespace

void set_rehearsing(bool on) { is_rehearsing = on; }

bool rehearsing() { return is_rehearsing; }

}  // namespace castline
