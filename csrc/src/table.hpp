// One table of the host store: an index from hashes to record numbers, and an arena of records.
#pragma once

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arena.hpp"
#include "index.hpp"
#include "initial.hpp"
#include "mix.hpp"
#include "nestpipe.h"

namespace nestpipe {

constexpr int64_t kMostRows = Index::kNoRow - 1;  // record numbers are 32 bits, one of them means "none"

// Records in an array of the caller's, stride_bytes apart: the i-th at places[i], or without places at i.
template <typename Byte>
struct RecordsAt {
    Byte* first;
    const int64_t* places;
    int64_t stride_bytes;

    Byte* operator[](int64_t i) const { return first + (places == nullptr ? i : places[i]) * stride_bytes; }
};

class Table {
 public:
    explicit Table(const nestpipe_table_spec& spec);

    const std::string& name() const { return name_; }
    int64_t dim() const { return dim_; }
    int64_t num_columns() const { return num_columns_; }
    int64_t item_bytes() const { return item_bytes_; }

    // What each does, its arguments and its errors: nestpipe.h.
    void gather(const int64_t* keys, int64_t num_keys, int64_t num_columns, RecordsAt<char> out, uint8_t* found,
                int64_t* steps, int32_t num_threads) const;
    void find(const int64_t* keys, int64_t num_keys, uint8_t* found, int32_t num_threads) const;
    int64_t size() const;
    int64_t count(int64_t first_bucket, int64_t end_bucket) const;
    int64_t export_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rooms, int64_t* keys, char* records,
                         int64_t* steps) const;
    void digest(uint8_t* sum, int32_t num_threads) const;
    nestpipe_memory_report memory() const;

    void scatter(const int64_t* keys, int64_t num_keys, RecordsAt<const char> records, int64_t step,
                 int32_t num_threads);
    void import_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rows, const int64_t* keys,
                      const char* records, const int64_t* steps, int32_t num_threads);
    int64_t erase(const int64_t* keys, int64_t num_keys);
    void reserve(int64_t num_rows);

 private:
    using ReadLock = std::shared_lock<std::shared_mutex>;
    using WriteLock = std::unique_lock<std::shared_mutex>;

    uint64_t place(int64_t key) const { return place_of_hash(hash_key(key, salt_)); }
    int64_t key_of_place(uint64_t place) const { return key_of_hash(hash_of_place(place), salt_); }
    int64_t size_unlocked() const { return num_used_ - static_cast<int64_t>(free_rows_.size()); }

    // use(first, count, places, rows): the keys from `first` on, their places in the index, and their records or
    // Index::kNoRow. used_bytes: of memory that `use` touches for a key.
    template <typename Use>
    void in_found_blocks(const int64_t* keys, int64_t num_keys, int64_t used_bytes, int32_t num_threads,
                         const Use& use) const;

    // visit(bucket - first_bucket, hash, row), in ascending order of hash within each bucket.
    template <typename Visit>
    void for_each_of(int64_t first_bucket, int64_t end_bucket, Visit&& visit) const;

    // rows[i] becomes the record number of keys[i] or Index::kNoRow. Returns how many are missing.
    int64_t find_rows(const int64_t* keys, int64_t num_keys, uint32_t* rows, int32_t num_threads) const;
    void insert_missing(const int64_t* keys, int64_t num_keys, uint32_t* rows);
    uint32_t take_row();
    void write_records(const uint32_t* rows, int64_t num_keys, RecordsAt<const char> records, const int64_t* steps,
                       int64_t step, int32_t num_threads);
    void write(const int64_t* keys, int64_t num_keys, RecordsAt<const char> records, const int64_t* steps, int64_t step,
               int32_t num_threads);

    const std::string name_;
    const int64_t dim_;
    const int64_t num_columns_;
    const int64_t item_bytes_;
    const int64_t record_bytes_;
    const int64_t max_rows_;
    const bool has_limit_;
    const uint64_t salt_;
    const InitialRecord initial_;

    mutable std::shared_mutex mutex_;  // guards all below
    Index index_;
    Arena arena_;
    int64_t num_used_ = 0;             // records [0, num_used_) of the arena are taken or free
    std::vector<uint32_t> free_rows_;  // erased, to be used again, last first
};

}  // namespace nestpipe
