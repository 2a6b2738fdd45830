// A scatter of the keys that were gathered last writes the same as one that looks for them, whatever happened between.
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

constexpr int64_t kDim = 3;

struct Keys {
    std::vector<int64_t> keys, offsets;
    int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

struct Fixture {
    nestpipe_store* store = nullptr;

    Fixture() {
        OK(nestpipe_store_create(&store));
        for (const char* name : {"one", "two"}) {
            nestpipe_table_spec spec = small_table(name, kDim);
            int32_t number;
            OK(nestpipe_table_create(store, &spec, &number));
        }
    }
    ~Fixture() { nestpipe_store_destroy(store); }

    const std::vector<int32_t> tables{0, 1};

    std::vector<float> gather(const Keys& call, int32_t num_threads = 1) {
        std::vector<float> out(static_cast<size_t>(call.size() * kDim));
        std::vector<uint8_t> found(call.keys.size());
        OK(nestpipe_gather_tables(store, tables.data(), call.offsets.data(), 2, call.keys.data(), call.size(), nullptr,
                                  kDim, out.data(), call.size(), kDim, found.data(), num_threads));
        return out;
    }
    void scatter(const Keys& call, float value, int32_t num_threads = 1) {
        std::vector<float> records(static_cast<size_t>(call.size() * kDim));
        std::iota(records.begin(), records.end(), value);
        OK(nestpipe_scatter_tables(store, tables.data(), call.offsets.data(), 2, call.keys.data(), call.size(), nullptr,
                                   records.data(), call.size(), kDim, nullptr, 1, num_threads));
    }
    void erase(int32_t table, std::vector<int64_t> keys) {
        int64_t num_erased;
        OK(nestpipe_erase(store, table, keys.data(), static_cast<int64_t>(keys.size()), &num_erased));
    }
    std::vector<uint8_t> digest() {
        std::vector<uint8_t> both(64);
        for (int32_t t = 0; t < 2; ++t) OK(nestpipe_digest(store, t, both.data() + 32 * t, 1));
        return both;
    }
};

Keys drawn(uint64_t seed, int64_t range) {
    std::mt19937_64 random(seed);
    Keys call{{}, {0}};
    for (int t = 0; t < 2; ++t) {
        for (int i = 0; i < 300; ++i)
            call.keys.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(range)));
        call.offsets.push_back(call.size());
    }
    return call;
}

// `between` happens after the gather. The other store never gathers, so it remembers nothing.
template <typename Between>
void check_same(const Keys& stored, const Keys& call, const Between& between) {
    for (const int32_t num_threads : {1, 3}) {
        Fixture f, other;
        for (Fixture* each : {&f, &other}) each->scatter(stored, 1.0f);
        f.gather(call, num_threads);
        for (Fixture* each : {&f, &other}) {
            between(*each);
            each->scatter(call, 7.0f, num_threads);
        }
        CHECK(f.digest() == other.digest());
        CHECK(f.gather(call) == other.gather(call));
    }
}

void test_same_as_looking() {
    const Keys stored = drawn(1, 400), call = drawn(2, 600);  // keys that repeat, and keys that are missing
    check_same(stored, call, [](Fixture&) {});
    check_same(stored, call, [&](Fixture& f) { f.scatter(call, 3.0f); });
    check_same(stored, call, [&](Fixture& f) { f.scatter(drawn(3, 900), 3.0f); });
}

// A key that was erased has lost its record, which another key may have got.
void test_erased_between() {
    const Keys stored = drawn(1, 400), call = drawn(2, 600);
    const auto keys = call.keys;
    check_same(stored, call, [&](Fixture& f) { f.erase(0, {keys[0], keys[5], keys[9]}); });
    check_same(stored, call, [&](Fixture& f) {
        f.erase(1, {call.keys.begin() + 300, call.keys.end()});
        f.scatter(drawn(4, 5000), 5.0f);
    });
}

// The same numbers, but another table has them: nothing may be taken from the gather.
void test_other_tables() {
    Keys stored = drawn(1, 400), call = drawn(2, 300), moved = call;
    moved.offsets[1] += 7;
    Fixture f, other;
    for (Fixture* each : {&f, &other}) each->scatter(stored, 1.0f);
    f.gather(call);
    for (Fixture* each : {&f, &other}) each->scatter(moved, 2.0f);
    CHECK(f.digest() == other.digest());
}

void test_threads() {
    Fixture f;
    std::vector<std::thread> threads;
    for (uint64_t seed = 0; seed < 3; ++seed)
        threads.emplace_back([&f, seed] {
            const Keys call = drawn(seed, 400);
            for (int round = 0; round < 40; ++round) {
                f.gather(call, 2);
                f.scatter(call, static_cast<float>(round), 2);
            }
        });
    for (auto& thread : threads) thread.join();
    Fixture other;
    for (uint64_t seed = 0; seed < 3; ++seed) other.scatter(drawn(seed, 400), 1.0f);
    int64_t size, expected;
    for (int32_t t = 0; t < 2; ++t) {
        OK(nestpipe_table_size(f.store, t, &size));
        OK(nestpipe_table_size(other.store, t, &expected));
        CHECK(size == expected);
    }
}

}  // namespace

int main() {
    test_same_as_looking();
    test_erased_between();
    test_other_tables();
    test_threads();
}
