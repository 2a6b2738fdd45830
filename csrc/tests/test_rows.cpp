// Grouping by row, pooling and its way back, and the row optimizers, against plain loops; what they refuse.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"

namespace {

struct Batch {
    std::vector<int64_t> index, offsets{0};
    std::vector<double> weights;
    int64_t num_rows, dim;

    nestpipe_occurrences occurrences() const {
        nestpipe_occurrences occurrences{};
        occurrences.index = index.data();
        occurrences.offsets = offsets.data();
        occurrences.weights = weights.data();
        occurrences.num_occurrences = static_cast<int64_t>(index.size());
        occurrences.num_samples = static_cast<int64_t>(offsets.size()) - 1;
        occurrences.num_rows = num_rows;
        occurrences.dim = dim;
        occurrences.dtype = NESTPIPE_FLOAT64;
        return occurrences;
    }
};

Batch random_batch(int64_t num_samples, int64_t num_rows, int64_t dim) {
    std::mt19937_64 random(5);
    Batch batch;
    batch.num_rows = num_rows;
    batch.dim = dim;
    for (int64_t s = 0; s < num_samples; ++s) {
        for (uint64_t i = random() % 4; i > 0; --i) {
            batch.index.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(num_rows + 1)));
            batch.weights.push_back(static_cast<double>(random() % 100) / 64);
        }
        batch.offsets.push_back(static_cast<int64_t>(batch.index.size()));
    }
    return batch;
}

std::vector<double> random_numbers(int64_t count) {
    std::mt19937_64 random(6);
    std::vector<double> numbers(static_cast<size_t>(count));
    for (double& number : numbers) number = static_cast<double>(random() % 1000) / 256 - 2;
    return numbers;
}

void test_group_by_row() {
    const Batch batch = random_batch(3000, 50, 1);
    const auto count = static_cast<int64_t>(batch.index.size());
    std::vector<int64_t> row_offsets(51, -1), occurrences(batch.index.size(), -1), samples(batch.index.size(), -1);
    OK(nestpipe_group_by_row(batch.index.data(), count, batch.offsets.data(), 3000, 50, row_offsets.data(),
                             occurrences.data(), samples.data()));
    size_t entry = 0;
    for (int64_t row = 0; row < 50; ++row) {
        CHECK(row_offsets[static_cast<size_t>(row)] == static_cast<int64_t>(entry));
        for (size_t s = 0; s < 3000; ++s)
            for (auto i = static_cast<size_t>(batch.offsets[s]); i < static_cast<size_t>(batch.offsets[s + 1]); ++i) {
                if (batch.index[i] != row) continue;
                CHECK(occurrences[entry] == static_cast<int64_t>(i) && samples[entry] == static_cast<int64_t>(s));
                ++entry;
            }
    }
    CHECK(row_offsets[50] == static_cast<int64_t>(entry) && entry < batch.index.size());  // there is padding
    std::vector<int64_t> alone(batch.index.size(), -1);
    OK(nestpipe_group_by_row(batch.index.data(), count, nullptr, count, 50, row_offsets.data(), nullptr, alone.data()));
    CHECK(std::equal(alone.begin(), alone.begin() + static_cast<int64_t>(entry), occurrences.begin()));
    OK(nestpipe_group_by_row(nullptr, 0, nullptr, 0, 0, row_offsets.data(), nullptr, nullptr));
    CHECK(row_offsets[0] == 0);
}

void test_group_by_row_refusals() {
    constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;
    int64_t index[3] = {0, 2, 1}, offsets[3] = {0, 1, 3}, row_offsets[3], samples[3];
    const auto group = [&](int64_t num_occurrences, const int64_t* sample_offsets, int64_t num_samples,
                           int64_t num_rows) {
        return nestpipe_group_by_row(index, num_occurrences, sample_offsets, num_samples, num_rows, row_offsets,
                                     nullptr, samples);
    };
    OK(group(3, offsets, 2, 2));
    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, INT64_MIN, INT64_MAX}) {
        index[1] = wrong;
        REFUSED(bad, "index has values outside 0 .. 2, the rows", group(3, offsets, 2, 2));
    }
    index[1] = 2;
    REFUSED(bad, "without offsets each sample has one occurrence", group(3, nullptr, 2, 2));
    for (const int64_t wrong : {int64_t{-1}, int64_t{4}, INT64_MAX}) {
        offsets[1] = wrong;
        REFUSED(bad, "offsets do not rise", group(3, offsets, 2, 2));
    }
    offsets[1] = 1;
    REFUSED(bad, "offsets do not rise", group(2, offsets, 2, 2));
    REFUSED(bad, "num_rows is -1", group(3, offsets, 2, -1));
    REFUSED(bad, "num_samples is -1", group(3, offsets, -1, 2));
    REFUSED(bad, "row_offsets is a null pointer",
            nestpipe_group_by_row(index, 3, offsets, 2, 2, nullptr, nullptr, samples));
    REFUSED(bad, "index is a null pointer",
            nestpipe_group_by_row(nullptr, 3, offsets, 2, 2, row_offsets, nullptr, samples));
}

