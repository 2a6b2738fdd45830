// Admission of a batch: its keys that are resident keep their slots, the others get free ones and those of victims.
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

void Slots::admit(const KeysByTable& keys, int64_t batch, int64_t first_in_flight, int64_t* slots,
                  const nestpipe_missing_keys& missing, const nestpipe_slot_records& leaving) {
    Lock lock(mutex_);
    check_batch(batch);
    if (first_in_flight < 0 || first_in_flight > batch)
        refuse("first_in_flight is " + std::to_string(first_in_flight) +
               ", must be 0 .. batch = " + std::to_string(batch));
    // Room first: a slot whose last use changes needs an entry in the order of uses, whatever happens next.
    order_.reserve(std::min(keys.num_keys, num_resident_) + 1, slots_, num_threads_);
    use_resident(keys, batch, slots);
    const int64_t num_missing = append_uses(keys, batch, slots, missing);
    last_batch_ = batch;

    const int64_t num_free = std::min(num_missing, free_.count());
    std::fill_n(leaving.offsets, num_tables() + 1, 0);
    const int64_t num_victims = choose_victims(num_missing - num_free, first_in_flight, leaving.offsets + 1);
    // From here to the victims' lists nothing may throw: the sets are empty between two calls.
    int64_t* const clean = missing.slots + num_free;
    list_victims(clean, leaving);
    if (num_free + num_victims < num_missing)
        refuse("the keys of batch " + std::to_string(batch) + " that are not resident need " +
               std::to_string(num_missing) + " slots, but only " + std::to_string(num_free + num_victims) +
               " are free or may be evicted; grow the pool first");
    const int64_t num_dirty = leaving.offsets[num_tables()];
    take_resident({clean, num_victims - num_dirty}, [](const Slot&) -> const char* { return nullptr; });
    free_.take(num_free, [&, next = missing.slots](uint32_t number) mutable {
        slots_[number].take();
        *next++ = number;
    });
    std::copy_n(leaving.slots, num_dirty, missing.slots + num_missing - num_dirty);
    for (int64_t i = 0; i < num_missing; ++i) slots[missing.indices[i]] = missing.slots[i];
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
// batch in flight would find another key in them. num_dirty: [num_tables] the number of dirty ones is added.
int64_t Slots::choose_victims(int64_t num_wanted, int64_t first_in_flight, int64_t* num_dirty) {
    if (num_wanted == 0) return 0;
    int64_t num_chosen = 0;
    order_.for_each_before(first_in_flight, slots_, [&](uint32_t number) {
        const Slot& slot = slots_[number];
        if (slot.num_claims > 0) return true;
        (slot.is(Slot::kDirty) ? dirty_victims_ : clean_victims_).add(number);
        num_dirty[slot.table] += slot.is(Slot::kDirty);
        return ++num_chosen < num_wanted;
    });
    return num_chosen;
}

// Lists the victims, ascending: keys that arrive together get neighbouring slots, and later calls that go through their
// slots read memory in order. leaving.offsets: the number of dirty victims of table t is in place t + 1.
void Slots::list_victims(int64_t* clean, const nestpipe_slot_records& leaving) {
    clean_victims_.take_all([&](uint32_t number) { *clean++ = number; });
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
