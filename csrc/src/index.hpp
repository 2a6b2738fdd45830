// The index of a table: place of a key -> number of its record.
//
// A place is a 64-bit number that stands for one key: its hash, which is a bijection of the key, with the bucket's bits
// last. The index is one sorted array of places with gaps, cut into cache lines of five slots. A place p has its home
// in line p * num_lines / 2^64 and lives there or, when that line is full, in the first of the lines behind it that has
// room; each line is filled from its front. So
//   - a probe compares the five places of a line without a branch and ends there nine times in ten, found or not;
//   - growing is one streaming pass, in order, that never looks at a key or a record;
//   - nothing has to be verified elsewhere: the array holds the keys themselves.
#pragma once

#include <cstdint>

#include "prefetch.hpp"
#include "region.hpp"

namespace nestpipe {

class Index {
 public:
    static constexpr uint32_t kNoRow = UINT32_MAX;

    Index() { rebuild(kFirstLines); }

    // The number of the record of `place`, or kNoRow.
    uint32_t find(uint64_t place) const { return first_not_below(place).row_of(place); }

    void prefetch(uint64_t place) const { nestpipe::prefetch(lines_ + home(place)); }
    // For insert and erase: a full line hands rows on to the next one, or takes them back.
    void prefetch_to_write(uint64_t place) const {
        nestpipe::prefetch_to_write(lines_ + home(place));
        nestpipe::prefetch(lines_ + home(place) + 1);
    }

    // Makes room for `rows` in all. May throw Error(NESTPIPE_OUT_OF_MEMORY); then nothing has changed.
    void reserve(uint64_t rows) {
        if (rows > rows_that_fit(num_lines_)) grow(rows);
    }

    void insert(uint64_t place, uint32_t row) {  // the place must be missing and its room reserved
        insert_at(first_not_below(place), place, row);
    }
    bool try_insert(uint64_t place, uint32_t row) {  // false if it is there already; its room must be reserved
        const Position at = first_not_below(place);
        if (at.row_of(place) != kNoRow) return false;
        insert_at(at, place, row);
        return true;
    }
    uint32_t erase(uint64_t place);  // the record it had, or kNoRow

    // Calls visit(place, row) for first <= place <= last, ascending.
    template <typename Visit>
    void for_each(uint64_t first, uint64_t last, Visit&& visit) const {
        for_each_while(first, [&](uint64_t place, uint32_t row) {
            if (place > last) return false;
            visit(place, row);
            return true;
        });
    }

    // The same from `first` on, until visit returns false.
    template <typename Visit>
    void for_each_while(uint64_t first, Visit&& visit) const {
        auto [line, slot] = first_not_below(first);
        for (; line < lines_ + num_lines_ || !line->is_empty(); ++line, slot = 0)
            for (; slot < kSlots && line->row_plus_one[slot] != 0; ++slot)
                if (!visit(~line->inverse[slot], line->row_plus_one[slot] - 1)) return;
    }

    uint64_t bytes_in_use() const { return num_lines_ * sizeof(Line); }
    uint64_t mapped_bytes() const { return region_.bytes(); }

 private:
    static constexpr int kSlots = 5;
    static constexpr uint64_t kFirstLines = 64;

    // Places are stored inverted: a fresh, zeroed slot then compares as larger than every place.
    struct Line {
        uint64_t inverse[kSlots];
        uint32_t row_plus_one[kSlots];  // 0: empty
        uint32_t unused;

        bool is_empty() const { return row_plus_one[0] == 0; }
        bool is_full() const { return row_plus_one[kSlots - 1] != 0; }
        int count_below(uint64_t place) const {
            int count = 0;
            for (int i = 0; i < kSlots; ++i) count += inverse[i] > ~place;
            return count;
        }
        void open(int slot);   // moves the slots from `slot` on one place back; the last one falls out
        void close(int slot);  // takes a slot away; the slots behind it move up
    };
    static_assert(sizeof(Line) == 64);

    struct Position {
        const Line* line;
        int slot;

        uint32_t row_of(uint64_t place) const {  // an empty slot has 0, and 0 - 1 is kNoRow
            return line->inverse[slot] == ~place ? line->row_plus_one[slot] - 1 : kNoRow;
        }
    };

    static uint64_t home(uint64_t place, uint64_t num_lines) {
        return static_cast<uint64_t>(static_cast<unsigned __int128>(place) * num_lines >> 64);
    }
    uint64_t home(uint64_t place) const { return home(place, num_lines_); }

    // The position of `place`, or else the one at which it would be inserted.
    Position first_not_below(uint64_t place) const {
        for (const Line* line = lines_ + home(place);; ++line)
            if (const int slot = line->count_below(place); slot < kSlots) return {line, slot};
    }

    // At 7/10 full one row in eight lives outside its home line.
    static constexpr uint64_t rows_that_fit(uint64_t num_lines) { return num_lines / 2 * 7; }

    void grow(uint64_t rows);
    void insert_at(Position at, uint64_t place, uint32_t row);
    void rebuild(uint64_t num_lines);

    Region region_;
    Line* lines_ = nullptr;
    uint64_t num_lines_ = 0;
};

}  // namespace nestpipe
