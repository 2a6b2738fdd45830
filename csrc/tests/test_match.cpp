// Keys that two batches share, table by table.
#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"

namespace {

constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Keys {
    std::vector<int64_t> keys, offsets{0};

    void add(const std::vector<int64_t>& table_keys) {
        keys.insert(keys.end(), table_keys.begin(), table_keys.end());
        offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

// Distinct keys of several tables, the same in many of them.
Keys distinct_keys(int32_t num_tables, int64_t most, uint64_t seed) {
    Keys result;
    std::mt19937_64 random(seed);
    for (int32_t t = 0; t < num_tables; ++t) {
        std::vector<int64_t> keys(at(2 * most));
        std::iota(keys.begin(), keys.end(), -most);
        std::shuffle(keys.begin(), keys.end(), random);
        keys.resize(random() % 4 == 0 ? 0 : random() % at(most));
        result.add(keys);
    }
    return result;
}

void test_match() {
    for (const auto& [num_tables, most] : std::map<int32_t, int64_t>{{1, 60000}, {3, 8}, {200, 500}, {26, 6000}})
        for (uint64_t seed = 0; seed < 4; ++seed) {
            const Keys before = distinct_keys(num_tables, most, seed),
                       after = distinct_keys(num_tables, most, seed + 9);
            std::vector<int64_t> expected(at(after.size()), -1);
            for (int32_t t = 0; t < num_tables; ++t) {
                std::map<int64_t, int64_t> places;
                for (int64_t i = before.offsets[at(t)]; i < before.offsets[at(t + 1)]; ++i)
                    places[before.keys[at(i)]] = i;
                for (int64_t i = after.offsets[at(t)]; i < after.offsets[at(t + 1)]; ++i)
                    if (const auto found = places.find(after.keys[at(i)]); found != places.end())
                        expected[at(i)] = found->second;
            }
            for (const int32_t num_threads : {1, 2, 5}) {
                std::vector<int64_t> places(at(after.size()), -7);
                OK(nestpipe_match_tables(before.keys.data(), before.size(), before.offsets.data(), after.keys.data(),
                                         after.size(), after.offsets.data(), num_tables, places.data(), num_threads));
                CHECK(places == expected);
            }
        }
    const int64_t keys[2] = {1, 2}, offsets[2] = {0, 2}, wrong[2] = {0, 3};
    int64_t places[2];
    REFUSED(bad, "before_offsets of 1 tables", nestpipe_match_tables(keys, 2, wrong, keys, 2, offsets, 1, places, 1));
    REFUSED(bad, "key_offsets of 1 tables", nestpipe_match_tables(keys, 2, offsets, keys, 2, wrong, 1, places, 1));
    REFUSED(bad, "places is a null", nestpipe_match_tables(keys, 2, offsets, keys, 2, offsets, 1, nullptr, 1));
}

}  // namespace

int main() {
    test_match();
    return 0;
}
