// The C interface: effects of each call, and refusals, which change nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.hpp"

namespace {

constexpr int64_t kDim = 3, kState = 2, kColumns = kDim + kState;

struct Fixture {
    nestpipe_store* store = nullptr;
    int32_t table = -1;

    explicit Fixture(int64_t max_rows = 0) {
        OK(nestpipe_store_create(&store));
        nestpipe_table_spec spec = small_table("item", kDim, kState);
        spec.max_rows = max_rows;
        OK(nestpipe_table_create(store, &spec, &table));
    }
    ~Fixture() { nestpipe_store_destroy(store); }

    nestpipe_status scatter(const std::vector<int64_t>& keys, float value, int64_t step, int32_t num_threads = 1) {
        const std::vector<float> records(keys.size() * kColumns, value);
        return nestpipe_scatter(store, table, keys.data(), static_cast<int64_t>(keys.size()), records.data(),
                                static_cast<int64_t>(records.size() * sizeof(float)), step, num_threads);
    }
    int64_t size() {
        int64_t num_rows;
        OK(nestpipe_table_size(store, table, &num_rows));
        return num_rows;
    }
    std::vector<uint8_t> digest() {
        std::vector<uint8_t> sum(32);
        OK(nestpipe_digest(store, table, sum.data(), 2));
        return sum;
    }
    float first_column(int64_t key) {
        float row[kDim];
        OK(nestpipe_gather(store, table, &key, 1, kDim, row, sizeof row, nullptr, nullptr, 1));
        return row[0];
    }
};

void test_gather_never_inserts() {
    Fixture f;
    const int64_t keys[2] = {5, -1};
    float out[2 * kColumns];
    uint8_t found[2];
    int64_t steps[2];
    OK(nestpipe_gather(f.store, f.table, keys, 2, kColumns, out, sizeof out, found, steps, 1));
    CHECK(found[0] == 0 && found[1] == 0 && steps[0] == -1 && f.size() == 0);
    CHECK(out[0] != out[kColumns] && std::abs(out[0]) < 0.2f && out[kDim] == 0.5f);
    OK(f.scatter({5}, 2.0f, 9));
    OK(nestpipe_gather(f.store, f.table, keys, 2, kColumns, out, sizeof out, found, steps, 1));
    CHECK(found[0] == 1 && found[1] == 0 && steps[0] == 9 && out[kColumns - 1] == 2.0f && f.size() == 1);
}

void test_last_of_repeated_keys_stays() {
    for (int32_t num_threads : {1, 2, 3}) {
        Fixture f;
        std::vector<int64_t> keys(150000);  // enough for several threads
        for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i % 1000);
        std::vector<float> records(keys.size() * kColumns);
        for (size_t i = 0; i < keys.size(); ++i)
            std::fill_n(records.begin() + static_cast<int64_t>(i) * kColumns, kColumns, static_cast<float>(i));
        for (int round = 0; round < 2; ++round) {  // inserting, then overwriting
            OK(nestpipe_scatter(f.store, f.table, keys.data(), 150000, records.data(),
                                static_cast<int64_t>(records.size() * sizeof(float)), 1, num_threads));
            CHECK(f.size() == 1000);
            for (int64_t key = 0; key < 1000; ++key) CHECK(f.first_column(key) == static_cast<float>(149000 + key));
        }
    }
}

