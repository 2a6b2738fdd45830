// Calls on several tables have the effect of one call on each table, all at once or not at all.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "failing_new.hpp"

namespace {

constexpr int64_t kDim = 3, kState = 2, kColumns = kDim + kState, kStride = kColumns + 2;
constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;

size_t at(int64_t i) { return static_cast<size_t>(i); }

// Keys of several tables, each with a record at a place of one array.
struct Keys {
    std::vector<int32_t> tables;
    std::vector<int64_t> offsets{0}, keys, places;
    std::vector<float> records;

    int64_t num_tables() const { return static_cast<int64_t>(tables.size()); }
    int64_t size() const { return static_cast<int64_t>(keys.size()); }
    int64_t room() const { return size() + 3; }

    void add(int32_t table, const std::vector<int64_t>& more) {
        tables.push_back(table);
        keys.insert(keys.end(), more.begin(), more.end());
        offsets.push_back(size());
    }
    void place(uint64_t seed) {
        std::mt19937_64 random(seed);
        places.resize(at(room()));
        std::iota(places.begin(), places.end(), 0);
        std::shuffle(places.begin(), places.end(), random);
        places.resize(keys.size());
        records.resize(at(room() * kStride));
        for (auto& value : records) value = static_cast<float>(random() % 100000);
    }
};

struct Fixture {
    nestpipe_store* store = nullptr;
    std::vector<std::string> names;

    // The table in the middle may have a limit.
    explicit Fixture(int32_t num_tables, int64_t max_rows = 0) {
        OK(nestpipe_store_create(&store));
        for (int32_t t = 0; t < num_tables; ++t) names.push_back("table" + std::to_string(t));
        for (int32_t t = 0; t < num_tables; ++t) {
            nestpipe_table_spec spec = small_table(names[at(t)].c_str(), kDim, kState);
            if (t == num_tables / 2) spec.max_rows = max_rows;
            int32_t number;
            OK(nestpipe_table_create(store, &spec, &number));
            CHECK(number == t);
        }
    }
    ~Fixture() { nestpipe_store_destroy(store); }

    nestpipe_status scatter(const Keys& call, int64_t step, int32_t num_threads, bool with_places = true) {
        return nestpipe_scatter_tables(store, call.tables.data(), call.offsets.data(), call.num_tables(),
                                       call.keys.data(), call.size(), with_places ? call.places.data() : nullptr,
                                       call.records.data(), call.room(), kStride, nullptr, step, num_threads);
    }
    // One call for each key.
    void scatter_each(const Keys& call, int64_t step) {
        for (int64_t t = 0; t < call.num_tables(); ++t)
            for (int64_t i = call.offsets[at(t)]; i < call.offsets[at(t + 1)]; ++i)
                OK(nestpipe_scatter(store, call.tables[at(t)], &call.keys[at(i)], 1,
                                    &call.records[at(call.places[at(i)] * kStride)], kColumns * 4, step, 1));
    }
    nestpipe_status gather(const Keys& call, int64_t num_columns, std::vector<float>& out, std::vector<uint8_t>& found,
                           int32_t num_threads) {
        out.assign(at(call.room() * kStride), -1.0f);
        found.assign(at(call.size()), 7);
        return nestpipe_gather_tables(store, call.tables.data(), call.offsets.data(), call.num_tables(),
                                      call.keys.data(), call.size(), call.places.data(), num_columns, out.data(),
                                      call.room(), kStride, found.data(), num_threads);
    }
    void gather_each(const Keys& call, int64_t num_columns, std::vector<float>& out, std::vector<uint8_t>& found) {
        out.assign(at(call.room() * kStride), -1.0f);
        found.assign(at(call.size()), 7);
        for (int64_t t = 0; t < call.num_tables(); ++t)
            for (int64_t i = call.offsets[at(t)]; i < call.offsets[at(t + 1)]; ++i)
                OK(nestpipe_gather(store, call.tables[at(t)], &call.keys[at(i)], 1, num_columns,
                                   &out[at(call.places[at(i)] * kStride)], num_columns * 4, &found[at(i)], nullptr, 1));
    }

