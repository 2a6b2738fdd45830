// The C boundary of operations that prepare a batch: dedup, parts, and rows copied between arrays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "boundary.hpp"
#include "feature_checks.hpp"
#include "mix.hpp"
#include "nestpipe.h"
#include "plan.hpp"
#include "row_ops.hpp"

using namespace nestpipe;

namespace {

// [num_ranks, num_tables]
void need_matrix(const int32_t* counts, int64_t num_ranks, int64_t num_tables) {
    need_range(num_ranks, 0, NESTPIPE_NUM_BUCKETS, "number of ranks");
    need_range(num_tables, 0, (int64_t{1} << 24) - 1, "num_tables");
    need_array(counts, num_ranks * num_tables, "counts");
}

// All of low .. high. The sign bit tells: no branch, whole vectors at once.
bool all_within(const int64_t* values, int64_t count, int64_t low, int64_t high) {
    uint64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t above_low = static_cast<uint64_t>(values[i]) - static_cast<uint64_t>(low);
        wrong |= above_low | (static_cast<uint64_t>(high) - static_cast<uint64_t>(low) - above_low);
    }
    return wrong >> 63 == 0;
}

// `count` rows of row_bytes in an array of `bytes`.
void need_rows(const void* array, int64_t bytes, int64_t stride, const int64_t* places, int64_t count,
               int64_t row_bytes, const std::string& what) {
    need_count(bytes, (what + ": bytes").c_str());
    need_count(stride, (what + ": stride").c_str());
    if (stride < 1) refuse(what + ": stride is 0, must be at least 1");
    if (count == 0) return;
    if (array == nullptr) refuse(what + " is a null pointer");
    const int64_t last = bytes < row_bytes ? -1 : (bytes - row_bytes) / stride;  // place where a row still ends inside
    if (places == nullptr) {
        if (count - 1 > last)
            refuse(what + " has " + std::to_string(bytes) + " bytes, too few for " + std::to_string(count) +
                   " rows of " + std::to_string(row_bytes) + " bytes, " + std::to_string(stride) + " apart");
        return;
    }
    if (last >= 0 && all_within(places, count, 0, last)) return;
    const auto is_outside = [last](int64_t place) { return place < 0 || place > last; };
    const int64_t* wrong = std::find_if(places, places + count, is_outside);
    refuse(what + ": place number " + std::to_string(wrong - places) + " is " + std::to_string(*wrong) +
           ", but the last row that ends within its " + std::to_string(bytes) + " bytes has place " +
           std::to_string(last));
}

void need_rank_counts(const int64_t* rank_counts, int64_t num_ranks, int64_t num_keys) {
    int64_t left = num_keys;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
        if (rank_counts[rank] < 0 || rank_counts[rank] > left)
            refuse("rank_counts[" + std::to_string(rank) + "] is " + std::to_string(rank_counts[rank]) +
                   ": they must not be negative, and their sum must be num_keys, " + std::to_string(num_keys));
        left -= rank_counts[rank];
    }
    if (left != 0)
        refuse("the sum of rank_counts is " + std::to_string(num_keys - left) + ", must be num_keys, " +
               std::to_string(num_keys));
}

int64_t item_bytes(int32_t dtype) {
    if (dtype == NESTPIPE_FLOAT32) return sizeof(float);
    if (dtype == NESTPIPE_FLOAT64) return sizeof(double);
    refuse("unknown dtype " + std::to_string(dtype));
}

void need_aligned(const void* array, int64_t stride, int64_t item, const char* what) {
    if (reinterpret_cast<uintptr_t>(array) % static_cast<uintptr_t>(item) != 0 || stride % item != 0)
        refuse(std::string(what) + ": address and stride must be multiples of " + std::to_string(item) + " bytes");
}

}  // namespace

nestpipe_status nestpipe_table_salt(const char* table_name, uint64_t* salt) {
    return guarded([&] {
        need(table_name, "table name");
        need(salt, "salt");
        *salt = name_salt(table_name);
    });
}

