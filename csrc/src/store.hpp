// The store behind the C boundary, and the checks of arguments that concern its tables.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "boundary.hpp"
#include "error.hpp"
#include "found_rows.hpp"
#include "nestpipe.h"
#include "table.hpp"

struct nestpipe_store {
    std::mutex mutex;  // guards the list, not the tables
    std::vector<std::unique_ptr<nestpipe::Table>> tables;
    nestpipe::FoundRows last_found;  // by gather_tables

    nestpipe::Table& table(int32_t number) {
        std::lock_guard lock(mutex);
        return table_unlocked(number);
    }

    nestpipe::Table& table_unlocked(int32_t number) {
        if (number < 0 || static_cast<size_t>(number) >= tables.size())
            nestpipe::refuse("there is no table number " + std::to_string(number) + " in this store, which has " +
                             std::to_string(tables.size()));
        return *tables[static_cast<size_t>(number)];
    }
};

namespace nestpipe {

inline void need_columns(const Table& table, int64_t num_columns) {
    if (num_columns != table.dim() && num_columns != table.num_columns())
        refuse("gather from table '" + table.name() + "': num_columns is " + std::to_string(num_columns) +
               ", must be " + std::to_string(table.dim()) + " (rows) or " + std::to_string(table.num_columns()) +
               " (rows and row state)");
}

inline void need_step(const Table& table, int64_t step) {
    if (step < 0)
        refuse("scatter into table '" + table.name() + "': step is " + std::to_string(step) + ", must be >= 0");
}

inline void need_steps(const int64_t* steps, int64_t num_keys) {
    for (int64_t i = 0; i < num_keys; ++i)
        if (steps[i] < 0) refuse("steps[" + std::to_string(i) + "] is " + std::to_string(steps[i]) + ", must be >= 0");
}

// Checks an array of num_records records, `stride` elements apart. Without places, the i-th key has record i.
inline void need_records(const Table& table, const void* records, int64_t num_records, int64_t num_columns,
                         int64_t stride, const int64_t* places, int64_t num_keys, const char* what) {
    need_count(num_records, "size of the array");
    int64_t bytes;
    if (stride < num_columns)
        refuse(std::string(what) + " has records that overlap: they have " + std::to_string(num_columns) +
               " columns and are " + std::to_string(stride) + " apart");
    if (__builtin_mul_overflow(stride, table.item_bytes(), &bytes) ||
        __builtin_mul_overflow(num_records, bytes, &bytes))
        refuse(std::string(what) + " would have more than 2^63 bytes");
    if (places != nullptr)
        need_places(places, num_keys, num_records, "places");
    else if (num_keys > num_records)
        refuse(std::string(what) + " has " + std::to_string(num_records) + " records for " + std::to_string(num_keys) +
               " keys and no places");
    need_array(records, num_keys, what);
}

}  // namespace nestpipe
