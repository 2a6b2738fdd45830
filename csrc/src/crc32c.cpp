#include "crc32c.hpp"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace nestpipe {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // bits reversed

using Table = std::array<std::array<uint32_t, 256>, 8>;

// tables[t][b]: what byte b contributes when t more bytes follow it.
constexpr Table make_tables() {
    Table tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (size_t t = 1; t < tables.size(); ++t)
        for (size_t byte = 0; byte < 256; ++byte)
            tables[t][byte] = (tables[t - 1][byte] >> 8) ^ tables[0][tables[t - 1][byte] & 255];
    return tables;
}

constexpr Table kTables = make_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(const void* data, size_t bytes, uint32_t before) {
    auto from = static_cast<const unsigned char*>(data);
    uint64_t crc = ~before;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        uint64_t word;
        std::memcpy(&word, from, sizeof word);
        crc = _mm_crc32_u64(crc, word);
    }
    auto rest = static_cast<uint32_t>(crc);
    for (; bytes > 0; --bytes) rest = _mm_crc32_u8(rest, *from++);
    return ~rest;
}
#endif

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before) {
    auto from = static_cast<const unsigned char*>(data);
    uint32_t crc = ~before;
    for (; bytes >= 8; bytes -= 8, from += 8) {
        uint64_t word;
        std::memcpy(&word, from, sizeof word);
        word ^= crc;
        crc = 0;
        for (size_t b = 0; b < 8; ++b) crc ^= kTables[7 - b][word >> 8 * b & 255];
    }
    for (; bytes > 0; --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *from++) & 255];
    return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) return crc32c_by_instruction(data, bytes, before);
#endif
    return crc32c_by_table(data, bytes, before);
}

}  // namespace nestpipe
