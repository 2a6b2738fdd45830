// Admission of a batch: its keys that are resident keep their slots, the others get free ones and those of victims.
#include <algorithm>
#include <string>

#include "error.hpp"
#include "slot_lists.hpp"
#include "slots.hpp"

namespace nestpipe {

namespace {
constexpr int64_t kUsedBefore = int64_t{1} << 32;  // beside the number of a slot: the batch has used it already
}

int64_t Slots::admit(const KeysByTable& keys, int64_t batch, int64_t first_in_flight, int64_t* slots, int64_t* missing,
                     const nestpipe_slot_records& leaving) {
    Lock lock(mutex_);
    check_batch(batch);
    if (first_in_flight < 0 || first_in_flight > batch)
        refuse("first_in_flight is " + std::to_string(first_in_flight) +
               ", must be 0 .. batch = " + std::to_string(batch));
    // Room first: a slot whose last use changes needs an entry in the order of uses, whatever happens next.
    order_.reserve(std::min(keys.num_keys, num_resident_), slots_, num_threads_);
    use_resident(keys, batch, slots);
    const int64_t num_missing = append_uses(keys.num_keys, batch, slots, missing);
    last_batch_ = batch;

    const int64_t num_free = std::min(num_missing, free_.count());
    const std::vector<Victim> chosen = choose_victims(num_missing - num_free, first_in_flight);
    const int64_t num_slots = num_free + static_cast<int64_t>(chosen.size());
    if (num_slots < num_missing)
        refuse("the keys of batch " + std::to_string(batch) + " that are not resident need " +
               std::to_string(num_missing) + " slots, but only " + std::to_string(num_slots) +
               " are free or may be evicted; grow the pool first");
    const Victims victims = split(chosen);
    take_from(entries_of(static_cast<int64_t>(victims.clean.size()),
                         [&](int64_t i) { return victims.clean[static_cast<size_t>(i)]; }));
    give(victims, num_free, slots, missing);
    mark_leaving(victims, leaving);
    return num_missing;
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
int64_t Slots::append_uses(int64_t num_keys, int64_t batch, int64_t* slots, int64_t* missing) {
    int64_t num_missing = 0;
    for (int64_t i = 0; i < num_keys; ++i) {
        if (slots[i] < 0) {
            missing[num_missing++] = i;
            continue;
        }
        if ((slots[i] & kUsedBefore) == 0) order_.append(batch, static_cast<uint32_t>(slots[i]));
        slots[i] &= ~kUsedBefore;
    }
    return num_missing;
}

// Slots that are claimed are left out: a batch in flight would find another key in them.
std::vector<Slots::Victim> Slots::choose_victims(int64_t num_wanted, int64_t first_in_flight) {
    std::vector<Victim> chosen;
    if (num_wanted == 0) return chosen;
    chosen.reserve(static_cast<size_t>(std::min(num_wanted, num_resident_)));
    order_.for_each_before(first_in_flight, slots_, [&](uint32_t number) {
        const Slot& slot = slots_[number];
        if (slot.num_claims == 0) chosen.push_back({number, slot.table, slot.is(Slot::kDirty)});
        return static_cast<int64_t>(chosen.size()) < num_wanted;
    });
    return chosen;
}

Slots::Victims Slots::split(const std::vector<Victim>& chosen) const {
    Victims victims;
    victims.dirty_offsets.resize(counts_.size() + 1);
    victims.clean.reserve(chosen.size());
    for (const Victim& victim : chosen) {
        if (victim.is_dirty)
            ++victims.dirty_offsets[size_t{victim.table} + 1];
        else
            victims.clean.push_back(victim.slot);
    }
    for (size_t t = 1; t < victims.dirty_offsets.size(); ++t) victims.dirty_offsets[t] += victims.dirty_offsets[t - 1];
    victims.dirty.resize(chosen.size() - victims.clean.size());
    std::vector<int64_t> next = victims.dirty_offsets;
    for (const Victim& victim : chosen)
        if (victim.is_dirty) victims.dirty[static_cast<size_t>(next[victim.table]++)] = victim.slot;
    return victims;
}

// Missing keys get free slots, lowest first, then clean ones, then dirty ones.
void Slots::give(const Victims& victims, int64_t num_free, int64_t* slots, const int64_t* missing) {
    free_.take(num_free, [&](uint32_t number) {
        slots_[number].take();
        slots[*missing++] = number;
    });
    for (const uint32_t number : victims.clean) slots[*missing++] = number;
    for (const int64_t number : victims.dirty) slots[*missing++] = number;
}

// Dirty victims stay until they are evicted.
void Slots::mark_leaving(const Victims& victims, const nestpipe_slot_records& leaving) {
    std::copy(victims.dirty.begin(), victims.dirty.end(), leaving.slots);
    std::copy(victims.dirty_offsets.begin(), victims.dirty_offsets.end(), leaving.offsets);
    for_each({victims.dirty.data(), victims.dirty_offsets.back()}, [&](int64_t i, Slot& slot, Changes&) {
        slot.state |= Slot::kLeaving;
        leaving.keys[i] = index_.key(slot.table, slot.place);
        leaving.steps[i] = slot.step;
    });
}

}  // namespace nestpipe