// However the keys are cut into pieces: every one is found, read and written, repeated ones in order.
void test_any_count_and_threads() {
    for (const int64_t count : {1, 63, 8191, 8193, 150001}) {
        std::vector<int64_t> keys(static_cast<size_t>(count));
        std::vector<float> records(keys.size() * kColumns);
        for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i % 100000) * 7919;
        for (size_t i = 0; i < records.size(); ++i) records[i] = static_cast<float>(i);
        const auto bytes = static_cast<int64_t>(records.size() * sizeof(float));
        Fixture one;
        OK(nestpipe_scatter(one.store, one.table, keys.data(), count, records.data(), bytes, 1, 1));
        for (const int32_t num_threads : {2, 7, 16}) {
            Fixture f;
            OK(nestpipe_scatter(f.store, f.table, keys.data(), count, records.data(), bytes, 1, num_threads));
            CHECK(f.digest() == one.digest());
            std::vector<float> out(records.size());
            std::vector<uint8_t> found(keys.size(), 7), found_alone(keys.size(), 7);
            OK(nestpipe_gather(f.store, f.table, keys.data(), count, kColumns, out.data(), bytes, found.data(), nullptr,
                               num_threads));
            OK(nestpipe_find(f.store, f.table, keys.data(), count, found_alone.data(), num_threads));
            CHECK(found == found_alone && std::count(found.begin(), found.end(), 1) == count);
            for (size_t i = 0; i < keys.size(); ++i) {
                const size_t last = i + 100000 < keys.size() ? i + 100000 : i;
                CHECK(std::equal(&out[i * kColumns], &out[i * kColumns] + kColumns, &records[last * kColumns]));
            }
        }
    }
}

// Records further apart than they are long, at places or one behind the other: what lies between them stays.
void test_stride() {
    constexpr int64_t kKeys = 110001, kRoom = kKeys + 5, kStride = kColumns + 3;
    std::vector<int64_t> keys(kKeys), places(kKeys);
    for (size_t i = 0; i < kKeys; ++i) keys[i] = static_cast<int64_t>(i) * 31;
    for (size_t i = 0; i < kKeys; ++i)
        places[i] = static_cast<int64_t>((i * 7 + 3) % kRoom);     // 7 does not divide 110006
    std::vector<float> records((kRoom - 1) * kStride + kColumns);  // the last one has nothing behind it
    for (size_t i = 0; i < records.size(); ++i) records[i] = static_cast<float>(i);
    for (const int64_t* at : {static_cast<const int64_t*>(nullptr), static_cast<const int64_t*>(places.data())}) {
        for (const int32_t num_threads : {1, 3}) {
            Fixture f;
            std::vector<float> out(records.size(), -1.0f), expected(records.size(), -1.0f);
            std::vector<uint8_t> found(kKeys);
            const int64_t offsets[] = {0, kKeys};
            OK(nestpipe_scatter_tables(f.store, &f.table, offsets, 1, keys.data(), kKeys, at, records.data(), kRoom,
                                       kStride, nullptr, 1, num_threads));
            OK(nestpipe_gather_tables(f.store, &f.table, offsets, 1, keys.data(), kKeys, at, kColumns, out.data(),
                                      kRoom, kStride, found.data(), num_threads));
            for (int64_t i = 0; i < kKeys; ++i) {
                const int64_t first = (at == nullptr ? i : at[i]) * kStride;
                std::copy_n(records.begin() + first, kColumns, expected.begin() + first);
            }
            CHECK(out == expected && f.size() == kKeys && std::count(found.begin(), found.end(), 1) == kKeys);
        }
    }
}

// Each record has a step of its own. If a key occurs twice, its last one stays.
void test_steps_of_records() {
    constexpr int64_t kKeys = 40000;
    for (const int32_t num_threads : {1, 3}) {
        Fixture f;
        std::vector<int64_t> keys(kKeys), steps(kKeys), stored(kKeys);
        for (size_t i = 0; i < kKeys; ++i) {
            keys[i] = static_cast<int64_t>(i) * 31;
            steps[i] = static_cast<int64_t>(i * 17 % 1009);
        }
        keys.back() = keys.front();
        const std::vector<float> records(kKeys * kColumns, 2.0f);
        std::vector<float> out(records.size());
        const int64_t offsets[] = {0, kKeys};
        const auto scatter = [&] {
            return nestpipe_scatter_tables(f.store, &f.table, offsets, 1, keys.data(), kKeys, nullptr, records.data(),
                                           kKeys, kColumns, steps.data(), -1, num_threads);
        };
        OK(scatter());
        OK(nestpipe_gather(f.store, f.table, keys.data(), kKeys, kColumns, out.data(), kKeys * kColumns * 4, nullptr,
                           stored.data(), num_threads));
        CHECK(stored.front() == steps.back() && std::equal(stored.begin() + 1, stored.end(), steps.begin() + 1));
        keys.front() = -1;
        steps[12345] = -2;
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "steps[12345] is -2, must be >= 0", scatter());
        CHECK(f.size() == kKeys - 1);
    }
}

