// Lists of slots that a call names: how they are checked, and how threads share them.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>

#include "error.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "slots.hpp"

namespace nestpipe {

constexpr int64_t kSlotBytes = 256;  // changing a slot takes as long as copying this much

// Changes of the counts of tables, gathered by one thread. Slots of a table come together in most lists, so that few of
// the additions, which all threads make to the same numbers, are left.
class Slots::Changes {
 public:
    explicit Changes(std::vector<Counts>& counts) : counts_(counts) {}
    ~Changes() { add(); }
    Changes(const Changes&) = delete;
    Changes& operator=(const Changes&) = delete;

    Changes& of(uint32_t table) {
        if (table != table_) add();
        table_ = table;
        return *this;
    }

    int64_t num_new = 0, num_unstored = 0, num_claimed = 0, num_dirty = 0;

 private:
    void add() {
        Counts& counts = counts_[table_];
        if (num_new != 0) counts.num_new += num_new;
        if (num_unstored != 0) counts.num_unstored += num_unstored;
        if (num_claimed != 0) counts.num_claimed += num_claimed;
        if (num_dirty != 0) counts.num_dirty += num_dirty;
        num_new = num_unstored = num_claimed = num_dirty = 0;
    }

    std::vector<Counts>& counts_;
    uint32_t table_ = 0;
};

// The first of some items that was noted, whichever thread notes it.
class FirstItem {
 public:
    void note(int64_t i) {
        int64_t before = first_;
        while (i < before && !first_.compare_exchange_weak(before, i)) {
        }
    }
    bool is_noted() const { return first_ < INT64_MAX; }
    int64_t index() const { return first_; }

 private:
    std::atomic<int64_t> first_{INT64_MAX};
};

template <typename WhyNot, typename Use>
void Slots::for_each(SlotList slots, int32_t num_threads, const WhyNot& why_not, const Use& use) {
    FirstItem wrong;
    const auto some = [&](int64_t begin, int64_t end) {
        Changes changes(counts_);
        in_two_steps(
            begin, end,
            [&](int64_t i) {
                if (has(slots.slots[i])) slots_.prefetch_to_write(slots[i]);
            },
            [&](int64_t i) {
                if (!has(slots.slots[i]) || why_not(slots_[slots[i]]) != nullptr) return wrong.note(i);
                Slot& slot = slots_[slots[i]];
                use(i, slot, changes.of(slot.table));
            });
    };
    parallel_for(slots.count, grain_for(slots.count, kSlotBytes, num_threads), num_threads, std::cref(some));
    if (wrong.is_noted()) refuse_slot(slots, wrong.index(), why_not);
}

template <typename WhyNot, typename EntryOf>
KeyIndex::Entries Slots::entries_of(SlotList slots, const WhyNot& why_not, const EntryOf& entry_of) const {
    FirstItem wrong;
    const auto entries = index_.entries(
        slots.count, num_beside_,
        [&](int64_t i) {
            if (has(slots.slots[i])) slots_.prefetch_to_write(slots[i]);
        },
        [&](int64_t i) {
            if (has(slots.slots[i]) && why_not(slots_[slots[i]]) == nullptr) return entry_of(i, slots_[slots[i]]);
            wrong.note(i);
            return KeyIndex::Entry{};
        });
    if (wrong.is_noted()) refuse_slot(slots, wrong.index(), why_not);
    return entries;
}

template <typename WhyNot>
void Slots::refuse_slot(SlotList slots, int64_t i, const WhyNot& why_not) const {
    const std::string which = "slots[" + std::to_string(i) + "] is " + std::to_string(slots.slots[i]);
    if (!has(slots.slots[i])) refuse(which + ": the pool has " + std::to_string(slots_.size()) + " slots");
    const char* const reason = why_not(slots_[slots[i]]);
    refuse(which + ", a slot that " + (reason != nullptr ? reason : "is in the list twice"));
}

template <typename WhyNot>
void Slots::take_resident(SlotList slots, const WhyNot& why_not) {
    struct Take {
        const SlotArray& array;
        SlotList slots;
        Changes all_changes;

        void operator()(int64_t i) {
            Slot& slot = array[slots[i]];
            Changes& changes = all_changes.of(slot.table);
            changes.num_new -= !slot.exists();
            changes.num_unstored -= slot.is_unstored();
            changes.num_dirty -= slot.is(Slot::kDirty);
            slot.take();
        }
    };
    const auto entry_of = [&](int64_t i, const Slot& slot) { return index_.entry(slot.table, slot.place, slots[i]); };
    index_.erase(entries_of(slots, why_not, entry_of), [&] { return Take{slots_, slots, Changes(counts_)}; });
    num_resident_ -= slots.count;
}

}  // namespace nestpipe
