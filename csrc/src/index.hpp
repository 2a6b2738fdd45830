// The index of a table: hash of a key -> number of its record.
//
// One sorted array with gaps, cut into cache lines of five slots. A hash h has its home in line h * num_lines / 2^64
// and lives there or, when that line is full, in the first of the lines behind it that has room; slots are in ascending
// order of hash all along the array, each line filled from its front. So
//   - a probe compares the five hashes of a line without a branch and ends there nine times in ten, found or not;
//   - growing is one streaming pass, in order, that never looks at a key or a record;
//   - a bucket, being a range of hashes, is a range of lines: export needs no other structure.
// The hash is a bijection of the key, so the array holds the keys themselves and nothing has to be verified elsewhere.
#pragma once

#include <cstdint>

#include "prefetch.hpp"
#include "region.hpp"

namespace nestpipe {

class Index {
 public:
    static constexpr uint32_t kNoRow = UINT32_MAX;

    Index() { rebuild(kFirstLines); }

    // The number of the record of `hash`, or kNoRow.
    uint32_t find(uint64_t hash) const {
        const Place place = first_not_below(hash);
        const bool there = place.line->inverse[place.slot] == ~hash;
        return there ? place.line->row_plus_one[place.slot] - 1 : kNoRow;  // an empty slot has 0, and 0 - 1 is kNoRow
    }

    void prefetch(uint64_t hash) const { nestpipe::prefetch(lines_ + home(hash)); }

    // Makes room for `rows` in all. May throw Error(NESTPIPE_OUT_OF_MEMORY); then nothing has changed.
    void reserve(uint64_t rows);

    void insert(uint64_t hash, uint32_t row);  // the hash must be missing and its room reserved
    uint32_t erase(uint64_t hash);             // the record it had, or kNoRow

    // Calls visit(hash, row) for first <= hash <= last, ascending.
    template <typename Visit>
    void for_each(uint64_t first, uint64_t last, Visit&& visit) const {
        auto [line, slot] = first_not_below(first);
        for (; line < lines_ + num_lines_ || !line->is_empty(); ++line, slot = 0)
            for (; slot < kSlots && line->row_plus_one[slot] != 0; ++slot) {
                if (~line->inverse[slot] > last) return;
                visit(~line->inverse[slot], line->row_plus_one[slot] - 1);
            }
    }

    uint64_t bytes_in_use() const { return num_lines_ * sizeof(Line); }
    uint64_t mapped_bytes() const { return region_.bytes(); }

 private:
    static constexpr int kSlots = 5;
    static constexpr uint64_t kFirstLines = 64;

    // Hashes are stored inverted: a fresh, zeroed slot then compares as larger than every hash.
    struct Line {
        uint64_t inverse[kSlots];
        uint32_t row_plus_one[kSlots];  // 0: empty
        uint32_t unused;

        bool is_empty() const { return row_plus_one[0] == 0; }
        bool is_full() const { return row_plus_one[kSlots - 1] != 0; }
        int count_below(uint64_t hash) const {
            int count = 0;
            for (int i = 0; i < kSlots; ++i) count += inverse[i] > ~hash;
            return count;
        }
        void open(int slot);   // moves the slots from `slot` on one place back; the last one falls out
        void close(int slot);  // takes a slot away; the slots behind it move up
    };
    static_assert(sizeof(Line) == 64);

    struct Place {
        const Line* line;
        int slot;
    };

    static uint64_t home(uint64_t hash, uint64_t num_lines) {
        return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * num_lines >> 64);
    }
    uint64_t home(uint64_t hash) const { return home(hash, num_lines_); }

    // Where `hash` is, or else where it would be inserted.
    Place first_not_below(uint64_t hash) const {
        for (const Line* line = lines_ + home(hash);; ++line)
            if (const int slot = line->count_below(hash); slot < kSlots) return {line, slot};
    }

    void rebuild(uint64_t num_lines);

    Region region_;
    Line* lines_ = nullptr;
    uint64_t num_lines_ = 0;
};

}  // namespace nestpipe
