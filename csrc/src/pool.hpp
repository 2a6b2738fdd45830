// Rows at the occurrences of their keys, added up for each sample, and the gradients on their way back.
#pragma once

#include <cstdint>

namespace nestpipe {

// The rows of each sample. `index` is 0 .. num_rows, where num_rows is padding: no row.
template <typename Real>
struct Occurrences {
    const int64_t* index;
    const int64_t* offsets;  // sample s has occurrences offsets[s] .. offsets[s + 1] - 1; null: it has number s only
    const Real* weights;     // of each occurrence; null: all are 1
    int64_t num_samples;
    int64_t num_rows;
    int64_t dim;

    int64_t first(int64_t sample) const { return offsets != nullptr ? offsets[sample] : sample; }
};

// out: [num_samples, dim], a sample every `stride` elements.
template <typename Real>
void pool(const Occurrences<Real>& occurrences, const Real* rows, Real* out, int64_t stride, int32_t num_threads);

// The sum of each row's gradients in the order of its occurrences, whatever the number of threads.
// gradient: [num_samples, dim], a sample every `stride` elements; row_gradients: [num_rows, dim], overwritten.
template <typename Real>
void pool_backward(const Occurrences<Real>& occurrences, const Real* gradient, int64_t stride, Real* row_gradients,
                   int32_t num_threads);

}  // namespace nestpipe
