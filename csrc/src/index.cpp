#include "index.hpp"

#include <algorithm>
#include <utility>

namespace nestpipe {

namespace {
// Growing by 1/4 keeps the array between 0.56 and 0.7 full, about 20 bytes a row, for five streamed writes of a slot in
// a row's life.
constexpr uint64_t grown(uint64_t num_lines) { return num_lines / 4 * 5; }
}  // namespace

// No branch depends on the slot: the processor could not predict it.
void Index::Line::open(int slot) {
    for (int i = kSlots - 1; i > 0; --i) {
        const int from = i - (i > slot);
        inverse[i] = inverse[from];
        row_plus_one[i] = row_plus_one[from];
    }
}

void Index::Line::close(int slot) {
    for (int i = 0; i + 1 < kSlots; ++i) {
        const int from = i + (i >= slot);
        inverse[i] = inverse[from];
        row_plus_one[i] = row_plus_one[from];
    }
    inverse[kSlots - 1] = 0;
    row_plus_one[kSlots - 1] = 0;
}

void Index::grow(uint64_t rows) {
    uint64_t num_lines = grown(num_lines_);
    while (rows_that_fit(num_lines) < rows) num_lines = grown(num_lines);
    rebuild(num_lines);
}

void Index::insert_at(Position at, uint64_t place, uint32_t row) {
    uint64_t inverse = ~place;
    uint32_t row_plus_one = row + 1;
    // A full line hands its largest on to the front of the next one, until one has room.
    for (auto* line = const_cast<Line*>(at.line);; ++line, at.slot = 0) {
        const uint64_t last_inverse = line->inverse[kSlots - 1];
        const uint32_t last_row_plus_one = line->row_plus_one[kSlots - 1];
        line->open(at.slot);
        line->inverse[at.slot] = inverse;
        line->row_plus_one[at.slot] = row_plus_one;
        if (last_row_plus_one == 0) return;
        inverse = last_inverse;
        row_plus_one = last_row_plus_one;
    }
}

uint32_t Index::erase(uint64_t place) {
    const Position at = first_not_below(place);
    const uint32_t row = at.row_of(place);
    if (row == kNoRow) return kNoRow;
    auto* line = const_cast<Line*>(at.line);
    bool was_full = line->is_full();
    line->close(at.slot);
    // A line that was full may have sent rows on to the next one; take the first of them back, and so on behind it.
    for (; was_full; ++line) {
        Line* next = line + 1;
        if (next->is_empty() || home(~next->inverse[0]) > static_cast<uint64_t>(line - lines_)) break;
        line->inverse[kSlots - 1] = next->inverse[0];
        line->row_plus_one[kSlots - 1] = next->row_plus_one[0];
        was_full = next->is_full();
        next->close(0);
    }
    return row;
}

// Streams the rows, in order, into a larger array, handing the old one back piece by piece: no second copy at any time.
void Index::rebuild(uint64_t num_lines) {
    // Behind its lines the array has room for every row, so that no row is ever pushed past the end. It is address
    // space: only the few lines in use there are ever backed by memory.
    Region region((num_lines + rows_that_fit(num_lines) / kSlots + 2) * sizeof(Line));
    region.advise_huge(0, num_lines * sizeof(Line) + kHugePage / 4);  // the last page, too, if most of it is used
    auto* lines = static_cast<Line*>(region.data());
    uint64_t position = 0;
    int slot = 0;
    const auto append = [&](uint64_t inverse, uint32_t row_plus_one) {
        const uint64_t at_least = home(~inverse, num_lines);
        if (position < at_least || slot == kSlots) {
            position = std::max(position + 1, at_least);
            slot = 0;
        }
        lines[position].inverse[slot] = inverse;
        lines[position].row_plus_one[slot] = row_plus_one;
        ++slot;
    };
    for (uint64_t i = 0; i < num_lines_ || (lines_ != nullptr && !lines_[i].is_empty()); ++i) {
        for (int s = 0; s < kSlots && lines_[i].row_plus_one[s] != 0; ++s)
            append(lines_[i].inverse[s], lines_[i].row_plus_one[s]);
        region_.release_before(i * sizeof(Line));
    }
    region_ = std::move(region);
    lines_ = lines;
    num_lines_ = num_lines;
}

}  // namespace nestpipe