void test_stride_refusals() {
    Fixture f;
    const int64_t keys[2] = {1, 2};
    const int64_t outside[2] = {0, 2};
    float records[2 * kColumns] = {};
    const int64_t offsets[] = {0, 2};
    constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;
    const auto gather = [&](const int64_t* places, int64_t num_out, int64_t stride) {
        return nestpipe_gather_tables(f.store, &f.table, offsets, 1, keys, 2, places, kColumns, records, num_out,
                                      stride, nullptr, 1);
    };
    const auto scatter = [&](const int64_t* places, int64_t num_records, int64_t stride) {
        return nestpipe_scatter_tables(f.store, &f.table, offsets, 1, keys, 2, places, records, num_records, stride,
                                       nullptr, 1, 1);
    };
    for (const int64_t stride : {kColumns - 1, int64_t{0}, -kColumns, INT64_MIN}) {
        REFUSED(bad, "out has records that overlap", gather(nullptr, 2, stride));
        REFUSED(bad, "records has records that overlap", scatter(nullptr, 2, stride));
    }
    for (const int64_t stride : {INT64_MAX, INT64_MAX / 4, INT64_MAX / 8 + 1}) {
        REFUSED(bad, "out would have more than 2^63 bytes", gather(nullptr, 2, stride));
        REFUSED(bad, "records would have more than 2^63 bytes", scatter(nullptr, 2, stride));
    }
    REFUSED(bad, "places[1] is 2, outside of an array of 2", gather(outside, 2, kColumns));
    REFUSED(bad, "places[1] is 2, outside of an array of 2", scatter(outside, 2, kColumns));
    REFUSED(bad, "out has 1 records for 2 keys and no places", gather(nullptr, 1, kColumns));
    REFUSED(bad, "records has 1 records for 2 keys and no places", scatter(nullptr, 1, kColumns));
    REFUSED(bad, "must be 0 .. 2^40 - 1", gather(nullptr, -1, kColumns));
    REFUSED(
        bad, "records is a null pointer",
        nestpipe_scatter_tables(f.store, &f.table, offsets, 1, keys, 2, nullptr, nullptr, 2, kColumns, nullptr, 1, 1));
    CHECK(f.size() == 0);
}

