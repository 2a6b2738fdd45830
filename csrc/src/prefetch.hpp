// Prefetching: asks for memory before it is needed.
#pragma once

#include <cstdint>

namespace nestpipe {

// Not __builtin_prefetch: GCC takes a function that does nothing but prefetch for one without effect, and drops it.
inline void prefetch(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address);
#endif
}

// For memory that will be written: another core that has it gives it up at once.
inline void prefetch_to_write(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address, 1);
#endif
}

// For a record: into the second level of the cache, which waits for more lines at a time than the first.
inline void prefetch_far(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht2 %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address, 0, 1);
#endif
}

inline void prefetch_lines(const char* from, uint64_t bytes) {
    constexpr uint64_t kLine = 64, kMost = 8 * kLine;  // the hardware follows a longer run by itself
    const uint64_t span = bytes < kMost ? bytes : kMost;
    for (uint64_t offset = 0; offset < span; offset += kLine) prefetch_far(from + offset);
}

}  // namespace nestpipe