// Adds the sums of a feature to columns `first` and following of `pooled`, and those of its rows to `row_gradients`.
void add_plainly(const Batch& batch, size_t num_rows, size_t dim, const std::vector<double>& rows,
                 const std::vector<double>& gradient, size_t stride, size_t first, std::vector<double>& pooled,
                 std::vector<double>& row_gradients) {
    for (size_t s = 0; s + 1 < batch.offsets.size(); ++s)
        for (size_t c = 0; c < dim; ++c) {
            double& sum = pooled[s * stride + first + c];
            sum = 0;
            for (auto i = static_cast<size_t>(batch.offsets[s]); i < static_cast<size_t>(batch.offsets[s + 1]); ++i) {
                if (static_cast<size_t>(batch.index[i]) == num_rows) continue;
                const size_t at = static_cast<size_t>(batch.index[i]) * dim + c;
                sum += batch.weights[i] * rows[at];
                row_gradients[at] += batch.weights[i] * gradient[s * stride + first + c];
            }
        }
}

// Two features side by side. All numbers are short in binary, so every order of summation gives the same bits.
void test_pool() {
    constexpr int64_t kSamples = 3000, kStride = 30, kRows[] = {50, 7}, kDims[] = {19, 5};
    const Batch batches[] = {random_batch(kSamples, kRows[0], kDims[0]), random_batch(kSamples, kRows[1], kDims[1])};
    const nestpipe_occurrences features[] = {batches[0].occurrences(), batches[1].occurrences()};
    const std::vector<double> rows[] = {random_numbers(kRows[0] * kDims[0]), random_numbers(kRows[1] * kDims[1])};
    const auto gradient = random_numbers(kSamples * kStride);
    std::vector<double> pooled(kSamples * kStride, 7.0), row_gradients[2];
    for (size_t f = 0, first = 0; f < 2; first += static_cast<size_t>(kDims[f++])) {
        row_gradients[f].assign(rows[f].size(), 0.0);
        add_plainly(batches[f], static_cast<size_t>(kRows[f]), static_cast<size_t>(kDims[f]), rows[f], gradient,
                    kStride, first, pooled, row_gradients[f]);
    }
    const void* from[] = {rows[0].data(), rows[1].data()};
    for (int32_t num_threads : {1, 2, 5}) {
        std::vector<double> out(pooled.size(), 7.0), first(row_gradients[0].size(), 7.0),
            second(row_gradients[1].size(), 7.0);
        OK(nestpipe_pool(features, 2, from, out.data(), kStride, num_threads));
        void* both[] = {first.data(), second.data()};
        OK(nestpipe_pool_backward(features, 2, gradient.data(), kStride, both, num_threads));
        CHECK(out == pooled && first == row_gradients[0] && second == row_gradients[1]);
        std::fill(second.begin(), second.end(), 7.0);
        void* only_second[] = {nullptr, second.data()};
        OK(nestpipe_pool_backward(features, 2, gradient.data(), kStride, only_second, num_threads));
        CHECK(second == row_gradients[1]);
    }
    OK(nestpipe_pool(nullptr, 0, nullptr, nullptr, 0, 1));
}

