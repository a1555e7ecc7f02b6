// A rehearsal: a step whose nodes take the memory that a step of its shapes takes, touch it, and compute nothing. What
// they give is undefined, and no KV pool is written.
#pragma once

#include <cstddef>

namespace castline {

// Of the nodes that this thread runs from now on. ONNX Runtime runs a session's nodes, one by one, on the thread that
// runs the step.
void set_rehearsing(bool on);
bool rehearsing();

// Fetches the pages of *count* elements from the system.
template <class T>
void touch(T* data, size_t count) {
  constexpr size_t kPage = 4096;
  auto* bytes = reinterpret_cast<volatile unsigned char*>(data);
  const size_t size = count * sizeof(T);
  for (size_t i = 0; i < size; i += kPage) bytes[i] = 0;
  if (size != 0) bytes[size - 1] = 0;
}

}  // namespace castline
