// The bulk operations on keys, for one table or for several at once: gather, find, write.
#pragma once

#include <cstdint>
#include <vector>

#include "found_rows.hpp"
#include "row_update.hpp"
#include "table.hpp"

namespace nestpipe {

// Records in the caller's array, stride_bytes apart: the i-th at places[i], or without places at i.
template <typename Byte>
struct RecordsAt {
    Byte* first;
    const int64_t* places;
    int64_t stride_bytes;

    Byte* operator[](int64_t i) const { return first + (places == nullptr ? i : places[i]) * stride_bytes; }
};

// The keys of one call and their tables. Table t has keys offsets[t] .. offsets[t + 1] - 1. Every operation locks all
// tables at once, so that it happens to all of them or to none, and its threads share the keys of all of them.
class Tables {
 public:
    // lock_order: the same tables, each once, by their number: calls that lock in one order never wait in a circle.
    Tables(Table* const* tables, Table* const* lock_order, int64_t num_tables, const int64_t* offsets,
           const int64_t* keys)
        : tables_(tables), lock_order_(lock_order), num_tables_(num_tables), offsets_(offsets), keys_(keys) {}

    // One table, which has all the keys.
    Tables(Table& table, const int64_t* keys, int64_t num_keys) : Tables(&only_, &only_, 1, only_offsets_, keys) {
        only_ = &table;
        only_offsets_[1] = num_keys;
    }

    Tables(const Tables&) = delete;
    Tables& operator=(const Tables&) = delete;

    // Arguments as in nestpipe.h. All tables have the same item size, and in `write` the same number of columns.
    // last: takes note of what `gather` has found, which `write` then need not look for. May be null.
    void gather(int64_t num_columns, RecordsAt<char> out, uint8_t* found, int64_t* steps, int32_t num_threads,
                FoundRows* last = nullptr) const;
    void find(uint8_t* found, int32_t num_threads) const;

    // Every record gets its step of `steps`, or `step` where that is null.
    void write(RecordsAt<const char> records, const int64_t* steps, int64_t step, int32_t num_threads,
               FoundRows* last = nullptr) const;

    // Applies a row optimizer to the records, missing ones included. gradient: [num_keys, dim]
    void update(const RowOptimizer& optimizer, const char* gradient, int64_t step, int32_t num_threads,
                FoundRows* last) const;

 private:
    class Walk;
    class Stay;

    int64_t num_keys() const { return offsets_[num_tables_]; }

    template <typename Lock>
    std::vector<Lock> locked() const;

    // body(tables): tables(i) is the table of key i, for ascending i of [first, end).
    template <typename Body>
    void walk(int64_t first, int64_t end, const Body& body) const;

    // use(tables, first, count, places, rows): the keys from `first` on, their tables as above, their places in their
    // indexes, and their records or Index::kNoRow. used_bytes: of memory that `use` touches for a key.
    template <typename Use>
    void in_found_blocks(int64_t used_bytes, int32_t num_threads, const Use& use) const;

    // rows[i] becomes the record number of keys[i] or Index::kNoRow. Returns how many are missing.
    int64_t find_rows(uint32_t* rows, int32_t num_threads, FoundRows* last) const;

    // Memory for the records of all keys, with the lock held; null if there is none, or they are too many.
    uint32_t* begin_remembering(FoundRows& last) const;
    void remember(FoundRows& last) const;
    bool remembers(const FoundRows& last) const;
    // with_values: missing keys get their initial records; otherwise their records are left to be written.
    void insert_missing(uint32_t* rows, int64_t num_missing, bool with_values) const;
    void undo(const std::vector<int64_t>& inserted, const uint32_t* rows,
              const std::vector<Table::Extent>& before) const;
    void write_records(const uint32_t* rows, RecordsAt<const char> records, const int64_t* steps, int64_t step,
                       int32_t num_threads) const;
    void update_records(const uint32_t* rows, const RowOptimizer& optimizer, const char* gradient, int64_t step,
                        int32_t num_threads) const;

    // fetch(table, i) and later visit(table, i) for each key. Each record is visited by the one thread its number
    // belongs to, so the occurrences of a repeated key come in order and to one thread.
    template <typename Fetch, typename Visit>
    void for_each_record(const uint32_t* rows, int32_t num_threads, const Fetch& fetch, const Visit& visit) const;

    Table* const* tables_;
    Table* const* lock_order_;
    int64_t num_tables_;
    const int64_t* offsets_;
    const int64_t* keys_;
    Table* only_ = nullptr;
    int64_t only_offsets_[2] = {0, 0};
};

}  // namespace nestpipe
