// The keys of a batch, for all tables and all ranks at once: distinct ones, their owners, the parts that use them.
#pragma once

#include <cstdint>

#include "nestpipe.h"

namespace nestpipe {

// The first occurrence of a key outside of its feature's limit; -1, -1 if there is none.
struct Outside {
    int64_t feature, occurrence;
};
Outside find_outside(const nestpipe_feature_keys* features, int64_t num_features);

// Arguments as in nestpipe_dedup, which has checked them. Returns the number of distinct keys.
int64_t dedup(const nestpipe_feature_keys* features, int64_t num_features, const uint64_t* salts, int64_t num_tables,
              int64_t world_size, int64_t* keys, int32_t* counts, int64_t* positions, int32_t num_threads);

// Arguments as in nestpipe_pack_keys, which has checked them.
void pack_keys(const nestpipe_feature_keys* features, int64_t num_features, int64_t num_tables, int64_t* keys,
               int16_t* tables, int32_t num_threads);

// Arguments as in nestpipe_copy_arrays.
void copy_arrays(const nestpipe_array_copy* arrays, int64_t num_arrays, uint8_t* target, int32_t num_threads);

// Arguments as in nestpipe_find_ranges.
void find_ranges(const nestpipe_array_copy* arrays, int64_t num_arrays, uint8_t* is_range, int32_t num_threads);

// Arguments as in nestpipe_lay_out. Returns the largest number of keys of a sample.
int64_t lay_out(const nestpipe_feature_samples* features, int64_t num_features, const int64_t* samples,
                const int64_t* part_offsets, int64_t num_parts, int64_t* bounds, int64_t* sources, int32_t num_threads);

// The number of keys of each rank and table.
struct KeyCounts {
    const int32_t* counts;
    int64_t num_ranks, num_tables;
    int64_t num_keys;  // refused if it is not the sum
};

// The input of nestpipe_split. All is checked except the sum of the counts, and that every position occurs.
struct SplitInput {
    const nestpipe_feature_samples* features;
    int64_t num_features;
    const int64_t* positions;
    KeyCounts distinct;
    const int64_t* samples;
    const int64_t* part_offsets;
    int64_t num_parts;
};

struct SplitOutput {
    uint8_t* uses;
    int64_t* row_positions;
    uint8_t* is_first;
    int64_t* row_counts;
    int64_t* num_rows;
    int64_t* index;
    int64_t* index_offsets;
    int64_t* offsets;
    int64_t* sources;
};

void split(const SplitInput& input, const SplitOutput& output);

// Arguments as in nestpipe_owner_dedup. Returns the number of distinct keys.
int64_t owner_dedup(const int64_t* keys, const KeyCounts& key_counts, int64_t* distinct, int64_t* slots,
                    int64_t* table_counts, int32_t num_threads);

struct ExchangeInput {
    const uint8_t* uses;
    int64_t num_keys, num_parts;
    nestpipe_which_parts which;
    const int64_t* rank_counts;
    int64_t num_ranks, own_rank;
};

// Arguments as in nestpipe_exchange_lists.
void exchange_lists(const ExchangeInput& input, int64_t* places, int64_t capacity, int64_t* offsets, int64_t* counts);

// The input of nestpipe_one_part_lists. Everything is checked but the sum of the counts, and key_index.
struct OnePart {
    KeyCounts requests;
    const int64_t *key_index, *entry_counts;
    int64_t num_entries, num_keys, own_rank;
};

struct OnePartLists {
    int64_t *rows_in, *rows_out, *entries, *order, *offsets;
};

void list_one_part(const OnePart& input, const OnePartLists& lists);

// Arguments as in nestpipe_cluster_numbers.
void cluster_numbers(const KeyCounts& key_counts, const int64_t* bases, int64_t* numbers);

}  // namespace nestpipe
