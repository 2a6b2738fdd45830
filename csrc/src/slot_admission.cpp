// Admission of a batch: keys that are resident keep their slots, the others get free ones and those of victims.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "error.hpp"
#include "scratch.hpp"
#include "slot_lists.hpp"
#include "slots.hpp"

namespace nestpipe {

// Threads share the keys, block by block. Each block lists its missing keys and its uses where the block begins; then
// the gaps between blocks are closed.
void Slots::use(const KeysByTable& keys, int64_t batch, int64_t* slots, const nestpipe_missing_keys& missing) {
    Lock lock(mutex_);
    check_batch(batch);
    if (num_leaving_ == 0) order_.drop_walked();
    order_.reserve(std::min(keys.num_keys, num_resident_), slots_, num_threads_);
    std::vector<Block> blocks(static_cast<size_t>((keys.num_keys + KeyIndex::kBlock - 1) / KeyIndex::kBlock));
    thread_local Region region;
    auto* const used = scratch<uint32_t>(region, keys.num_keys);
    // From here on nothing throws.
    index_.find(keys, num_threads_, [&](int64_t first, int64_t count, const uint32_t* found) {
        Block block{};
        in_two_steps(
            0, count,
            [&](int64_t i) {
                if (found[i] != KeyIndex::kNoSlot) slots_.prefetch_to_write(found[i]);
            },
            [&](int64_t i) {
                if (found[i] == KeyIndex::kNoSlot) {
                    missing.indices[first + block.num_missing] = first + i;
                    missing.keys[first + block.num_missing++] = keys.keys[first + i];
                } else {
                    slots[first + i] = found[i];
                    used[first + block.num_used] = found[i];
                    block.num_used += slots_.use(found[i], batch, block.num_stayed);
                }
            });
        blocks[static_cast<size_t>(first / KeyIndex::kBlock)] = block;
    });
    list_missing(keys, blocks, missing);
    append_uses(batch, blocks, used);
    for (const Block& block : blocks) num_leaving_ -= block.num_stayed;
    last_batch_ = batch;
    ++admission_;
    order_.begin_walk();
}

void Slots::list_missing(const KeysByTable& keys, const std::vector<Block>& blocks,
                         const nestpipe_missing_keys& missing) const {
    int64_t count = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
        const int64_t first = static_cast<int64_t>(b) * KeyIndex::kBlock, end = first + blocks[b].num_missing;
        std::copy(missing.indices + first, missing.indices + end, missing.indices + count);
        std::copy(missing.keys + first, missing.keys + end, missing.keys + count);
        count += blocks[b].num_missing;
    }
    const auto num_before = [&](int64_t key) {
        return std::lower_bound(missing.indices, missing.indices + count, key) - missing.indices;
    };
    std::transform(keys.offsets, keys.offsets + num_tables() + 1, missing.offsets, num_before);
}

void Slots::append_uses(int64_t batch, const std::vector<Block>& blocks, const uint32_t* used) {
    const auto sum = [](int64_t total, const Block& block) { return total + block.num_used; };
    const int64_t num_used = std::accumulate(blocks.begin(), blocks.end(), int64_t{0}, sum);
    order_.append(batch, num_used, [&](uint32_t* next) {
        for (size_t b = 0; b < blocks.size(); ++b)
            next = std::copy_n(used + static_cast<int64_t>(b) * KeyIndex::kBlock, blocks[b].num_used, next);
        return num_used;
    });
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
    if (num_free + num_victims < missing.count) {
        clean_victims_.clear();
        dirty_victims_.clear();
        refuse("the keys of batch " + std::to_string(batch) + " that are not resident need " +
               std::to_string(missing.count) + " slots, but only " + std::to_string(num_free + num_victims) +
               " are free or may be evicted; grow the pool first");
    }
    // Ascending: keys that arrive together get neighbouring slots, and later calls that go through their slots read
    // memory in order.
    int64_t* const clean = missing.slots + num_free;
    int64_t num_clean = 0, num_dirty = 0;
    clean_victims_.take_all([&](uint32_t number) { clean[num_clean++] = number; });
    dirty_victims_.take_all([&](uint32_t number) { leaving.slots[num_dirty++] = number; });
    leaving.offsets[num_tables()] = num_dirty;
    thread_local Region region;
    auto* const victims = scratch<Victim>(region, num_dirty);
    take_resident({clean, num_clean}, [](const Slot&) -> const char* { return nullptr; });
    // From here on nothing throws.
    free_.take(num_free, [&, next = missing.slots](uint32_t number) mutable {
        slots_[number].take();
        *next++ = number;
    });
    mark_leaving(victims, leaving);
    std::copy_n(leaving.slots, num_dirty, clean + num_clean);
    order_.commit_walk();
}