nestpipe_status nestpipe_dedup(const nestpipe_feature_keys* features, int64_t num_features, const uint64_t* salts,
                               int64_t num_tables, int64_t world_size, int64_t* keys, int32_t* counts,
                               int64_t* positions, int64_t* num_distinct, int64_t* outside, int32_t num_threads) {
    return guarded([&] {
        need_count(num_features, "num_features");
        need_array(features, num_features, "features");
        need_range(world_size, 1, NESTPIPE_NUM_BUCKETS, "world_size");
        need_matrix(counts, world_size, num_tables);
        need_array(salts, num_tables, "salts");
        need(num_distinct, "num_distinct");
        need(outside, "outside");
        need_threads(num_threads);
        const int64_t num_occurrences = need_feature_keys(features, num_features, num_tables);
        need_array(keys, num_occurrences, "keys");
        need_array(positions, num_occurrences, "positions");
        if (has_outside(features, num_features, outside)) {
            *num_distinct = 0;
            return;
        }
        *num_distinct =
            dedup(features, num_features, salts, num_tables, world_size, keys, counts, positions, num_threads);
    });
}

nestpipe_status nestpipe_split(const nestpipe_feature_samples* features, int64_t num_features, const int64_t* positions,
                               const int32_t* counts, int64_t num_ranks, int64_t num_tables, int64_t num_distinct,
                               const int64_t* samples, const int64_t* part_offsets, int64_t num_parts,
                               int64_t num_samples, uint8_t* uses, int64_t* row_positions, uint8_t* is_first,
                               int64_t* row_counts, int64_t* num_rows, int64_t* index, int64_t* index_offsets,
                               int64_t* offsets, int64_t* sources) {
    return guarded([&] {
        need_count(num_features, "num_features");
        need_count(num_samples, "num_samples");
        need_range(num_parts, 1, NESTPIPE_MAX_PARTS, "num_parts");
        need_few_keys(num_distinct, "num_distinct");
        need_matrix(counts, num_ranks, num_tables);
        need_array(features, num_features, "features");
        need_offsets_to(part_offsets, num_parts, num_samples, "parts");
        int64_t num_occurrences = 0;
        for (int64_t f = 0; f < num_features; ++f) {
            need_feature(features[f], f, num_tables, num_occurrences);
            need_offsets_to(features[f].offsets, num_samples, features[f].num_keys, feature_text(f));
        }
        if (samples != nullptr) need_permutation(samples, num_samples);
        need_array(positions, num_occurrences, "positions");
        if (!all_within(positions, num_occurrences, -1, num_distinct - 1))
            refuse("positions has values outside of -1 .. " + std::to_string(num_distinct - 1));
        need_array(uses, num_distinct, "uses");
        need_array(row_positions, num_distinct, "row_positions");
        need_array(is_first, num_distinct, "is_first");
        need_array(row_counts, num_tables, "row_counts");
        need(num_rows, "num_rows");
        need_array(index, num_occurrences, "index");
        need(index_offsets, "index_offsets");
        need_array(offsets, num_features, "offsets");
        split({features,
               num_features,
               positions,
               {counts, num_ranks, num_tables, num_distinct},
               samples,
               part_offsets,
               num_parts},
              {uses, row_positions, is_first, row_counts, num_rows, index, index_offsets, offsets, sources});
    });
}

nestpipe_status nestpipe_owner_dedup(const int64_t* keys, int64_t num_keys, const int32_t* counts, int64_t num_ranks,
                                     int64_t num_tables, int64_t* distinct, int64_t* slots, int64_t* table_counts,
                                     int64_t* num_distinct, int32_t num_threads) {
    return guarded([&] {
        need_few_keys(num_keys, "num_keys");
        need_matrix(counts, num_ranks, num_tables);
        need_array(keys, num_keys, "keys");
        need_array(distinct, num_keys, "distinct");
        need_array(slots, num_keys, "slots");
        need_array(table_counts, num_tables, "table_counts");
        need(num_distinct, "num_distinct");
        need_threads(num_threads);
        *num_distinct =
            owner_dedup(keys, {counts, num_ranks, num_tables, num_keys}, distinct, slots, table_counts, num_threads);
    });
}

nestpipe_status nestpipe_exchange_lists(const uint8_t* uses, int64_t num_keys, int64_t num_parts, int32_t which,
                                        const int64_t* rank_counts, int64_t num_ranks, int64_t own_rank,
                                        int64_t* places, int64_t capacity, int64_t* offsets, int64_t* counts) {
    return guarded([&] {
        need_few_keys(num_keys, "num_keys");
        need_range(num_parts, 1, NESTPIPE_MAX_PARTS, "num_parts");
        need_range(num_ranks, 1, NESTPIPE_NUM_BUCKETS, "num_ranks");
        need_range(own_rank, 0, num_ranks - 1, "own_rank");
        need_range(which, NESTPIPE_FIRST_PART, NESTPIPE_ALL_PARTS, "which");
        need_count(capacity, "capacity");
        need_array(uses, num_keys, "uses");
        need(rank_counts, "rank_counts");
        need(offsets, "offsets");
        need(counts, "counts");
        need_rank_counts(rank_counts, num_ranks, num_keys);
        exchange_lists(
            {uses, num_keys, num_parts, static_cast<nestpipe_which_parts>(which), rank_counts, num_ranks, own_rank},
            places, capacity, offsets, counts);
    });
}

