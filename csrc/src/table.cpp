#include "table.hpp"

#include <algorithm>

#include "error.hpp"

namespace nestpipe {

Table::Table(const nestpipe_table_spec& spec)
    : name_(spec.name),
      dim_(spec.dim),
      num_columns_(spec.dim + spec.state_width),
      item_bytes_(spec.dtype == NESTPIPE_FLOAT32 ? 4 : 8),
      record_bytes_(num_columns_ * item_bytes_),
      max_rows_(spec.max_rows > 0 ? spec.max_rows : kMostRows),
      has_limit_(spec.max_rows > 0),
      salt_(name_salt(name_)),
      initial_(spec, salt_),
      arena_(static_cast<uint64_t>(record_bytes_)) {}

// ---- reading ---------------------------------------------------------------------------------------------------

int64_t Table::size() const {
    ReadLock lock(mutex_);
    return size_unlocked();
}

nestpipe_memory_report Table::memory() const {
    ReadLock lock(mutex_);
    nestpipe_memory_report report{};
    report.num_rows = size_unlocked();
    report.record_bytes = record_bytes_;
    report.payload_bytes = report.num_rows * record_bytes_;
    report.metadata_bytes = num_used_ * static_cast<int64_t>(sizeof(int64_t)) + static_cast<int64_t>(changed_.bytes());
    report.index_bytes = static_cast<int64_t>(index_.bytes_in_use());
    report.erased_bytes = static_cast<int64_t>(free_rows_.size()) * record_bytes_;
    report.mapped_bytes = static_cast<int64_t>(index_.mapped_bytes() + arena_.mapped_bytes());
    return report;
}

// ---- writing ---------------------------------------------------------------------------------------------------

uint32_t Table::take_row() {
    if (size_unlocked() >= max_rows_) {
        const std::string limit = std::to_string(max_rows_);
        throw Error(NESTPIPE_TABLE_FULL, "table '" + name_ + "' is full: it may hold max_rows = " + limit + " rows" +
                                             (has_limit_ ? "; raise max_rows, or erase rows that are no longer needed"
                                                         : " on one rank; use more ranks"));
    }
    if (free_rows_.empty()) {
        index_.reserve(static_cast<uint64_t>(size_unlocked()) + 1);
        arena_.reserve(static_cast<uint64_t>(num_used_) + 1);
        if (marks_changes_) changed_.resize(num_used_ + 1);
        return static_cast<uint32_t>(num_used_++);
    }
    const uint32_t row = free_rows_.back();
    free_rows_.pop_back();
    return row;
}

uint32_t Table::insert(uint64_t place) {
    const uint32_t row = take_row();
    index_.insert(place, row);
    return row;
}

void Table::undo_insert(int64_t key, uint32_t row, const Extent& before) {
    index_.erase(place(key));
    ++num_freed_;
    if (row < before.num_used) free_rows_.push_back(row);  // it was taken from there, so there is room
}

void Table::shrink(const Extent& before) {
    num_used_ = before.num_used;
    arena_.shrink(before.num_blocks);
}

int64_t Table::erase(const int64_t* keys, int64_t num_keys) {
    WriteLock lock(mutex_);
    const size_t most = free_rows_.size() + static_cast<size_t>(std::min(num_keys, size_unlocked()));
    if (most > free_rows_.capacity()) free_rows_.reserve(std::max(most, 2 * free_rows_.capacity()));
    if (marks_changes_) erased_keys_.reserve(erased_keys_.size() + most - free_rows_.size());
    int64_t num_erased = 0;
    ++num_freed_;
    for (int64_t i = 0; i < num_keys; ++i) {
        const uint32_t row = index_.erase(place(keys[i]));
        if (row == Index::kNoRow) continue;
        free_rows_.push_back(row);
        if (marks_changes_) {
            erased_keys_.push_back(keys[i]);
            changed_.clear(row);
        }
        if (snapshot_) snapshot_->pending.clear(row);
        ++num_erased;
    }
    return num_erased;
}

void Table::reserve(int64_t num_rows) {
    if (num_rows < 0 || num_rows > max_rows_)
        refuse("reserve of " + std::to_string(num_rows) + " rows in table '" + name_ +
               "': must be 0 .. max_rows = " + std::to_string(max_rows_));
    WriteLock lock(mutex_);
    const size_t num_blocks_before = arena_.num_blocks();
    arena_.reserve(static_cast<uint64_t>(num_rows));
    try {
        index_.reserve(static_cast<uint64_t>(num_rows));
    } catch (...) {
        arena_.shrink(num_blocks_before);
        throw;
    }
}

}  // namespace nestpipe
