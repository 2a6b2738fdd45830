// The C boundary of what works on rows: grouping by row, pooling, row optimizers.
#include <algorithm>

#include "boundary.hpp"
#include "group.hpp"
#include "nestpipe.h"
#include "pool.hpp"
#include "row_update.hpp"

using namespace nestpipe;

namespace {

void need_offsets(const int64_t* offsets, int64_t num_samples, int64_t num_occurrences, const std::string& what) {
    if (offsets == nullptr) {
        if (num_occurrences != num_samples) refuse(what + ": without offsets each sample has one occurrence");
        return;
    }
    const int64_t* end = offsets + num_samples;
    if (offsets[0] != 0 || *end != num_occurrences || !std::is_sorted(offsets, end + 1))
        refuse(what + ": offsets do not rise from 0 to num_occurrences");
}

void check_occurrences(const nestpipe_occurrences* of, int64_t stride) {
    need(of, "occurrences");
    need_count(of->num_occurrences, "num_occurrences");
    need_count(of->num_samples, "num_samples");
    need_count(of->num_rows, "num_rows");
    need_array(of->index, of->num_occurrences, "index");
    if (of->dtype != NESTPIPE_FLOAT32 && of->dtype != NESTPIPE_FLOAT64) refuse("pool: unknown dtype");
    if (of->dim < 1 || stride < of->dim) refuse("pool: needs 1 <= dim <= stride");
    const auto is_row = [of](int64_t row) { return row >= 0 && row <= of->num_rows; };
    if (!std::all_of(of->index, of->index + of->num_occurrences, is_row)) refuse("pool: index is not 0 .. num_rows");
    need_offsets(of->offsets, of->num_samples, of->num_occurrences, "pool");
}

template <typename Real>
Occurrences<Real> as(const nestpipe_occurrences& of) {
    return {of.index, of.offsets, static_cast<const Real*>(of.weights), of.num_samples, of.num_rows, of.dim};
}

// `columns` of state.
void check_update(const nestpipe_row_update* of, int64_t columns, int32_t num_threads) {
    need_count(of->num_rows, "num_rows");
    need_array(of->rows, of->num_rows, "rows");
    need_array(of->state, of->num_rows, "state");
    need_array(of->gradient, of->num_rows, "gradient");
    need_threads(num_threads);
    if (of->dtype != NESTPIPE_FLOAT32 && of->dtype != NESTPIPE_FLOAT64) refuse("row update: unknown dtype");
    if (of->dim < 1 || of->row_stride < of->dim || of->state_stride < columns)
        refuse("row update: rows or states overlap");
}

template <typename Real>
RowUpdate<Real> as(const nestpipe_row_update& of) {
    return {static_cast<Real*>(of.rows),
            static_cast<Real*>(of.state),
            static_cast<const Real*>(of.gradient),
            of.num_rows,
            of.dim,
            of.row_stride,
            of.state_stride};
}

}  // namespace

nestpipe_status nestpipe_group_by_row(const int64_t* index, int64_t num_occurrences, const int64_t* offsets,
                                      int64_t num_samples, int64_t num_rows, int64_t* row_offsets, int64_t* occurrences,
                                      int64_t* samples) {
    return guarded([&] {
        need_count(num_occurrences, "num_occurrences");
        need_count(num_samples, "num_samples");
        need_count(num_rows, "num_rows");
        need_array(index, num_occurrences, "index");
        need(row_offsets, "row_offsets");
        need_offsets(offsets, num_samples, num_occurrences, "group_by_row");
        if (!group_by_row(index, num_occurrences, offsets, num_samples, num_rows, row_offsets, occurrences, samples))
            refuse("index has values outside 0 .. " + std::to_string(num_rows) +
                   ", the rows and, one beyond them, padding");
    });
}

nestpipe_status nestpipe_pool(const nestpipe_occurrences* of, const void* rows, void* out, int64_t stride,
                              int32_t num_threads) {
    return guarded([&] {
        check_occurrences(of, stride);
        need_array(rows, of->num_rows, "rows");
        need_array(out, of->num_samples, "out");
        need_threads(num_threads);
        if (of->dtype == NESTPIPE_FLOAT32)
            pool(as<float>(*of), static_cast<const float*>(rows), static_cast<float*>(out), stride, num_threads);
        else
            pool(as<double>(*of), static_cast<const double*>(rows), static_cast<double*>(out), stride, num_threads);
    });
}

nestpipe_status nestpipe_pool_backward(const nestpipe_occurrences* of, const void* gradient, int64_t stride,
                                       void* row_gradients, int32_t num_threads) {
    return guarded([&] {
        check_occurrences(of, stride);
        need_array(gradient, of->num_samples, "gradient");
        need_array(row_gradients, of->num_rows, "row_gradients");
        need_threads(num_threads);
        if (of->dtype == NESTPIPE_FLOAT32)
            pool_backward(as<float>(*of), static_cast<const float*>(gradient), stride,
                          static_cast<float*>(row_gradients), num_threads);
        else
            pool_backward(as<double>(*of), static_cast<const double*>(gradient), stride,
                          static_cast<double*>(row_gradients), num_threads);
    });
}

nestpipe_status nestpipe_adagrad(const nestpipe_row_update* of, double lr, double eps, int32_t num_threads) {
    return guarded([&] {
        need(of, "update");
        check_update(of, of->dim, num_threads);
        if (of->dtype == NESTPIPE_FLOAT32)
            adagrad(as<float>(*of), static_cast<float>(lr), static_cast<float>(eps), num_threads);
        else
            adagrad(as<double>(*of), lr, eps, num_threads);
    });
}

nestpipe_status nestpipe_adam(const nestpipe_row_update* of, double beta1, double beta2, double step_size, double eps,
                              int32_t num_threads) {
    return guarded([&] {
        need(of, "update");
        check_update(of, 2 * of->dim, num_threads);
        if (of->dtype == NESTPIPE_FLOAT32)
            adam(as<float>(*of), Decay<float>(beta1), Decay<float>(beta2), static_cast<float>(step_size),
                 static_cast<float>(eps), num_threads);
        else
            adam(as<double>(*of), Decay<double>(beta1), Decay<double>(beta2), step_size, eps, num_threads);
    });
}
