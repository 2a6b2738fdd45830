// Grouping the occurrences of a batch by row.
#pragma once

#include <algorithm>
#include <cstdint>

namespace nestpipe {

// A stable counting sort, whose counts become the offsets, without memory of its own. Arguments as in
// nestpipe_group_by_row; false, and nothing else but row_offsets written, where an index is not 0 .. num_rows.
inline bool group_by_row(const int64_t* index, int64_t num_occurrences, const int64_t* offsets, int64_t num_samples,
                         int64_t num_rows, int64_t* row_offsets, int64_t* occurrences, int64_t* samples) {
    std::fill(row_offsets, row_offsets + num_rows + 1, 0);
    for (int64_t i = 0; i < num_occurrences; ++i) {
        if (index[i] < 0 || index[i] > num_rows) return false;
        ++row_offsets[index[i]];  // padding in the last one
    }
    for (int64_t row = 0, first = 0; row <= num_rows; ++row) {
        const int64_t count = row_offsets[row];
        row_offsets[row] = first;
        first += count;
    }
    for (int64_t sample = 0; sample < num_samples; ++sample) {
        const int64_t begin = offsets == nullptr ? sample : offsets[sample];
        const int64_t end = offsets == nullptr ? sample + 1 : offsets[sample + 1];
        for (int64_t i = begin; i < end; ++i) {
            const int64_t entry = row_offsets[index[i]]++;  // padding comes last, behind all rows
            if (occurrences != nullptr) occurrences[entry] = i;
            if (samples != nullptr) samples[entry] = sample;
        }
    }
    std::copy_backward(row_offsets, row_offsets + num_rows, row_offsets + num_rows + 1);  // ends are the next's starts
    row_offsets[0] = 0;
    return true;
}

}  // namespace nestpipe
