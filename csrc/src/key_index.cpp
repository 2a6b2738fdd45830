#include "key_index.hpp"

#include <atomic>
#include <numeric>

#include "error.hpp"
#include "scratch.hpp"

namespace nestpipe {

uint64_t KeyIndex::bytes() const {
    return std::accumulate(shards_.begin(), shards_.end(), uint64_t{0},
                           [](uint64_t sum, const Shard& shard) { return sum + shard.index.bytes_in_use(); });
}

void KeyIndex::find_in_table(uint32_t table, const int64_t* keys, int64_t count, uint32_t* slots) const {
    struct Probe {
        const Index* index;
        uint64_t place;
    };
    Probe probes[kRing];
    in_two_steps(
        0, count,
        [&](int64_t i) {
            const uint64_t at = place(table, keys[i]);
            const Index& index = shards_[shard(table, at)].index;
            index.prefetch(at);
            probes[ring(i)] = {&index, at};
        },
        [&](int64_t i) { slots[i] = probes[ring(i)].index->find(probes[ring(i)].place); });
}

KeyIndex::Entry* KeyIndex::memory_for(int64_t count, bool is_grouped) {
    thread_local Region given, grouped;
    return scratch<Entry>(is_grouped ? grouped : given, count);
}

std::vector<int64_t> KeyIndex::count_by_shard(const Entry* entries, int64_t count) const {
    std::vector<int64_t> offsets(shards_.size() + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++offsets[entries[i].shard + 1];
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    return offsets;
}

// The shards of a table are equally full, so all of them grow in the same call. Threads share that work, too.
void KeyIndex::reserve(const Entries& entries) {
    std::atomic<bool> has_failed{false};
    for_each_shard(entries, [&](Shard& shard, const Entry* first, const Entry* end) {
        try {
            shard.index.reserve(shard.num_keys + static_cast<uint64_t>(end - first));
        } catch (...) {  // a body of parallel_for must not throw
            has_failed = true;
        }
    });
    if (has_failed)
        throw Error(NESTPIPE_OUT_OF_MEMORY,
                    "out of memory: the system refused address space for the index of resident keys; use fewer slots");
}

int64_t KeyIndex::insert(const Entries& entries) {
    std::atomic<bool> is_repeated{false};
    for_each_shard(entries, [&](Shard& shard, const Entry* first, const Entry* end) {
        in_two_steps(
            0, end - first, [&](int64_t i) { shard.index.prefetch(first[i].place); },
            [&](int64_t i) {
                if (shard.index.find(first[i].place) == kNoSlot)
                    shard.index.insert(first[i].place, first[i].slot);
                else
                    is_repeated = true;
            });
        shard.num_keys += static_cast<uint64_t>(end - first);
    });
    if (!is_repeated) return -1;
    erase_inserted(entries);
    for_each_shard(entries, [&](Shard& shard, const Entry* first, const Entry* end) {
        shard.num_keys -= static_cast<uint64_t>(end - first);
    });
    return first_repeated(entries);
}

// A place that has the slot of its entry was inserted by this call: no key had the slot before.
void KeyIndex::erase_inserted(const Entries& entries) {
    for_each_shard(entries, [&](Shard& shard, const Entry* first, const Entry* end) {
        for (const Entry* entry = first; entry < end; ++entry)
            if (shard.index.find(entry->place) == entry->slot) shard.index.erase(entry->place);
    });
}

// Inserts one entry after the other until one is there already; then takes them back.
int64_t KeyIndex::first_repeated(const Entries& entries) {
    int64_t i = 0;
    for (; i < entries.size(); ++i) {
        const Entry& entry = entries.given[i];
        Index& index = shards_[entry.shard].index;
        if (index.find(entry.place) != kNoSlot) break;
        index.insert(entry.place, entry.slot);
    }
    erase_inserted(entries);
    return i;
}

}  // namespace nestpipe