nestpipe_status nestpipe_one_part_lists(const int32_t* counts, int64_t num_ranks, int64_t num_tables,
                                        int64_t num_requests, const int64_t* key_index, const int64_t* entry_counts,
                                        int64_t num_entries, int64_t num_keys, int64_t own_rank, int64_t* rows_in,
                                        int64_t* rows_out, int64_t* entries, int64_t* order, int64_t* offsets) {
    return guarded([&] {
        need_few_keys(num_requests, "num_requests");
        need_few_keys(num_entries, "num_entries");
        need_few_keys(num_keys, "num_keys");
        need_matrix(counts, num_ranks, num_tables);
        need_range(num_ranks, 1, NESTPIPE_NUM_BUCKETS, "num_ranks");
        need_range(own_rank, 0, num_ranks - 1, "own_rank");
        need(entry_counts, "entry_counts");
        need_rank_counts(entry_counts, num_ranks, num_entries);
        need_array(key_index, num_entries, "key_index");
        need_array(rows_in, num_requests, "rows_in");
        need_array(rows_out, num_entries, "rows_out");
        need_array(entries, num_entries, "entries");
        need_array(order, num_entries, "order");
        need(offsets, "offsets");
        list_one_part(
            {{counts, num_ranks, num_tables, num_requests}, key_index, entry_counts, num_entries, num_keys, own_rank},
            {rows_in, rows_out, entries, order, offsets});
    });
}

nestpipe_status nestpipe_cluster_numbers(const int32_t* counts, int64_t num_ranks, int64_t num_tables,
                                         const int64_t* bases, int64_t num_positions, int64_t* numbers) {
    return guarded([&] {
        need_few_keys(num_positions, "num_positions");
        need_matrix(counts, num_ranks, num_tables);
        need_array(bases, num_tables, "bases");
        need_array(numbers, num_positions, "numbers");
        cluster_numbers({counts, num_ranks, num_tables, num_positions}, bases, numbers);
    });
}

nestpipe_status nestpipe_copy_runs(const void* from, int64_t from_bytes, const int64_t* from_offsets, void* to,
                                   int64_t to_bytes, const int64_t* to_offsets, const int64_t* sizes,
                                   int64_t num_runs) {
    return guarded([&] {
        need_count(num_runs, "num_runs");
        need_count(from_bytes, "from_bytes");
        need_count(to_bytes, "to_bytes");
        need_array(from_offsets, num_runs, "from_offsets");
        need_array(to_offsets, num_runs, "to_offsets");
        need_array(sizes, num_runs, "sizes");
        need_array(from, from_bytes, "from");
        need_array(to, to_bytes, "to");
        for (int64_t i = 0; i < num_runs; ++i) {
            const auto is_inside = [&](int64_t offset, int64_t bytes) {
                return offset >= 0 && offset <= bytes && sizes[i] <= bytes - offset;
            };
            if (sizes[i] < 0 || !is_inside(from_offsets[i], from_bytes) || !is_inside(to_offsets[i], to_bytes))
                refuse("run " + std::to_string(i) + " of " + std::to_string(sizes[i]) + " bytes, from " +
                       std::to_string(from_offsets[i]) + " of " + std::to_string(from_bytes) + " to " +
                       std::to_string(to_offsets[i]) + " of " + std::to_string(to_bytes) +
                       ": is not inside both arrays");
        }
        for (int64_t i = 0; i < num_runs; ++i)
            if (sizes[i] > 0)
                std::memcpy(static_cast<char*>(to) + to_offsets[i], static_cast<const char*>(from) + from_offsets[i],
                            static_cast<size_t>(sizes[i]));
    });
}

