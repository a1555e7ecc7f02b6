// Threads that share the rows of one call, beside the thread that makes it.
#pragma once

#include <cstdint>
#include <functional>

namespace castline {

// Runs work(i) once for each i in 0 .. count - 1, on this thread and on up to *helpers* others, and returns when all have
// been run. Without helpers, and where another thread's call has them, all run here.
//
// Helpers are started by the first call that wants them. They sleep between calls and end with the process; a process
// that was forked starts its own.
void share_out(int64_t count, int helpers, const std::function<void(int64_t)>& work);

}  // namespace castline
