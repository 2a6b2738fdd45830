// The slots of a row pool against a model that looks at all uses so far: the same victims, in the same order, whatever
// was claimed, given up or used again meanwhile.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "slot_pool.hpp"

namespace {

constexpr int64_t kTables = 3;

struct Held {
    int64_t table = -1, key = 0, last_use = 0, step = 0, num_claims = 0;
    bool is_dirty = false, exists = false, is_awaited = false, is_taken = false;
};

struct Model {
    std::vector<Held> slots;
    std::vector<std::pair<int64_t, int64_t>> uses;  // batch and slot

    explicit Model(int64_t num_slots) : slots(at(num_slots)) {}

    int64_t slot_of(int64_t table, int64_t key) const {
        for (size_t s = 0; s < slots.size(); ++s)
            if (slots[s].table == table && slots[s].key == key) return static_cast<int64_t>(s);
        return -1;
    }
    void use(int64_t slot, int64_t batch) {
        Held& held = slots[at(slot)];
        if (held.last_use != batch) uses.emplace_back(batch, slot);
        held.last_use = batch;
        held.is_awaited = false;
    }
    // Free slots, clean victims, dirty ones by table; the dirty ones once more.
    std::pair<List, List> assign(int64_t count, int64_t first_in_flight) {
        List chosen, clean, dirty;
        for (size_t s = 0; s < slots.size() && size_of(chosen) < count; ++s)
            if (slots[s].table < 0 && !slots[s].is_taken) chosen.push_back(static_cast<int64_t>(s));
        for (const auto& [batch, slot] : uses) {
            const Held& held = slots[at(slot)];
            const bool may_leave = held.table >= 0 && held.last_use == batch && batch < first_in_flight &&
                                   held.num_claims == 0 && !held.is_awaited;
            if (!may_leave || size_of(chosen) + size_of(clean) + size_of(dirty) == count) continue;
            (held.is_dirty ? dirty : clean).push_back(slot);
        }
        std::sort(clean.begin(), clean.end());
        std::sort(dirty.begin(), dirty.end(), [&](int64_t a, int64_t b) {
            return std::pair(slots[at(a)].table, a) < std::pair(slots[at(b)].table, b);
        });
        return {joined(joined(chosen, clean), dirty), dirty};
    }
    void take(const List& list) {
        for (const int64_t slot : list) {
            slots[at(slot)] = Held{};
            slots[at(slot)].is_taken = true;
        }
    }
};

class Run {
 public:
    Run(int64_t num_slots, uint64_t seed)
        : num_slots_(num_slots), pool_(num_slots, kTables), model_(num_slots), random_(seed) {}

    int64_t num_settled = 0;  // batches that were not given up

    void batch(int64_t number) {
        const Keys keys = some_keys();
        Admission room = Admission::room(size_of(keys.keys), kTables);
        for (Held& held : model_.slots) held.is_awaited = false;
        OK(pool_.use_into(room, keys, number));
        List missing;
        for (int64_t i = 0; i < size_of(keys.keys); ++i) {
            const int64_t slot = model_.slot_of(keys.table(i), keys.keys[at(i)]);
            if (slot < 0)
                missing.push_back(i);
            else
                model_.use(slot, number);
            CHECK(slot < 0 || room.slots[at(i)] == slot);
        }
        CHECK(room.missing_offsets.back() == size_of(missing));
        for (int64_t first = 0; first < size_of(missing);) {
            const int64_t count = std::min(1 + draw(20), size_of(missing) - first);
            const List stretch(missing.begin() + first, missing.begin() + first + count);
            if (!retrieve(keys, stretch, number, room)) return;
            first += count;
        }
        settle(room.slots, number);
    }

 private:
    int64_t draw(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }

    Keys some_keys() {
        std::vector<List> tables(kTables);
        for (List& table : tables) {
            for (int64_t i = draw(num_slots_ / 8); i >= 0; --i) table.push_back(std::min(draw(100), draw(100)));
            std::sort(table.begin(), table.end());
            table.erase(std::unique(table.begin(), table.end()), table.end());
        }
        return Keys(tables);
    }

