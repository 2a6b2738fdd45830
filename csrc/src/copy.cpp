#include "copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nestpipe {

namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kStreamBytes = uint64_t{4} << 20;

void plain_copy(char* to, const char* from, uint64_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)

// The bytes of `to` before its first whole line, or all of them if there is no whole line.
uint64_t head_bytes(const char* to, uint64_t bytes) {
    const uint64_t head = (kLine - (reinterpret_cast<uintptr_t>(to) & (kLine - 1))) & (kLine - 1);
    return bytes < head + kLine ? bytes : head;
}

__attribute__((target("avx512f"))) void stream_avx512(char* to, const char* from, uint64_t bytes) {
    uint64_t offset = head_bytes(to, bytes);
    if (offset != 0) std::memcpy(to, from, offset);
    for (; offset + kLine <= bytes; offset += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset), _mm512_loadu_si512(from + offset));
    if (offset != bytes) std::memcpy(to + offset, from + offset, bytes - offset);
}

__attribute__((target("avx"))) void stream_avx(char* to, const char* from, uint64_t bytes) {
    uint64_t offset = head_bytes(to, bytes);
    if (offset != 0) std::memcpy(to, from, offset);
    for (; offset + kLine <= bytes; offset += kLine) {
        const auto* source = reinterpret_cast<const __m256i*>(from + offset);
        auto* target = reinterpret_cast<__m256i*>(to + offset);
        const __m256i first = _mm256_loadu_si256(source), second = _mm256_loadu_si256(source + 1);
        _mm256_stream_si256(target, first);
        _mm256_stream_si256(target + 1, second);
    }
    if (offset != bytes) std::memcpy(to + offset, from + offset, bytes - offset);
}

#endif

Copy fastest_streaming_copy() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    if (__builtin_cpu_supports("avx")) return stream_avx;
#endif
    return plain_copy;
}

}  // namespace

Copy streaming_copy() {
    static const Copy fastest = fastest_streaming_copy();
    return fastest;
}

Copy copy_for(uint64_t total_bytes) { return total_bytes > kStreamBytes ? streaming_copy() : plain_copy; }

void finish_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace nestpipe