nestpipe_status nestpipe_copy_rows(const void* from, int64_t from_bytes, int64_t from_stride,
                                   const int64_t* from_places, void* to, int64_t to_bytes, int64_t to_stride,
                                   const int64_t* to_places, int64_t count, int64_t row_bytes, int32_t num_threads) {
    return guarded([&] {
        need_count(count, "count");
        need_count(row_bytes, "row_bytes");
        need_threads(num_threads);
        need_rows(from, from_bytes, from_stride, from_places, count, row_bytes, "from");
        need_rows(to, to_bytes, to_stride, to_places, count, row_bytes, "to");
        copy_rows({static_cast<const char*>(from), from_places, from_stride},
                  {static_cast<char*>(to), to_places, to_stride}, count, row_bytes, num_threads);
    });
}

nestpipe_status nestpipe_add_rows(void* target, int64_t target_bytes, int64_t target_stride, const int64_t* places,
                                  const void* source, int64_t source_bytes, int64_t source_stride,
                                  const uint8_t* is_first, int64_t count, int64_t dim, int32_t dtype, double limit,
                                  int32_t* exceeds, int32_t num_threads) {
    return guarded([&] {
        need_count(count, "count");
        need_range(dim, 1, int64_t{1} << 30, "dim");
        need_threads(num_threads);
        const int64_t item = item_bytes(dtype);
        need_rows(target, target_bytes, target_stride, places, count, dim * item, "target");
        need_rows(source, source_bytes, source_stride, nullptr, count, dim * item, "source");
        need_aligned(target, target_stride, item, "target");
        need_aligned(source, source_stride, item, "source");
        if (std::isnan(limit)) refuse("limit is not a number");
        const RowsAt<char> to{static_cast<char*>(target), places, target_stride};
        const RowsAt<const char> from{static_cast<const char*>(source), nullptr, source_stride};
        const auto add = dtype == NESTPIPE_FLOAT32 ? add_rows<float> : add_rows<double>;
        if (add(to, from, is_first, count, dim, exceeds != nullptr, limit, num_threads)) *exceeds = 1;
    });
}

nestpipe_status nestpipe_check_rows(const void* rows, int64_t bytes, int64_t stride, int64_t count, int64_t dim,
                                    int32_t dtype, double limit, int32_t* exceeds, int32_t num_threads) {
    return guarded([&] {
        need_count(count, "count");
        need_range(dim, 1, int64_t{1} << 30, "dim");
        need_threads(num_threads);
        need(exceeds, "exceeds");
        const int64_t item = item_bytes(dtype);
        need_rows(rows, bytes, stride, nullptr, count, dim * item, "rows");
        need_aligned(rows, stride, item, "rows");
        if (std::isnan(limit)) refuse("limit is not a number");
        const auto is_any = dtype == NESTPIPE_FLOAT32 ? any_exceeds<float> : any_exceeds<double>;
        if (is_any({static_cast<const char*>(rows), nullptr, stride}, count, dim, limit, num_threads)) *exceeds = 1;
    });
}

nestpipe_status nestpipe_sum_rows(const void* values, int64_t values_bytes, int64_t value_stride, const int64_t* order,
                                  int64_t num_entries, const int64_t* offsets, int64_t num_segments, int64_t dim,
                                  int32_t dtype, void* out, int64_t out_bytes, int64_t out_stride,
                                  int32_t num_threads) {
    return guarded([&] {
        need_count(num_entries, "num_entries");
        need_count(num_segments, "num_segments");
        need_range(dim, 1, int64_t{1} << 30, "dim");
        need_threads(num_threads);
        const int64_t item = item_bytes(dtype);
        need(offsets, "offsets");
        if (offsets[0] < 0 || offsets[num_segments] > num_entries ||
            !std::is_sorted(offsets, offsets + num_segments + 1))
            refuse("sum_rows: offsets do not rise within 0 .. " + std::to_string(num_entries));
        const int64_t first = offsets[0], end = offsets[num_segments];
        if (order != nullptr)
            need_rows(values, values_bytes, value_stride, order + first, end - first, dim * item, "values");
        else
            need_rows(values, values_bytes, value_stride, nullptr, end, dim * item, "values");
        need_rows(out, out_bytes, out_stride, nullptr, num_segments, dim * item, "out");
        need_aligned(values, value_stride, item, "values");
        need_aligned(out, out_stride, item, "out");
        const auto sum = dtype == NESTPIPE_FLOAT32 ? sum_rows<float> : sum_rows<double>;
        sum({static_cast<const char*>(values), order, value_stride}, offsets, num_segments, dim,
            {static_cast<char*>(out), nullptr, out_stride}, num_threads);
    });
}
