// Row optimizers in one pass over rows, row state and gradients.
#pragma once

#include <cstdint>

namespace nestpipe {

template <typename Real>
struct RowUpdate {
    Real* rows;  // a row every row_stride elements
    Real* state;
    const Real* gradient;  // dense
    const int64_t* slots;  // gradient i changes row and state slots[i]; null: i
    int64_t num_rows, dim, row_stride, state_stride;
};

// If a divisor below is zero, which takes eps = 0, the row keeps its value: a gradient of zero that meets a state of
// zero changes nothing.

// state += g^2; row -= lr * g / (sqrt(state) + eps)
template <typename Real>
void adagrad(const RowUpdate<Real>& arrays, Real lr, Real eps, int32_t num_threads);

// Weights with which a moment is updated: keep * moment + add * gradient.
template <typename Real>
struct Decay {
    Real keep, add;

    // add = 1 - beta is taken in double and rounded once. In float, 1 - beta would cancel: beta = 0.999999 would give
    // an `add` that is 1.3% off.
    explicit Decay(double beta) : keep(static_cast<Real>(beta)), add(static_cast<Real>(1 - beta)) {}
};

// state = (first, second moment); row -= step_size * first / (sqrt(second) + eps)
template <typename Real>
void adam(const RowUpdate<Real>& arrays, Decay<Real> first_decay, Decay<Real> second_decay, Real step_size, Real eps,
          int32_t num_threads);

}  // namespace nestpipe
