// Admission of a batch: keys that are resident keep their slots, the others get free ones and those of victims.
#include <algorithm>
#include <numeric>
#include <string>

#include "error.hpp"
#include "slot_lists.hpp"
#include "slots.hpp"

namespace nestpipe {

namespace {
constexpr int64_t kUsedBefore = int64_t{1} << 32;  // beside the number of a slot: the batch has used it already
}

int64_t Slots::use(const KeysByTable& keys, int64_t batch, int64_t* slots, const nestpipe_missing_keys& missing) {
    Lock lock(mutex_);
    check_batch(batch);
    order_.reserve(std::min(keys.num_keys, num_resident_) + 1, slots_, num_threads_);
    use_resident(keys, batch, slots);
    last_batch_ = batch;
    return append_uses(keys, batch, slots, missing);
}

void Slots::assign(int64_t batch, int64_t first_in_flight, SlotRoom missing, const nestpipe_slot_records& leaving) {
    Lock lock(mutex_);
    if (batch != last_batch_)
        refuse("batch is " + std::to_string(batch) + ", must be the last that has used slots, " +
               std::to_string(last_batch_));
    if (first_in_flight < 0 || first_in_flight > batch)
        refuse("first_in_flight is " + std::to_string(first_in_flight) +
               ", must be 0 .. batch = " + std::to_string(batch));
    const int64_t num_free = std::min(missing.count, free_.count());
    const int64_t num_victims = choose_victims(missing.count - num_free, first_in_flight);
    int64_t* const clean = missing.slots + num_free;
    list_victims(clean, leaving);  // nothing has thrown: the sets are empty between two calls
    if (num_free + num_victims < missing.count)
        refuse("the keys of batch " + std::to_string(batch) + " that are not resident need " +
               std::to_string(missing.count) + " slots, but only " + std::to_string(num_free + num_victims) +
               " are free or may be evicted; grow the pool first");
    const int64_t num_dirty = leaving.offsets[num_tables()];
    take_resident({clean, num_victims - num_dirty}, [](const Slot&) -> const char* { return nullptr; });
    free_.take(num_free, [&, next = missing.slots](uint32_t number) mutable {
        slots_[number].take();
        *next++ = number;
    });
    std::copy_n(leaving.slots, num_dirty, missing.slots + missing.count - num_dirty);
    mark_leaving(leaving);
}

// slots[i] becomes the slot of key i, with kUsedBefore where this is not its first use by the batch, or -1.
void Slots::use_resident(const KeysByTable& keys, int64_t batch, int64_t* slots) {
    constexpr auto kOthers = static_cast<uint8_t>(~Slot::kLeaving);
    index_.find(keys, num_threads_, [&](int64_t first, int64_t count, const uint32_t* found) {
        const auto fetch = [&](int64_t i) {
            if (found[i] != KeyIndex::kNoSlot) slots_.prefetch(found[i]);
        };
        const auto use = [&](int64_t i) {
            slots[first + i] = -1;
            if (found[i] == KeyIndex::kNoSlot) return;
            Slot& slot = slots_[found[i]];
            // Atomic, because a key that occurs twice, against the rules, may be at hand in two threads.
            const int64_t last_use = __atomic_exchange_n(&slot.last_use, batch, __ATOMIC_RELAXED);
            if ((__atomic_load_n(&slot.state, __ATOMIC_RELAXED) & Slot::kLeaving) != 0)
                __atomic_fetch_and(&slot.state, kOthers, __ATOMIC_RELAXED);
            slots[first + i] = found[i] | (last_use == batch ? kUsedBefore : 0);
        };
        in_two_steps(0, count, fetch, use);
    });
}

// Takes the note from `slots`, and lists the keys that are missing. Returns their number.
int64_t Slots::append_uses(const KeysByTable& keys, int64_t batch, int64_t* slots,
                           const nestpipe_missing_keys& missing) {
    int64_t num_missing = 0;
    order_.append(batch, std::min(keys.num_keys, num_resident_) + 1, [&](uint32_t* used) {
        int64_t num_used = 0;
        for (int64_t i = 0; i < keys.num_keys; ++i) {  // no branch: the processor could not predict it
            missing.indices[num_missing] = i;
            num_missing += slots[i] < 0;
            used[num_used] = static_cast<uint32_t>(slots[i]);
            num_used += slots[i] >= 0 && (slots[i] & kUsedBefore) == 0;
            slots[i] &= ~kUsedBefore;
        }
        return num_used;
    });
    missing.offsets[0] = 0;
    for (int64_t i = 0, t = 0; t < num_tables(); ++t) {
        for (; i < num_missing && missing.indices[i] < keys.offsets[t + 1]; ++i)
            missing.keys[i] = keys.keys[missing.indices[i]];
        missing.offsets[t + 1] = i;
    }
    return num_missing;
}

// Chooses victims, at most as many as are wanted, and returns their number. Slots that are claimed are left out: a
// batch in flight would find another key in them.
int64_t Slots::choose_victims(int64_t num_wanted, int64_t first_in_flight) {
    enum Class : uint8_t { kNone, kClean, kDirty };
    const auto class_of = [](const Slot& slot) -> uint8_t {
        if (slot.num_claims > 0) return kNone;
        return slot.is(Slot::kDirty) ? kDirty : kClean;
    };
    int64_t num_chosen = 0;
    if (num_wanted > 0)
        order_.for_each_before(first_in_flight, slots_, num_wanted, num_threads_, class_of,
                               [&](uint32_t number, uint8_t its_class) {
                                   (its_class == kDirty ? dirty_victims_ : clean_victims_).add(number);
                                   return ++num_chosen < num_wanted;
                               });
    return num_chosen;
}

// Lists the victims, ascending: keys that arrive together get neighbouring slots, and later calls that go through their
// slots read memory in order.
void Slots::list_victims(int64_t* clean, const nestpipe_slot_records& leaving) {
    clean_victims_.take_all([&](uint32_t number) { *clean++ = number; });
    std::fill_n(leaving.offsets, num_tables() + 1, 0);
    if (num_tables() == 1) {
        dirty_victims_.take_all([&](uint32_t number) { leaving.slots[leaving.offsets[1]++] = number; });
        return;
    }
    dirty_victims_.for_each([&](uint32_t number) { ++leaving.offsets[slots_[number].table + 1]; });
    std::partial_sum(leaving.offsets, leaving.offsets + num_tables() + 1, leaving.offsets);
    std::copy_n(leaving.offsets, num_tables(), next_.begin());
    dirty_victims_.take_all([&](uint32_t number) { leaving.slots[next_[slots_[number].table]++] = number; });
}

// Dirty victims stay until they are evicted.
void Slots::mark_leaving(const nestpipe_slot_records& leaving) {
    const auto use = [&](int64_t i, Slot& slot, Changes&) {
        slot.state |= Slot::kLeaving;
        leaving.keys[i] = index_.key(slot.table, slot.place);
        leaving.steps[i] = slot.step;
    };
    for_each({leaving.slots, leaving.offsets[num_tables()]}, [](const Slot&) -> const char* { return nullptr; }, use);
}

}  // namespace nestpipe
