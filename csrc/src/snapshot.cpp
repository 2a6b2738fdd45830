// The part of Table that copies its rows as they were at one moment, while other threads go on writing.
//
// A bit for each record says that the snapshot still has to copy it. The pass over the index copies the records whose
// bit is set, a stretch at a time, and clears it; so does `preserve` for keys that are about to be written. A record
// that was inserted later has no bit. So every row of the snapshot is copied once, as it was.
#include <algorithm>
#include <cstring>
#include <vector>

#include "error.hpp"
#include "lookahead.hpp"
#include "prefetch.hpp"
#include "table.hpp"

namespace nestpipe {

namespace {
constexpr int64_t kMostVisits = int64_t{1} << 20;  // slots of the index that one call looks at: writers wait meanwhile
constexpr int64_t kBlock = 1024;

struct Found {
    uint64_t place;
    uint32_t row;
};
}  // namespace

void Table::begin_snapshot(bool changed_only, int64_t* num_rows, int64_t* num_erased) {
    WriteLock lock(mutex_);
    if (snapshot_) refuse("table '" + name_ + "' has a snapshot under way; end it before the next one begins");
    if (changed_only && !marks_changes_)
        refuse("table '" + name_ + "' has had no snapshot yet, so nothing says what has changed; begin a complete one");
    auto snapshot = std::make_unique<Snapshot>();
    RowBits changed;
    changed.resize(num_used_);
    if (!changed_only) {
        snapshot->pending.resize(num_used_);
        snapshot->pending.set_first(num_used_);
        for (const uint32_t row : free_rows_) snapshot->pending.clear(row);
    } else {
        std::swap(snapshot->pending, changed_);
        std::swap(snapshot->erased_keys, erased_keys_);
    }
    snapshot->num_pending = snapshot->pending.count();
    std::swap(changed_, changed);
    erased_keys_.clear();
    marks_changes_ = true;
    snapshot_ = std::move(snapshot);
    *num_rows = snapshot_->num_pending;
    *num_erased = static_cast<int64_t>(snapshot_->erased_keys.size());
}

void Table::end_snapshot() {
    WriteLock lock(mutex_);
    snapshot_.reset();
}

void Table::copy_erased(int64_t capacity, int64_t* keys) const {
    ReadLock lock(mutex_);
    if (!snapshot_) refuse("table '" + name_ + "' has no snapshot under way");
    const std::vector<int64_t>& erased = snapshot_->erased_keys;
    if (static_cast<int64_t>(erased.size()) != capacity)
        refuse("the snapshot of table '" + name_ + "' has " + std::to_string(erased.size()) + " erased keys, not " +
               std::to_string(capacity));
    if (capacity > 0) std::memcpy(keys, erased.data(), erased.size() * sizeof(int64_t));
}

void Table::copy_row(uint64_t place, uint32_t row, int64_t i, const Rows& out) const {
    out.keys[i] = key_of_place(place);
    std::memcpy(out.records + i * record_bytes_, arena_.record(row), static_cast<size_t>(record_bytes_));
    out.steps[i] = *arena_.step(row);
}

int64_t Table::next_rows(const Shards& shards, const Rows& out, int64_t* counts, bool* is_done) {
    std::vector<Found> found, sorted;
    found.reserve(static_cast<size_t>(out.capacity));
    std::vector<int64_t> next(static_cast<size_t>(shards.num_own) + 1, 0);
    ReadLock lock(mutex_);
    std::lock_guard snapshot_lock(snapshot_mutex_);
    if (!snapshot_) refuse("table '" + name_ + "' has no snapshot under way");
    Snapshot& snapshot = *snapshot_;
    const auto shard_of = [&](uint64_t place) {
        return owner_of_hash(hash_of_place(place), shards.num_in_world) - shards.first;
    };
    if (!snapshot.is_done) {
        int64_t num_visits = 0;
        bool has_stopped = false;
        index_.for_each_while(snapshot.next_place, [&](uint64_t place, uint32_t row) {
            if (num_visits++ == kMostVisits || static_cast<int64_t>(found.size()) == out.capacity) {
                snapshot.next_place = place;
                has_stopped = true;
                return false;
            }
            if (snapshot.pending.test(row)) found.push_back({place, row});
            return true;
        });
        snapshot.is_done = !has_stopped;
    }
    for (const Found& row : found) {
        const int64_t shard = shard_of(row.place);
        if (shard < 0 || shard >= shards.num_own)
            refuse("key " + std::to_string(key_of_place(row.place)) + " of table '" + name_ +
                   "' is in a bucket of another rank");
        ++next[static_cast<size_t>(shard) + 1];
    }
    for (int64_t s = 0; s < shards.num_own; ++s) {
        counts[s] = next[static_cast<size_t>(s) + 1];
        next[static_cast<size_t>(s) + 1] += next[static_cast<size_t>(s)];
    }
    sorted.resize(found.size());
    for (const Found& row : found) sorted[static_cast<size_t>(next[static_cast<size_t>(shard_of(row.place))]++)] = row;
    const auto num_rows = static_cast<int64_t>(sorted.size());
    in_two_steps(
        0, num_rows,
        [&](int64_t i) {
            const uint32_t row = sorted[static_cast<size_t>(i)].row;
            prefetch_lines(arena_.record(row), static_cast<uint64_t>(record_bytes_));
            prefetch(arena_.step(row));
        },
        [&](int64_t i) {
            const auto [place, row] = sorted[static_cast<size_t>(i)];
            copy_row(place, row, i, out);
            snapshot.pending.clear(row);
        });
    snapshot.num_pending -= num_rows;
    *is_done = snapshot.is_done;
    return num_rows;
}

int64_t Table::preserve(const int64_t* keys, int64_t num_keys, const Rows& out, int64_t* num_done) {
    ReadLock lock(mutex_);
    std::lock_guard snapshot_lock(snapshot_mutex_);
    int64_t num_rows = 0, first = 0;
    if (!snapshot_ || snapshot_->num_pending == 0) {
        *num_done = num_keys;
        return 0;
    }
    Snapshot& snapshot = *snapshot_;
    Found pending[kBlock];
    for (; first < num_keys && num_rows < out.capacity;) {
        const int64_t end = std::min({first + kBlock, num_keys, first + out.capacity - num_rows});
        int64_t num_pending = 0;
        in_two_steps(
            first, end, [&](int64_t i) { index_.prefetch(place(keys[i])); },
            [&](int64_t i) {
                const uint64_t at = place(keys[i]);
                const uint32_t row = index_.find(at);
                if (row == Index::kNoRow || !snapshot.pending.test(row)) return;
                snapshot.pending.clear(row);  // at once: a key may occur twice
                pending[num_pending++] = {at, row};
            });
        in_two_steps(
            0, num_pending,
            [&](int64_t p) { prefetch_lines(arena_.record(pending[p].row), static_cast<uint64_t>(record_bytes_)); },
            [&](int64_t p) { copy_row(pending[p].place, pending[p].row, num_rows + p, out); });
        num_rows += num_pending;
        snapshot.num_pending -= num_pending;
        first = end;
    }
    *num_done = first;
    return num_rows;
}

}  // namespace nestpipe
