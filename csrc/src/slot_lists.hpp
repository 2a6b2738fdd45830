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
    explicit Changes(Slots& slots) : slots_(slots) {}
    ~Changes() {
        add();
        if (num_leaving != 0) slots_.num_leaving_ += num_leaving;
    }
    Changes(const Changes&) = delete;
    Changes& operator=(const Changes&) = delete;

    Changes& of(uint32_t table) {
        if (table != table_) add();
        table_ = table;
        return *this;
    }

    int64_t num_new = 0, num_unstored = 0, num_claimed = 0, num_dirty = 0;  // of one table
    int64_t num_leaving = 0;                                                // of all

 private:
    void add() {
        Counts& counts = slots_.counts_[table_];
        if (num_new != 0) counts.num_new += num_new;
        if (num_unstored != 0) counts.num_unstored += num_unstored;
        if (num_claimed != 0) counts.num_claimed += num_claimed;
        if (num_dirty != 0) counts.num_dirty += num_dirty;
        num_new = num_unstored = num_claimed = num_dirty = 0;
    }

    Slots& slots_;
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
        Changes changes(*this);
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

// The table of each key of a call, asked for in order.
class TableOf {
 public:
    TableOf(const KeysByTable& keys, int64_t num_tables)
        : offsets_(keys.offsets), end_(keys.offsets + num_tables), at_(nullptr) {}

    uint32_t operator()(int64_t i) {
        if (at_ == nullptr) at_ = std::upper_bound(offsets_, end_, i) - 1;
        while (at_[1] <= i) ++at_;
        return static_cast<uint32_t>(at_ - offsets_);
    }

 private:
    const int64_t *offsets_, *end_, *at_;
};

template <typename WhyNot, typename Change>
KeyIndex::Entries Slots::change_slots(SlotList slots, const WhyNot& why_not, const Change& change) {
    FirstItem wrong;
    const auto entries = index_.entries(
        slots.count, num_beside_,
        [&](int64_t i) {
            if (has(slots.slots[i])) slots_.prefetch_to_write(slots[i]);
        },
        [&, its_change = Change(change)](int64_t i) mutable {
            if (has(slots.slots[i]) && why_not(slots_[slots[i]]) == nullptr)
                return its_change(i, slots_[slots[i]], slots_[slots[i]].state);
            wrong.note(i);
            return KeyIndex::Entry{};
        });
    if (wrong.is_noted()) {
        put_back(entries);
        refuse_slot(slots, wrong.index(), why_not);
    }
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
    const auto take = [&](int64_t i, Slot& slot, uint8_t state) {
        slot.take();
        return index_.entry(slot.table, slot.place, slots[i], state);
    };
    const auto entries = change_slots(slots, why_not, take);
    struct Note {
        const KeyIndex& index;
        const KeyIndex::Entries& entries;
        Changes all_changes;

        void operator()(int64_t i) {
            Slot before{};
            before.state = entries[i].state;
            Changes& changes = all_changes.of(index.table(entries[i]));
            changes.num_new -= !before.exists();
            changes.num_unstored -= before.is_unstored();
            changes.num_dirty -= before.is(Slot::kDirty);
            changes.num_leaving -= before.is(Slot::kLeaving);
        }
    };
    index_.erase(entries, [&] { return Note{index_, entries, Changes(*this)}; });
    num_resident_ -= slots.count;
}

}  // namespace nestpipe
