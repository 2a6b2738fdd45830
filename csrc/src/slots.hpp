// The slots of a row pool: which key each holds, since when, and what of it the store has.
//
// A slot is free, taken (it belongs to a batch and holds no key), or resident. nestpipe.h describes the
// operations. Most check all their arguments, then allocate what they need, then change the slots: if they are refused
// or run out of memory, they have changed nothing. Those that only note something of each slot check it on the way.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "free_slots.hpp"
#include "key_index.hpp"
#include "nestpipe.h"
#include "slot_array.hpp"
#include "slot_set.hpp"
#include "use_order.hpp"

namespace nestpipe {

constexpr int64_t kMostSlots = KeyIndex::kNoSlot - 1;
constexpr int64_t kMostTables = 65536;

// Slots that a call names.
struct SlotList {
    const int64_t* slots;
    int64_t count;

    uint32_t operator[](int64_t i) const { return static_cast<uint32_t>(slots[i]); }
};

// Slots that a call writes.
struct SlotRoom {
    int64_t* slots;
    int64_t count;
};

class Slots {
 public:
    // num_beside: threads of assign, evict and fill, which may run beside other work.
    Slots(const uint64_t* salts, int64_t num_tables, int32_t num_threads, int32_t num_beside);

    int64_t num_tables() const { return index_.num_tables(); }

    nestpipe_slot_counts counts() const;
    void grow(int64_t num_slots);
    void find(const KeysByTable& keys, int64_t* slots) const;
    void use(const KeysByTable& keys, int64_t batch, int64_t* slots, const nestpipe_missing_keys& missing);
    void assign(int64_t batch, int64_t first_in_flight, SlotRoom missing, const nestpipe_slot_records& leaving);
    void evict(SlotList slots);
    void fill(const KeysByTable& keys, SlotList slots, const uint8_t* is_stored, int64_t batch);
    void release(SlotList slots);
    void claim(SlotList slots, int64_t* num_rows);
    void settle(SlotList slots, int64_t step);
    void dirty(const nestpipe_slot_records& records) const;
    void clean(SlotList slots);
    void clear();

 private:
    using Lock = std::lock_guard<std::mutex>;

    // Numbers of keys of a table.
    struct Counts {
        std::atomic<int64_t> num_new{0};       // resident, and do not exist
        std::atomic<int64_t> num_unstored{0};  // exist, but not in the store
        std::atomic<int64_t> num_claimed{0};
        std::atomic<int64_t> num_dirty{0};
    };
    class Changes;

    // What `use` finds of a block of keys.
    struct Block {
        int64_t num_missing, num_used, num_stayed;
    };

    bool has(int64_t slot) const { return slot >= 0 && slot < slots_.size(); }

    // use(i, slot, changes) for each slot of a list, which threads share. If why_not(slot) has a text, or there is no
    // such slot, it is left out, and the list is refused at the end.
    template <typename WhyNot, typename Use>
    void for_each(SlotList slots, int32_t num_threads, const WhyNot& why_not, const Use& use);
    template <typename WhyNot>
    [[noreturn]] void refuse_slot(SlotList slots, int64_t i, const WhyNot& why_not) const;

    void check_batch(int64_t batch) const;
    void list_missing(const KeysByTable& keys, const std::vector<Block>& blocks,
                      const nestpipe_missing_keys& missing) const;
    void append_uses(int64_t batch, const std::vector<Block>& blocks, const uint32_t* used);
    int64_t choose_victims(int64_t num_wanted, int64_t first_in_flight);
    struct Victim;
    void mark_leaving(Victim* victims, const nestpipe_slot_records& leaving);

    // change(i, slot, state) for each slot of a list, which returns its entry. Refused if why_not(slot) has a text. May
    // throw. If it does, or is refused, nothing has changed.
    template <typename WhyNot, typename Change>
    KeyIndex::Entries change_slots(SlotList slots, const WhyNot& why_not, const Change& change);
    // Undoes what `change` did to slots. Of a slot that holds a key it may have changed the state only.
    void put_back(const KeyIndex::Entries& entries);
    template <typename WhyNot>
    void take_resident(SlotList slots, const WhyNot& why_not);  // they leave the index, and are taken

    const int32_t num_threads_, num_beside_;

    mutable std::mutex mutex_;  // guards all below
    KeyIndex index_;
    SlotArray slots_;
    FreeSlots free_;
    UseOrder order_;
    SlotSet clean_victims_, dirty_victims_;  // of the assignment that is under way
    std::vector<Counts> counts_;             // by table
    std::vector<int64_t> next_;              // by thread and table: memory to work in
    int64_t num_resident_ = 0;
    std::atomic<int64_t> num_leaving_{0};
    int64_t last_batch_ = 0;
    uint32_t admission_ = 0;  // number of the last one; a batch that failed may be admitted again
};

}  // namespace nestpipe
