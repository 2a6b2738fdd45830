// Clustering: every sample in one part, the same in every thread, planted structure found, nonsense refused.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.hpp"
#include "mix.hpp"

namespace {

using Numbers = std::vector<int64_t>;

struct Lists {
    Numbers index, offsets{0};
    std::vector<double> cost;
    int64_t num_distinct = 0;

    void add(const Numbers& keys) {
        for (int64_t key : keys) {
            index.push_back(key);
            num_distinct = std::max(num_distinct, key + 1);
        }
        offsets.push_back(static_cast<int64_t>(index.size()));
        cost.push_back(static_cast<double>(std::max<size_t>(keys.size(), 1)));
    }
    int64_t num_samples() const { return static_cast<int64_t>(cost.size()); }
    nestpipe_key_lists feature() const { return {index.data(), offsets.data(), static_cast<int64_t>(index.size())}; }
};

struct Result {
    Numbers order, part_offsets;
    bool operator==(const Result& other) const { return order == other.order && part_offsets == other.part_offsets; }
};

Result cluster(const Lists& lists, int32_t num_parts, nestpipe_cluster_method method, uint64_t seed = 0) {
    const nestpipe_key_lists feature = lists.feature();
    const nestpipe_batch batch{&feature, lists.cost.data(), lists.num_samples(), lists.num_distinct, 1};
    Result result{Numbers(lists.cost.size(), -1), Numbers(static_cast<size_t>(num_parts) + 1, -1)};
    OK(nestpipe_cluster(&batch, num_parts, method, seed, result.order.data(), result.part_offsets.data()));
    return result;
}

Lists random_lists(int64_t num_samples, uint64_t num_keys, uint64_t most_keys, uint64_t seed) {
    Lists lists;
    for (int64_t s = 0; s < num_samples; ++s) {
        uint64_t word = nestpipe::mix64(seed * 1000003 + static_cast<uint64_t>(s));
        Numbers keys(word % (most_keys + 1));
        for (int64_t& key : keys) {
            word = nestpipe::mix64(word + 1);
            key = static_cast<int64_t>((word % num_keys) * (word >> 40 & 1023) / 1023) - 1;  // -1: padding
        }
        lists.add(keys);
    }
    return lists;
}

void check_partition(const Lists& lists, const Result& result, int32_t num_parts) {
    CHECK(result.part_offsets.front() == 0 && result.part_offsets.back() == lists.num_samples());
    std::vector<int> seen(lists.cost.size(), 0);
    for (size_t p = 0; p < static_cast<size_t>(num_parts); ++p)
        for (int64_t i = result.part_offsets[p], previous = -1; i < result.part_offsets[p + 1]; ++i) {
            const int64_t sample = result.order[static_cast<size_t>(i)];
            CHECK(sample > previous && sample < lists.num_samples());
            CHECK(seen[static_cast<size_t>(sample)]++ == 0);
            previous = sample;
        }
}

constexpr nestpipe_cluster_method kMethods[] = {NESTPIPE_SPECTRAL, NESTPIPE_MINHASH};

void test_partitions() {
    std::vector<Lists> cases(1);
    for (uint64_t seed = 1; seed < 6; ++seed) cases.push_back(random_lists(400, 300, 12, seed));
    cases.push_back(random_lists(3, 5, 3, 1));        // fewer samples than parts
    cases.push_back(random_lists(50, 1, 4, 1));       // padding only
    cases.push_back(random_lists(50, 2, 4, 1));       // one key
    cases.push_back(random_lists(20, 9000, 0, 1));    // no keys
    cases.push_back(random_lists(60, 5000, 900, 1));  // long lists
    for (const Lists& lists : cases)
        for (int32_t num_parts : {1, 2, 3, 8, 9, 33})
            for (nestpipe_cluster_method method : kMethods)
                check_partition(lists, cluster(lists, num_parts, method), num_parts);
}

void test_threads() {
    const Lists lists = random_lists(500, 400, 10, 9);
    const Result expected = cluster(lists, 6, NESTPIPE_SPECTRAL, 3);
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 3; ++t)
        threads.emplace_back([&, t] {
            for (int64_t size : {900, 10, 0}) cluster(random_lists(size, 800, 10, t), 9, NESTPIPE_SPECTRAL);
            CHECK(cluster(lists, 6, NESTPIPE_SPECTRAL, 3) == expected);
        });
    for (std::thread& thread : threads) thread.join();
}

void test_separates_groups() {
    Lists lists;
    for (int64_t s = 0; s < 200; ++s) {
        const uint64_t word = nestpipe::mix64(static_cast<uint64_t>(s));
        Numbers keys;
        for (int shift = 0; shift < 60; shift += 6)
            keys.push_back(s % 2 * 64 + static_cast<int64_t>(word >> shift & 63));
        lists.add(keys);
    }
    const Result result = cluster(lists, 2, NESTPIPE_SPECTRAL);
    CHECK(result.part_offsets[1] == 100);
    for (size_t i = 0; i < 200; ++i) CHECK(result.order[i] % 2 == result.order[i < 100 ? 0 : 100] % 2);
}

void test_refusals() {
    const Lists lists = random_lists(4, 5, 3, 2);
    Numbers order(4), part_offsets(3);
    nestpipe_key_lists feature = lists.feature();
    nestpipe_batch batch{&feature, lists.cost.data(), 4, lists.num_distinct, 1};
    const auto call = [&](int32_t num_parts, int method = NESTPIPE_SPECTRAL) {
        return nestpipe_cluster(&batch, num_parts, static_cast<nestpipe_cluster_method>(method), 0, order.data(),
                                part_offsets.data());
    };
    OK(call(2));
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "num_parts is 0", call(0));
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "num_parts is 4097", call(4097));
    batch.num_distinct = lists.num_distinct - 1;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "index is not below", call(2));
    batch.num_distinct = -1;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "num_distinct is -1", call(2));
    batch.num_distinct = lists.num_distinct;
    feature.num_keys -= 1;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "offsets do not rise", call(2));
    feature = lists.feature();
    const std::vector<double> free(4, 0.0);
    batch.cost = free.data();
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "a cost is not above 0", call(2));
    batch.cost = nullptr;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "cost is a null pointer", call(2));
    batch.cost = lists.cost.data();
    batch.features = nullptr;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "features is a null pointer", call(2));
}

}  // namespace

int main() {
    test_partitions();
    test_threads();
    test_separates_groups();
    test_refusals();
    return 0;
}
