// Every allocation of every call fails once: the call is refused or succeeds, nothing aborts, nothing is half done.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "check.hpp"
#include "failing_new.hpp"

namespace {

constexpr int64_t kDim = 4, kRows = 3000;

struct Fixture {
    nestpipe_store* store = nullptr;
    int32_t table = -1;
    std::vector<int64_t> keys = std::vector<int64_t>(2 * kRows);
    std::vector<float> records = std::vector<float>(2 * kRows * kDim, 1.0f);
    std::vector<int64_t> unique = std::vector<int64_t>(2 * kRows), inverse = std::vector<int64_t>(2 * kRows);

    Fixture() {
        OK(nestpipe_store_create(&store));
        nestpipe_table_spec spec = small_table("item", kDim);
        spec.max_rows = 2 * kRows - 1;
        OK(nestpipe_table_create(store, &spec, &table));
        for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 77;
        OK(scatter(kRows));
    }
    ~Fixture() { nestpipe_store_destroy(store); }

    nestpipe_status scatter(int64_t num_keys) {
        return nestpipe_scatter(store, table, keys.data(), num_keys, records.data(), num_keys * kDim * 4, 1, 1);
    }
    std::vector<uint8_t> digest() {
        std::vector<uint8_t> sum(32);
        OK(nestpipe_digest(store, table, sum.data(), 1));
        return sum;
    }
};

// Fails the first, second, ... allocation of the call until it no longer runs out of memory.
void sweep(const std::function<nestpipe_status(Fixture&)>& call) {
    for (int64_t k = 0;; ++k) {
        Fixture f;
        const auto before = f.digest();
        allocations_left = k;
        const nestpipe_status status = call(f);
        allocations_left = INT64_MAX;
        if (status != NESTPIPE_OK) CHECK(*nestpipe_last_error() != '\0' && f.digest() == before);
        if (status != NESTPIPE_OUT_OF_MEMORY) return;
        CHECK(k < 1000);
    }
}

}  // namespace

int main() {
    sweep([](Fixture& f) { return f.scatter(2 * kRows - 1); });
    sweep([](Fixture& f) { return f.scatter(2 * kRows); });  // refused in the end: one row too many
    sweep([](Fixture& f) { return nestpipe_erase(f.store, f.table, f.keys.data(), kRows / 2, nullptr); });
    sweep([](Fixture& f) { return nestpipe_table_reserve(f.store, f.table, 2 * kRows - 1); });
    sweep([](Fixture& f) {
        int64_t num_unique;
        return nestpipe_unique(f.keys.data(), kRows, f.unique.data(), f.inverse.data(), &num_unique, 2);
    });
    sweep([](Fixture& f) {
        const nestpipe_table_spec again = small_table("item", kDim);
        int32_t table;
        return nestpipe_table_create(f.store, &again, &table);
    });
    sweep([](Fixture& f) {
        int64_t num_rows;
        return nestpipe_export(f.store, f.table, 0, NESTPIPE_NUM_BUCKETS, kRows, f.keys.data(), f.records.data(),
                               kRows * kDim * 4, f.unique.data(), &num_rows);
    });
    sweep([](Fixture& f) {  // one key for each sample
        constexpr size_t kSamples = 500;
        double cost[kSamples];
        std::fill_n(cost, kSamples, 1.0);
        int64_t *index = f.unique.data(), *offsets = f.inverse.data();
        for (int64_t i = 0; i <= int64_t{kSamples}; ++i) index[i] = i % 40, offsets[i] = i;
        const nestpipe_key_lists feature{index, offsets, kSamples};
        const nestpipe_batch batch{&feature, cost, kSamples, 40, 1};
        return nestpipe_cluster(&batch, 4, NESTPIPE_SPECTRAL, 0, f.keys.data(), f.keys.data() + kSamples);
    });
    return 0;
}
