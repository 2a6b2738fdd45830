// One table of the host store: an index from hashes to record numbers, and an arena of records.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arena.hpp"
#include "index.hpp"
#include "initial.hpp"
#include "mix.hpp"
#include "nestpipe.h"
#include "row_bits.hpp"

namespace nestpipe {

constexpr int64_t kMostRows = Index::kNoRow - 1;  // record numbers are 32 bits, one of them means "none"

class Table {
 public:
    explicit Table(const nestpipe_table_spec& spec);

    const std::string& name() const { return name_; }
    int64_t dim() const { return dim_; }
    int64_t num_columns() const { return num_columns_; }
    int64_t item_bytes() const { return item_bytes_; }

    // nestpipe.h describes these operations, tables.hpp declares gather, scatter and find.
    int64_t size() const;
    int64_t count(int64_t first_bucket, int64_t end_bucket) const;
    int64_t export_piece(int64_t first_bucket, int64_t end_bucket, int64_t capacity, int64_t* keys, char* records,
                         int64_t* steps) const;
    void digest(uint8_t* sum, int32_t num_threads) const;
    nestpipe_memory_report memory() const;

    void import_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rows, const int64_t* keys,
                      const char* records, const int64_t* steps, int32_t num_threads);
    int64_t erase(const int64_t* keys, int64_t num_keys);
    void reserve(int64_t num_rows);

    // Even ranges of buckets. The table has rows of num_own of them, from `first` on.
    struct Shards {
        int64_t num_in_world;
        int64_t first;
        int64_t num_own;
    };
    // Arrays that receive rows.
    struct Rows {
        int64_t capacity;
        int64_t* keys;
        char* records;
        int64_t* steps;
    };
    // Snapshots, in snapshot.cpp.
    void begin_snapshot(bool changed_only, int64_t* num_rows, int64_t* num_erased);
    void copy_erased(int64_t capacity, int64_t* keys) const;
    int64_t next_rows(const Shards& shards, const Rows& out, int64_t* counts, bool* is_done);
    int64_t preserve(const int64_t* keys, int64_t num_keys, const Rows& out, int64_t* num_done);
    void end_snapshot();

 private:
    friend class Tables;
    using ReadLock = std::shared_lock<std::shared_mutex>;
    using WriteLock = std::unique_lock<std::shared_mutex>;

    uint64_t place(int64_t key) const { return place_of_hash(hash_key(key, salt_)); }
    int64_t key_of_place(uint64_t place) const { return key_of_hash(hash_of_place(place), salt_); }
    int64_t size_unlocked() const { return num_used_ - static_cast<int64_t>(free_rows_.size()); }

    // visit(bucket - first_bucket, hash, row), in ascending order of hash within each bucket.
    template <typename Visit>
    void for_each_of(int64_t first_bucket, int64_t end_bucket, Visit&& visit) const;

    // Size of the table before a call inserted keys into it.
    struct Extent {
        int64_t num_used;
        size_t num_blocks;
    };
    Extent extent() const { return {num_used_, arena_.num_blocks()}; }

    // The record that a missing key gets. May throw; then nothing has changed.
    uint32_t insert(uint64_t place);
    uint32_t take_row();

    // Take back what a call has inserted, last first; then the records that it took from the end.
    void undo_insert(int64_t key, uint32_t row, const Extent& before);
    void shrink(const Extent& before);

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
    uint64_t num_freed_ = 0;           // calls that took records from keys

    // Marks of what changes between two snapshots. Kept from the first snapshot on.
    bool marks_changes_ = false;
    RowBits changed_;
    std::vector<int64_t> erased_keys_;  // some may have been inserted again

    struct Snapshot {
        RowBits pending;  // rows of the snapshot that were not copied yet
        int64_t num_pending = 0;
        uint64_t next_place = 0;  // of the pass over the index
        bool is_done = false;     // the pass has reached the end
        std::vector<int64_t> erased_keys;
    };
    void copy_row(uint64_t place, uint32_t row, int64_t i, const Rows& out) const;

    std::mutex snapshot_mutex_;  // taken after mutex_; guards the snapshot against other readers of the table
    std::unique_ptr<Snapshot> snapshot_;
};

}  // namespace nestpipe
