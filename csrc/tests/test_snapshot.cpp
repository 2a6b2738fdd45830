// A snapshot has the rows of the moment at which it began, whatever is written meanwhile.
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"
#include "mix.hpp"

namespace {

constexpr int64_t kDim = 3, kState = 1, kColumns = kDim + kState, kShards = 5;

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Row {
    std::vector<float> record;
    int64_t step;
    bool operator==(const Row& other) const { return record == other.record && step == other.step; }
};
using Rows = std::map<int64_t, Row>;

// A store with one table, and what the table should hold.
struct Tested {
    nestpipe_store* store = nullptr;
    int32_t table = 0;
    Rows rows;    // now
    Rows copied;  // by the snapshot so far
    std::mutex mutex;

    Tested() {
        OK(nestpipe_store_create(&store));
        const nestpipe_table_spec spec = small_table("t", kDim, kState);
        OK(nestpipe_table_create(store, &spec, &table));
    }
    ~Tested() { OK(nestpipe_store_destroy(store)); }

    void take(const std::vector<int64_t>& keys, const std::vector<float>& records, const std::vector<int64_t>& steps,
              int64_t num_rows) {
        std::lock_guard lock(mutex);
        for (int64_t i = 0; i < num_rows; ++i) {
            const auto first = records.begin() + i * kColumns;
            const bool is_new = copied.insert({keys[at(i)], {{first, first + kColumns}, steps[at(i)]}}).second;
            CHECK(is_new);
        }
    }

    void preserve(const std::vector<int64_t>& changing, int64_t capacity) {
        std::vector<int64_t> keys(at(capacity)), steps(at(capacity));
        std::vector<float> records(at(capacity * kColumns));
        const nestpipe_rows out{keys.data(), records.data(), steps.data(), capacity, kColumns};
        int64_t num_rows = 0, num_done = 0;
        for (size_t first = 0; first < changing.size(); first += at(num_done)) {
            OK(nestpipe_snapshot_preserve(store, table, changing.data() + first,
                                          static_cast<int64_t>(changing.size() - first), &out, &num_rows, &num_done));
            CHECK(num_done > 0);
            take(keys, records, steps, num_rows);
        }
    }

    bool next(int64_t capacity) {
        std::vector<int64_t> keys(at(capacity)), steps(at(capacity)), counts(kShards);
        std::vector<float> records(at(capacity * kColumns));
        const nestpipe_rows out{keys.data(), records.data(), steps.data(), capacity, kColumns};
        int64_t num_rows = 0;
        int32_t is_done = 0;
        OK(nestpipe_snapshot_next(store, table, kShards, 0, kShards, &out, counts.data(), &num_rows, &is_done));
        int64_t i = 0;
        for (int64_t shard = 0; shard < kShards; ++shard)
            for (int64_t n = 0; n < counts[at(shard)]; ++n, ++i) {
                const uint64_t hash = nestpipe::hash_key(keys[at(i)], nestpipe::name_salt("t"));
                CHECK(nestpipe::owner_of_hash(hash, kShards) == shard);
            }
        CHECK(i == num_rows);
        take(keys, records, steps, num_rows);
        return is_done == 0;
    }

    void write(const std::vector<int64_t>& keys, float value, int64_t step) {
        std::vector<float> records;
        for (size_t i = 0; i < keys.size() * kColumns; ++i) records.push_back(value + static_cast<float>(i));
        OK(nestpipe_scatter(store, table, keys.data(), static_cast<int64_t>(keys.size()), records.data(),
                            static_cast<int64_t>(records.size() * sizeof(float)), step, 2));
        for (size_t i = 0; i < keys.size(); ++i) {
            const auto first = records.begin() + static_cast<int64_t>(i) * kColumns;
            rows[keys[i]] = {{first, first + kColumns}, step};
        }
    }

    void erase(const std::vector<int64_t>& keys) {
        OK(nestpipe_erase(store, table, keys.data(), static_cast<int64_t>(keys.size()), nullptr));
        for (const int64_t key : keys) rows.erase(key);
    }