void test_erase_reuses_records() {
    Fixture f;
    std::vector<int64_t> keys(5000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 1000003;
    OK(f.scatter(keys, 1.0f, 1));
    nestpipe_memory_report before, after;
    OK(nestpipe_table_memory(f.store, f.table, &before));
    for (int round = 0; round < 5; ++round) {
        int64_t num_erased;
        OK(nestpipe_erase(f.store, f.table, keys.data(), 3000, &num_erased));
        CHECK(num_erased == 3000 && f.size() == 2000);
        OK(nestpipe_erase(f.store, f.table, keys.data(), 3000, &num_erased));
        CHECK(num_erased == 0);
        CHECK(f.first_column(keys[0]) != 1.0f && f.first_column(keys[4000]) == 1.0f);
        OK(f.scatter(keys, 1.0f, 1));
        CHECK(f.size() == 5000);
    }
    OK(nestpipe_table_memory(f.store, f.table, &after));
    CHECK(after.metadata_bytes == before.metadata_bytes && after.erased_bytes == 0);
}

void test_pieces() {
    Fixture f, g;
    std::vector<int64_t> keys(20000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) - 10000;
    OK(f.scatter(keys, 1.5f, 3));
    OK(f.scatter({0, 1, 2}, 2.5f, 4));
    int64_t total = 0;
    for (int64_t first = 0; first < NESTPIPE_NUM_BUCKETS; first += 6000) {
        const int64_t end = std::min<int64_t>(first + 6000, NESTPIPE_NUM_BUCKETS);
        int64_t count;
        OK(nestpipe_count(f.store, f.table, first, end, &count));
        total += count;
        std::vector<int64_t> piece_keys(static_cast<size_t>(count)), steps(static_cast<size_t>(count));
        std::vector<float> records(static_cast<size_t>(count * kColumns));
        const auto bytes = static_cast<int64_t>(records.size() * sizeof(float));
        int64_t num_rows;
        OK(nestpipe_export(f.store, f.table, first, end, count, piece_keys.data(), records.data(), bytes, steps.data(),
                           &num_rows));
        CHECK(num_rows == count);
        OK(nestpipe_import(g.store, g.table, first, end, count, piece_keys.data(), records.data(), bytes, steps.data(),
                           2));
        REFUSED(NESTPIPE_CHANGED, "count again",
                nestpipe_export(f.store, f.table, first, end, count - 1, piece_keys.data(), records.data(),
                                bytes - kColumns * 4, steps.data(), &num_rows));
        if (first > 0)
            REFUSED(NESTPIPE_INVALID_ARGUMENT, "outside [0, 1)",
                    nestpipe_import(g.store, g.table, 0, 1, count, piece_keys.data(), records.data(), bytes,
                                    steps.data(), 1));
    }
    CHECK(total == 20000 && g.size() == 20000 && f.digest() == g.digest());
    OK(g.scatter({1}, 2.6f, 4));
    CHECK(f.digest() != g.digest());
}

void test_full_table_changes_nothing() {
    Fixture f(1000);
    std::vector<int64_t> keys(990);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
    OK(f.scatter(keys, 1.0f, 1));
    OK(nestpipe_erase(f.store, f.table, keys.data(), 5, nullptr));  // some records now come from the free list
    const auto digest = f.digest();
    std::vector<int64_t> more = {0, 989, 990};
    for (int64_t key = 2000; key < 2100; ++key) more.push_back(key);
    REFUSED(NESTPIPE_TABLE_FULL, "max_rows = 1000", f.scatter(more, 5.0f, 2));
    CHECK(f.digest() == digest && f.size() == 985);
    OK(f.scatter({0, 1, 2, 3, 4, 990, 991, 992, 993, 994, 995, 996, 997, 998, 999}, 1.0f, 1));
    CHECK(f.size() == 1000);
    OK(f.scatter({7, 8}, 3.0f, 2));  // what is there can still be written
    REFUSED(NESTPIPE_TABLE_FULL, "'item' is full", f.scatter({-5}, 1.0f, 2));
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "max_rows", nestpipe_table_reserve(f.store, f.table, 1001));
    OK(nestpipe_table_reserve(f.store, f.table, 1000));
}

void test_sizes_that_overflow() {
    Fixture f;
    const std::vector<double> state(1 << 20);
    nestpipe_table_spec spec = small_table("wide", 1 << 20, 1 << 20);
    spec.dtype = NESTPIPE_FLOAT64;
    spec.initial_state = state.data();
    int32_t wide;
    OK(nestpipe_table_create(f.store, &spec, &wide));
    const int64_t key = 1;
    double out[1];
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "more than 2^63 bytes",
            nestpipe_gather(f.store, wide, &key, (int64_t{1} << 40) - 1, 1 << 21, out, INT64_MIN, nullptr, nullptr, 1));
}

