// The index of a row pool: key of a table -> slot.
//
// The keys of a table are spread over a few shards, each an Index of its own, so that threads can insert and erase at
// once: a thread owns the shards on which it works.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "index.hpp"
#include "lookahead.hpp"
#include "mix.hpp"
#include "parallel.hpp"

namespace nestpipe {

// The keys of one call. Table t has keys offsets[t] .. offsets[t + 1] - 1.
struct KeysByTable {
    const int64_t* offsets;
    const int64_t* keys;
    int64_t num_keys;
};

class KeyIndex {
 public:
    static constexpr uint32_t kNoSlot = Index::kNoRow;
    static constexpr int64_t kBlock = 1024;  // keys looked up before their slots are used

    KeyIndex(const uint64_t* salts, int64_t num_tables)
        : salts_(salts, salts + num_tables),
          num_shards_(std::max<int64_t>(1, kShards / num_tables)),
          shards_(static_cast<size_t>(num_tables * num_shards_)) {}

    int64_t num_tables() const { return static_cast<int64_t>(salts_.size()); }
    int64_t num_shards() const { return static_cast<int64_t>(shards_.size()); }
    uint64_t bytes() const;

    uint64_t place(uint32_t table, int64_t key) const { return place_of_hash(hash_key(key, salts_[table])); }
    int64_t key(uint32_t table, uint64_t place) const { return key_of_hash(hash_of_place(place), salts_[table]); }

    // use(first, count, slots): the slots of keys first .. first + count - 1, or kNoSlot, for each block of keys.
    // Threads share the blocks.
    template <typename Use>
    void find(const KeysByTable& keys, int32_t num_threads, const Use& use) const;

    // A key of a call. state: of its slot before the call.
    struct Entry {
        uint64_t place;
        uint32_t slot;
        uint16_t shard;
        uint8_t state;
    };
    Entry entry(uint32_t table, uint64_t place, uint32_t slot, uint8_t state) const {
        return {place, slot, static_cast<uint16_t>(shard(table, place)), state};
    }
    uint32_t table(const Entry& entry) const { return entry.shard / static_cast<uint32_t>(num_shards_); }

    // The keys of one call, in memory of the thread that its next call uses again.
    struct Entries {
        const Entry* items;
        int64_t count;
        int32_t num_threads;  // that the work is worth

        const Entry& operator[](int64_t i) const { return items[i]; }
    };

    // Item i becomes entry_of(i), called for some items in order by each copy of it; fetch(i) prefetches what that
    // reads. May throw; then nothing was called.
    template <typename Fetch, typename EntryOf>
    Entries entries(int64_t count, int32_t num_threads, const Fetch& fetch, const EntryOf& entry_of) const;

    // Inserts entries. No slot of an entry may be in the index. Returns -1, or if a key is in the index already or
    // occurs twice the first such item; then nothing has changed. May throw; then nothing has changed but the memory
    // that is used.
    int64_t insert(const Entries& entries);

    // Erases entries, which are in the index. new_use(): one for each thread. use(i): item i was erased.
    template <typename NewUse>
    void erase(const Entries& entries, const NewUse& new_use);

    // Forgets all keys. May throw; then nothing has changed.
    void clear() { shards_ = std::vector<Shard>(shards_.size()); }

 private:
    static constexpr int64_t kShards = 32;        // enough for threads to have about as many each
    static constexpr int64_t kLookupBytes = 512;  // finding a key takes as long as copying this much

    struct Shard {
        Index index;
        uint64_t num_keys = 0;
    };

    // The bits in the middle of a place: an index is ordered by those before them, a rank owns keys by those behind.
    uint32_t shard(uint32_t table, uint64_t place) const {
        const uint64_t shards = static_cast<uint64_t>(num_shards_);
        return static_cast<uint32_t>(table * shards + ((place >> 16 & 0xffff) * shards >> 16));
    }

