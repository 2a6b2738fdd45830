#include "sha256.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nestpipe {

namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int bits) { return (x >> bits) | (x << (32 - bits)); }

void compress_portable(uint32_t state[8], const uint8_t* block, size_t num_blocks) {
    for (; num_blocks > 0; --num_blocks, block += 64) {
        uint32_t w[64];
        for (int i = 0; i < 16; ++i)
            w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
                   uint32_t{block[4 * i + 3]};
        for (int i = 16; i < 64; ++i) {
            const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; ++i) {
            const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
            const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
            const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
            const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined(__x86_64__)

// The same with the processor's SHA instructions, which keep the state as (A,B,E,F) and (C,D,G,H) and do two rounds at
// a time; five times faster.
__attribute__((target("sha,sse4.1"))) void compress_sha_ni(uint32_t state[8], const uint8_t* block, size_t num_blocks) {
    const auto lane = [&](int a, int b, int c, int d) {
        return _mm_set_epi32(static_cast<int>(state[a]), static_cast<int>(state[b]), static_cast<int>(state[c]),
                             static_cast<int>(state[d]));
    };
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = lane(0, 1, 4, 5);
    __m128i cdgh = lane(2, 3, 6, 7);
    for (; num_blocks > 0; --num_blocks, block += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[16];  // four words of the message schedule each
        for (int i = 0; i < 4; ++i)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + i), big_endian);
        for (int i = 4; i < 16; ++i) {
            const __m128i seven_back = _mm_alignr_epi8(w[i - 1], w[i - 2], 4);
            const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(w[i - 4], w[i - 3]), seven_back);
            w[i] = _mm_sha256msg2_epu32(partial, w[i - 1]);
        }
        for (int i = 0; i < 16; ++i) {
            const __m128i message = _mm_add_epi32(w[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRound) + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, message);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(message, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    alignas(16) uint32_t first[4], second[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(first), abef);
    _mm_store_si128(reinterpret_cast<__m128i*>(second), cdgh);
    state[0] = first[3], state[1] = first[2], state[4] = first[1], state[5] = first[0];
    state[2] = second[3], state[3] = second[2], state[6] = second[1], state[7] = second[0];
}

bool has_sha_ni() {
    unsigned a, b, c, d;
    const bool sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
    return sha && __builtin_cpu_supports("sse4.1");
}

#endif

using Compress = void (*)(uint32_t state[8], const uint8_t* block, size_t num_blocks);

Compress fastest_compress() {
#if defined(__x86_64__)
    if (has_sha_ni()) return compress_sha_ni;
#endif
    return compress_portable;
}

const Compress kFastest = fastest_compress();

}  // namespace

Sha256::Sha256(bool portable) : compress_(portable ? compress_portable : kFastest) {}

void Sha256::update(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    total_bytes_ += bytes;
    if (buffered_ > 0) {
        const size_t taken = std::min(bytes, sizeof buffer_ - buffered_);
        std::memcpy(buffer_ + buffered_, from, taken);
        buffered_ += taken;
        from += taken;
        bytes -= taken;
        if (buffered_ < sizeof buffer_) return;
        compress_(state_, buffer_, 1);
        buffered_ = 0;
    }
    const size_t num_blocks = bytes / sizeof buffer_;
    compress_(state_, from, num_blocks);
    buffered_ = bytes - num_blocks * sizeof buffer_;
    std::memcpy(buffer_, from + num_blocks * sizeof buffer_, buffered_);
}

void Sha256::finish(uint8_t digest[32]) {
    const uint64_t total_bits = total_bytes_ * 8;
    uint8_t padding[72] = {0x80};
    size_t num_padding = (buffered_ < 56 ? 56 : 120) - buffered_;
    for (int i = 0; i < 8; ++i) padding[num_padding++] = static_cast<uint8_t>(total_bits >> (56 - 8 * i));
    update(padding, num_padding);
    for (int i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
}

}  // namespace nestpipe
