#include "tables.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "copy.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"

namespace nestpipe {

namespace {
constexpr int64_t kBlock = 1024;       // keys looked up before their records are touched
constexpr int64_t kLookupBytes = 512;  // finding a key takes as long as copying this much

// Uninitialised on purpose: every element is written before it is read.
std::unique_ptr<uint32_t[]> row_numbers(int64_t count) {
    return std::unique_ptr<uint32_t[]>(new uint32_t[static_cast<size_t>(count)]);
}
}  // namespace

// Tells the table of each key to a loop that meets keys in ascending order, from `first` on.
class Tables::Walk {
 public:
    Walk(const Tables& tables, int64_t first)
        : tables_(&tables),
          next_(std::upper_bound(tables.offsets_, tables.offsets_ + tables.num_tables_, first) - tables.offsets_ - 1),
          end_(tables.offsets_[next_]) {}

    NESTPIPE_INLINE Table& operator()(int64_t key) {
        while (key >= end_) {
            table_ = tables_->tables_[next_];
            end_ = tables_->offsets_[++next_];
        }
        return *table_;
    }

    // Returns the one table that has all keys up to `end`; null if several tables have them.
    Table* only(int64_t end) const { return tables_->offsets_[next_ + 1] >= end ? tables_->tables_[next_] : nullptr; }

 private:
    const Tables* tables_;
    Table* table_ = nullptr;
    int64_t next_;  // the table behind table_
    int64_t end_;   // of the keys of table_
};

// A Walk over keys of one table, whose members the compiler can keep in registers.
class Tables::Stay {
 public:
    explicit Stay(Table& table) : table_(&table) {}
    Table& operator()(int64_t) const { return *table_; }

