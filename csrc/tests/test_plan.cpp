// Dedup by owner, parts, exchange lists and rows in motion, with arrays of exactly the size that is promised: under
// AddressSanitizer a write beyond one is found. What they compute is tested from Python, against plain loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"

namespace {

constexpr auto kBad = NESTPIPE_INVALID_ARGUMENT;

using Integers = std::vector<int64_t>;

int64_t size_of(const Integers& values) { return static_cast<int64_t>(values.size()); }

// Features of several tables, with padding (the key 0) and without.
struct Batch {
    int64_t num_samples, num_tables;
    std::vector<Integers> keys, offsets;
    std::vector<nestpipe_feature_keys> feature_keys;
    std::vector<nestpipe_feature_samples> feature_samples;
    std::vector<uint64_t> salts;
    int64_t num_occurrences = 0;

    Batch(int64_t samples, int64_t tables, uint64_t most_keys) : num_samples(samples), num_tables(tables) {
        std::mt19937_64 random(static_cast<uint64_t>(samples + 100 * tables));
        for (int64_t f = 0; f < 2 * tables; ++f) {
            keys.emplace_back();
            offsets.push_back({0});
            for (int64_t s = 0; s < samples; ++s) {
                for (uint64_t i = random() % (most_keys + 1); i > 0; --i)
                    keys.back().push_back(static_cast<int64_t>(random() % 50));
                offsets.back().push_back(size_of(keys.back()));
            }
        }
        for (size_t f = 0; f < keys.size(); ++f) {
            const int64_t num_keys = size_of(keys[f]), table = static_cast<int64_t>(f) / 2;
            feature_keys.push_back({keys[f].data(), num_keys, table, static_cast<int64_t>(f % 2), 0, 50});
            feature_samples.push_back({offsets[f].data(), num_keys, table});
            num_occurrences += num_keys;
        }
        salts.resize(static_cast<size_t>(tables));
        for (uint64_t& salt : salts) OK(nestpipe_table_salt("some table", &salt));
    }

    int64_t num_features() const { return static_cast<int64_t>(keys.size()); }
};

struct Deduped {
    Integers keys, positions;
    std::vector<int32_t> counts;
    int64_t num_distinct = -1;

