// Distinct keys in order of first occurrence, with the inverse; keys that two lists share.
#pragma once

#include <cstdint>

namespace nestpipe {

constexpr int64_t kMostUniqueKeys = int64_t{1} << 31;

// Arguments and result as in nestpipe_unique.
int64_t unique(const int64_t* keys, int64_t num_keys, int64_t* unique, int64_t* inverse, int32_t num_threads);

// Arguments and result as in nestpipe_match_tables.
void match_tables(const int64_t* before, const int64_t* before_offsets, const int64_t* keys, const int64_t* key_offsets,
                  int64_t num_tables, int64_t* places, int32_t num_threads);

}  // namespace nestpipe
