#include "table.hpp"

#include <algorithm>
#include <atomic>
#include <memory>

#include "copy.hpp"
#include "error.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"

namespace nestpipe {

namespace {
constexpr int64_t kBlock = 1024;       // keys looked up before their records are touched
constexpr int64_t kLookupBytes = 512;  // to find a key takes as long as to copy so many

// Uninitialised on purpose: every element is written before it is read.
std::unique_ptr<uint32_t[]> row_numbers(int64_t count) {
    return std::unique_ptr<uint32_t[]>(new uint32_t[static_cast<size_t>(count)]);
}
}  // namespace

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

// Blocks of keys, each first looked up and then copied: two loops with one kind of memory access each run faster than
// one loop that mixes them.
template <typename Use>
void Table::in_found_blocks(const int64_t* keys, int64_t num_keys, int64_t used_bytes, int32_t num_threads,
                            const Use& use) const {
    const int64_t grain = grain_for(num_keys, kLookupBytes + used_bytes, num_threads);
    parallel_for(num_keys, grain, num_threads, [&](int64_t begin, int64_t end) {
        uint64_t places[kBlock];
        uint32_t rows[kBlock];
        for (int64_t first = begin; first < end; first += kBlock) {
            const int64_t count = std::min(kBlock, end - first);
            in_two_steps(
                0, count,
                [&](int64_t i) {
                    places[i] = place(keys[first + i]);
                    index_.prefetch(places[i]);
                },
                [&](int64_t i) { rows[i] = index_.find(places[i]); });
            use(first, count, places, rows);
        }
        finish_streaming();
    });
}

void Table::gather(const int64_t* keys, int64_t num_keys, int64_t num_columns, RecordsAt<char> out, uint8_t* found,
                   int64_t* steps, int32_t num_threads) const {
    const auto bytes = static_cast<uint64_t>(num_columns * item_bytes_);
    const Copy copy = copy_for(static_cast<uint64_t>(num_keys) * bytes);
    ReadLock lock(mutex_);
    in_found_blocks(keys, num_keys, 2 * num_columns * item_bytes_, num_threads,
                    [&](int64_t first, int64_t count, const uint64_t* index_places, const uint32_t* rows) {
                        const auto fetch = [&](int64_t i) {
                            if (rows[i] == Index::kNoRow) return;
                            prefetch_lines(arena_.record(rows[i]), bytes);
                            if (steps != nullptr) prefetch(arena_.step(rows[i]));
                        };
                        const auto write = [&](int64_t i) {
                            const bool there = rows[i] != Index::kNoRow;
                            char* target = out[first + i];
                            if (there)
                                copy(target, arena_.record(rows[i]), bytes);
                            else
                                initial_.write(hash_of_place(index_places[i]), target, num_columns);
                            if (found != nullptr) found[first + i] = there;
                            if (steps != nullptr) steps[first + i] = there ? *arena_.step(rows[i]) : -1;
                        };
                        in_two_steps(0, count, fetch, write);
                    });
}

int64_t Table::find_rows(const int64_t* keys, int64_t num_keys, uint32_t* rows, int32_t num_threads) const {
    std::atomic<int64_t> num_missing{0};
    in_found_blocks(keys, num_keys, 0, num_threads,
                    [&](int64_t first, int64_t count, const uint64_t*, const uint32_t* found) {
                        std::copy(found, found + count, rows + first);
                        num_missing += std::count(found, found + count, Index::kNoRow);
                    });
    return num_missing;
}

void Table::find(const int64_t* keys, int64_t num_keys, uint8_t* found, int32_t num_threads) const {
    const auto rows = row_numbers(num_keys);
    ReadLock lock(mutex_);
    find_rows(keys, num_keys, rows.get(), num_threads);
    std::transform(rows.get(), rows.get() + num_keys, found, [](uint32_t row) { return row != Index::kNoRow; });
}

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
    report.metadata_bytes = num_used_ * static_cast<int64_t>(sizeof(int64_t));
    report.index_bytes = static_cast<int64_t>(index_.bytes_in_use());
    report.erased_bytes = static_cast<int64_t>(free_rows_.size()) * record_bytes_;
    report.mapped_bytes = static_cast<int64_t>(index_.mapped_bytes() + arena_.mapped_bytes());
    return report;
}

// ---- writing ---------------------------------------------------------------------------------------------------