    // Everything a table holds, and its memory: the index of a refused call may stay larger, so where it is large the
    // memory mapped is left out.
    std::vector<std::vector<int64_t>> state() {
        std::vector<std::vector<int64_t>> all;
        for (int32_t t = 0; t < static_cast<int32_t>(names.size()); ++t) {
            std::vector<int64_t> one(4);
            OK(nestpipe_digest(store, t, reinterpret_cast<uint8_t*>(one.data()), 1));
            nestpipe_memory_report memory;
            OK(nestpipe_table_memory(store, t, &memory));
            const int64_t mapped = memory.index_bytes > 4096 ? 0 : memory.mapped_bytes;
            one.insert(one.end(), {memory.num_rows, memory.metadata_bytes, memory.erased_bytes, mapped});
            all.push_back(one);
        }
        return all;
    }
};

std::vector<int64_t> some_keys(int64_t count, uint64_t seed, int64_t range) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> keys(at(count));
    for (auto& key : keys) key = static_cast<int64_t>(random() % static_cast<uint64_t>(range)) * 7919;
    return keys;
}

// Tables of any size in any order, repeated keys among them; a table without keys at the start, in between, at the end.
Keys mixed_keys(int32_t num_tables, int64_t most, uint64_t seed) {
    Keys call;
    std::mt19937_64 random(seed);
    std::vector<int32_t> order(at(num_tables));
    std::iota(order.begin(), order.end(), 0);
    if (seed % 2 == 1) std::shuffle(order.begin(), order.end(), random);
    for (int32_t t = 0; t < num_tables; ++t) {
        const bool empty = t == 0 || t == num_tables / 3 || t == num_tables / 3 + 1 || t == num_tables - 1;
        const auto count = empty ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(most));
        call.add(order[at(t)], some_keys(count, random(), most));
    }
    call.place(random());
    return call;
}

void test_same_as_one_call_each() {
    // At most 60 tables: ThreadSanitizer knows no more than 64 locks of one thread.
    for (const auto& [num_tables, most] : std::map<int32_t, int64_t>{{1, 10}, {5, 2}, {13, 9000}, {60, 1500}}) {
        for (const int32_t num_threads : {1, 2, 5}) {
            Fixture one(num_tables), f(num_tables);
            for (uint64_t round = 0; round < 4; ++round) {
                const Keys call = mixed_keys(num_tables, most, round);
                one.scatter_each(call, static_cast<int64_t>(round));
                OK(f.scatter(call, static_cast<int64_t>(round), num_threads));
                CHECK(f.state() == one.state());
                const Keys other = mixed_keys(num_tables, 2 * most, round + 10);
                for (const int64_t num_columns : {kDim, kColumns}) {
                    std::vector<float> out, expected;
                    std::vector<uint8_t> found, expected_found;
                    OK(f.gather(other, num_columns, out, found, num_threads));
                    one.gather_each(other, num_columns, expected, expected_found);
                    CHECK(out == expected && found == expected_found);
                    std::fill(found.begin(), found.end(), 9);
                    OK(nestpipe_find_tables(f.store, other.tables.data(), other.offsets.data(), num_tables,
                                            other.keys.data(), other.size(), found.data(), num_threads));
                    CHECK(found == expected_found);
                }
                std::vector<int64_t> sizes(at(num_tables), -1);
                OK(nestpipe_table_sizes(f.store, call.tables.data(), num_tables, sizes.data()));
                for (size_t t = 0; t < sizes.size(); ++t) {
                    int64_t size;
                    OK(nestpipe_table_size(one.store, call.tables[t], &size));
                    CHECK(sizes[t] == size);
                }
            }
        }
    }
}

void test_last_of_repeated_keys_stays() {
    for (const int32_t num_threads : {1, 3}) {
        Fixture f(2);
        Keys call;
        for (const int32_t table : {1, 0}) call.add(table, std::vector<int64_t>(at(40000), 5));
        call.place(0);
        for (int64_t i = 0; i < call.room(); ++i) call.records[at(i * kStride)] = static_cast<float>(i);
        OK(f.scatter(call, 3, num_threads, false));
        for (const int32_t table : {0, 1}) {
            const int64_t key = 5;
            float row[kDim];
            int64_t step;
            OK(nestpipe_gather(f.store, table, &key, 1, kDim, row, sizeof row, nullptr, &step, 1));
            CHECK(row[0] == (table == 0 ? 79999.0f : 39999.0f) && step == 3);
        }
    }
}

