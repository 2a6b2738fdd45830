// Row optimizers in one pass over rows, row state and gradients.
#pragma once

#include <cstdint>

#include "nestpipe.h"

namespace nestpipe {

// Constants of a row optimizer, computed in double and rounded once.
template <typename Real>
struct UpdateConstants {
    Real lr, eps;
    Real keep1, add1, keep2, add2;  // a moment becomes keep * moment + add * gradient
};

// Updates one row and its state by its gradient. nestpipe.h has the formulas.
class RowOptimizer {
 public:
    RowOptimizer(const nestpipe_optimizer& optimizer, int32_t dtype);

    int64_t state_width(int64_t dim) const;

    void operator()(char* row, char* state, const char* gradient, int64_t dim) const {
        update_(*this, row, state, gradient, dim);
    }

    template <typename Real>
    const UpdateConstants<Real>& constants() const;

 private:
    using Update = void (*)(const RowOptimizer& optimizer, char* row, char* state, const char* gradient, int64_t dim);

    int32_t kind_;
    UpdateConstants<float> single_;
    UpdateConstants<double> double_;
    Update update_;
};

template <>
inline const UpdateConstants<float>& RowOptimizer::constants() const {
    return single_;
}

template <>
inline const UpdateConstants<double>& RowOptimizer::constants() const {
    return double_;
}

// Arrays of rows and states, in bytes.
struct RowUpdate {
    char* rows;  // a row every row_stride bytes
    char* state;
    const char* gradient;  // dense
    const int64_t* slots;  // gradient i changes row and state slots[i]; null: i
    int64_t num_rows, dim, item_bytes, row_stride, state_stride;
};

void update_rows(const RowOptimizer& optimizer, const RowUpdate& arrays, int32_t num_threads);

}  // namespace nestpipe
