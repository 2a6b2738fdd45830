// Loops over items whose data is scattered in memory.
#pragma once

#include <algorithm>
#include <cstdint>

// For loops over small steps given as lambdas: in a single function, values that the steps use again and again stay in
// registers.
#define NESTPIPE_INLINE inline __attribute__((always_inline))

namespace nestpipe {

constexpr int64_t kAhead = 40;  // items between two steps: enough to cover a trip to memory
constexpr int64_t kRing = 64;   // a power of two above it
constexpr int64_t ring(int64_t i) { return i & (kRing - 1); }
static_assert(kRing > kAhead);

// Each item of [begin, end) goes through two steps, in order, kAhead items apart: what the first one prefetches has
// arrived when the second one reads it. Item i may keep its data in place ring(i) of small arrays.
template <typename First, typename Second>
NESTPIPE_INLINE void in_two_steps(int64_t begin, int64_t end, First&& first, Second&& second) {
    const int64_t ahead = std::min(kAhead, end - begin);
    for (int64_t i = begin; i < begin + ahead; ++i) first(i);
    for (int64_t i = begin; i < end - ahead; ++i) {
        first(i + ahead);
        second(i);
    }
    for (int64_t i = end - ahead; i < end; ++i) second(i);
}

// The items of [0, count) that belong(i), in order, each through two steps. Threads share items by content in this way:
// every thread looks at all of them, cheaply, and handles its own.
template <typename Belongs, typename First, typename Second>
NESTPIPE_INLINE void selected_in_two_steps(int64_t count, Belongs&& belongs, First&& first, Second&& second) {
    constexpr int64_t kSome = 1024;
    int64_t selected[kSome];
    for (int64_t begin = 0; begin < count; begin += kSome) {
        const int64_t end = std::min(begin + kSome, count);
        int64_t num_selected = 0;
        for (int64_t i = begin; i < end; ++i) {  // no branch: the processor could not predict it
            selected[num_selected] = i;
            num_selected += belongs(i);
        }
        in_two_steps(0, num_selected, [&](int64_t s) { first(selected[s]); }, [&](int64_t s) { second(selected[s]); });
    }
}

}  // namespace nestpipe
