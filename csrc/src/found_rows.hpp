// The records that the last gather of a store has found. Training gathers keys and later scatters the same ones, which
// then need not be looked up again.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace nestpipe {

class Table;

struct FoundRows {
    static constexpr int64_t kMostKeys = int64_t{1} << 18;  // 3 MB

    std::mutex mutex;  // guards all below; only ever tried: calls that meet here do without
    std::vector<Table*> tables;
    std::vector<int64_t> offsets, keys;
    std::vector<uint32_t> rows;       // of each key; Index::kNoRow if it was missing
    std::vector<uint64_t> num_freed;  // Table::num_freed_ at that time, of each table
};

}  // namespace nestpipe
