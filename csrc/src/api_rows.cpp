// The C boundary of operations on rows: grouping by row, pooling, row optimizers.
#include <algorithm>

#include "boundary.hpp"
#include "group.hpp"
#include "nestpipe.h"
#include "optimizer_checks.hpp"
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

void check_occurrences(const nestpipe_occurrences& occurrences) {
    need_count(occurrences.num_occurrences, "num_occurrences");
    need_count(occurrences.num_samples, "num_samples");
    need_count(occurrences.num_rows, "num_rows");
    need_array(occurrences.index, occurrences.num_occurrences, "index");
    const auto is_row = [&](int64_t row) { return row >= 0 && row <= occurrences.num_rows; };
    if (!std::all_of(occurrences.index, occurrences.index + occurrences.num_occurrences, is_row))
        refuse("pool: index is not 0 .. num_rows");
    need_offsets(occurrences.offsets, occurrences.num_samples, occurrences.num_occurrences, "pool");
}

void check_features(const nestpipe_occurrences* features, int64_t num_features, const void* array, int64_t stride) {
    need_count(num_features, "num_features");
    need_array(features, num_features, "features");
    int64_t width = 0;
    for (int64_t f = 0; f < num_features; ++f) {
        if (features[f].dtype != NESTPIPE_FLOAT32 && features[f].dtype != NESTPIPE_FLOAT64)
            refuse("pool: unknown dtype");
        if (features[f].dtype != features[0].dtype || features[f].num_samples != features[0].num_samples)
            refuse("pool: features differ in their dtype or their number of samples");
        if (features[f].dim < 1 || features[f].dim > stride - width) refuse("pool: needs 1 <= sum of dims <= stride");
        width += features[f].dim;
        check_occurrences(features[f]);
    }
    need_array(array, num_features == 0 ? 0 : features[0].num_samples, "out or gradient");
}

template <typename Real>
Occurrences<Real> as(const nestpipe_occurrences& occurrences) {
    return {occurrences.index,       occurrences.offsets,  static_cast<const Real*>(occurrences.weights),
            occurrences.num_samples, occurrences.num_rows, occurrences.dim};
}

template <typename Real>
void pool_all(const nestpipe_occurrences* features, int64_t num_features, const void* const* rows, void* out,
              int64_t stride, int32_t num_threads) {
    auto* columns = static_cast<Real*>(out);
    for (int64_t f = 0; f < num_features; columns += features[f++].dim)
        pool(as<Real>(features[f]), static_cast<const Real*>(rows[f]), columns, stride, num_threads);
}

template <typename Real>
void pool_all_backward(const nestpipe_occurrences* features, int64_t num_features, const void* gradient, int64_t stride,
                       void* const* row_gradients, int32_t num_threads) {
    auto* columns = static_cast<const Real*>(gradient);
    for (int64_t f = 0; f < num_features; columns += features[f++].dim)
        if (row_gradients[f] != nullptr)
            pool_backward(as<Real>(features[f]), columns, stride, static_cast<Real*>(row_gradients[f]), num_threads);
}

// columns: of row state.
void check_update(const nestpipe_row_update* update, int64_t columns, int32_t num_threads) {
    need_count(update->num_rows, "num_rows");
    need_count(update->num_slots, "num_slots");
    need_array(update->rows, update->num_rows, "rows");
    need_array(update->state, columns == 0 ? 0 : update->num_rows, "state");
    need_array(update->gradient, update->num_rows, "gradient");
    need_threads(num_threads);
    if (update->num_rows > update->num_slots) refuse("row update: more rows than slots");
    if (update->slots != nullptr) need_places(update->slots, update->num_rows, update->num_slots, "slots");
    if (update->dtype != NESTPIPE_FLOAT32 && update->dtype != NESTPIPE_FLOAT64) refuse("row update: unknown dtype");
    if (update->dim < 1 || update->row_stride < update->dim || update->state_stride < columns)
        refuse("row update: rows or states overlap");
}

RowUpdate in_bytes(const nestpipe_row_update& update) {
    const int64_t item = update.dtype == NESTPIPE_FLOAT32 ? 4 : 8;
    return {static_cast<char*>(update.rows),
            static_cast<char*>(update.state),
            static_cast<const char*>(update.gradient),
            update.slots,
            update.num_rows,
            update.dim,
            item,
            update.row_stride * item,
            update.state_stride * item};
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

nestpipe_status nestpipe_pool(const nestpipe_occurrences* features, int64_t num_features, const void* const* rows,
                              void* out, int64_t stride, int32_t num_threads) {
    return guarded([&] {
        check_features(features, num_features, out, stride);
        need_array(rows, num_features, "rows");
        for (int64_t f = 0; f < num_features; ++f) need_array(rows[f], features[f].num_rows, "rows of a feature");
        need_threads(num_threads);
        if (num_features == 0) return;
        if (features[0].dtype == NESTPIPE_FLOAT32)
            pool_all<float>(features, num_features, rows, out, stride, num_threads);
        else
            pool_all<double>(features, num_features, rows, out, stride, num_threads);
    });
}

nestpipe_status nestpipe_pool_backward(const nestpipe_occurrences* features, int64_t num_features, const void* gradient,
                                       int64_t stride, void* const* row_gradients, int32_t num_threads) {
    return guarded([&] {
        check_features(features, num_features, gradient, stride);
        need_array(row_gradients, num_features, "row_gradients");
        need_threads(num_threads);
        if (num_features == 0) return;
        if (features[0].dtype == NESTPIPE_FLOAT32)
            pool_all_backward<float>(features, num_features, gradient, stride, row_gradients, num_threads);
        else
            pool_all_backward<double>(features, num_features, gradient, stride, row_gradients, num_threads);
    });
}

nestpipe_status nestpipe_update_rows(const nestpipe_optimizer* optimizer, const nestpipe_row_update* update,
                                     int32_t num_threads) {
    return guarded([&] {
        need(update, "update");
        const RowOptimizer with = optimizer_of(optimizer, update->dtype);
        check_update(update, with.state_width(update->dim), num_threads);
        update_rows(with, in_bytes(*update), num_threads);
    });
}
