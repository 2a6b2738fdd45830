// Row optimizers in one pass over rows, row state and gradients.
#pragma once

#include <cstdint>

namespace nestpipe {

template <typename Real>
struct RowUpdate {
    Real* rows;  // a row every row_stride elements
    Real* state;
    const Real* gradient;  // dense
    int64_t num_rows, dim, row_stride, state_stride;
};

// state += g^2; row -= lr * g / (sqrt(state) + eps)
template <typename Real>
void adagrad(const RowUpdate<Real>& of, Real lr, Real eps, int32_t num_threads);

// state = (first, second moment); row -= step_size * first / (sqrt(second) + eps)
template <typename Real>
void adam(const RowUpdate<Real>& of, Real beta1, Real beta2, Real step_size, Real eps, int32_t num_threads);

}  // namespace nestpipe
