// Loops over columns in vectors as wide as the processor has, though the library is built for the baseline.
#pragma once

namespace nestpipe {

#if defined(__x86_64__)

inline bool has_wide_vectors() {
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
}

// Everything that the body calls is inlined, and so compiled for AVX2. That has no fused multiply-add: the bits stay.
template <typename Body>
__attribute__((target("avx2"), flatten, noinline)) void in_avx2(const Body& body) {
    body();
}

template <typename Body>
void in_wide_vectors(const Body& body) {
    if (has_wide_vectors())
        in_avx2(body);
    else
        body();
}

#else

template <typename Body>
void in_wide_vectors(const Body& body) {
    body();
}

#endif

}  // namespace nestpipe