// A table without room for the last of its keys: no table has changed, and each goes on as if nothing had been tried.
void test_full_table_changes_nothing() {
    constexpr int32_t kTables = 7;
    for (const int32_t num_threads : {1, 2}) {
        Fixture f(kTables, 900), untouched(kTables, 900);
        Keys first, more, last;
        for (int32_t t = 0; t < kTables; ++t) {
            std::vector<int64_t> keys(at(800)), many(at(t == kTables / 2 ? 500 : 6000));
            std::iota(keys.begin(), keys.end(), 0);
            std::iota(many.begin(), many.end(), 750);  // 50 are known
            first.add(t, keys);
            more.add(kTables - 1 - t, many);
            last.add(t, {-1, -2, -3, -4, -5, 3, 790});
        }
        for (Keys* call : {&first, &more, &last}) call->place(7);
        for (Fixture* each : {&f, &untouched}) {
            OK(each->scatter(first, 1, num_threads));
            for (int32_t t = 0; t < kTables; ++t)
                OK(nestpipe_erase(each->store, t, first.keys.data(), 10 + t, nullptr));
        }
        const auto before = f.state();
        REFUSED(NESTPIPE_TABLE_FULL, "'table3' is full", f.scatter(more, 2, num_threads));
        CHECK(f.state() == before);
        // The same records are used next, in the same order: what follows leaves both stores in one state.
        for (Fixture* each : {&f, &untouched}) OK(each->scatter(last, 3, num_threads));
        CHECK(f.state() == untouched.state());
    }
}

// Every allocation of a call fails once.
void test_no_memory() {
    constexpr int32_t kTables = 6;
    Keys first, more;
    for (int32_t t = 0; t < kTables; ++t) {
        first.add(t, some_keys(500, static_cast<uint64_t>(t), 1 << 20));
        more.add(t, some_keys(t % 2 == 0 ? 6000 : 100, static_cast<uint64_t>(t), 1 << 20));
    }
    std::reverse(more.tables.begin(), more.tables.end());  // so that the order of locks is allocated, too
    first.place(1);
    more.place(2);
    for (int64_t k = 0;; ++k) {
        Fixture f(kTables);
        OK(f.scatter(first, 1, 1));
        const auto before = f.state();
        allocations_left = k;
        const nestpipe_status status = f.scatter(more, 2, 1);
        allocations_left = INT64_MAX;
        if (status == NESTPIPE_OK) {
            CHECK(k > 4 && f.state() != before);
            return;
        }
        CHECK(status == NESTPIPE_OUT_OF_MEMORY && std::strcmp(nestpipe_last_error(), "out of memory") == 0);
        CHECK(f.state() == before && k < 1000);
    }
}

void test_first_keys_without_memory() {  // an arena has no blocks yet: each table allocates
    constexpr int32_t kTables = 6;
    const Keys call = mixed_keys(kTables, 200, 3);
    for (int64_t k = 0;; ++k) {
        Fixture f(kTables);
        const auto before = f.state();
        allocations_left = k;
        const nestpipe_status result = f.scatter(call, 2, 1);
        allocations_left = INT64_MAX;
        if (result == NESTPIPE_OK) {
            CHECK(k > 6);
            return;
        }
        CHECK(result == NESTPIPE_OUT_OF_MEMORY && f.state() == before && k < 1000);
        OK(f.scatter(call, 2, 1));
    }
}

// Readers and writers of the same tables in different orders: no thread waits forever, and none sees half a call.
void test_threads() {
    constexpr int32_t kTables = 8, kKeys = 1500;
    Fixture f(kTables);
    const auto work = [&](uint64_t seed) {
        std::mt19937_64 random(seed);
        std::vector<int32_t> order(at(kTables));
        std::iota(order.begin(), order.end(), 0);
        for (int round = 0; round < 25; ++round) {
            std::shuffle(order.begin(), order.end(), random);
            Keys call;
            for (const int32_t table : order) {
                std::vector<int64_t> keys(at(kKeys));
                std::iota(keys.begin(), keys.end(), 0);
                call.add(table, keys);
            }
            call.place(random());
            std::fill(call.records.begin(), call.records.end(), static_cast<float>(random() % 1000 + 1));
            std::vector<float> out;
            std::vector<uint8_t> found;
            OK(f.scatter(call, round, 2));
            OK(f.gather(call, kColumns, out, found, 2));
            const float value = out[at(call.places[0] * kStride)];
            for (const int64_t place : call.places)
                for (int64_t j = 0; j < kColumns; ++j) CHECK(out[at(place * kStride + j)] == value);
            OK(nestpipe_find_tables(f.store, call.tables.data(), call.offsets.data(), kTables, call.keys.data(),
                                    call.size(), found.data(), 2));
            CHECK(std::count(found.begin(), found.end(), 1) == call.size());
        }
    };
    std::vector<std::thread> threads;
    for (uint64_t seed = 0; seed < 3; ++seed) threads.emplace_back(work, seed);
    for (auto& thread : threads) thread.join();
}

