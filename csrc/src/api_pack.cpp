// The C boundary of operations that pack a batch for an accelerator.
#include <string>

#include "boundary.hpp"
#include "feature_checks.hpp"
#include "nestpipe.h"
#include "plan.hpp"

using namespace nestpipe;

nestpipe_status nestpipe_pack_keys(const nestpipe_feature_keys* features, int64_t num_features, int64_t num_tables,
                                   int64_t* keys, int16_t* tables, int64_t* outside, int32_t num_threads) {
    return guarded([&] {
        need_count(num_features, "num_features");
        need_array(features, num_features, "features");
        need_range(num_tables, 0, tables == nullptr ? (int64_t{1} << 24) - 1 : INT16_MAX, "num_tables");
        need(outside, "outside");
        need_threads(num_threads);
        need_feature_keys(features, num_features, num_tables);
        if (!has_outside(features, num_features, outside))
            pack_keys(features, num_features, num_tables, keys, tables, num_threads);
    });
}

nestpipe_status nestpipe_copy_arrays(const nestpipe_array_copy* arrays, int64_t num_arrays, void* target,
                                     int64_t num_bytes, int32_t num_threads) {
    return guarded([&] {
        need_count(num_arrays, "num_arrays");
        need_count(num_bytes, "num_bytes");
        need_array(arrays, num_arrays, "arrays");
        need_threads(num_threads);
        for (int64_t i = 0; i < num_arrays; ++i) {
            need_count(arrays[i].num_bytes, "num_bytes of an array");
            if (arrays[i].num_bytes > 0) need(arrays[i].source, "source");
            need_range(arrays[i].offset, 0, num_bytes - arrays[i].num_bytes, "offset");
        }
        if (num_bytes > 0) need(target, "target");
        copy_arrays(arrays, num_arrays, static_cast<uint8_t*>(target), num_threads);
    });
}

nestpipe_status nestpipe_find_ranges(const nestpipe_array_copy* arrays, int64_t num_arrays, uint8_t* is_range,
                                     int32_t num_threads) {
    return guarded([&] {
        need_count(num_arrays, "num_arrays");
        need_array(arrays, num_arrays, "arrays");
        need_array(is_range, num_arrays, "is_range");
        need_threads(num_threads);
        for (int64_t i = 0; i < num_arrays; ++i) {
            need_count(arrays[i].num_bytes, "num_bytes of an array");
            if (arrays[i].num_bytes > 0) need(arrays[i].source, "source");
        }
        find_ranges(arrays, num_arrays, is_range, num_threads);
    });
}

nestpipe_status nestpipe_lay_out(const nestpipe_feature_samples* features, int64_t num_features, const int64_t* samples,
                                 const int64_t* part_offsets, int64_t num_parts, int64_t num_samples, int64_t* bounds,
                                 int64_t* sources, int64_t* longest, int32_t num_threads) {
    return guarded([&] {
        need_count(num_features, "num_features");
        need_count(num_samples, "num_samples");
        need_range(num_parts, 1, NESTPIPE_MAX_PARTS, "num_parts");
        need_array(features, num_features, "features");
        need_offsets_to(part_offsets, num_parts, num_samples, "parts");
        for (int64_t f = 0; f < num_features; ++f) {
            need(features[f].offsets, "offsets of a feature");
            if (features[f].offsets[0] != 0 || features[f].offsets[num_samples] != features[f].num_keys)
                refuse(feature_text(f) + ": offsets do not rise from 0 to " + std::to_string(features[f].num_keys));
        }
        if (samples != nullptr) need_permutation(samples, num_samples);
        need(bounds, "bounds");
        need(longest, "longest");
        need_threads(num_threads);
        *longest = lay_out(features, num_features, samples, part_offsets, num_parts, bounds, sources, num_threads);
    });
}
