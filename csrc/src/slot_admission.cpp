// Admission of a batch: keys that are resident keep their slots, the others get free ones and those of victims.
#include <algorithm>
#include <numeric>
#include <string>

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
                    block.num_used += slots_.use(found[i], batch);
                }
            });
        blocks[static_cast<size_t>(first / KeyIndex::kBlock)] = block;
    });
    list_missing(keys, blocks, missing);
    append_uses(batch, blocks, used);
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

// Chooses victims, at most as many as are wanted, and returns their number. Slots that are claimed are left out: a
// batch in flight would find another key in them.
int64_t Slots::choose_victims(int64_t num_wanted, int64_t first_in_flight) {
    enum Class : uint8_t { kNone, kClean, kDirty };
    const auto class_of = [admission = admission_](const Slot& slot) -> uint8_t {
        if (slot.num_claims > 0 || slot.is_awaited_by(admission)) return kNone;
        return slot.is(Slot::kDirty) ? kDirty : kClean;
    };
    int64_t num_chosen = 0;
    if (num_wanted > 0)
        order_.walk(first_in_flight, slots_, num_wanted, num_beside_, class_of,
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
        slot.leave_for(admission_);
        leaving.keys[i] = index_.key(slot.table, slot.place);
        leaving.steps[i] = slot.step;
    };
    for_each(
        {leaving.slots, leaving.offsets[num_tables()]}, num_beside_, [](const Slot&) -> const char* { return nullptr; },
        use);
}

}  // namespace nestpipe
