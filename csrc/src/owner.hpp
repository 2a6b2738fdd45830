// Grouping keys by the rank that owns them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mix.hpp"

namespace nestpipe {

// A stable counting sort. Arguments as in nestpipe_group_by_owner.
inline void group_by_owner(uint64_t salt, const int64_t* keys, int64_t num_keys, int64_t world_size, int64_t* order,
                           int64_t* counts) {
    std::vector<int64_t> next(static_cast<size_t>(world_size), 0);
    const auto owner = [&](int64_t i) { return owner_of_hash(hash_key(keys[i], salt), world_size); };
    std::fill(counts, counts + world_size, 0);
    for (int64_t i = 0; i < num_keys; ++i) ++counts[owner(i)];
    for (size_t rank = 1; rank < next.size(); ++rank) next[rank] = next[rank - 1] + counts[rank - 1];
    for (int64_t i = 0; i < num_keys; ++i) order[next[static_cast<size_t>(owner(i))]++] = i;
}

}  // namespace nestpipe
