// Dedup against std::unordered_map, for several numbers of threads; and grouping by owner.
#include <cstdint>
#include <functional>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.hpp"
#include "mix.hpp"

namespace {

void check_unique(const std::vector<int64_t>& keys) {
    std::vector<int64_t> wanted_unique, wanted_inverse;
    std::unordered_map<int64_t, int64_t> numbers;
    for (int64_t key : keys) {
        const auto [found, is_new] = numbers.emplace(key, static_cast<int64_t>(wanted_unique.size()));
        if (is_new) wanted_unique.push_back(key);
        wanted_inverse.push_back(found->second);
    }
    for (int32_t num_threads : {1, 2, 3, 4, 16}) {
        std::vector<int64_t> unique(keys.size()), inverse(keys.size());
        int64_t num_unique;
        OK(nestpipe_unique(keys.data(), static_cast<int64_t>(keys.size()), unique.data(), inverse.data(), &num_unique,
                           num_threads));
        unique.resize(static_cast<size_t>(num_unique));
        CHECK(unique == wanted_unique && inverse == wanted_inverse);
    }
}

void check_unique_of(size_t num_keys, const std::function<int64_t(size_t)>& key) {
    std::vector<int64_t> keys(num_keys);
    for (size_t i = 0; i < num_keys; ++i) keys[i] = key(i);
    check_unique(keys);
}

void test_unique() {
    std::mt19937_64 random(3);
    for (size_t num_keys :
         {size_t{0}, size_t{1}, size_t{2}, size_t{1000}, size_t{16384}, size_t{50001}, size_t{200000}}) {
        check_unique_of(num_keys, [](size_t) { return int64_t{-1}; });
        check_unique_of(num_keys, [](size_t i) { return static_cast<int64_t>(i); });
        check_unique_of(num_keys, [](size_t i) { return static_cast<int64_t>(i) << 40; });
        check_unique_of(num_keys, [](size_t i) { return i % 2 == 0 ? INT64_MIN : INT64_MAX; });
        check_unique_of(num_keys, [&](size_t) { return static_cast<int64_t>(random()); });
        check_unique_of(num_keys, [&](size_t) { return static_cast<int64_t>(random() % 5000); });
        check_unique_of(num_keys, [&](size_t i) { return static_cast<int64_t>(i / 3 * 2 + random() % 7); });
    }
}

void test_group_by_owner() {
    const uint64_t salt = nestpipe::name_salt("user");
    std::vector<int64_t> keys(10000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 17 - 5000;
    for (int32_t world_size : {1, 2, 3, 7, 1536}) {
        std::vector<int64_t> order(keys.size()), counts(static_cast<size_t>(world_size));
        OK(nestpipe_group_by_owner("user", keys.data(), 10000, world_size, order.data(), counts.data()));
        size_t at = 0;
        for (int64_t rank = 0; rank < world_size; ++rank)
            for (int64_t i = 0, previous = -1; i < counts[static_cast<size_t>(rank)]; ++i, ++at) {
                CHECK(nestpipe::owner_of_hash(nestpipe::hash_key(keys[static_cast<size_t>(order[at])], salt),
                                              world_size) == rank);
                CHECK(order[at] > previous);  // stable
                previous = order[at];
            }
        CHECK(at == keys.size());
    }
}

}  // namespace

int main() {
    test_unique();
    test_group_by_owner();
    return 0;
}