void test_refusals() {
    Fixture f;
    const int64_t key = 1;
    float record[kColumns] = {};
    constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;
    int32_t table;
    int64_t number;
    nestpipe_table_spec spec = small_table("item", 4);
    REFUSED(NESTPIPE_TABLE_EXISTS, "already has a table 'item'", nestpipe_table_create(f.store, &spec, &table));
    spec = small_table("", 4);
    REFUSED(bad, "needs a name", nestpipe_table_create(f.store, &spec, &table));
    spec = small_table("other", 0);
    REFUSED(bad, "dim is 0", nestpipe_table_create(f.store, &spec, &table));
    spec = small_table("other", 4, 2);
    spec.initial_state = nullptr;
    REFUSED(bad, "initial_state is a null pointer", nestpipe_table_create(f.store, &spec, &table));
    spec = small_table("other", 4);
    spec.initial_b = -1;
    REFUSED(bad, "standard deviation", nestpipe_table_create(f.store, &spec, &table));
    spec.initial_b = NAN;
    REFUSED(bad, "not finite", nestpipe_table_create(f.store, &spec, &table));
    spec.initial = 17;
    spec.initial_b = 1;
    REFUSED(bad, "unknown initial distribution 17", nestpipe_table_create(f.store, &spec, &table));
    REFUSED(bad, "store is a null pointer", nestpipe_store_create(nullptr));
    REFUSED(bad, "store is a null pointer", nestpipe_table_size(nullptr, 0, &number));
    REFUSED(bad, "no table number 1", nestpipe_table_size(f.store, 1, &number));
    REFUSED(bad, "num_rows is a null pointer", nestpipe_table_size(f.store, f.table, nullptr));
    REFUSED(bad, "keys is a null pointer", nestpipe_scatter(f.store, f.table, nullptr, 1, record, sizeof record, 0, 1));
    REFUSED(bad, "records is a null pointer",
            nestpipe_scatter(f.store, f.table, &key, 1, nullptr, sizeof record, 0, 1));
    REFUSED(bad, "has 16 bytes", nestpipe_scatter(f.store, f.table, &key, 1, record, 16, 0, 1));
    REFUSED(bad, "step is -1", nestpipe_scatter(f.store, f.table, &key, 1, record, sizeof record, -1, 1));
    REFUSED(bad, "num_threads is 0", nestpipe_scatter(f.store, f.table, &key, 1, record, sizeof record, 0, 0));
    REFUSED(bad, "num_keys is -1", nestpipe_scatter(f.store, f.table, &key, -1, record, sizeof record, 0, 1));
    REFUSED(bad, "out is a null pointer",
            nestpipe_gather(f.store, f.table, &key, 1, kDim, nullptr, 12, nullptr, nullptr, 1));
    REFUSED(bad, "num_columns is 4", nestpipe_gather(f.store, f.table, &key, 1, 4, record, 16, nullptr, nullptr, 1));
    REFUSED(bad, "found is a null pointer", nestpipe_find(f.store, f.table, &key, 1, nullptr, 1));
    REFUSED(bad, "overlap in memory", nestpipe_unique(&key, 1, &number, &number, &number, 1));
    REFUSED(bad, "not a range", nestpipe_count(f.store, f.table, 5, 4, &number));
    REFUSED(bad, "not a range", nestpipe_count(f.store, f.table, 0, 65537, &number));
    REFUSED(bad, "digest is a null pointer", nestpipe_digest(f.store, f.table, nullptr, 1));
    REFUSED(bad, "world_size is 0", nestpipe_group_by_owner("item", &key, 1, 0, &number, &number));
    REFUSED(bad, "table name is a null pointer", nestpipe_hash(nullptr, &key, 1, reinterpret_cast<uint64_t*>(&number)));
    CHECK(f.size() == 0);
    OK(nestpipe_scatter(f.store, f.table, nullptr, 0, nullptr, 0, 0, 1));  // nothing to do needs no memory
    OK(nestpipe_store_destroy(nullptr));
    CHECK(nestpipe_abi_version() == NESTPIPE_ABI_VERSION);
}

}  // namespace

int main() {
    test_gather_never_inserts();
    test_last_of_repeated_keys_stays();
    test_any_count_and_threads();
    test_stride();
    test_steps_of_records();
    test_stride_refusals();
    test_erase_reuses_records();
    test_pieces();
    test_full_table_changes_nothing();
    test_sizes_that_overflow();
    test_refusals();
    return 0;
}