 private:
    Table* table_;
};

template <typename Body>
NESTPIPE_INLINE void Tables::walk(int64_t first, int64_t end, const Body& body) const {
    const Walk begin(*this, first);
    if (Table* only = begin.only(end))
        body(Stay(*only));
    else
        body(begin);
}

template <typename Lock>
std::vector<Lock> Tables::locked() const {
    std::vector<Lock> locks;
    locks.reserve(static_cast<size_t>(num_tables_));
    for (int64_t t = 0; t < num_tables_; ++t) locks.emplace_back(lock_order_[t]->mutex_);
    return locks;
}

// ---- reading ---------------------------------------------------------------------------------------------------

// Blocks of keys, each first looked up and then copied: two loops with one kind of memory access each run faster than
// one loop that mixes them. A block may have keys of many tables.
template <typename Use>
void Tables::in_found_blocks(int64_t used_bytes, int32_t num_threads, const Use& use) const {
    const int64_t grain = grain_for(num_keys(), kLookupBytes + used_bytes, num_threads);
    parallel_for(num_keys(), grain, num_threads, [&](int64_t begin, int64_t end) {
        uint64_t places[kBlock];
        uint32_t rows[kBlock];
        for (int64_t first = begin; first < end; first += kBlock) {
            const int64_t count = std::min(kBlock, end - first);
            walk(first, first + count, [&](const auto& tables) {
                auto fetching = tables, finding = tables;
                in_two_steps(
                    0, count,
                    [&](int64_t i) {
                        const Table& table = fetching(first + i);
                        places[i] = table.place(keys_[first + i]);
                        table.index_.prefetch(places[i]);
                    },
                    [&](int64_t i) { rows[i] = finding(first + i).index_.find(places[i]); });
                use(tables, first, count, places, rows);
            });
        }
        finish_streaming();
    });
}

void Tables::gather(int64_t num_columns, RecordsAt<char> out, uint8_t* found, int64_t* steps, int32_t num_threads,
                    FoundRows* last) const {
    if (num_tables_ == 0) return;
    const int64_t row_bytes = num_columns * tables_[0]->item_bytes();
    const auto bytes = static_cast<uint64_t>(row_bytes);
    const Copy copy = copy_for(static_cast<uint64_t>(num_keys()) * bytes);
    const auto remembering =
        last == nullptr ? std::unique_lock<std::mutex>() : std::unique_lock(last->mutex, std::try_to_lock);
    const auto locks = locked<Table::ReadLock>();
    uint32_t* remembered = remembering ? begin_remembering(*last) : nullptr;
    in_found_blocks(
        2 * row_bytes, num_threads,
        [&](const auto& tables, int64_t first, int64_t count, const uint64_t* index_places, const uint32_t* rows) {
            if (remembered != nullptr) std::copy(rows, rows + count, remembered + first);
            auto fetching = tables, writing = tables;
            const auto fetch = [&](int64_t i) {
                if (rows[i] == Index::kNoRow) return;
                const Arena& arena = fetching(first + i).arena_;
                prefetch_lines(arena.record(rows[i]), bytes);
                if (steps != nullptr) prefetch(arena.step(rows[i]));
            };
            const auto write = [&](int64_t i) {
                const bool is_found = rows[i] != Index::kNoRow;
                const Table& table = writing(first + i);
                char* target = out[first + i];
                if (is_found)
                    copy(target, table.arena_.record(rows[i]), bytes);
                else
                    table.initial_.write(hash_of_place(index_places[i]), target, num_columns);
                if (found != nullptr) found[first + i] = is_found;
                if (steps != nullptr) steps[first + i] = is_found ? *table.arena_.step(rows[i]) : -1;
            };
            in_two_steps(0, count, fetch, write);
        });
    if (remembered != nullptr) remember(*last);
}

uint32_t* Tables::begin_remembering(FoundRows& last) const {
    last.tables.clear();  // what was remembered is being overwritten
    if (num_keys() > FoundRows::kMostKeys) return nullptr;
    try {
        last.rows.resize(static_cast<size_t>(num_keys()));
        last.keys.assign(keys_, keys_ + num_keys());
        last.offsets.assign(offsets_, offsets_ + num_tables_ + 1);
        last.num_freed.reserve(static_cast<size_t>(num_tables_));
        last.tables.reserve(static_cast<size_t>(num_tables_));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
    return last.rows.data();
}

void Tables::remember(FoundRows& last) const {
    last.num_freed.clear();
    for (int64_t t = 0; t < num_tables_; ++t) last.num_freed.push_back(tables_[t]->num_freed_);
    last.tables.assign(tables_, tables_ + num_tables_);
}

// Records do not move: a key has lost its record only if its table has freed some.
bool Tables::remembers(const FoundRows& last) const {
    if (!std::equal(tables_, tables_ + num_tables_, last.tables.begin(), last.tables.end())) return false;
    for (int64_t t = 0; t < num_tables_; ++t)
        if (tables_[t]->num_freed_ != last.num_freed[static_cast<size_t>(t)]) return false;
    return std::equal(offsets_, offsets_ + num_tables_ + 1, last.offsets.begin()) &&
           std::equal(keys_, keys_ + num_keys(), last.keys.begin());
}

void Tables::find(uint8_t* found, int32_t num_threads) const {
    const auto locks = locked<Table::ReadLock>();
    in_found_blocks(
        0, num_threads, [&](const auto&, int64_t first, int64_t count, const uint64_t*, const uint32_t* rows) {
            std::transform(rows, rows + count, found + first, [](uint32_t row) { return row != Index::kNoRow; });
        });
}

int64_t Tables::find_rows(uint32_t* rows, int32_t num_threads, FoundRows* last) const {
    if (last != nullptr) {
        const std::unique_lock lock(last->mutex, std::try_to_lock);
        if (lock && remembers(*last)) {
            std::copy(last->rows.begin(), last->rows.end(), rows);
            return std::count(last->rows.begin(), last->rows.end(), Index::kNoRow);
        }
    }
    std::atomic<int64_t> num_missing{0};
    in_found_blocks(0, num_threads,
                    [&](const auto&, int64_t first, int64_t count, const uint64_t*, const uint32_t* found) {
                        std::copy(found, found + count, rows + first);
                        num_missing += std::count(found, found + count, Index::kNoRow);
                    });
    return num_missing;
}

// ---- writing ---------------------------------------------------------------------------------------------------

// All that can fail (memory, max_rows) happens in insert_missing, which undoes itself; the copying cannot fail.
void Tables::write(RecordsAt<const char> records, const int64_t* steps, int64_t step, int32_t num_threads,
                   FoundRows* last) const {
    if (num_tables_ == 0) return;
    const auto rows = row_numbers(num_keys());
    const auto locks = locked<Table::WriteLock>();
    if (const int64_t num_missing = find_rows(rows.get(), num_threads, last))
        insert_missing(rows.get(), num_missing, false);
    write_records(rows.get(), records, steps, step, num_threads);
}

void Tables::update(const RowOptimizer& optimizer, const char* gradient, int64_t step, int32_t num_threads,
                    FoundRows* last) const {
    if (num_tables_ == 0) return;
    const auto rows = row_numbers(num_keys());
    const auto locks = locked<Table::WriteLock>();
    if (const int64_t num_missing = find_rows(rows.get(), num_threads, last))
        insert_missing(rows.get(), num_missing, true);
    update_records(rows.get(), optimizer, gradient, step, num_threads);
}

// One thread, in the order given: which record a key gets must not depend on the number of threads. A key that occurs
// twice is found the second time.
void Tables::insert_missing(uint32_t* rows, int64_t num_missing, bool with_values) const {
    std::vector<int64_t> inserted;
    inserted.reserve(static_cast<size_t>(num_missing));
    std::vector<Table::Extent> before;
    before.reserve(static_cast<size_t>(num_tables_));
    for (int64_t t = 0; t < num_tables_; ++t) before.push_back(tables_[t]->extent());
    Walk fetching(*this, 0), inserting(*this, 0);
    const auto fetch = [&](int64_t i) {
        if (rows[i] != Index::kNoRow) return;
        const Table& table = fetching(i);
        table.index_.prefetch(table.place(keys_[i]));
    };
    const auto insert = [&](int64_t i) {
        if (rows[i] != Index::kNoRow) return;
        Table& table = inserting(i);
        const uint64_t place = table.place(keys_[i]);
        rows[i] = table.index_.find(place);
        if (rows[i] != Index::kNoRow) return;
        rows[i] = table.insert(place);
        inserted.push_back(i);
        if (with_values) table.initial_.write(hash_of_place(place), table.arena_.record(rows[i]), table.num_columns_);
    };
    try {
        in_two_steps(0, num_keys(), fetch, insert);
    } catch (...) {
        undo(inserted, rows, before);
        throw;
    }
}

// Last first: records that came from the end of an arena or of a free list go back there.
void Tables::undo(const std::vector<int64_t>& inserted, const uint32_t* rows,
                  const std::vector<Table::Extent>& before) const {
    int64_t t = num_tables_ - 1;
    for (auto i = inserted.rbegin(); i != inserted.rend(); ++i) {
        while (*i < offsets_[t]) --t;
        tables_[t]->undo_insert(keys_[*i], rows[*i], before[static_cast<size_t>(t)]);
    }
    for (t = 0; t < num_tables_; ++t) tables_[t]->shrink(before[static_cast<size_t>(t)]);
}

template <typename Fetch, typename Visit>
void Tables::for_each_record(const uint32_t* rows, int32_t num_threads, const Fetch& fetch, const Visit& visit) const {
    const auto num_parts = static_cast<uint64_t>(threads_for(num_keys(), 2 * tables_[0]->record_bytes_, num_threads));
    const auto part_of = [=](uint32_t row) { return uint64_t{row * 2654435769u} * num_parts >> 32; };
    const auto visit_part = [&](uint64_t part) {
        walk(0, num_keys(), [=](const auto& tables) {  // by value: a reference is read for every key
            auto fetching = tables, visiting = tables;
            selected_in_two_steps(
                num_keys(), [&](int64_t i) { return part_of(rows[i]) == part; },
                [&](int64_t i) { fetch(fetching(i), i); }, [&](int64_t i) { visit(visiting(i), i); });
        });
        finish_streaming();
    };
    parallel_for(static_cast<int64_t>(num_parts), 1, num_threads, [&](int64_t first, int64_t end) {
        for (int64_t part = first; part < end; ++part) visit_part(static_cast<uint64_t>(part));
    });
}

void Tables::write_records(const uint32_t* rows, RecordsAt<const char> records, const int64_t* steps, int64_t step,
                           int32_t num_threads) const {
    const auto bytes = static_cast<uint64_t>(tables_[0]->record_bytes_);
    const Copy copy = copy_for(static_cast<uint64_t>(num_keys()) * bytes);
    const bool is_cached = copy != streaming_copy();
    for_each_record(
        rows, num_threads,
        [=](const Table& table, int64_t i) {
            prefetch(table.arena_.step(rows[i]));
            if (is_cached) prefetch_lines(table.arena_.record(rows[i]), bytes);
            if (records.places != nullptr) prefetch_lines(records[i], bytes);
        },
        [=](Table& table, int64_t i) {
            copy(table.arena_.record(rows[i]), records[i], bytes);
            *table.arena_.step(rows[i]) = steps != nullptr ? steps[i] : step;
            if (table.marks_changes_) table.changed_.set(rows[i]);
        });
}

void Tables::update_records(const uint32_t* rows, const RowOptimizer& optimizer, const char* gradient, int64_t step,
                            int32_t num_threads) const {
    const int64_t dim = tables_[0]->dim_, row_bytes = dim * tables_[0]->item_bytes_;
    const auto bytes = static_cast<uint64_t>(tables_[0]->record_bytes_);
    for_each_record(
        rows, num_threads,
        [=](const Table& table, int64_t i) {
            prefetch(table.arena_.step(rows[i]));
            prefetch_lines(table.arena_.record(rows[i]), bytes);
        },
        [=, &optimizer](Table& table, int64_t i) {
            char* record = table.arena_.record(rows[i]);
            optimizer(record, record + row_bytes, gradient + i * row_bytes, dim);
            *table.arena_.step(rows[i]) = step;
            if (table.marks_changes_) table.changed_.set(rows[i]);
        });
}

}  // namespace nestpipe