void Table::scatter(const int64_t* keys, int64_t num_keys, RecordsAt<const char> records, int64_t step,
                    int32_t num_threads) {
    if (step < 0) refuse("scatter into table '" + name_ + "': step is " + std::to_string(step) + ", must be >= 0");
    write(keys, num_keys, records, nullptr, step, num_threads);
}

// All that can fail (memory, max_rows) happens in insert_missing, which undoes itself; the copying cannot fail.
void Table::write(const int64_t* keys, int64_t num_keys, RecordsAt<const char> records, const int64_t* steps,
                  int64_t step, int32_t num_threads) {
    const auto rows = row_numbers(num_keys);
    WriteLock lock(mutex_);
    if (find_rows(keys, num_keys, rows.get(), num_threads) > 0) insert_missing(keys, num_keys, rows.get());
    write_records(rows.get(), num_keys, records, steps, step, num_threads);
}

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
        return static_cast<uint32_t>(num_used_++);
    }
    const uint32_t row = free_rows_.back();
    free_rows_.pop_back();
    return row;
}

// One thread, in the order given: which record a key gets must not depend on the number of threads. A key that occurs
// twice is found the second time.
void Table::insert_missing(const int64_t* keys, int64_t num_keys, uint32_t* rows) {
    const int64_t num_used_before = num_used_;
    const size_t num_blocks_before = arena_.num_blocks();
    std::vector<int64_t> inserted;
    const auto insert = [&](int64_t i) {
        if (rows[i] != Index::kNoRow) return;
        const uint64_t key_place = place(keys[i]);
        rows[i] = index_.find(key_place);
        if (rows[i] != Index::kNoRow) return;
        inserted.push_back(i);
        rows[i] = take_row();
        index_.insert(key_place, rows[i]);
    };
    const auto fetch = [&](int64_t i) {
        if (rows[i] == Index::kNoRow) index_.prefetch(place(keys[i]));
    };
    try {
        in_two_steps(0, num_keys, fetch, insert);
    } catch (...) {
        // Undo, last first: records that came from the end of the arena or of the free list go back there.
        for (auto i = inserted.rbegin(); i != inserted.rend(); ++i) {
            const uint32_t row = rows[*i];
            if (row == Index::kNoRow) continue;  // the one that failed
            index_.erase(place(keys[*i]));
            if (row < num_used_before) free_rows_.push_back(row);
        }
        num_used_ = num_used_before;
        arena_.shrink(num_blocks_before);
        throw;
    }
}

// Each record is written by the one thread its number belongs to, so the occurrences of a repeated key are written in
// order and by nobody else.
void Table::write_records(const uint32_t* rows, int64_t num_keys, RecordsAt<const char> records, const int64_t* steps,
                          int64_t step, int32_t num_threads) {
    const auto bytes = static_cast<uint64_t>(record_bytes_);
    const Copy copy = streaming_copy();
    const auto num_parts = static_cast<uint64_t>(threads_for(num_keys, 2 * record_bytes_, num_threads));
    const auto part_of = [&](uint32_t row) { return uint64_t{row * 2654435769u} * num_parts >> 32; };
    const auto write_part = [&](uint64_t part) {
        selected_in_two_steps(
            num_keys, [&](int64_t i) { return part_of(rows[i]) == part; },
            [&](int64_t i) {
                prefetch(arena_.step(rows[i]));
                if (records.places != nullptr) prefetch_lines(records[i], bytes);
            },
            [&](int64_t i) {
                copy(arena_.record(rows[i]), records[i], bytes);
                *arena_.step(rows[i]) = steps != nullptr ? steps[i] : step;
            });
        finish_streaming();
    };
    parallel_for(static_cast<int64_t>(num_parts), 1, num_threads, [&](int64_t first, int64_t end) {
        for (int64_t part = first; part < end; ++part) write_part(static_cast<uint64_t>(part));
    });
}

int64_t Table::erase(const int64_t* keys, int64_t num_keys) {
    WriteLock lock(mutex_);
    const size_t most = free_rows_.size() + static_cast<size_t>(std::min(num_keys, size_unlocked()));
    if (most > free_rows_.capacity()) free_rows_.reserve(std::max(most, 2 * free_rows_.capacity()));
    int64_t num_erased = 0;
    for (int64_t i = 0; i < num_keys; ++i) {
        const uint32_t row = index_.erase(place(keys[i]));
        if (row == Index::kNoRow) continue;
        free_rows_.push_back(row);
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