void test_refusals() {
    Fixture f(4);
    const auto spec = small_table("wide", kDim + 1, kState);
    auto doubles = small_table("doubles", kDim, kState), split = small_table("split", kDim + 1, kState - 1);
    doubles.dtype = NESTPIPE_FLOAT64;
    int32_t wide, twice_as_long, divided;
    OK(nestpipe_table_create(f.store, &spec, &wide));
    OK(nestpipe_table_create(f.store, &doubles, &twice_as_long));
    OK(nestpipe_table_create(f.store, &split, &divided));
    Keys good;
    for (const int32_t table : {2, 0}) good.add(table, {1, 2, 3});
    good.place(1);
    const auto before = f.state();
    std::vector<float> out;
    std::vector<uint8_t> found;
    const auto refused = [&](const Keys& call, const char* why) {
        REFUSED(bad, why, f.gather(call, kColumns, out, found, 1));
        CHECK(std::all_of(out.begin(), out.end(), [](float value) { return value == -1.0f; }));
        REFUSED(bad, why, f.scatter(call, 1, 1));
        CHECK(f.state() == before);
    };
    Keys call = good;
    call.tables = {2, 2};
    refused(call, "table 'table2' is given twice");
    REFUSED(bad, "is given twice",
            nestpipe_find_tables(f.store, &call.tables[0], &call.offsets[0], 2, &call.keys[0], 6, found.data(), 1));
    call.tables = {2, 99};
    refused(call, "no table number 99");
    int64_t sizes[2];
    REFUSED(bad, "no table number 99", nestpipe_table_sizes(f.store, call.tables.data(), 2, sizes));
    REFUSED(bad, "sizes is a null pointer", nestpipe_table_sizes(f.store, call.tables.data(), 1, nullptr));
    call.tables = {2, wide};
    refused(call, "'table2' has 5 columns of 4 bytes, table 'wide' has 6 columns of 4 bytes");
    call.tables = {2, twice_as_long};
    refused(call, "'table2' has 5 columns of 4 bytes, table 'doubles' has 5 columns of 8 bytes");
    call.tables = {2, divided};
    REFUSED(bad, "gather from table 'split': num_columns is 3", f.gather(call, kDim, out, found, 1));
    OK(f.gather(call, kColumns, out, found, 1));
    call = good;
    for (const auto& offsets : std::vector<std::vector<int64_t>>{{1, 3, 6}, {0, 3, 5}, {0, 7, 6}, {0, -1, 6}}) {
        call.offsets = offsets;
        refused(call, "offsets of 2 tables do not rise from 0 to the number of keys, 6");
    }
    call = good;
    call.places[4] = call.room();
    refused(call, "places[4] is 9, outside of an array of 9");
    REFUSED(bad, "step is -1", f.scatter(good, -1, 1));
    REFUSED(bad, "num_threads is 0", f.scatter(good, 1, 0));
    REFUSED(bad, "offsets is a null pointer",
            nestpipe_gather_tables(f.store, good.tables.data(), nullptr, 2, good.keys.data(), 6, nullptr, kColumns,
                                   out.data(), 9, kStride, nullptr, 1));
    REFUSED(bad, "out has 5 records for 6 keys and no places",
            nestpipe_gather_tables(f.store, good.tables.data(), good.offsets.data(), 2, good.keys.data(), 6, nullptr,
                                   kColumns, out.data(), 5, kStride, nullptr, 1));
    CHECK(f.state() == before);
}

void test_nothing_to_do() {
    Fixture f(3);
    const auto before = f.state();
    const int64_t zeros[4] = {0, 0, 0, 0};
    const int32_t tables[3] = {2, 1, 0};
    for (const int64_t num_tables : {0, 1, 3}) {
        OK(nestpipe_gather_tables(f.store, tables, zeros, num_tables, nullptr, 0, nullptr, kColumns, nullptr, 0,
                                  kColumns, nullptr, 2));
        OK(nestpipe_scatter_tables(f.store, tables, zeros, num_tables, nullptr, 0, nullptr, nullptr, 0, kColumns,
                                   nullptr, 1, 2));
        OK(nestpipe_find_tables(f.store, tables, zeros, num_tables, nullptr, 0, nullptr, 2));
        OK(nestpipe_match_tables(nullptr, 0, zeros, nullptr, 0, zeros, num_tables, nullptr, 2));
    }
    OK(nestpipe_table_sizes(f.store, nullptr, 0, nullptr));
    CHECK(f.state() == before);
}

}  // namespace

int main() {
    test_same_as_one_call_each();
    test_last_of_repeated_keys_stays();
    test_full_table_changes_nothing();
    test_no_memory();
    test_first_keys_without_memory();
    test_threads();
    test_refusals();
    test_nothing_to_do();
}
