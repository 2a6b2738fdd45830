// A row pool's slots for tests, with lists in place of arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"

using List = std::vector<int64_t>;

inline size_t at(int64_t i) { return static_cast<size_t>(i); }
inline int64_t size_of(const List& list) { return static_cast<int64_t>(list.size()); }

inline List range(int64_t first, int64_t end) {
    List list(at(end - first));
    std::iota(list.begin(), list.end(), first);
    return list;
}

inline List joined(List list, const List& more) {
    list.insert(list.end(), more.begin(), more.end());
    return list;
}

// Keys of each table.
struct Keys {
    List keys, offsets{0};

    explicit Keys(const std::vector<List>& tables) {
        for (const List& table : tables) {
            keys = joined(keys, table);
            offsets.push_back(size_of(keys));
        }
    }
    // The table of a key.
    int64_t table(int64_t i) const { return std::upper_bound(offsets.begin(), offsets.end(), i) - offsets.begin() - 1; }
    // Some of the keys.
    Keys at_indices(const List& indices) const {
        std::vector<List> tables(offsets.size() - 1);
        for (const int64_t i : indices) tables[at(table(i))].push_back(keys[at(i)]);
        return Keys(tables);
    }
};

inline Keys one(const List& keys) { return Keys(std::vector<List>{keys}); }  // of one table

struct Records {
    List slots, keys, steps, offsets;

    Records(int64_t capacity, int64_t num_tables)
        : slots(at(capacity), -9), keys(slots), steps(slots), offsets(at(num_tables + 1), -9) {}
    nestpipe_slot_records native() { return {slots.data(), keys.data(), steps.data(), offsets.data(), size_of(slots)}; }
    void cut() {
        for (List* list : {&slots, &keys, &steps}) list->resize(at(offsets.back()));
    }
    bool operator==(const Records& other) const {
        return slots == other.slots && keys == other.keys && steps == other.steps && offsets == other.offsets;
    }
};

struct Admission {
    List slots, missing;  // the indices of missing keys
    Records leaving;
    List missing_slots{}, missing_keys{}, missing_offsets{};

    // Room for all that an admission of so many keys writes.
    static Admission room(int64_t num_keys, int64_t num_tables) {
        const List list(at(num_keys), -9);
        return {list, list, Records(num_keys, num_tables), list, list, List(at(num_tables + 1), -9)};
    }
    nestpipe_missing_keys native_missing() { return {missing.data(), missing_keys.data(), missing_offsets.data()}; }
    void cut() {
        for (List* list : {&missing, &missing_slots, &missing_keys}) list->resize(at(missing_offsets.back()));
        leaving.cut();
    }
    const List& of_missing() const { return missing_slots; }
    // The slots of missing keys that may be overwritten at once.
    List taken() const {
        List some = of_missing();
        some.resize(some.size() - leaving.slots.size());
        return some;
    }
    bool operator==(const Admission& other) const {
        return slots == other.slots && missing == other.missing && leaving == other.leaving &&
               missing_slots == other.missing_slots && missing_keys == other.missing_keys &&
               missing_offsets == other.missing_offsets;
    }
};

struct Pool {
    nestpipe_slots* slots = nullptr;
    int64_t num_tables;

    explicit Pool(int64_t num_slots, int64_t tables = 1, int32_t num_threads = 1) : num_tables(tables) {
        std::vector<uint64_t> salts(at(tables));
        for (size_t t = 0; t < salts.size(); ++t)
            OK(nestpipe_table_salt(("table" + std::to_string(t)).c_str(), &salts[t]));
        OK(nestpipe_slots_create(salts.data(), tables, num_threads, num_threads, &slots));
        OK(nestpipe_slots_grow(slots, num_slots));
    }
    ~Pool() { nestpipe_slots_destroy(slots); }
    Pool(const Pool&) = delete;