    // Shards first .. end - 1, on which one thread works.
    struct Part {
        uint32_t first, end;

        bool has(const Entry& entry) const { return uint32_t{entry.shard} - first < end - first; }
    };

    // body(part) for all parts, which threads share.
    template <typename Body>
    void for_each_part(const Entries& entries, const Body& body);

    // use(shard, i) for the entries of a part, in order, each after its line is prefetched.
    template <typename Use>
    void for_each_entry(const Entries& entries, Part part, const Use& use);

    void find_in_table(uint32_t table, const int64_t* keys, int64_t count, uint32_t* slots) const;
    void erase_inserted(const Entries& entries);
    int64_t first_repeated(const Entries& entries);
    [[noreturn]] static void refuse_memory();
    static Entry* memory_for(int64_t count);  // of the calling thread

    std::vector<uint64_t> salts_;
    int64_t num_shards_;  // of a table
    std::vector<Shard> shards_;
};

template <typename Use>
void KeyIndex::find(const KeysByTable& keys, int32_t num_threads, const Use& use) const {
    const int64_t* const offsets = keys.offsets;
    const auto find_some = [&](int64_t begin, int64_t end) {
        uint32_t slots[kBlock];
        int64_t t = std::upper_bound(offsets, offsets + num_tables(), begin) - offsets - 1;
        for (int64_t first = begin; first < end; first += kBlock) {
            const int64_t last = std::min(first + kBlock, end);
            for (int64_t i = first; i < last;) {
                while (offsets[t + 1] <= i) ++t;
                const int64_t end_of_table = std::min(last, offsets[t + 1]);
                find_in_table(static_cast<uint32_t>(t), keys.keys + i, end_of_table - i, slots + (i - first));
                i = end_of_table;
            }
            use(first, last - first, slots);
        }
    };
    const int64_t num_blocks = (grain_for(keys.num_keys, kLookupBytes, num_threads) + kBlock - 1) / kBlock;
    parallel_for(keys.num_keys, num_blocks * kBlock, num_threads, std::cref(find_some));
}

template <typename Fetch, typename EntryOf>
KeyIndex::Entries KeyIndex::entries(int64_t count, int32_t num_threads, const Fetch& fetch,
                                    const EntryOf& entry_of) const {
    Entry* const items = memory_for(count);
    const auto fill = [&](int64_t begin, int64_t end) {
        auto its_entry_of = entry_of;
        in_two_steps(begin, end, fetch, [&](int64_t i) { items[i] = its_entry_of(i); });
    };
    parallel_for(count, grain_for(count, kLookupBytes, num_threads), num_threads, std::cref(fill));
    return {items, count, threads_for(count, kLookupBytes, num_threads)};
}

template <typename Body>
void KeyIndex::for_each_part(const Entries& entries, const Body& body) {
    const int64_t num_parts = std::min<int64_t>(entries.num_threads, num_shards());
    const auto first = [&](int64_t part) { return static_cast<uint32_t>(part * num_shards() / num_parts); };
    const auto some = [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) body(Part{first(part), first(part + 1)});
    };
    parallel_for(num_parts, 1, entries.num_threads, std::cref(some));
}

template <typename Use>
void KeyIndex::for_each_entry(const Entries& entries, Part part, const Use& use) {
    selected_in_two_steps(
        entries.count, [&](int64_t i) { return part.has(entries[i]); },
        [&](int64_t i) { shards_[entries[i].shard].index.prefetch_to_write(entries[i].place); },
        [&](int64_t i) { use(shards_[entries[i].shard], i); });
}

template <typename NewUse>
void KeyIndex::erase(const Entries& entries, const NewUse& new_use) {
    for_each_part(entries, [&](Part part) {
        auto use = new_use();
        for_each_entry(entries, part, [&](Shard& shard, int64_t i) {
            shard.index.erase(entries[i].place);
            --shard.num_keys;
            use(i);
        });
    });
}

}  // namespace nestpipe
