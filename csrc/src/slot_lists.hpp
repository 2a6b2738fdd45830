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

    int64_t num_unstored = 0, num_claimed = 0, num_dirty = 0;

 private:
    void add() {
        Counts& counts = counts_[table_];
        if (num_unstored != 0) counts.num_unstored += num_unstored;
        if (num_claimed != 0) counts.num_claimed += num_claimed;
        if (num_dirty != 0) counts.num_dirty += num_dirty;
        num_unstored = num_claimed = num_dirty = 0;
    }

    std::vector<Counts>& counts_;
    uint32_t table_ = 0;
};

template <typename Use>
void Slots::for_each(SlotList slots, const Use& use) {
    const auto some = [&](int64_t begin, int64_t end) {
        Changes changes(counts_);
        in_two_steps(
            begin, end, [&](int64_t i) { slots_.prefetch(slots[i]); },
            [&](int64_t i) {
                Slot& slot = slots_[slots[i]];
                use(i, slot, changes.of(slot.table));
            });
    };
    parallel_for(slots.count, grain_for(slots.count, kSlotBytes, num_threads_), num_threads_, std::cref(some));
}

template <typename SlotAt>
KeyIndex::Entries Slots::entries_of(int64_t count, const SlotAt& slot_at) const {
    return index_.group(
        count, num_threads_, [&](int64_t i) { slots_.prefetch(slot_at(i)); },
        [&](int64_t i) {
            const Slot& slot = slots_[slot_at(i)];
            return index_.entry(slot.table, slot.place, slot_at(i));
        });
}

// Each slot notes the number of the check, and must not have it yet.
template <typename WhyNot>
void Slots::check(SlotList slots, const WhyNot& why_not) {
    const uint32_t number = next_check();
    const int64_t grain = grain_for(slots.count, kSlotBytes, num_threads_);
    const bool is_shared = grain < slots.count;
    std::atomic<bool> is_wrong{false};
    const auto look = [&](int64_t begin, int64_t end) {
        in_two_steps(
            begin, end,
            [&](int64_t i) {
                if (has(slots.slots[i])) slots_.prefetch(slots[i]);
            },
            [&](int64_t i) {
                if (has(slots.slots[i])) {
                    Slot& slot = slots_[slots[i]];
                    const uint32_t before = slot.noted(number, is_shared);
                    if (before != number && why_not(slot) == nullptr) return;
                }
                is_wrong = true;
            });
    };
    parallel_for(slots.count, grain, num_threads_, std::cref(look));
    if (is_wrong) refuse_list(slots, why_not);
}

// Looks at one slot after the other: the error names the first that is wrong, whatever the number of threads.
template <typename WhyNot>
void Slots::refuse_list(SlotList slots, const WhyNot& why_not) const {
    for (int64_t i = 0; i < slots.count; ++i) {
        const std::string which = "slots[" + std::to_string(i) + "] is " + std::to_string(slots.slots[i]);
        if (!has(slots.slots[i])) refuse(which + ": the pool has " + std::to_string(slots_.size()) + " slots");
        if (const char* reason = why_not(slots_[slots[i]])) refuse(which + ", a slot that " + reason);
    }
    std::vector<int64_t> sorted(slots.slots, slots.slots + slots.count);
    std::sort(sorted.begin(), sorted.end());
    refuse("slot " + std::to_string(*std::adjacent_find(sorted.begin(), sorted.end())) + " is in the list twice");
}

}  // namespace nestpipe
