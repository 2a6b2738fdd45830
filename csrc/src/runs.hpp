// Counts of keys by (rank, table): a large matrix, mostly zeros, read once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "error.hpp"
#include "lookahead.hpp"
#include "plan.hpp"
#include "scratch.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nestpipe {

// The number of set bits among the lowest 16.
constexpr unsigned count_bits(unsigned bits) {
    bits -= bits >> 1 & 0x5555u;
    bits = (bits & 0x3333u) + (bits >> 2 & 0x3333u);
    bits = (bits + (bits >> 4)) & 0x0f0fu;
    return (bits + (bits >> 8)) & 0x1fu;
}

// use(i) for every value that is not 0, in order. The first four of a block are written without a branch, even if there
// are fewer: the processor could not predict it.
template <typename Use>
NESTPIPE_INLINE void for_each_nonzero(const int32_t* values, int64_t count, Use&& use) {
    int64_t i = 0;
#if defined(__SSE2__)
    constexpr int64_t kBlock = 16, kSome = 512;
    int64_t indices[kSome + kBlock], num_indices = 0;
    const auto hand_on = [&] {
        for (int64_t k = 0; k < num_indices; ++k) use(indices[k]);
        num_indices = 0;
    };
    const __m128i zero = _mm_setzero_si128();
    const auto is_zero = [&](int64_t at) {
        return _mm_cmpeq_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + at)), zero);
    };
    for (; i + kBlock <= count; i += kBlock) {
        const __m128i front = _mm_packs_epi32(is_zero(i), is_zero(i + 4));
        const __m128i back = _mm_packs_epi32(is_zero(i + 8), is_zero(i + 12));
        const auto mask = static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(front, back))) ^ 0xffffu;
        if (mask == 0) continue;
        unsigned left = mask | 0xf0000u;
        for (int64_t k = 0; k < 4; ++k, left &= left - 1) indices[num_indices + k] = i + __builtin_ctz(left);
        int64_t* more = indices + num_indices + 4;
        for (left &= 0xffffu; left != 0; left &= left - 1) *more++ = i + __builtin_ctz(left);
        num_indices += count_bits(mask);
        if (num_indices >= kSome) hand_on();
    }
    hand_on();
#endif
    for (; i < count; ++i)
        if (values[i] != 0) use(i);
}

// Successive keys of one table.
struct Run {
    int32_t table, count;
};

struct Runs {
    const Run* first;
    int64_t count;
    const Run* begin() const { return first; }
    const Run* end() const { return first + count; }
};

[[noreturn]] __attribute__((noinline)) inline void refuse_count(const KeyCounts& key_counts, int64_t i) {
    refuse("counts[" + std::to_string(i / key_counts.num_tables) + ", " + std::to_string(i % key_counts.num_tables) +
           "] is " + std::to_string(key_counts.counts[i]) +
           ": counts must not be negative, and their sum must be the number of keys, " +
           std::to_string(key_counts.num_keys));
}

// The entries of the matrix that are not 0, in memory that the thread's next call uses again.
inline Runs find_runs(const KeyCounts& key_counts) {
    thread_local Region memory;
    Run* next = scratch<Run>(memory, key_counts.num_keys);
    const Run* first = next;
    int64_t row = 0, left = key_counts.num_keys;
    const auto note = [&](int64_t i) __attribute__((always_inline)) {
        const int32_t count = key_counts.counts[i];
        while (i - row >= key_counts.num_tables) row += key_counts.num_tables;
        if (count < 0 || count > left) refuse_count(key_counts, i);
        left -= count;
        *next++ = {static_cast<int32_t>(i - row), count};
    };
    for_each_nonzero(key_counts.counts, key_counts.num_ranks * key_counts.num_tables, note);
    if (left != 0)
        refuse("the sum of counts is " + std::to_string(key_counts.num_keys - left) + ", must be the number of keys, " +
               std::to_string(key_counts.num_keys));
    return {first, next - first};
}

// use() for each key of a run. Most have one.
template <typename Use>
NESTPIPE_INLINE void for_each_key(const Run& run, Use&& use) {
    use();
    for (int32_t i = 1; i < run.count; ++i) use();
}

// [num_tables + 1] where the keys of each table begin when they are ordered by table.
inline std::vector<int64_t> table_starts(Runs runs, int64_t num_tables) {
    std::vector<int64_t> starts(static_cast<size_t>(num_tables) + 1, 0);
    for (const Run& run : runs) starts[static_cast<size_t>(run.table) + 1] += run.count;
    for (size_t t = 1; t < starts.size(); ++t) starts[t] += starts[t - 1];
    return starts;
}

}  // namespace nestpipe
