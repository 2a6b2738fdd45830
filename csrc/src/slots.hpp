// The slots of a row pool: which key each holds, since when, and what of it the store has.
//
// A slot is free, taken (it belongs to an admission and holds no key), or resident. nestpipe.h describes the
// operations. Each checks all its arguments, then allocates what it needs, then changes the slots: a call that is
// refused or runs out of memory has changed nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "free_slots.hpp"
#include "key_index.hpp"
#include "nestpipe.h"
#include "slot_array.hpp"
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

class Slots {
 public:
    Slots(const uint64_t* salts, int64_t num_tables, int32_t num_threads);

    int64_t num_tables() const { return index_.num_tables(); }

    nestpipe_slot_counts counts() const;
    void grow(int64_t num_slots);
    void find(const KeysByTable& keys, int64_t* slots) const;
    int64_t admit(const KeysByTable& keys, int64_t batch, int64_t first_in_flight, int64_t* slots, int64_t* missing,
                  const nestpipe_slot_records& leaving);
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
        std::atomic<int64_t> num_unstored{0};  // exist, but not in the store
        std::atomic<int64_t> num_claimed{0};
        std::atomic<int64_t> num_dirty{0};
    };
    class Changes;

    // The slots that an admission is given, besides free ones.
    struct Victim {
        uint32_t slot;
        uint16_t table;
        bool is_dirty;
    };
    struct Victims {
        std::vector<uint32_t> clean;
        std::vector<int64_t> dirty;          // table after table
        std::vector<int64_t> dirty_offsets;  // [num_tables + 1]
    };

    bool has(int64_t slot) const { return slot >= 0 && slot < slots_.size(); }

    // Refuses a list with a slot that does not exist, that occurs twice, or for which why_not(slot) has a text.
    template <typename WhyNot>
    void check(SlotList slots, const WhyNot& why_not);
    template <typename WhyNot>
    [[noreturn]] void refuse_list(SlotList slots, const WhyNot& why_not) const;

    // use(i, slot, changes) for each slot of a list, all different. Threads share the list.
    template <typename Use>
    void for_each(SlotList slots, const Use& use);

    uint32_t next_check();
    void check_batch(int64_t batch) const;
    void use_resident(const KeysByTable& keys, int64_t batch, int64_t* slots);
    int64_t append_uses(int64_t num_keys, int64_t batch, int64_t* slots, int64_t* missing);
    std::vector<Victim> choose_victims(int64_t num_wanted, int64_t first_in_flight);
    Victims split(const std::vector<Victim>& chosen) const;
    void give(const Victims& victims, int64_t num_free, int64_t* slots, const int64_t* missing);
    void mark_leaving(const Victims& victims, const nestpipe_slot_records& leaving);

    // The keys of resident slots. May throw.
    template <typename SlotAt>
    KeyIndex::Entries entries_of(int64_t count, const SlotAt& slot_at) const;
    void take_from(const KeyIndex::Entries& entries);  // they leave the index, and their slots are taken

    const int32_t num_threads_;

    mutable std::mutex mutex_;  // guards all below
    KeyIndex index_;
    SlotArray slots_;
    FreeSlots free_;
    UseOrder order_;
    std::vector<Counts> counts_;  // by table
    int64_t num_resident_ = 0;
    int64_t last_batch_ = 0;
    uint32_t last_check_ = 0;
};

}  // namespace nestpipe
