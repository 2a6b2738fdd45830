// Checks of the arguments that describe the features of a batch.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "boundary.hpp"
#include "nestpipe.h"
#include "plan.hpp"

namespace nestpipe {

constexpr int64_t kMostKeys = (int64_t{1} << 31) - 1;  // positions are kept in 32 bits

static_assert(sizeof(nestpipe_feature_keys) == 6 * sizeof(int64_t));
static_assert(sizeof(nestpipe_feature_samples) == 3 * sizeof(int64_t));

inline void need_few_keys(int64_t num_keys, const char* what) {
    need_count(num_keys, what);
    if (num_keys > kMostKeys)
        refuse(std::string(what) + " is " + std::to_string(num_keys) + ", must be below 2^31; cut the batch");
}

inline void need_range(int64_t value, int64_t low, int64_t high, const std::string& what) {
    if (value < low || value > high)
        refuse(what + " is " + std::to_string(value) + ", must be " + std::to_string(low) + " .. " +
               std::to_string(high));
}

inline std::string feature_text(int64_t feature) { return "feature " + std::to_string(feature); }

// Checks the fields that both kinds of features have. Adds their keys to num_keys.
template <typename Feature>
inline void need_feature(const Feature& feature, int64_t f, int64_t num_tables, int64_t& num_keys) {
    need_few_keys(feature.num_keys, "num_keys of a feature");
    need_few_keys(num_keys += feature.num_keys, "number of occurrences");
    if (feature.table < 0 || feature.table >= num_tables)
        refuse(feature_text(f) + ": there is no table number " + std::to_string(feature.table) + " of " +
               std::to_string(num_tables));
}

// Refuses offsets[0] .. offsets[count] that do not ascend from 0 to `end`.
inline void need_offsets_to(const int64_t* offsets, int64_t count, int64_t end, const std::string& what) {
    if (offsets == nullptr) refuse(what + ": offsets is a null pointer");
    if (offsets[0] != 0 || offsets[count] != end || !std::is_sorted(offsets, offsets + count + 1))
        refuse(what + ": offsets do not rise from 0 to " + std::to_string(end));
}

// Checks the features of nestpipe_dedup and nestpipe_pack_keys. Returns the number of all their keys.
inline int64_t need_feature_keys(const nestpipe_feature_keys* features, int64_t num_features, int64_t num_tables) {
    int64_t num_occurrences = 0;
    for (int64_t f = 0; f < num_features; ++f) {
        need_feature(features[f], f, num_tables, num_occurrences);
        need_array(features[f].keys, features[f].num_keys, "keys of a feature");
        if (f > 0 && features[f].table < features[f - 1].table)
            refuse(feature_text(f) + " is of table " + std::to_string(features[f].table) +
                   ", the one before it of table " + std::to_string(features[f - 1].table) +
                   ": features must be ordered by table");
    }
    return num_occurrences;
}

// Writes the first key outside of its limit to outside [2].
inline bool has_outside(const nestpipe_feature_keys* features, int64_t num_features, int64_t* outside) {
    const Outside first = find_outside(features, num_features);
    outside[0] = first.feature;
    outside[1] = first.occurrence;
    return first.feature >= 0;
}

// Each of 0 .. count - 1 once.
inline void need_permutation(const int64_t* samples, int64_t count) {
    std::vector<uint8_t> seen(static_cast<size_t>(count), 0);
    for (int64_t i = 0; i < count; ++i) {
        if (samples[i] < 0 || samples[i] >= count || seen[static_cast<size_t>(samples[i])] != 0)
            refuse("samples[" + std::to_string(i) + "] is " + std::to_string(samples[i]) +
                   ": each of 0 .. num_samples - 1 must be there once");
        seen[static_cast<size_t>(samples[i])] = 1;
    }
}

}  // namespace nestpipe