// Chooses victims, at most as many as are wanted, and returns their number. Slots that are claimed are left out: a
// batch in flight would find another key in them.
int64_t Slots::choose_victims(int64_t num_wanted, int64_t first_in_flight) {
    enum Class : uint8_t { kClean = UseOrder::kFirstClass, kDirty };
    const auto class_of = [admission = admission_](const Slot& slot) -> uint8_t {
        if (slot.is_awaited_by(admission)) return UseOrder::kGone;
        if (slot.num_claims > 0) return UseOrder::kStays;
        return slot.is(Slot::kDirty) ? kDirty : kClean;
    };
    SlotSet* const sets[] = {&clean_victims_, &dirty_victims_};
    return order_.walk(first_in_flight, slots_, num_wanted, num_beside_, class_of,
                       [&](uint32_t number, uint8_t its_class) { sets[its_class - kClean]->add(number); });
}

struct Slots::Victim {
    uint64_t place;
    int64_t step;
    uint32_t slot, table;
};

// Dirty victims stay until they are evicted. leaving.slots has them in ascending order, and gets them table after
// table. Threads share the list in parts of equal size; for each part and table `next_` has the number of victims, then
// the place of the next one.
void Slots::mark_leaving(Victim* victims, const nestpipe_slot_records& leaving) {
    const int64_t count = leaving.offsets[num_tables()];
    const int64_t num_parts = threads_for(count, kSlotBytes, num_beside_);
    const auto for_each_part = [&](const auto& body) {
        const auto some = [&](int64_t part, int64_t end) {
            for (; part < end; ++part)
                body(part * count / num_parts, (part + 1) * count / num_parts, next_.data() + part * num_tables());
        };
        parallel_for(num_parts, 1, static_cast<int32_t>(num_parts), std::cref(some));
    };
    for_each_part([&](int64_t begin, int64_t end, int64_t* counts) {
        std::fill_n(counts, num_tables(), 0);
        int64_t num_new = 0;
        in_two_steps(
            begin, end, [&](int64_t i) { slots_.prefetch_to_write(static_cast<uint32_t>(leaving.slots[i])); },
            [&](int64_t i) {
                const auto number = static_cast<uint32_t>(leaving.slots[i]);
                Slot& slot = slots_[number];
                num_new += !slot.is(Slot::kLeaving);
                slot.leave_for(admission_);
                victims[i] = {slot.place, slot.step, number, slot.table};
                ++counts[slot.table];
            });
        num_leaving_ += num_new;
    });
    int64_t next = 0;
    for (int64_t t = 0; t < num_tables(); ++t) {
        leaving.offsets[t] = next;
        for (int64_t part = 0; part < num_parts; ++part)
            next += std::exchange(next_[static_cast<size_t>(part * num_tables() + t)], next);
    }
    for_each_part([&](int64_t begin, int64_t end, int64_t* places) {
        for (const Victim* victim = victims + begin; victim < victims + end; ++victim) {
            const int64_t i = places[victim->table]++;
            leaving.slots[i] = victim->slot;
            leaving.keys[i] = index_.key(victim->table, victim->place);
            leaving.steps[i] = victim->step;
        }
    });
}

}  // namespace nestpipe
