// An update of stored records equals a gather, an update of what it returned, and a scatter.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "check.hpp"
#include "failing_new.hpp"

namespace {

constexpr int64_t kDim = 21, kKeys = 900;

struct Kind {
    nestpipe_optimizer optimizer;
    int64_t state_width;
};

constexpr Kind kKinds[] = {{{NESTPIPE_SGD, 0.1, 0, 0, 0}, 0},
                           {{NESTPIPE_ADAGRAD, 0.1, 1e-8, 0, 0}, kDim},
                           {{NESTPIPE_ROWWISE_ADAGRAD, 0.1, 1e-8, 0, 0}, 1},
                           {{NESTPIPE_ADAM, 0.1, 1e-8, 0.5, 0.75}, 2 * kDim}};

struct Fixture {
    nestpipe_store* store = nullptr;
    Kind kind;
    std::vector<int32_t> tables{1, 0};
    std::vector<int64_t> keys, offsets{0, kKeys / 3, kKeys};
    std::vector<float> gradient;

    explicit Fixture(const Kind& of, int64_t max_rows = 0) : kind(of) {
        OK(nestpipe_store_create(&store));
        const std::vector<double> state(static_cast<size_t>(kind.state_width), 0.25);
        for (const char* name : {"one", "two"}) {
            nestpipe_table_spec spec = small_table(name, kDim);
            spec.state_width = kind.state_width;
            spec.initial_state = state.data();
            spec.initial_a = 0.5;
            spec.max_rows = max_rows;
            int32_t number;
            OK(nestpipe_table_create(store, &spec, &number));
        }
        for (int64_t i = 0; i < kKeys; ++i) keys.push_back(i * 13 % kKeys);
        for (int64_t i = 0; i < kKeys * kDim; ++i) gradient.push_back(static_cast<float>(i % 97 - 48) / 16);
    }
    ~Fixture() { nestpipe_store_destroy(store); }

    int64_t columns() const { return kDim + kind.state_width; }

    nestpipe_status update(int64_t step, int32_t num_threads) {
        return nestpipe_update_tables(store, tables.data(), offsets.data(), 2, keys.data(), kKeys, &kind.optimizer,
                                      gradient.data(), step, num_threads);
    }
    std::vector<float> gather() {
        std::vector<float> records(static_cast<size_t>(kKeys * columns()));
        OK(nestpipe_gather_tables(store, tables.data(), offsets.data(), 2, keys.data(), kKeys, nullptr, columns(),
                                  records.data(), kKeys, columns(), nullptr, 1));
        return records;
    }
    void update_by_copies(int64_t step) {
        auto records = gather();
        const nestpipe_row_update update{
            records.data(), records.data() + kDim, gradient.data(), nullptr, kKeys, kKeys, kDim, columns(),
            columns(),      NESTPIPE_FLOAT32};
        OK(nestpipe_update_rows(&kind.optimizer, &update, 1));
        OK(nestpipe_scatter_tables(store, tables.data(), offsets.data(), 2, keys.data(), kKeys, nullptr, records.data(),
                                   kKeys, columns(), nullptr, step, 1));
    }
    // Of both tables: keys, records and steps.
    std::vector<uint8_t> content() {
        std::vector<uint8_t> all;
        for (int32_t t = 0; t < 2; ++t) {
            int64_t num_rows;
            OK(nestpipe_table_size(store, t, &num_rows));
            const auto size = static_cast<size_t>(num_rows);
            std::vector<int64_t> found(size), steps(size);
            std::vector<float> records(size * static_cast<size_t>(columns()));
            OK(nestpipe_export(store, t, 0, NESTPIPE_NUM_BUCKETS, num_rows, found.data(), records.data(),
                               static_cast<int64_t>(records.size() * sizeof(float)), steps.data(), &num_rows));
            const auto append = [&](const auto& values) {
                const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
                all.insert(all.end(), bytes, bytes + values.size() * sizeof(values[0]));
            };
            append(found), append(records), append(steps);
        }
        return all;
    }
};

// The first update inserts all keys. Fails if insert_missing leaves out the initial record, or update_records the step.
void test_same_as_copies() {
    for (const Kind& kind : kKinds)
        for (const int32_t num_threads : {1, 3})
            for (const bool is_gathered : {false, true}) {
                Fixture f(kind), other(kind);
                for (int64_t step = 1; step < 4; ++step) {
                    if (is_gathered) f.gather();
                    OK(f.update(step, num_threads));
                    other.update_by_copies(step);
                    CHECK(f.content() == other.content());
                    f.keys[5] += kKeys, other.keys[5] += kKeys;  // one key is new
                }
            }
}

void test_refused_changes_nothing() {
    const Kind& kind = kKinds[2];
    Fixture full(kind, kKeys / 2);
    const auto before = full.content();
    REFUSED(NESTPIPE_TABLE_FULL, "is full", full.update(1, 1));
    CHECK(full.content() == before);
    Fixture f(kind);
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "must be >= 0", f.update(-1, 1));
    f.kind.optimizer.kind = NESTPIPE_ADAM;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "1 columns of row state, the row optimizer needs 42", f.update(1, 1));
    f.kind.optimizer.kind = -1;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "no row optimizer of kind -1", f.update(1, 1));
    CHECK(f.content().empty());
}

void test_no_memory() {
    for (int64_t k = 0;; ++k) {
        Fixture f(kKinds[2]);
        allocations_left = k;
        const nestpipe_status status = f.update(1, 1);
        allocations_left = INT64_MAX;
        if (status == NESTPIPE_OK) return;
        CHECK(status == NESTPIPE_OUT_OF_MEMORY && f.content().empty() && k < 1000);
    }
}

void test_readers() {
    Fixture f(kKinds[3]);
    std::thread reader([&f] {
        for (int round = 0; round < 20; ++round) f.gather();
    });
    for (int64_t step = 1; step < 20; ++step) OK(f.update(step, 2));
    reader.join();
}

}  // namespace

int main() {
    test_same_as_copies();
    test_refused_changes_nothing();
    test_no_memory();
    test_readers();
    return 0;
}
