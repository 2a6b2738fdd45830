// Distinct keys in order of first occurrence, with the inverse.
#pragma once

#include <cstdint>

namespace nestpipe {

constexpr int64_t kMostUniqueKeys = int64_t{1} << 31;

// Arguments and result as in nestpipe_unique.
int64_t unique(const int64_t* keys, int64_t num_keys, int64_t* unique, int64_t* inverse, int32_t num_threads);

}  // namespace nestpipe