    nestpipe_slot_counts counts() const {
        nestpipe_slot_counts counts;
        OK(nestpipe_slots_counts(slots, &counts));
        return counts;
    }
    List find(const Keys& keys) const {
        List found(keys.keys.size(), -9);
        OK(nestpipe_slots_find(slots, keys.offsets.data(), keys.keys.data(), size_of(keys.keys), found.data()));
        return found;
    }
    nestpipe_status use_into(Admission& room, const Keys& keys, int64_t batch) const {
        const nestpipe_missing_keys missing = room.native_missing();
        return nestpipe_slots_use(slots, keys.offsets.data(), keys.keys.data(), size_of(keys.keys), batch,
                                  room.slots.data(), &missing);
    }
    nestpipe_status assign_into(Admission& room, int64_t batch, int64_t first_in_flight) const {
        const nestpipe_slot_records leaving = room.leaving.native();
        return nestpipe_slots_assign(slots, batch, first_in_flight, room.missing.data(), room.missing_offsets.back(),
                                     room.missing_slots.data(), room.slots.data(), size_of(room.slots), &leaving);
    }
    nestpipe_status admit_into(Admission& room, const Keys& keys, int64_t batch, int64_t first_in_flight) const {
        const nestpipe_status status = use_into(room, keys, batch);
        return status == NESTPIPE_OK ? assign_into(room, batch, first_in_flight) : status;
    }
    nestpipe_status try_admit(const Keys& keys, int64_t batch, int64_t first_in_flight, Admission& result) const {
        result = Admission::room(size_of(keys.keys), num_tables);
        const nestpipe_status status = admit_into(result, keys, batch, first_in_flight);
        if (status == NESTPIPE_OK) {
            result.cut();
            const Keys missing = keys.at_indices(result.missing);
            CHECK(result.missing_keys == missing.keys && result.missing_offsets == missing.offsets);
            for (size_t i = 0; i < result.missing.size(); ++i)
                CHECK(result.slots[at(result.missing[i])] == result.missing_slots[i]);
        }
        return status;
    }
    Admission admit(const Keys& keys, int64_t batch, int64_t first_in_flight) const {
        Admission result{{}, {}, Records(0, 0)};
        OK(try_admit(keys, batch, first_in_flight, result));
        return result;
    }
    nestpipe_status evict(const List& list) const { return nestpipe_slots_evict(slots, list.data(), size_of(list)); }
    nestpipe_status release(const List& list) const {
        return nestpipe_slots_release(slots, list.data(), size_of(list));
    }
    nestpipe_status clean(const List& list) const { return nestpipe_slots_clean(slots, list.data(), size_of(list)); }
    nestpipe_status settle(const List& list, int64_t step) const {
        return nestpipe_slots_settle(slots, list.data(), size_of(list), step);
    }
    List claim(const List& list) const {
        List num_rows(at(num_tables));
        OK(nestpipe_slots_claim(slots, list.data(), size_of(list), num_rows.data()));
        return num_rows;
    }
    nestpipe_status fill(const Keys& keys, const List& list, int64_t batch, bool is_stored = true) const {
        const std::vector<uint8_t> stored(keys.keys.size(), is_stored);
        return nestpipe_slots_fill(slots, keys.offsets.data(), keys.keys.data(), size_of(keys.keys), list.data(),
                                   stored.data(), batch);
    }
    Records dirty() const {
        Records records(counts().num_dirty, num_tables);
        const nestpipe_slot_records room = records.native();
        OK(nestpipe_slots_dirty(slots, &room));
        records.cut();
        return records;
    }
    // A batch from its admission to its filled slots.
    Admission retrieve(const Keys& keys, int64_t batch, int64_t first_in_flight, bool is_stored = true) const {
        const Admission admission = admit(keys, batch, first_in_flight);
        OK(evict(admission.leaving.slots));
        OK(fill(keys.at_indices(admission.missing), admission.of_missing(), batch, is_stored));
        return admission;
    }
};

// Everything that can be seen of a pool, but its memory.
using State = std::vector<List>;
inline State state(const Pool& pool, const Keys& keys) {
    const nestpipe_slot_counts counts = pool.counts();
    const Records dirty = pool.dirty();
    return {{counts.num_slots, counts.num_free, counts.num_resident},
            pool.find(keys),
            pool.claim({}),
            dirty.slots,
            dirty.keys,
            dirty.steps,
            dirty.offsets};
}