    // Gives a stretch of missing keys slots and fills them. False if the batch is given up.
    bool retrieve(const Keys& keys, const List& stretch, int64_t batch, Admission& room) {
        const int64_t count = size_of(stretch);
        List slots(at(count), -9);
        Records leaving(count, kTables);
        const nestpipe_slot_records native = leaving.native();
        const int64_t first_in_flight = before_.empty() ? batch : batch_before_;
        const auto [expected, dirty] = model_.assign(count, first_in_flight);
        const bool is_assigned =
            nestpipe_slots_assign(pool_.slots, batch, first_in_flight, stretch.data(), count, slots.data(),
                                  room.slots.data(), size_of(room.slots), &native) == NESTPIPE_OK;
        CHECK(is_assigned == (size_of(expected) == count));
        if (!is_assigned) return false;
        leaving.cut();
        CHECK(slots == expected && leaving.slots == dirty);
        for (size_t i = 0; i < dirty.size(); ++i) {
            const Held& held = model_.slots[at(dirty[i])];
            CHECK(leaving.keys[i] == held.key && leaving.steps[i] == held.step);
            CHECK(leaving.offsets[at(held.table)] <= static_cast<int64_t>(i) &&
                  static_cast<int64_t>(i) < leaving.offsets[at(held.table + 1)]);
        }
        List ready(slots.begin(), slots.end() - size_of(dirty));
        model_.take(ready);
        for (const int64_t slot : dirty) model_.slots[at(slot)].is_awaited = true;
        if (draw(12) == 0) {  // given up: dirty victims stay
            OK(pool_.release(ready));
            for (const int64_t slot : ready) model_.slots[at(slot)] = Held{};
            return false;
        }
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "the pool has", pool_.evict(joined(dirty, {num_slots_})));
        OK(pool_.evict(dirty));
        model_.take(dirty);
        const Keys some = keys.at_indices(stretch);
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "", refused_fill(some, slots, batch));
        const bool is_stored = draw(2) == 0;
        OK(pool_.fill(some, slots, batch, is_stored));
        for (int64_t i = 0; i < count; ++i) {
            Held& held = model_.slots[at(slots[at(i)])];
            held = Held{};
            held.table = some.table(i);
            held.key = some.keys[at(i)];
            held.exists = is_stored;
            model_.use(slots[at(i)], batch);
        }
        return true;
    }

    // A list that is wrong at its end, and changes nothing.
    nestpipe_status refused_fill(const Keys& keys, List slots, int64_t batch) {
        slots.back() = num_slots_;
        return pool_.fill(keys, slots, batch);
    }

    // Each batch is claimed, and applied or not one batch later; now and then what is dirty is written.
    void settle(const List& slots, int64_t number) {
        pool_.claim(slots);
        for (const int64_t slot : slots) model_.slots[at(slot)].num_claims += !model_.slots[at(slot)].exists;
        if (!before_.empty()) {
            const bool is_applied = draw(4) != 0;
            OK(pool_.settle(before_, is_applied ? number : -1));
            for (const int64_t slot : before_) {
                Held& held = model_.slots[at(slot)];
                held.num_claims = is_applied ? 0 : std::max<int64_t>(held.num_claims - 1, 0);
                if (!is_applied) continue;
                held.is_dirty = held.exists = true;
                held.step = number;
            }
        }
        before_ = slots;
        batch_before_ = number;
        ++num_settled;
        if (draw(8) != 0) return;
        OK(pool_.clean(pool_.dirty().slots));
        for (Held& held : model_.slots) held.is_dirty = false;
    }

    int64_t num_slots_;
    Pool pool_;
    Model model_;
    std::mt19937_64 random_;
    List before_;  // slots of the batch before, which is in flight
    int64_t batch_before_ = 0;
};

}  // namespace

int main() {
    for (uint64_t seed = 0; seed < 40; ++seed) {
        Run run(60 + 7 * static_cast<int64_t>(seed % 10), seed);
        for (int64_t number = 1; number <= 150; ++number) run.batch(number);
        CHECK(run.num_settled > 75);
    }
    return 0;
}
