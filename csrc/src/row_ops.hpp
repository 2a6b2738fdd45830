// Copies, adds and sums rows between arrays.
#pragma once

#include <cstdint>

namespace nestpipe {

// Rows in an array: row i begins places[i] * stride bytes behind the start, or i * stride without places.
template <typename Byte>
struct RowsAt {
    Byte* start;
    const int64_t* places;
    int64_t stride;
    Byte* operator[](int64_t i) const { return start + (places == nullptr ? i : places[i]) * stride; }
};

// to[i] = from[i]
void copy_rows(const RowsAt<const char>& from, const RowsAt<char>& to, int64_t count, int64_t row_bytes,
               int32_t num_threads);

// target[i] += source[i], or 0 + source[i] where is_first[i]. Returns whether a result is NaN or its absolute value
// above the limit, if that is asked for.
template <typename Real>
bool add_rows(const RowsAt<char>& target, const RowsAt<const char>& source, const uint8_t* is_first, int64_t count,
              int64_t dim, bool with_limit, double limit, int32_t num_threads);

// Returns whether an element of the rows is NaN or its absolute value above the limit.
template <typename Real>
bool any_exceeds(const RowsAt<const char>& rows, int64_t count, int64_t dim, double limit, int32_t num_threads);

// out[s] = ((0 + values[o]) + values[o + 1]) + ..., o = offsets[s] .. offsets[s + 1] - 1
template <typename Real>
void sum_rows(const RowsAt<const char>& values, const int64_t* offsets, int64_t num_segments, int64_t dim,
              const RowsAt<char>& out, int32_t num_threads);

}  // namespace nestpipe
