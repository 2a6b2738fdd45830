// Packing of batches, with arrays of exactly the size that is promised, on one thread and on several. What is packed is
// tested from Python, against plain loops.
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.hpp"

namespace {

constexpr auto kBad = NESTPIPE_INVALID_ARGUMENT;

using Integers = std::vector<int64_t>;

void test_keys(int64_t number, int32_t num_threads) {
    Integers one(static_cast<size_t>(number)), other(static_cast<size_t>(number / 2));
    std::iota(one.begin(), one.end(), 0);
    std::iota(other.begin(), other.end(), -3);
    const nestpipe_feature_keys features[] = {{one.data(), number, 0, 0, 0, number + 1},
                                              {other.data(), number / 2, 2, 1, -3, 0}};
    Integers keys(one.size() + other.size());
    std::vector<int16_t> tables(keys.size());
    int64_t outside[2];
    OK(nestpipe_pack_keys(features, 2, 3, keys.data(), tables.data(), outside, num_threads));
    CHECK(outside[0] == -1 && outside[1] == -1);
    for (size_t i = 0; i < keys.size(); ++i) {
        const bool is_first = i < one.size();
        CHECK(keys[i] == (is_first ? one[i] : other[i - one.size()]));
        CHECK(tables[i] == (is_first ? 0 : keys[i] == -3 ? 3 : 2));
    }
    OK(nestpipe_pack_keys(features, 2, 3, nullptr, tables.data(), outside, num_threads));
    OK(nestpipe_pack_keys(features, 2, 3, keys.data(), nullptr, outside, num_threads));
    if (number == 0) return;
    one.back() = number + 1;
    OK(nestpipe_pack_keys(features, 2, 3, keys.data(), tables.data(), outside, num_threads));
    CHECK(outside[0] == 0 && outside[1] == number - 1);
}

void test_layout(int64_t num_samples, int32_t num_threads) {
    Integers one(static_cast<size_t>(num_samples) + 1), other(one.size());
    for (size_t s = 1; s < one.size(); ++s) {
        one[s] = one[s - 1] + static_cast<int64_t>(s % 3);
        other[s] = other[s - 1] + 1;
    }
    const nestpipe_feature_samples features[] = {{one.data(), one.back(), 0}, {other.data(), other.back(), 0}};
    Integers samples(static_cast<size_t>(num_samples)), parts = {0, num_samples / 2, num_samples};
    for (size_t i = 0; i < samples.size(); ++i) samples[i] = num_samples - 1 - static_cast<int64_t>(i);
    Integers bounds(2 * samples.size() + 1), sources(2 * samples.size());
    int64_t longest = 0;
    OK(nestpipe_lay_out(features, 2, samples.data(), parts.data(), 2, num_samples, bounds.data(), sources.data(),
                        &longest, num_threads));
    CHECK(bounds.front() == 0 && bounds.back() == one.back() + other.back());
    CHECK(longest == (num_samples == 0 ? 0 : num_samples == 1 ? 1 : 2));
    if (num_samples < 3) return;
    one[1] = one[2] + 1;
    bounds.assign(bounds.size(), -7);
    REFUSED(kBad, "feature 0: offsets fall",
            nestpipe_lay_out(features, 2, samples.data(), parts.data(), 2, num_samples, bounds.data(), sources.data(),
                             &longest, num_threads));
    CHECK(bounds.front() == -7 && bounds.back() == -7);  // a call that fails has changed nothing
}

void test_copies(int64_t number, int32_t num_threads) {
    Integers one(static_cast<size_t>(number)), other = {1, 2, 3};
    std::iota(one.begin(), one.end(), 0);
    const int64_t bytes = number * 8;
    Integers target(one.size() + other.size());
    nestpipe_array_copy arrays[] = {{one.data(), bytes, 24}, {other.data(), 24, 0}};
    OK(nestpipe_copy_arrays(arrays, 2, target.data(), bytes + 24, num_threads));
    CHECK(target[0] == 1 && target[2] == 3);
    for (int64_t i = 0; i < number; ++i) CHECK(target[static_cast<size_t>(i) + 3] == i);
    uint8_t is_range[2];
    OK(nestpipe_find_ranges(arrays, 2, is_range, num_threads));
    CHECK(is_range[0] == 1 && is_range[1] == 0);
    arrays[0].offset = 25;
    REFUSED(kBad, "offset", nestpipe_copy_arrays(arrays, 2, target.data(), bytes + 24, num_threads));
}

}  // namespace

int main() {
    for (const int32_t num_threads : {1, 4}) {
        for (const int64_t number : {0, 1, 2, 7, 100'000}) {
            test_keys(number, num_threads);
            test_layout(number, num_threads);
            test_copies(number, num_threads);
        }
    }
    return 0;
}