void test_pool_refusals() {
    constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;
    Batch batch = random_batch(10, 5, 3);
    std::vector<double> rows(15), out(60);
    const void* from[] = {rows.data(), rows.data()};
    void* to[] = {rows.data()};
    nestpipe_occurrences features[] = {batch.occurrences(), batch.occurrences()};
    REFUSED(bad, "stride", nestpipe_pool(features, 1, from, out.data(), 2, 1));
    REFUSED(bad, "stride", nestpipe_pool(features, 2, from, out.data(), 5, 1));
    REFUSED(bad, "features is a null pointer", nestpipe_pool(nullptr, 1, from, out.data(), 3, 1));
    REFUSED(bad, "rows is a null pointer", nestpipe_pool(features, 1, nullptr, out.data(), 3, 1));
    const void* nowhere[] = {nullptr};
    REFUSED(bad, "rows of a feature is a null pointer", nestpipe_pool(features, 1, nowhere, out.data(), 3, 1));
    features[1].dtype = NESTPIPE_FLOAT32;
    REFUSED(bad, "differ", nestpipe_pool(features, 2, from, out.data(), 6, 1));
    batch.offsets[3] = 1000;
    REFUSED(bad, "offsets", nestpipe_pool(features, 1, from, out.data(), 3, 1));
    features[0].offsets = nullptr;
    features[0].num_samples = features[0].num_occurrences + 1;
    REFUSED(bad, "one occurrence", nestpipe_pool(features, 1, from, out.data(), 3, 1));
    features[0].num_samples = features[0].num_occurrences;
    batch.index[0] = 6;
    REFUSED(bad, "index", nestpipe_pool_backward(features, 1, out.data(), 3, to, 1));
}

nestpipe_row_update update_of(std::vector<double>& records, const std::vector<double>& gradient, int64_t dim,
                              int64_t columns) {
    nestpipe_row_update update{};
    update.rows = records.data();
    update.state = records.data() + dim;
    update.gradient = gradient.data();
    update.num_rows = static_cast<int64_t>(gradient.size()) / dim;
    update.num_slots = static_cast<int64_t>(records.size()) / columns;
    update.dim = dim;
    update.row_stride = update.state_stride = columns;
    update.dtype = NESTPIPE_FLOAT64;
    return update;
}

constexpr nestpipe_optimizer kAdagrad{NESTPIPE_ADAGRAD, 0.1, 1e-10, 0, 0}, kAdam{NESTPIPE_ADAM, 0.1, 1e-8, 0.5, 0.75},
    kSgd{NESTPIPE_SGD, 0.1, 0, 0, 0}, kRowWise{NESTPIPE_ROWWISE_ADAGRAD, 0.1, 1e-10, 0, 0};

void test_row_optimizers() {
    constexpr int64_t kRows = 1200, kDim = 7;
    const auto gradient = random_numbers(kRows * kDim);
    for (int32_t num_threads : {1, 3}) {
        std::vector<double> two(kRows * 2 * kDim, 0.5), three(kRows * 3 * kDim, 0.5);
        const auto adagrad = update_of(two, gradient, kDim, 2 * kDim),
                   adam = update_of(three, gradient, kDim, 3 * kDim);
        OK(nestpipe_update_rows(&kAdagrad, &adagrad, num_threads));
        OK(nestpipe_update_rows(&kAdam, &adam, num_threads));
        for (size_t i = 0; i < gradient.size(); ++i) {
            const size_t row = i / kDim, c = i % kDim;
            const double g = gradient[i], sum = 0.5 + g * g, first = 0.25 + 0.5 * g, second = 0.375 + 0.25 * (g * g);
            CHECK(two[row * 2 * kDim + kDim + c] == sum);
            CHECK(std::abs(two[row * 2 * kDim + c] - (0.5 - 0.1 * g / (std::sqrt(sum) + 1e-10))) < 1e-14);
            CHECK(three[row * 3 * kDim + kDim + c] == first && three[row * 3 * kDim + 2 * kDim + c] == second);
            CHECK(std::abs(three[row * 3 * kDim + c] - (0.5 - 0.1 * first / (std::sqrt(second) + 1e-8))) < 1e-14);
        }
        auto narrow = adam;
        narrow.state_stride = kDim;
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "overlap", nestpipe_update_rows(&kAdam, &narrow, num_threads));
    }
}

// In float, 1 - 0.999999 would be 1.0133e-06.
void test_adam_in_float() {
    constexpr double kBeta = 0.999999;
    float records[3] = {0, 0, 0};
    const float gradient = 1;
    const nestpipe_row_update update{records, records + 1, &gradient, nullptr, 1, 1, 1, 3, 3, NESTPIPE_FLOAT32};
    const nestpipe_optimizer adam{NESTPIPE_ADAM, 0.1, 1e-8, kBeta, kBeta};
    OK(nestpipe_update_rows(&adam, &update, 1));
    CHECK(records[1] == static_cast<float>(1 - kBeta) && records[2] == static_cast<float>(1 - kBeta));
}

// Returns `count` distinct slots of num_slots, in random order.
std::vector<int64_t> random_slots(int64_t count, int64_t num_slots) {
    std::vector<int64_t> slots(static_cast<size_t>(num_slots));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), std::mt19937_64(7));
    slots.resize(static_cast<size_t>(count));
    return slots;
}

