#include "key_index.hpp"

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

KeyIndex::Entry* KeyIndex::memory_for(int64_t count) {
    thread_local Region region;
    return scratch<Entry>(region, count);
}

void KeyIndex::refuse_memory() {
    throw Error(NESTPIPE_OUT_OF_MEMORY,
                "out of memory: the system refused address space for the index of resident keys; use fewer slots");
}

// Threads share the work of growing, too: the shards of a table are equally full.
int64_t KeyIndex::insert(const Entries& entries) {
    std::atomic<bool> is_repeated{false}, has_failed{false};
    for_each_part(entries, [&](Part part) {
        try {
            for_each_entry(entries, part, [&](Shard& shard, int64_t i) {
                shard.index.reserve(shard.num_keys + 1);
                if (shard.index.try_insert(entries[i].place, entries[i].slot))
                    ++shard.num_keys;
                else
                    is_repeated = true;
            });
        } catch (...) {  // a body of parallel_for must not throw
            has_failed = true;
        }
    });
    if (is_repeated || has_failed) erase_inserted(entries);
    if (has_failed) refuse_memory();
    return is_repeated ? first_repeated(entries) : -1;
}

// A place that has the slot of its entry was inserted by this call: no key had the slot before.
void KeyIndex::erase_inserted(const Entries& entries) {
    for (int64_t i = 0; i < entries.count; ++i) {
        Shard& shard = shards_[entries[i].shard];
        if (shard.index.find(entries[i].place) != entries[i].slot) continue;
        shard.index.erase(entries[i].place);
        --shard.num_keys;
    }
}

// Inserts one entry after the other until one is there already; then takes them back.
int64_t KeyIndex::first_repeated(const Entries& entries) {
    int64_t i = 0;
    while (i < entries.count && shards_[entries[i].shard].index.try_insert(entries[i].place, entries[i].slot)) {
        ++shards_[entries[i].shard].num_keys;
        ++i;
    }
    erase_inserted(entries);
    return i;
}

}  // namespace nestpipe
