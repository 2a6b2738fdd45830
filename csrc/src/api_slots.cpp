// The C boundary of the slots of a row pool.
#include "boundary.hpp"
#include "nestpipe.h"
#include "slots.hpp"

using namespace nestpipe;

struct nestpipe_slots {
    Slots all;
};

namespace {

Slots& the_slots(nestpipe_slots* slots) {
    need(slots, "slots");
    return slots->all;
}

KeysByTable keys_of(const Slots& slots, const int64_t* offsets, const int64_t* keys, int64_t num_keys) {
    need_table_offsets(offsets, slots.num_tables(), num_keys, "offsets");
    need_array(keys, num_keys, "keys");
    return {offsets, keys, num_keys};
}

SlotList list_of(const int64_t* list, int64_t num_slots) {
    need_count(num_slots, "number of slots");
    need_array(list, num_slots, "list of slots");
    return {list, num_slots};
}

void need_room(const nestpipe_slot_records* records) {
    need(records, "room for slots");
    need_count(records->capacity, "capacity");
    need_array(records->slots, records->capacity, "slots of the room");
    need_array(records->keys, records->capacity, "keys of the room");
    need_array(records->steps, records->capacity, "steps of the room");
    need(records->offsets, "offsets of the room");
}

}  // namespace

nestpipe_status nestpipe_slots_create(const uint64_t* salts, int64_t num_tables, int32_t num_threads,
                                      int32_t num_beside, nestpipe_slots** slots) {
    return guarded([&] {
        if (num_tables < 1 || num_tables > kMostTables)
            refuse("num_tables is " + std::to_string(num_tables) + ", must be 1 .. " + std::to_string(kMostTables));
        need_array(salts, num_tables, "salts");
        need_threads(num_threads);
        need_threads(num_beside);
        need(slots, "slots");
        *slots = new nestpipe_slots{{salts, num_tables, num_threads, num_beside}};
    });
}

nestpipe_status nestpipe_slots_destroy(nestpipe_slots* slots) {
    return guarded([&] { delete slots; });
}

nestpipe_status nestpipe_slots_counts(nestpipe_slots* slots, nestpipe_slot_counts* counts) {
    return guarded([&] {
        need(counts, "counts");
        *counts = the_slots(slots).counts();
    });
}

nestpipe_status nestpipe_slots_grow(nestpipe_slots* slots, int64_t num_slots) {
    return guarded([&] { the_slots(slots).grow(num_slots); });
}

nestpipe_status nestpipe_slots_find(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys,
                                    int64_t num_keys, int64_t* key_slots) {
    return guarded([&] {
        const Slots& all = the_slots(slots);
        const KeysByTable wanted = keys_of(all, offsets, keys, num_keys);
        need_array(key_slots, num_keys, "key_slots");
        all.find(wanted, key_slots);
    });
}

nestpipe_status nestpipe_slots_use(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys, int64_t num_keys,
                                   int64_t batch, int64_t* key_slots, const nestpipe_missing_keys* missing) {
    return guarded([&] {
        Slots& all = the_slots(slots);
        const KeysByTable used = keys_of(all, offsets, keys, num_keys);
        need_array(key_slots, num_keys, "key_slots");
        need(missing, "missing");
        need(missing->offsets, "offsets of missing");
        for (const int64_t* array : {missing->indices, missing->keys}) need_array(array, num_keys, "array of missing");
        all.use(used, batch, key_slots, *missing);
    });
}

nestpipe_status nestpipe_slots_assign(nestpipe_slots* slots, int64_t batch, int64_t first_in_flight,
                                      const int64_t* missing, int64_t num_missing, int64_t* missing_slots,
                                      int64_t* key_slots, int64_t num_keys, const nestpipe_slot_records* leaving) {
    return guarded([&] {
        Slots& all = the_slots(slots);
        need_count(num_missing, "num_missing");
        need_places(missing, num_missing, num_keys, "missing");
        need_array(missing_slots, num_missing, "missing_slots");
        need_array(key_slots, num_keys, "key_slots");
        need_room(leaving);
        if (leaving->capacity < num_missing)
            refuse("leaving has room for " + std::to_string(leaving->capacity) + " slots, must have it for all " +
                   std::to_string(num_missing) + " missing keys");
        all.assign(batch, first_in_flight, {missing_slots, num_missing}, *leaving);
        for (int64_t i = 0; i < num_missing; ++i) key_slots[missing[i]] = missing_slots[i];
    });
}

nestpipe_status nestpipe_slots_evict(nestpipe_slots* slots, const int64_t* list, int64_t num_slots) {
    return guarded([&] { the_slots(slots).evict(list_of(list, num_slots)); });
}

nestpipe_status nestpipe_slots_fill(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys,
                                    int64_t num_keys, const int64_t* key_slots, const uint8_t* is_stored,
                                    int64_t batch) {
    return guarded([&] {
        Slots& all = the_slots(slots);
        const KeysByTable filled = keys_of(all, offsets, keys, num_keys);
        need_array(is_stored, num_keys, "is_stored");
        all.fill(filled, list_of(key_slots, num_keys), is_stored, batch);
    });
}

nestpipe_status nestpipe_slots_release(nestpipe_slots* slots, const int64_t* list, int64_t num_slots) {
    return guarded([&] { the_slots(slots).release(list_of(list, num_slots)); });
}

nestpipe_status nestpipe_slots_claim(nestpipe_slots* slots, const int64_t* list, int64_t num_slots, int64_t* num_rows) {
    return guarded([&] {
        need(num_rows, "num_rows");
        the_slots(slots).claim(list_of(list, num_slots), num_rows);
    });
}

nestpipe_status nestpipe_slots_settle(nestpipe_slots* slots, const int64_t* list, int64_t num_slots, int64_t step) {
    return guarded([&] {
        if (step < -1) refuse("step is " + std::to_string(step) + ", must be >= 0, or -1 if the batch was not applied");
        the_slots(slots).settle(list_of(list, num_slots), step);
    });
}

nestpipe_status nestpipe_slots_dirty(nestpipe_slots* slots, const nestpipe_slot_records* records) {
    return guarded([&] {
        need_room(records);
        the_slots(slots).dirty(*records);
    });
}

nestpipe_status nestpipe_slots_clean(nestpipe_slots* slots, const int64_t* list, int64_t num_slots) {
    return guarded([&] { the_slots(slots).clean(list_of(list, num_slots)); });
}

nestpipe_status nestpipe_slots_clear(nestpipe_slots* slots) {
    return guarded([&] { the_slots(slots).clear(); });
}
