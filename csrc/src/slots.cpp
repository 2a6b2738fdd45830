#include "slots.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"
#include "slot_lists.hpp"

namespace nestpipe {

namespace {

constexpr uint8_t kMostClaims = UINT8_MAX;

// Each says why a slot is not one of those that a call changes; null if it is.

constexpr auto why_not_taken = [](const Slot& slot) -> const char* {
    if (slot.is(Slot::kResident)) return "holds a key";
    return slot.is(Slot::kTaken) ? nullptr : "is free: it belongs to no batch";
};

constexpr auto why_not_leaving = [](const Slot& slot) -> const char* {
    if (!slot.is(Slot::kResident)) return "holds no key";
    return slot.is(Slot::kLeaving) ? nullptr : "no batch waits for";
};

constexpr auto why_not_in_a_batch = [](const Slot& slot) -> const char* {
    if (!slot.is(Slot::kResident)) return "holds no key";
    return slot.is(Slot::kLeaving) ? "is to be evicted: no batch in flight can have it" : nullptr;
};

constexpr auto why_not_claimable = [](const Slot& slot) -> const char* {
    if (slot.num_claims == kMostClaims) return "is claimed too often: settle the batches that were trained";
    return why_not_in_a_batch(slot);
};

constexpr auto why_not_dirty = [](const Slot& slot) -> const char* {
    if (!slot.is(Slot::kResident)) return "holds no key";
    return slot.is(Slot::kDirty) ? nullptr : "is not dirty";
};

}  // namespace

Slots::Slots(const uint64_t* salts, int64_t num_tables, int32_t num_threads, int32_t num_beside)
    : num_threads_(num_threads),
      num_beside_(num_beside),
      index_(salts, num_tables),
      counts_(static_cast<size_t>(num_tables)),
      next_(static_cast<size_t>(num_tables * num_beside)) {}

nestpipe_slot_counts Slots::counts() const {
    Lock lock(mutex_);
    nestpipe_slot_counts counts{};
    counts.num_slots = slots_.size();
    counts.num_free = free_.count();
    counts.num_resident = num_resident_;
    for (const Counts& table : counts_) counts.num_dirty += table.num_dirty;
    counts.memory_bytes = static_cast<int64_t>(slots_.bytes() + free_.bytes() + clean_victims_.bytes() +
                                               dirty_victims_.bytes() + order_.bytes() + index_.bytes());
    return counts;
}

void Slots::grow(int64_t num_slots) {
    Lock lock(mutex_);
    if (num_slots < slots_.size() || num_slots > kMostSlots)
        refuse("num_slots is " + std::to_string(num_slots) + ", must be " + std::to_string(slots_.size()) +
               " (as many as there are) .. " + std::to_string(kMostSlots));
    free_.reserve(num_slots);
    clean_victims_.reserve(num_slots);
    dirty_victims_.reserve(num_slots);
    slots_.grow(num_slots);
    free_.grow(num_slots);
}

void Slots::find(const KeysByTable& keys, int64_t* slots) const {
    Lock lock(mutex_);
    index_.find(keys, num_threads_, [&](int64_t first, int64_t count, const uint32_t* found) {
        std::transform(found, found + count, slots + first,
                       [](uint32_t slot) { return slot == KeyIndex::kNoSlot ? -1 : int64_t{slot}; });
    });
}

void Slots::check_batch(int64_t batch) const {
    if (batch < 1 || batch < last_batch_)
        refuse("batch is " + std::to_string(batch) + ", must be at least " +
               std::to_string(std::max<int64_t>(last_batch_, 1)) + ": batches are numbered upwards");
}

void Slots::evict(SlotList slots) {
    Lock lock(mutex_);
    take_resident(slots, why_not_leaving);
}

void Slots::fill(const KeysByTable& keys, SlotList slots, const uint8_t* is_stored, int64_t batch) {
    Lock lock(mutex_);
    check_batch(batch);
    order_.reserve(slots.count, slots_, num_beside_);
    const auto hold = [&, table = TableOf(keys, num_tables())](int64_t i, Slot& slot, uint8_t state) mutable {
        const uint32_t its_table = table(i);
        const uint64_t place = index_.place(its_table, keys.keys[i]);
        slot.hold(place, its_table, batch, is_stored[i] != 0);
        return index_.entry(its_table, place, slots[i], state);
    };
    const auto entries = change_slots(slots, why_not_taken, hold);
    int64_t repeated = -1;
    try {
        repeated = index_.insert(entries);
    } catch (...) {
        put_back(entries);
        throw;
    }
    if (repeated >= 0) {
        put_back(entries);
        refuse("keys[" + std::to_string(repeated) + "] is " + std::to_string(keys.keys[repeated]) +
               ", a key of table " + std::to_string(index_.table(entries[repeated])) +
               " that is resident already or in the list twice");
    }
    order_.append(batch, slots.count, [&](uint32_t* used) {
        std::transform(slots.slots, slots.slots + slots.count, used, [](int64_t slot) { return uint32_t(slot); });
        return slots.count;
    });
    for (int64_t t = 0; t < num_tables(); ++t)
        counts_[static_cast<size_t>(t)].num_new +=
            std::count(is_stored + keys.offsets[t], is_stored + keys.offsets[t + 1], 0);
    num_resident_ += slots.count;
    last_batch_ = batch;
}

void Slots::put_back(const KeyIndex::Entries& entries) {
    for (int64_t i = 0; i < entries.count; ++i)
        if (entries[i].state != 0) slots_[entries[i].slot].state = entries[i].state;
}

void Slots::release(SlotList slots) {
    Lock lock(mutex_);
    for_each(slots, num_beside_, why_not_taken, [](int64_t, Slot&, Changes&) {});  // checks
    for (int64_t i = 0; i < slots.count; ++i) {
        slots_[slots[i]] = Slot{};
        free_.put(slots[i]);
    }
}

void Slots::claim(SlotList slots, int64_t* num_rows) {
    Lock lock(mutex_);
    const auto has_new = [](const Counts& table) { return table.num_new > 0; };
    if (std::any_of(counts_.begin(), counts_.end(), has_new))
        for_each(slots, num_threads_, why_not_claimable, [](int64_t, Slot& slot, Changes& changes) {
            if (!slot.exists()) changes.num_claimed += slot.num_claims++ == 0;
        });
    std::transform(counts_.begin(), counts_.end(), num_rows,
                   [](const Counts& table) { return table.num_unstored + table.num_claimed; });
}

// A key that is applied exists, whoever else has claimed it. One that is not may still be claimed by another batch.
void Slots::settle(SlotList slots, int64_t step) {
    Lock lock(mutex_);
    if (step < 0)
        for_each(slots, num_threads_, why_not_in_a_batch, [](int64_t, Slot& slot, Changes& changes) {
            if (slot.num_claims > 0) changes.num_claimed -= --slot.num_claims == 0;
        });
    else
        for_each(slots, num_threads_, why_not_in_a_batch, [&](int64_t, Slot& slot, Changes& changes) {
            changes.num_new -= !slot.exists();
            changes.num_unstored += !slot.exists();
            changes.num_claimed -= slot.num_claims > 0;
            changes.num_dirty += !slot.is(Slot::kDirty);
            slot.num_claims = 0;
            slot.state |= Slot::kDirty;
            slot.step = step;
        });
}

void Slots::dirty(const nestpipe_slot_records& records) const {
    Lock lock(mutex_);
    std::vector<int64_t> next;
    next.reserve(counts_.size());
    int64_t num_dirty = 0;
    for (const Counts& table : counts_) {
        next.push_back(num_dirty);
        num_dirty += table.num_dirty;
    }
    if (num_dirty > records.capacity)
        throw Error(NESTPIPE_CHANGED, "there are " + std::to_string(num_dirty) + " dirty slots, and room for " +
                                          std::to_string(records.capacity) + "; count them again");
    *std::copy(next.begin(), next.end(), records.offsets) = num_dirty;
    free_.for_each_used([&](uint32_t number) {
        const Slot& slot = slots_[number];
        if (!slot.is(Slot::kDirty)) return;
        const int64_t i = next[slot.table]++;
        records.slots[i] = number;
        records.keys[i] = index_.key(slot.table, slot.place);
        records.steps[i] = slot.step;
    });
}

void Slots::clean(SlotList slots) {
    Lock lock(mutex_);
    for_each(slots, num_threads_, why_not_dirty, [](int64_t, Slot& slot, Changes& changes) {
        changes.num_unstored -= slot.is_unstored();
        --changes.num_dirty;
        slot.state = static_cast<uint8_t>((slot.state & ~Slot::kDirty) | Slot::kStored);
    });
}

void Slots::clear() {
    Lock lock(mutex_);
    index_.clear();
    free_.for_each_used([&](uint32_t slot) { slots_[slot] = Slot{}; });
    free_.put_all();
    order_.clear();
    for (Counts& table : counts_) table.num_new = table.num_unstored = table.num_claimed = table.num_dirty = 0;
    num_resident_ = num_leaving_ = 0;
    last_batch_ = 0;
}

}  // namespace nestpipe