    Deduped(const Batch& batch, int64_t world_size, int32_t num_threads)
        : keys(static_cast<size_t>(batch.num_occurrences)),
          positions(keys.size()),
          counts(static_cast<size_t>(world_size * batch.num_tables)) {
        int64_t outside[2];
        OK(nestpipe_dedup(batch.feature_keys.data(), batch.num_features(), batch.salts.data(), batch.num_tables,
                          world_size, keys.data(), counts.data(), positions.data(), &num_distinct, outside,
                          num_threads));
        CHECK(outside[0] == -1 && outside[1] == -1);
        CHECK(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == num_distinct);
    }
};

void check_positions(const Batch& batch, const Deduped& deduped) {
    size_t i = 0;
    for (size_t f = 0; f < batch.keys.size(); ++f)
        for (const int64_t key : batch.keys[f]) {
            const int64_t position = deduped.positions[i++];
            if (f % 2 == 1 && key == 0)
                CHECK(position == -1);
            else
                CHECK(deduped.keys[static_cast<size_t>(position)] == key);
        }
}

void check_split(const Batch& batch, const Deduped& deduped, int64_t world_size, int64_t num_parts, bool shuffled) {
    const auto parts = static_cast<size_t>(num_parts), num_bytes = (parts + 7) / 8;
    const auto distinct = static_cast<size_t>(deduped.num_distinct);
    const auto features = static_cast<size_t>(batch.num_features());
    const size_t most_rows = parts == 1 ? distinct : deduped.positions.size();
    Integers samples(static_cast<size_t>(batch.num_samples)), part_offsets(parts + 1);
    std::iota(samples.begin(), samples.end(), 0);
    std::shuffle(samples.begin(), samples.end(), std::mt19937_64(1));
    for (size_t p = 0; p <= parts; ++p) part_offsets[p] = batch.num_samples * static_cast<int64_t>(p) / num_parts;
    std::vector<uint8_t> uses(distinct * num_bytes), is_first(most_rows);
    Integers row_positions(most_rows), row_counts(parts * static_cast<size_t>(batch.num_tables));
    Integers index(deduped.positions.size()), index_offsets(parts * features + 1), sources(index.size());
    Integers offsets(features * (samples.size() + parts));
    int64_t num_rows = -1;
    OK(nestpipe_split(batch.feature_samples.data(), batch.num_features(), deduped.positions.data(),
                      deduped.counts.data(), world_size, batch.num_tables, deduped.num_distinct,
                      shuffled ? samples.data() : nullptr, part_offsets.data(), num_parts, batch.num_samples,
                      uses.data(), row_positions.data(), is_first.data(), row_counts.data(), &num_rows, index.data(),
                      index_offsets.data(), offsets.data(), sources.data()));
    CHECK(std::accumulate(row_counts.begin(), row_counts.end(), int64_t{0}) == num_rows);
    CHECK(std::accumulate(is_first.begin(), is_first.begin() + num_rows, int64_t{0}) == deduped.num_distinct);
    CHECK(index_offsets.back() == batch.num_occurrences);
    size_t rows_before = 0;
    for (size_t p = 0; p < parts; ++p) {
        for (size_t f = 0; f < features; ++f)
            for (auto i = static_cast<size_t>(index_offsets[p * features + f]);
                 i < static_cast<size_t>(index_offsets[p * features + f + 1]); ++i) {
                const size_t row_table = p * static_cast<size_t>(batch.num_tables) + f / 2;
                const int64_t position = deduped.positions[static_cast<size_t>(sources[i])];
                if (position < 0) {
                    CHECK(index[i] == row_counts[row_table]);
                    continue;
                }
                size_t row = rows_before + static_cast<size_t>(index[i]);
                for (size_t t = 0; t < f / 2; ++t)
                    row += static_cast<size_t>(row_counts[p * static_cast<size_t>(batch.num_tables) + t]);
                CHECK(index[i] < row_counts[row_table] && row_positions[row] == position);
                CHECK((uses[static_cast<size_t>(position) * num_bytes + p / 8] >> (p % 8) & 1) == 1);
            }
        for (size_t t = 0; t < static_cast<size_t>(batch.num_tables); ++t)
            rows_before += static_cast<size_t>(row_counts[p * static_cast<size_t>(batch.num_tables) + t]);
    }

    Integers rank_counts(static_cast<size_t>(world_size));
    for (size_t i = 0; i < deduped.counts.size(); ++i)
        rank_counts[i / static_cast<size_t>(batch.num_tables)] += deduped.counts[i];
    for (const int32_t which : {NESTPIPE_FIRST_PART, NESTPIPE_LAST_PART, NESTPIPE_ALL_PARTS}) {
        const int64_t num_listed = which == NESTPIPE_ALL_PARTS ? num_rows : deduped.num_distinct;
        Integers places(static_cast<size_t>(num_listed)), list_offsets(2 * parts + 1);
        Integers list_counts(parts * rank_counts.size());
        OK(nestpipe_exchange_lists(uses.data(), deduped.num_distinct, num_parts, which, rank_counts.data(), world_size,
                                   world_size / 2, places.data(), num_listed, list_offsets.data(), list_counts.data()));
        CHECK(list_offsets.back() == num_listed);
        if (num_listed > 0)
            REFUSED(kBad, "places has room for",
                    nestpipe_exchange_lists(uses.data(), deduped.num_distinct, num_parts, which, rank_counts.data(),
                                            world_size, 0, places.data(), num_listed - 1, list_offsets.data(),
                                            list_counts.data()));
    }
}

void check_owner(const Batch& batch, const Deduped& deduped, int64_t world_size, int32_t num_threads) {
    const auto distinct = static_cast<size_t>(deduped.num_distinct);
    Integers keys(deduped.keys.begin(), deduped.keys.begin() + deduped.num_distinct);
    Integers unique(distinct), slots(distinct), table_counts(static_cast<size_t>(batch.num_tables));
    int64_t num_unique = -1;
    OK(nestpipe_owner_dedup(keys.data(), deduped.num_distinct, deduped.counts.data(), world_size, batch.num_tables,
                            unique.data(), slots.data(), table_counts.data(), &num_unique, num_threads));
    CHECK(num_unique == deduped.num_distinct);  // each key had one owner
    for (size_t i = 0; i < distinct; ++i) CHECK(unique[static_cast<size_t>(slots[i])] == keys[i]);
    Integers numbers(distinct), bases(table_counts.size(), 5);
    OK(nestpipe_cluster_numbers(deduped.counts.data(), world_size, batch.num_tables, bases.data(), deduped.num_distinct,
                                numbers.data()));
    numbers.push_back(0);
    REFUSED(kBad, "the sum of counts",
            nestpipe_cluster_numbers(deduped.counts.data(), world_size, batch.num_tables, bases.data(),
                                     deduped.num_distinct + 1, numbers.data()));
}

void test_batches() {
    for (const uint64_t most_keys : {0, 1, 3, 12})
        for (const int64_t num_tables : {1, 5, 33})
            for (const int64_t num_samples : {0, 1, 40}) {
                const Batch batch(num_samples, num_tables, most_keys);
                for (const int64_t world_size : {1, 3, 1536}) {
                    const Deduped deduped(batch, world_size, 1);
                    check_positions(batch, deduped);
                    check_owner(batch, deduped, world_size, 2);
                    for (const int64_t num_parts : {1, 2, 8, 11}) {
                        check_split(batch, deduped, world_size, num_parts, false);
                        check_split(batch, deduped, world_size, num_parts, true);
                    }
                }
            }
}

void test_threads() {
    const Batch batch(9000, 3, 8);
    const Deduped one(batch, 7, 1), several(batch, 7, 4);
    CHECK(one.num_distinct == several.num_distinct && one.counts == several.counts);
    CHECK(one.positions == several.positions);
    check_positions(batch, several);
}

void test_dedup_refusals() {
    Batch batch(10, 2, 3);
    Integers keys(static_cast<size_t>(batch.num_occurrences)), positions(keys.size());
    int32_t counts[8];
    int64_t num_distinct, outside[2];
    const auto dedup = [&] {
        return nestpipe_dedup(batch.feature_keys.data(), 4, batch.salts.data(), 2, 4, keys.data(), counts,
                              positions.data(), &num_distinct, outside, 1);
    };
    OK(dedup());
    batch.keys[2][1] = -1;
    OK(dedup());
    CHECK(outside[0] == 2 && outside[1] == 1);
    batch.feature_keys[3].keys = nullptr;
    REFUSED(kBad, "keys of a feature is a null pointer", dedup());
    batch.feature_keys[3].num_keys = -1;
    REFUSED(kBad, "num_keys of a feature is -1", dedup());
    batch.feature_keys[2].num_keys = int64_t{1} << 31;
    REFUSED(kBad, "must be below 2^31", dedup());
    REFUSED(kBad, "salts is a null pointer",
            nestpipe_dedup(nullptr, 0, nullptr, 2, 4, nullptr, counts, nullptr, &num_distinct, outside, 1));
    REFUSED(kBad, "counts is a null pointer",
            nestpipe_dedup(nullptr, 0, batch.salts.data(), 2, 4, nullptr, nullptr, nullptr, &num_distinct, outside, 1));
    OK(nestpipe_dedup(nullptr, 0, nullptr, 0, 4, nullptr, nullptr, nullptr, &num_distinct, outside, 1));
    CHECK(num_distinct == 0);
}

// Rank 1 of 3 asks for keys of two tables, and is asked for two keys by all ranks.
void test_one_part() {
    const int32_t counts[] = {1, 2, 2, 0, 1, 1};
    int64_t entry_counts[] = {2, 1, 2};
    Integers key_index{0, 1, 1, 0, 1}, rows_in(7), rows_out(5), entries(5), order(5), offsets(3);
    const auto list = [&](int64_t num_requests, int64_t own_rank) {
        return nestpipe_one_part_lists(counts, 3, 2, num_requests, key_index.data(), entry_counts, 5, 2, own_rank,
                                       rows_in.data(), rows_out.data(), entries.data(), order.data(), offsets.data());
    };
    OK(list(7, 1));
    CHECK((rows_in == Integers{0, 4, 5, 3, 6, 1, 2}));  // rank 0: tables 0, 1, 1; rank 2: 0, 1; then the own two
    CHECK((rows_out == Integers{0, 1, 0, 1, 1}) && (entries == Integers{0, 1, 3, 4, 2}));
    CHECK((order == Integers{0, 3, 1, 2, 4}) && (offsets == Integers{0, 2, 5}));
    REFUSED(kBad, "own_rank is 3", list(7, 3));
    REFUSED(kBad, "the sum of counts is 7", list(8, 1));
    for (const int64_t wrong : {int64_t{-1}, int64_t{2}, INT64_MAX}) {
        key_index[3] = wrong;
        REFUSED(kBad, "key_index has values outside of 0 .. 1", list(7, 1));
    }
    key_index[3] = 0;
    entry_counts[2] = 1;
    REFUSED(kBad, "the sum of rank_counts is 4", list(7, 1));
    entry_counts[2] = -1;
    REFUSED(kBad, "rank_counts[2] is -1", list(7, 1));
    const int32_t none[] = {0, 0, 0};
    const int64_t no_entries[] = {0, 0, 0};
    OK(nestpipe_one_part_lists(none, 3, 1, 0, nullptr, no_entries, 0, 0, 0, nullptr, nullptr, nullptr, nullptr,
                               offsets.data()));
    CHECK(offsets[0] == 0);
}

void test_rows() {
    constexpr int64_t kRows = 3000, kDim = 5, kBytes = kDim * 4;
    std::vector<float> source(kRows * kDim), target(kRows * kDim, -1.0f), sums(kRows * kDim, -1.0f);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i % 1000) / 8;
    Integers places(kRows), fine(kRows), offsets(kRows + 1);
    for (int64_t i = 0; i < kRows; ++i) {
        places[static_cast<size_t>(i)] = kRows - 1 - i;
        fine[static_cast<size_t>(i)] = (kRows - 1 - i) * kDim;  // in units of a float
        offsets[static_cast<size_t>(i) + 1] = i + 1;
    }
    const auto all_bytes = kRows * kBytes;
    for (const int32_t num_threads : {1, 3}) {
        OK(nestpipe_copy_rows(source.data(), all_bytes, kBytes, places.data(), target.data(), all_bytes, 4, fine.data(),
                              kRows, kBytes, num_threads));
        CHECK(target == source);
        int32_t exceeds = 0;
        const std::vector<uint8_t> is_first(kRows, 1);
        OK(nestpipe_add_rows(sums.data(), all_bytes, 4, fine.data(), source.data(), all_bytes, kBytes, is_first.data(),
                             kRows, kDim, NESTPIPE_FLOAT32, 124.875, &exceeds, num_threads));
        CHECK(exceeds == 0);
        OK(nestpipe_add_rows(sums.data(), all_bytes, 4, fine.data(), source.data(), all_bytes, kBytes, nullptr, kRows,
                             kDim, NESTPIPE_FLOAT32, 124.875, &exceeds, num_threads));
        CHECK(exceeds == 1);
        OK(nestpipe_sum_rows(sums.data(), all_bytes, kBytes, places.data(), kRows, offsets.data(), kRows, kDim,
                             NESTPIPE_FLOAT32, target.data(), all_bytes, kBytes, num_threads));
        for (size_t i = 0; i < target.size(); ++i) CHECK(target[i] == 2 * source[i]);
    }
    fine[7] = kRows * kDim - kDim + 1;
    for (const int32_t num_threads : {1, 3}) {
        const auto check = [&](double limit) {
            int32_t exceeds = 0;
            OK(nestpipe_check_rows(source.data(), all_bytes, kBytes, kRows, kDim, NESTPIPE_FLOAT32, limit, &exceeds,
                                   num_threads));
            return exceeds == 1;
        };
        CHECK(!check(124.875) && check(124.8));
        float& last = source.back();
        for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
            last = wrong;
            CHECK(check(124.875) && check(1e300));
            last = 0;
        }
    }
    int32_t stays = 1;
    OK(nestpipe_check_rows(nullptr, 0, kBytes, 0, kDim, NESTPIPE_FLOAT32, 1.0, &stays, 1));
    CHECK(stays == 1);
    REFUSED(kBad, "exceeds is a null pointer",
            nestpipe_check_rows(source.data(), all_bytes, kBytes, kRows, kDim, NESTPIPE_FLOAT32, 1.0, nullptr, 1));
    REFUSED(kBad, "too few",
            nestpipe_check_rows(source.data(), all_bytes, kBytes, kRows + 1, kDim, NESTPIPE_FLOAT32, 1.0, &stays, 1));
    REFUSED(kBad, "to: place number 7 is 14996",
            nestpipe_copy_rows(source.data(), all_bytes, kBytes, places.data(), target.data(), all_bytes, 4,
                               fine.data(), kRows, kBytes, 1));
    REFUSED(kBad, "multiples of 4 bytes",
            nestpipe_add_rows(sums.data(), all_bytes, 2, nullptr, source.data(), all_bytes, kBytes, nullptr, 1, kDim,
                              NESTPIPE_FLOAT32, 1.0, nullptr, 1));
    REFUSED(kBad, "unknown dtype 2",
            nestpipe_sum_rows(sums.data(), all_bytes, kBytes, nullptr, 0, offsets.data(), 0, kDim, 2, target.data(),
                              all_bytes, kBytes, 1));
    REFUSED(kBad, "values is a null pointer",
            nestpipe_sum_rows(nullptr, all_bytes, kBytes, nullptr, kRows, offsets.data(), 1, kDim, NESTPIPE_FLOAT32,
                              target.data(), all_bytes, kBytes, 1));
}

void test_runs() {
    const char from[] = "abcdef";
    char to[4] = {'.', '.', '.', '.'};
    const int64_t from_offsets[] = {4, 0, 6}, to_offsets[] = {0, 3, 4};
    int64_t sizes[] = {2, 1, 0};
    OK(nestpipe_copy_runs(from, 6, from_offsets, to, 4, to_offsets, sizes, 3));
    CHECK(std::equal(to, to + 4, "ef.a"));
    sizes[2] = 1;
    REFUSED(kBad, "run 2 of 1 bytes", nestpipe_copy_runs(from, 6, from_offsets, to, 4, to_offsets, sizes, 3));
    REFUSED(kBad, "sizes is a null pointer", nestpipe_copy_runs(from, 6, from_offsets, to, 4, to_offsets, nullptr, 3));
    OK(nestpipe_copy_runs(nullptr, 0, nullptr, nullptr, 0, nullptr, nullptr, 0));
}

}  // namespace

int main() {
    test_batches();
    test_threads();
    test_dedup_refusals();
    test_one_part();
    test_rows();
    test_runs();
}
