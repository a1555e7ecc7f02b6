/* Reads a buffer once, as fast as one thread can: the sum is returned so that no load may be dropped. */
#include <stddef.h>
#include <stdint.h>

uint64_t read_all(const uint64_t *words, size_t count) {
    uint64_t a[32] = {0};
    for (size_t i = 0; i + 32 <= count; i += 32)
        for (int lane = 0; lane < 32; lane++) a[lane] += words[i + lane];
    uint64_t sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += a[lane];
    return sum;
}
