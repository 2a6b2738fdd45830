// Four threads gather, scatter, find, erase, export and digest one table at once, as the header allows. Every record is
// written with one value in all columns, so a torn read shows. Meant for ThreadSanitizer, but true everywhere.
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

constexpr int64_t kColumns = 24, kKeys = 25000, kRange = 60000;

void work(nestpipe_store* store, int32_t table, uint64_t seed, int rounds) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> keys(kKeys), unique(kKeys), inverse(kKeys);
    std::vector<float> records(kKeys * kColumns);
    std::vector<uint8_t> found(kKeys);
    const auto bytes = static_cast<int64_t>(records.size() * sizeof(float));
    for (int round = 0; round < rounds; ++round) {
        for (auto& key : keys) key = static_cast<int64_t>(random() % kRange);
        int64_t num_unique;
        OK(nestpipe_unique(keys.data(), kKeys, unique.data(), inverse.data(), &num_unique, 2));
        const auto value = static_cast<float>(random() % 1000);
        std::fill(records.begin(), records.end(), value);
        OK(nestpipe_scatter(store, table, keys.data(), kKeys, records.data(), bytes, round, 2));
        OK(nestpipe_gather(store, table, keys.data(), kKeys, kColumns, records.data(), bytes, found.data(), nullptr,
                           2));
        for (size_t i = 0; i < keys.size(); ++i)
            for (size_t j = 1; found[i] != 0 && j < kColumns; ++j)
                CHECK(records[i * kColumns + j] == records[i * kColumns]);
        OK(nestpipe_find(store, table, keys.data(), kKeys, found.data(), 2));
        uint8_t digest[32];
        int64_t num_rows;
        if (round % 4 == 0) OK(nestpipe_digest(store, table, digest, 2));
        if (round % 4 == 1) OK(nestpipe_erase(store, table, keys.data(), kKeys / 4, nullptr));
        if (round % 4 == 2) OK(nestpipe_count(store, table, 0, NESTPIPE_NUM_BUCKETS, &num_rows));
        if (round % 4 == 3) OK(nestpipe_table_size(store, table, &num_rows));
    }
}

}  // namespace

int main() {
    nestpipe_store* store;
    OK(nestpipe_store_create(&store));
    const nestpipe_table_spec spec = small_table("item", 16, 8);
    int32_t table;
    OK(nestpipe_table_create(store, &spec, &table));
    std::vector<std::thread> threads;
    for (uint64_t seed = 0; seed < 4; ++seed) threads.emplace_back(work, store, table, seed, 20);
    for (auto& thread : threads) thread.join();
    OK(nestpipe_store_destroy(store));
    return 0;
}
