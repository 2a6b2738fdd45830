// The slots of a row pool: states, refusals, the order of victims.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "slot_pool.hpp"

namespace {

constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;

void test_a_batch() {
    Pool pool(6, 2);
    const Keys keys({{7, -3}, {7, 8}});
    CHECK(pool.find(keys) == List({-1, -1, -1, -1}));
    const Admission first = pool.admit(keys, 1, 1);
    CHECK(first.slots == List({0, 1, 2, 3}) && first.missing == List({0, 1, 2, 3}));
    CHECK(first.leaving.slots.empty() && first.leaving.offsets == List({0, 0, 0}));
    CHECK(pool.find(keys) == List({-1, -1, -1, -1}) && pool.counts().num_free == 2);
    OK(pool.fill(Keys({{7}, {8}}), {0, 3}, 1));
    CHECK(pool.find(keys) == List({0, -1, -1, 3}) && pool.counts().num_resident == 2);
    OK(pool.release({2, 1}));
    CHECK(pool.counts().num_free == 4);
    const Admission second = pool.admit(keys, 2, 1);
    CHECK(second.slots == List({0, 1, 2, 3}) && second.missing == List({1, 2}));  // free slots, lowest first
    OK(pool.fill(Keys({{-3}, {7}}), {1, 2}, 2, false));
    CHECK(pool.claim(second.slots) == List({1, 1}));
    OK(pool.settle(second.slots, 5));
    const Records dirty = pool.dirty();
    CHECK(dirty.slots == List({0, 1, 2, 3}) && dirty.keys == keys.keys && dirty.steps == List({5, 5, 5, 5}));
    CHECK(dirty.offsets == List({0, 2, 4}));
    OK(pool.clean({0, 3, 2}));
    CHECK(pool.dirty().slots == List({1}) && pool.claim({}) == List({1, 0}));
    OK(nestpipe_slots_clear(pool.slots));
    CHECK(pool.counts().num_free == 6 && pool.counts().num_resident == 0 && pool.dirty().slots.empty());
    CHECK(pool.find(keys) == List({-1, -1, -1, -1}) && pool.claim({}) == List({0, 0}));
    CHECK(pool.admit(keys, 1, 0).slots == List({0, 1, 2, 3}));
}

// Oldest batch first, and within a batch in the order of its list. Those chosen come clean ones first, then dirty ones
// by table, each ascending.
void test_order_of_victims() {
    Pool pool(8, 2);
    pool.retrieve(Keys({{0, 1}, {10, 11}}), 1, 1);   // slots 0 .. 3
    pool.retrieve(Keys({{2}, {11, 12, 13}}), 2, 1);  // 4, 3, 5, 6
    pool.retrieve(Keys({{0}, {}}), 3, 2);            // 0 again
    OK(pool.settle({1, 2, 3, 5, 4}, 9));             // dirty; 6 and 0 are clean
    const Keys next({{20, 21, 22}, {23, 24}});       // one free slot, four victims: 1, 2, 4, 3
    const Admission admission = pool.admit(next, 5, 4);
    CHECK(admission.slots == List({7, 1, 4, 2, 3}) && admission.missing == range(0, 5));
    CHECK(admission.leaving.slots == List({1, 4, 2, 3}) && admission.leaving.keys == List({1, 2, 10, 11}));
    CHECK(admission.leaving.steps == List({9, 9, 9, 9}) && admission.leaving.offsets == List({0, 2, 4}));
    CHECK(pool.find(Keys({{1, 2}, {10, 11}})) == List({1, 4, 2, 3}));  // resident until they are evicted
    OK(pool.evict({4, 3}));
    CHECK(pool.find(Keys({{1, 2}, {10, 11}})) == List({1, -1, 2, -1}));
    OK(pool.release({7, 4, 3}));
    // What was not evicted may be again, in its old place: 1, 2, then 5, 6 of batch 2, then 0 of batch 3.
    const Admission again = pool.admit(Keys({range(30, 37), {}}), 5, 4);
    CHECK(again.slots == List({3, 4, 7, 6, 1, 2, 5}) && again.leaving.slots == List({1, 2, 5}));
    CHECK(pool.find(Keys({{0}, {13}})) == List({0, -1}));
    OK(pool.evict(again.leaving.slots));
    OK(pool.release(again.of_missing()));
    CHECK(pool.admit(Keys({range(30, 38), {}}), 6, 4).slots == List({1, 2, 3, 4, 5, 6, 7, 0}));
}

// Keys of a batch that are given slots some at a time: no slot is given twice, whether its record has left or not. Nor
// if the order of uses is compacted meanwhile, which happens after one of these numbers of batches: fails if
// choose_victims does not ask is_awaited_by.
void test_stretches(int64_t num_batches) {
    Pool pool(100);
    OK(pool.settle(pool.retrieve(one(range(0, 10)), 1, 1).slots, 3));  // all are dirty
    for (int64_t batch = 2; batch < num_batches; ++batch) pool.admit(one({2}), batch, batch);
    Admission room = Admission::room(96, 1);
    OK(pool.use_into(room, one(joined({2}, range(100, 195))), num_batches));
    CHECK(room.slots[0] == 2 && room.missing_offsets.back() == 95);
    const auto assign = [&](int64_t first, int64_t count) {
        List slots(at(count));
        const nestpipe_slot_records leaving = room.leaving.native();
        OK(nestpipe_slots_assign(pool.slots, num_batches, num_batches, room.missing.data() + first, count, slots.data(),
                                 room.slots.data(), 96, &leaving));
        return slots;
    };
    CHECK(assign(0, 92) == joined(range(10, 100), {0, 1}));
    OK(pool.fill(one(range(100, 190)), range(10, 100), num_batches));
    OK(pool.evict({0}));
    CHECK(assign(92, 3) == List({3, 4, 5}));
    CHECK(room.slots == joined({2}, joined(range(10, 100), {0, 1, 3, 4, 5})));
    // The batch is given up. What has not left may be chosen again, by another batch.
    OK(pool.release({0}));
    CHECK(pool.admit(one(range(20, 28)), num_batches + 1, num_batches).slots == List({0, 1, 3, 4, 5, 6, 7, 8}));
}

// A slot that a failed admission has used is a victim later, once, and not before its batch is out of flight.
void test_too_few_slots() {
    Pool pool(4);
    pool.retrieve(one({1, 2, 3}), 1, 1);
    Admission none{{}, {}, Records(0, 0)};
    for (int round = 0; round < 3; ++round) {
        REFUSED(bad,
                "the keys of batch 3 that are not resident need 4 slots, but only 3 are free or may be evicted; "
                "grow the pool first",
                pool.try_admit(one({2, 10, 11, 12, 13}), 3, 2, none));
        CHECK(pool.find(one({1, 2, 3, 10})) == List({0, 1, 2, -1}) && pool.counts().num_free == 1);
    }
    REFUSED(bad, "need 4 slots, but only 1 are free", pool.try_admit(one({20, 21, 22, 23}), 3, 1, none));
    OK(nestpipe_slots_grow(pool.slots, 5));
    const Admission some = pool.admit(one({2, 10, 11, 12, 13}), 3, 2);
    CHECK(some.slots == List({1, 3, 4, 0, 2}));
    OK(pool.fill(one({10, 11, 12, 13}), {3, 4, 0, 2}, 3));
    // 2 is listed once, before the others of batch 3.
    CHECK(pool.admit(one({20}), 4, 4).slots == List({1}));
    CHECK(pool.admit(one({21, 22}), 4, 4).slots == List({3, 4}));
    CHECK(pool.admit(one({23, 24}), 4, 4).slots == List({0, 2}));
}

// Two batches claim a key. It is claimed until one is applied, or until neither can be.
void test_claims() {
    for (const int64_t first_step : {-1, 7})
        for (const int64_t second_step : {-1, 8}) {
            Pool pool(4);
            CHECK(pool.claim(pool.retrieve(one({1, 2}), 1, 1, false).slots) == List({2}));
            CHECK(pool.claim(pool.retrieve(one({2, 3}), 2, 1, false).slots) == List({3}));
            OK(pool.settle({0, 1}, first_step));
            CHECK(pool.claim({}) == List({first_step < 0 ? 2 : 3}));
            OK(pool.settle({1, 2}, second_step));
            const int64_t num_left = first_step < 0 ? (second_step < 0 ? 0 : 2) : (second_step < 0 ? 2 : 3);
            CHECK(pool.claim({}) == List({num_left}) && size_of(pool.dirty().slots) == num_left);
            OK(pool.clean(pool.dirty().slots));
            CHECK(pool.claim(range(0, 3)) == List({3 - num_left}));  // those that exist are stored
        }
    Pool other(2);  // nor is a claimed slot forgotten when the search for victims has passed it
    CHECK(other.claim(other.retrieve(one({1}), 1, 1, false).slots) == List({1}));
    for (int64_t batch = 2; batch <= 4; ++batch) CHECK(other.retrieve(one({batch}), batch, batch).slots == List({1}));
    OK(other.settle({0}, -1));
    CHECK(other.admit(one({5, 6}), 5, 5).slots == List({0, 1}));
    Pool pool(2);  // a claimed slot is no victim
    CHECK(pool.claim(pool.retrieve(one({1, 2}), 1, 1, false).slots) == List({2}));
    Admission none{{}, {}, Records(0, 0)};
    REFUSED(bad, "only 0 are free", pool.try_admit(one({3}), 5, 5, none));
    OK(pool.settle({1}, -1));
    CHECK(pool.admit(one({3}), 5, 5).slots == List({1}) && pool.claim({}) == List({1}));
    for (int i = 1; i < 255; ++i) pool.claim({0});
    int64_t num_rows;
    const List wrong{0, 1, 2};
    const auto claim = [&](int64_t slot) { return nestpipe_slots_claim(pool.slots, &wrong[at(slot)], 1, &num_rows); };
    REFUSED(bad, "is claimed too often", claim(0));
    REFUSED(bad, "a slot that holds no key", claim(1));
    REFUSED(bad, "the pool has 2 slots", claim(2));
}

void test_refusals() {
    Pool pool(6, 2);
    const Keys all({{1, 2, 3, 4}, {1, 2, 5, 6}});
    pool.retrieve(Keys({{1, 2}, {1}}), 1, 1);  // slots 0, 1, 2
    OK(pool.settle({0, 1}, 3));
    const Admission admission = pool.admit(Keys({{2, 3}, {5, 6}}), 3, 3);  // 1; 3, 4, 5
    const Admission more = pool.admit(Keys({{4}, {2}}), 3, 3);             // 2 is taken, 0 leaves
    CHECK(more.slots == List({2, 0}) && admission.slots == List({1, 3, 4, 5}));
    const State before = state(pool, all);
    const auto refused = [&](const char* why, const std::function<nestpipe_status()>& call) {
        REFUSED(bad, why, call());
        CHECK(state(pool, all) == before);
    };
    const std::map<std::string, std::function<nestpipe_status(const List&)>> lists{
        {"evict", [&](const List& list) { return pool.evict(list); }},
        {"release", [&](const List& list) { return pool.release(list); }},
        {"clean", [&](const List& list) { return pool.clean(list); }},
        {"settle", [&](const List& list) { return pool.settle(list, 4); }},
        {"not applied", [&](const List& list) { return pool.settle(list, -1); }},
        {"fill", [&](const List& list) { return pool.fill(Keys({range(20, 20 + size_of(list)), {}}), list, 4); }}};
    const auto each = [&](const List& list, const char* why, const std::vector<std::string>& names) {
        for (const std::string& name : names) refused(why, [&] { return lists.at(name)(list); });
    };
    const std::vector<std::string> resident{"evict", "clean", "settle", "not applied"}, taken{"release", "fill"};
    for (const auto& names : {resident, taken}) {
        each({6}, "slots[0] is 6: the pool has 6 slots", names);
        each({INT64_MAX}, "the pool has 6 slots", names);
        each({-1}, "slots[0] is -1", names);
    }
    each({3}, "slots[0] is 3, a slot that holds no key", resident);
    each({3, 0}, "slots[1] is 0, a slot that holds a key", taken);
    each({1}, "slots[0] is 1, a slot that no batch waits for", {"evict"});
    each({0}, "a slot that is to be evicted", {"settle", "not applied"});
    refused("must be at least 3", [&] { return pool.fill(Keys({{3}, {}}), {3}, 2); });
    refused("keys[1] is 2, a key of table 0 that is resident already or in the list twice",
            [&] { return pool.fill(Keys({{3, 2}, {}}), {3, 4}, 3); });
    refused("keys[2] is 3, a key of table 0", [&] { return pool.fill(Keys({{3, 4, 3}, {}}), {3, 4, 5}, 3); });
    Admission none{{}, {}, Records(0, 0)};
    refused("batch is 2, must be at least 3", [&] { return pool.try_admit(all, 2, 1, none); });
    const Keys some({{2, 7}, {8}});
    refused("first_in_flight is 5, must be 0 .. batch = 4", [&] { return pool.try_admit(some, 4, 5, none); });
    refused("first_in_flight is -1", [&] { return pool.try_admit(some, 4, -1, none); });
    Admission used = Admission::room(3, 2);
    OK(pool.use_into(used, some, 4));
    refused("batch is 3, must be the last that has used slots, 4", [&] { return pool.assign_into(used, 3, 3); });
    used.missing[0] = 3;
    refused("missing[0] is 3, outside of an array of 3", [&] { return pool.assign_into(used, 4, 3); });
    refused("step is -2", [&] { return pool.settle({1}, -2); });
    refused("num_slots is 5, must be 6", [&] { return nestpipe_slots_grow(pool.slots, 5); });
    refused("num_slots is 4294967295", [&] { return nestpipe_slots_grow(pool.slots, 4294967295); });
    Keys wrong = all;
    wrong.offsets[1] = 9;
    refused("offsets of 2 tables do not rise", [&] { return pool.try_admit(wrong, 4, 1, none); });
    refused("offsets of 2 tables do not rise", [&] { return pool.fill(wrong, range(0, 8), 4); });
    nestpipe_slot_records room{nullptr, nullptr, nullptr, nullptr, 0};
    refused("offsets of the room is a null", [&] { return nestpipe_slots_dirty(pool.slots, &room); });
    int64_t offsets[3];
    room.offsets = offsets;
    REFUSED(NESTPIPE_CHANGED, "there are 2 dirty slots, and room for 0", nestpipe_slots_dirty(pool.slots, &room));
    OK(pool.evict({0}));
    OK(pool.release({0, 2, 3, 4, 5}));
    for (const std::string& name : taken) REFUSED(bad, "a slot that is free", lists.at(name)({3}));
    nestpipe_slots* created;
    const uint64_t salt = 1;
    REFUSED(bad, "num_tables is 0", nestpipe_slots_create(&salt, 0, 1, 1, &created));
    REFUSED(bad, "num_threads is 0", nestpipe_slots_create(&salt, 1, 1, 0, &created));
    REFUSED(bad, "slots is a null", nestpipe_slots_clear(nullptr));
    REFUSED(bad, "list of slots is a null", nestpipe_slots_evict(pool.slots, nullptr, 1));
    OK(nestpipe_slots_destroy(nullptr));
}

}  // namespace

int main() {
    test_a_batch();
    test_order_of_victims();
    for (const int64_t num_batches : {2, 4200, 4240, 4280}) test_stretches(num_batches);
    test_too_few_slots();
    test_claims();
    test_refusals();
    return 0;
}
