// A hash table from keys to their numbers, in the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lookahead.hpp"
#include "prefetch.hpp"
#include "scratch.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nestpipe {

constexpr uint32_t kNoNumber = UINT32_MAX;

// Both halves of one 128-bit product: cheaper than mix64, and good enough for a table that compares whole keys.
inline uint64_t fold_hash(int64_t key) {
    const auto product =
        static_cast<unsigned __int128>(static_cast<uint64_t>(key) ^ 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

// A cache line of a hash table from keys to their numbers. A slot has 32 bits of the hash; the key itself, in the list
// of distinct keys, decides.
struct alignas(64) Line {
    uint32_t tag[8];
    uint32_t number_plus_one[8];  // 0: empty; a line is filled from its front

    // Bit s is set where slot s is empty or has this tag.
    unsigned candidates(uint32_t wanted) const {
#if defined(__SSE2__)
        const auto* word = reinterpret_cast<const __m128i*>(this);
        const __m128i tags = _mm_set1_epi32(static_cast<int>(wanted)), zero = _mm_setzero_si128();
        const __m128i front = _mm_or_si128(_mm_cmpeq_epi32(word[0], tags), _mm_cmpeq_epi32(word[2], zero));
        const __m128i back = _mm_or_si128(_mm_cmpeq_epi32(word[1], tags), _mm_cmpeq_epi32(word[3], zero));
        return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(front, back), zero)));
#else
        unsigned mask = 0;
        for (unsigned s = 0; s < 8; ++s) mask |= unsigned{tag[s] == wanted || number_plus_one[s] == 0} << s;
        return mask;
#endif
    }
};
static_assert(sizeof(Line) == 64);

constexpr int64_t num_lines_for(int64_t num_keys) { return num_keys / 5 + 2; }  // eight slots each: 5/8 full at most

// Lines that hold the numbers of keys; the keys themselves are in a list elsewhere, each at its number.
class KeyLines {
 public:
    KeyLines(Line* lines, int64_t num_lines) : lines_(lines), num_lines_(static_cast<uint64_t>(num_lines)) {}

    void clear() { std::memset(static_cast<void*>(lines_), 0, num_lines_ * sizeof(Line)); }  // before all else

    // The line at which the search for a key begins, and the tag to look for.
    struct Start {
        Line* line;
        uint32_t tag;
    };
    Start start(int64_t key) const {
        const uint64_t hash = fold_hash(key);
        Line* line = lines_ + ((hash >> 32) * num_lines_ >> 32);
        prefetch(line);
        return {line, static_cast<uint32_t>(hash)};
    }

    // The number of a known key, or kNoNumber. Of a key that was added twice, the first.
    NESTPIPE_INLINE uint32_t find(int64_t key, Start at, const int64_t* keys) const {
        for (const Line* line = at.line;; line = next(line))
            for (unsigned mask = line->candidates(at.tag); mask != 0; mask &= mask - 1) {
                const uint32_t number_plus_one = line->number_plus_one[__builtin_ctz(mask)];
                if (number_plus_one == 0) return kNoNumber;
                if (keys[number_plus_one - 1] == key) return number_plus_one - 1;
            }
    }

    // Adds a key without looking for it. The table must have room.
    NESTPIPE_INLINE void add(uint32_t number, Start at) {
        for (Line* line = at.line;; line = next(line))
            for (unsigned mask = line->candidates(at.tag); mask != 0; mask &= mask - 1) {
                const int slot = __builtin_ctz(mask);
                if (line->number_plus_one[slot] != 0) continue;  // another key with this tag
                line->tag[slot] = at.tag;
                line->number_plus_one[slot] = number + 1;
                return;
            }
    }

 protected:
    template <typename SomeLine>
    SomeLine* next(SomeLine* line) const {
        return line + 1 == lines_ + num_lines_ ? lines_ : line + 1;
    }

    Line* lines_;
    uint64_t num_lines_;
};

}  // namespace nestpipe