    std::vector<int64_t> begin(bool changed_only, int64_t* num_rows) {
        int64_t num_erased = 0;
        OK(nestpipe_snapshot_begin(store, table, changed_only, num_rows, &num_erased));
        std::vector<int64_t> erased(at(num_erased));
        OK(nestpipe_snapshot_erased(store, table, num_erased, erased.data()));
        copied.clear();
        return erased;
    }
};

std::vector<int64_t> some_keys(std::mt19937_64& random, int64_t count, uint64_t range) {
    std::set<int64_t> keys;
    for (int64_t i = 0; i < count; ++i) keys.insert(static_cast<int64_t>(random() % range) - 7);
    return {keys.begin(), keys.end()};
}

void change(Tested& tested, std::mt19937_64& random, int64_t step) {
    const std::vector<int64_t> keys = some_keys(random, 1 + static_cast<int64_t>(random() % 40), 300);
    tested.preserve(keys, 1 + static_cast<int64_t>(random() % 9));
    if (random() % 4 == 0)
        tested.erase(keys);
    else
        tested.write(keys, static_cast<float>(step), step);
}

// Each snapshot has the rows of its beginning, and one of changes, applied to the one before it, gives them all.
void test_rows_of_the_beginning() {
    for (uint64_t seed = 0; seed < 200; ++seed) {
        std::mt19937_64 random(seed);
        Tested tested;
        Rows saved;
        for (int64_t save = 0, step = 0; save < 4; ++save) {
            for (int i = 0; i < 5; ++i) change(tested, random, ++step);
            const bool changed_only = save > 0 && random() % 3 > 0;
            int64_t num_rows = 0;
            const std::vector<int64_t> erased = tested.begin(changed_only, &num_rows);
            const Rows expected = tested.rows;
            bool goes_on = true;
            while (goes_on) {
                if (random() % 2 == 0) change(tested, random, ++step);
                goes_on = tested.next(1 + static_cast<int64_t>(random() % 50));
            }
            CHECK(static_cast<int64_t>(tested.copied.size()) == num_rows);
            if (!changed_only) saved.clear();
            for (const int64_t key : erased) saved.erase(key);
            for (const auto& [key, row] : tested.copied) saved[key] = row;
            CHECK(saved == expected);
            CHECK(changed_only || tested.copied == expected);
            OK(nestpipe_snapshot_end(tested.store, tested.table));
        }
    }
}

// One thread takes the rows of the pass while another writes; under ThreadSanitizer this also shows the locks.
void test_while_another_thread_writes() {
    Tested tested;
    std::mt19937_64 random(1);
    tested.write(some_keys(random, 20000, 1u << 20), 0.5f, 1);
    for (int save = 0; save < 3; ++save) {
        int64_t num_rows = 0;
        tested.begin(save > 0, &num_rows);
        const Rows expected = tested.rows;
        std::thread pass([&] {
            while (tested.next(700)) {
            }
        });
        for (int64_t step = 2; step < 20; ++step) {
            const std::vector<int64_t> keys = some_keys(random, 900, 1u << 20);
            tested.preserve(keys, 256);
            tested.write(keys, static_cast<float>(step), step);
        }
        pass.join();
        CHECK(static_cast<int64_t>(tested.copied.size()) == num_rows);
        for (const auto& [key, row] : tested.copied) CHECK(expected.at(key) == row);
        CHECK(save > 0 || tested.copied.size() == expected.size());
        OK(nestpipe_snapshot_end(tested.store, tested.table));
    }
}

void test_refusals() {
    Tested tested;
    int64_t num_rows = 0, num_erased = 0, key = 3, step = 0, counts = 0, num_done = 0;
    int32_t is_done = 0;
    float record[kColumns];
    const nestpipe_rows out{&key, record, &step, 1, kColumns}, narrow{&key, record, &step, 1, 2};
    const auto bad = NESTPIPE_INVALID_ARGUMENT;
    REFUSED(bad, "begin a complete one", nestpipe_snapshot_begin(tested.store, 0, 1, &num_rows, &num_erased));
    REFUSED(bad, "no snapshot", nestpipe_snapshot_next(tested.store, 0, 1, 0, 1, &out, &counts, &num_rows, &is_done));
    OK(nestpipe_snapshot_preserve(tested.store, 0, &key, 1, &out, &num_rows, &num_done));
    CHECK(num_rows == 0 && num_done == 1);
    tested.write({3}, 1.0f, 1);
    OK(nestpipe_snapshot_begin(tested.store, 0, 0, &num_rows, &num_erased));
    CHECK(num_rows == 1 && num_erased == 0);
    REFUSED(bad, "under way", nestpipe_snapshot_begin(tested.store, 0, 0, &num_rows, &num_erased));
    REFUSED(bad, "columns", nestpipe_snapshot_preserve(tested.store, 0, &key, 1, &narrow, &num_rows, &num_done));
    REFUSED(bad, "not a range", nestpipe_snapshot_next(tested.store, 0, 4, 3, 2, &out, &counts, &num_rows, &is_done));
    const int64_t other = nestpipe::owner_of_hash(nestpipe::hash_key(3, nestpipe::name_salt("t")), 2) == 0 ? 1 : 0;
    REFUSED(bad, "another rank",
            nestpipe_snapshot_next(tested.store, 0, 2, other, 1, &out, &counts, &num_rows, &is_done));
    OK(nestpipe_snapshot_end(tested.store, 0));
    OK(nestpipe_snapshot_end(tested.store, 0));
}

void test_checksum() {
    CHECK(nestpipe::crc32c("123456789", 9) == 0xe3069283u);  // the check value that every description of CRC-32C gives
    std::mt19937_64 random(2);
    std::vector<unsigned char> bytes(1000);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    for (size_t first = 0; first < 20; ++first)
        for (size_t count = 0; count < 100; ++count) {
            const uint32_t whole = nestpipe::crc32c(&bytes[first], count);
            CHECK(nestpipe::crc32c_by_table(&bytes[first], count) == whole);
            const size_t half = count / 3;
            const uint32_t before = nestpipe::crc32c(&bytes[first], half);
            CHECK(nestpipe::crc32c(&bytes[first + half], count - half, before) == whole);
        }
}

}  // namespace

int main() {
    test_rows_of_the_beginning();
    test_while_another_thread_writes();
    test_refusals();
    test_checksum();
}