// Returns the records in these slots.
std::vector<double> gathered(const std::vector<double>& records, const std::vector<int64_t>& slots, size_t columns) {
    std::vector<double> some;
    for (const int64_t slot : slots) {
        const auto* record = records.data() + static_cast<size_t>(slot) * columns;
        some.insert(some.end(), record, record + columns);
    }
    return some;
}

// Writes records to these slots.
void scatter(const std::vector<double>& some, const std::vector<int64_t>& slots, size_t columns,
             std::vector<double>& records) {
    for (size_t i = 0; i < slots.size(); ++i)
        std::copy_n(some.data() + i * columns, columns, records.data() + static_cast<size_t>(slots[i]) * columns);
}

// An update in slots gives the same bits as one of the gathered records, and changes no other slot. Fails if gradient()
// of for_each_row is asked for slot slots[i].
void test_slots() {
    constexpr int64_t kSlots = 3000, kRows = 1200, kDim = 7;
    const auto gradient = random_numbers(kRows * kDim);
    const auto slots = random_slots(kRows, kSlots);
    const auto check = [&](int64_t columns, const nestpipe_optimizer& optimizer) {
        auto records = random_numbers(kSlots * columns);
        for (double& number : records) number += 2;  // sums of squares are not negative
        auto expected = records, dense = gathered(records, slots, static_cast<size_t>(columns));
        const auto all = update_of(dense, gradient, kDim, columns);
        OK(nestpipe_update_rows(&optimizer, &all, 1));
        scatter(dense, slots, static_cast<size_t>(columns), expected);
        for (int32_t num_threads : {1, 3}) {
            auto in_slots = records;
            auto update = update_of(in_slots, gradient, kDim, columns);
            update.slots = slots.data();
            OK(nestpipe_update_rows(&optimizer, &update, num_threads));
            CHECK(in_slots == expected && in_slots != records);
        }
    };
    check(kDim, kSgd);
    check(kDim + 1, kRowWise);
    check(2 * kDim, kAdagrad);
    check(3 * kDim, kAdam);
}

void test_refused_slots() {
    std::vector<double> records(9, 0.5);
    const std::vector<double> before = records, gradient(2, 1.0);
    int64_t slots[2] = {2, 0};
    auto update = update_of(records, gradient, 1, 3);
    update.slots = slots;
    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, INT64_MIN, INT64_MAX}) {
        slots[1] = wrong;
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "slots[1] is", nestpipe_update_rows(&kAdagrad, &update, 1));
        REFUSED(NESTPIPE_INVALID_ARGUMENT, "slots[1] is", nestpipe_update_rows(&kAdam, &update, 1));
    }
    const nestpipe_optimizer unknown{4, 0.1, 0, 0, 0};
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "kind 4", nestpipe_update_rows(&unknown, &update, 1));
    update.slots = nullptr;
    update.num_slots = 1;
    REFUSED(NESTPIPE_INVALID_ARGUMENT, "more rows than slots", nestpipe_update_rows(&kAdagrad, &update, 1));
    CHECK(records == before);
    update.num_rows = update.num_slots = 0;
    update.slots = slots;
    OK(nestpipe_update_rows(&kAdagrad, &update, 1));
}

void test_zero_divisors() {
    constexpr int64_t kRows = 3, kDim = 9;
    const std::vector<double> gradient(kRows * kDim, 0.0);
    std::vector<double> two(kRows * 2 * kDim, 0.0), three(kRows * 3 * kDim, 0.0);
    for (size_t i = 0; i < kDim; ++i) two[i] = three[i] = 0.5;
    const auto two_before = two, three_before = three;
    const auto adagrad = update_of(two, gradient, kDim, 2 * kDim), adam = update_of(three, gradient, kDim, 3 * kDim);
    for (auto [optimizer, update] : {std::pair{kAdagrad, &adagrad}, std::pair{kAdam, &adam}}) {
        optimizer.eps = 0;
        OK(nestpipe_update_rows(&optimizer, update, 1));
    }
    CHECK(two == two_before && three == three_before);
}

}  // namespace

int main() {
    test_group_by_row();
    test_group_by_row_refusals();
    test_pool();
    test_pool_refusals();
    test_row_optimizers();
    test_adam_in_float();
    test_slots();
    test_refused_slots();
    test_zero_divisors();
    return 0;
}
