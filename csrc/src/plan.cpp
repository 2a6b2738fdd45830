#include "plan.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#include "dedup.hpp"
#include "lookahead.hpp"
#include "mix.hpp"
#include "parallel.hpp"
#include "runs.hpp"
#include "scratch.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kKeyBytes = 64;  // memory that the dedup of one key touches, about

thread_local Region key_memory, distinct_memory, number_memory, place_memory;

// work(table, num_threads) for each table: a large one alone, with all threads; the others side by side. Each table has
// starts[table] .. starts[table + 1] - 1 of the keys. The work may throw.
template <typename Work>
void for_each_table(const std::vector<int64_t>& starts, int32_t num_threads, Work&& work) {
    const auto num_tables = static_cast<int64_t>(starts.size()) - 1;
    const auto size = [&](int64_t table) {
        return starts[static_cast<size_t>(table) + 1] - starts[static_cast<size_t>(table)];
    };
    const int32_t threads = threads_for(starts.back(), kKeyBytes, num_threads);
    if (threads == 1) {
        for (int64_t table = 0; table < num_tables; ++table) work(table, 1);
        return;
    }
    const int64_t large = starts.back() / threads;
    std::exception_ptr failure;
    std::mutex mutex;
    parallel_for(num_tables, 1, threads, [&](int64_t begin, int64_t end) {
        try {
            for (int64_t table = begin; table < end; ++table)
                if (size(table) < large) work(table, 1);
        } catch (...) {
            std::lock_guard lock(mutex);
            failure = std::current_exception();
        }
    });
    if (failure) std::rethrow_exception(failure);
    for (int64_t table = 0; table < num_tables; ++table)
        if (size(table) >= large) work(table, threads);
}

// The occurrences of all features and the distinct keys of all tables, by stages; see nestpipe_dedup.
class Dedup {
 public:
    Dedup(const nestpipe_feature_keys* features, int64_t num_features, int64_t num_tables)
        : features_(features),
          feature_starts_(static_cast<size_t>(num_features) + 1, 0),
          kept_starts_(static_cast<size_t>(num_features), 0),
          first_features_(static_cast<size_t>(num_tables) + 1, num_features),
          starts_(static_cast<size_t>(num_tables) + 1, 0),
          num_distinct_(static_cast<size_t>(num_tables), 0) {
        for (int64_t f = num_features - 1; f >= 0; --f) first_features_[at(features[f].table)] = f;
        for (size_t t = at(num_tables); t > 0; --t)
            first_features_[t - 1] = std::min(first_features_[t - 1], first_features_[t]);
        for (size_t f = 0; f < kept_starts_.size(); ++f)
            feature_starts_[f + 1] = feature_starts_[f] + features[f].num_keys;
        for (size_t t = 0; t < starts_.size(); ++t) starts_[t] = feature_starts_[at(first_features_[t])];
        keys_ = scratch<int64_t>(key_memory, num_occurrences());
        distinct_ = scratch<int64_t>(distinct_memory, num_occurrences());
        numbers_ = scratch<int64_t>(number_memory, num_occurrences());
        places_ = scratch<int32_t>(place_memory, num_occurrences());
    }

    // places_[i] = owner of the i-th distinct key of each table.
    void find_distinct(const uint64_t* salts, int64_t world_size, int32_t num_threads) {
        for_each_table(starts_, num_threads, [&](int64_t table, int32_t threads) {
            const int64_t start = starts_[at(table)];
            const int64_t num_kept = keep(table);
            if (num_kept == 0) return;
            const int64_t count = unique(keys_ + start, num_kept, distinct_ + start, numbers_ + start, threads);
            num_distinct_[at(table)] = count;
            for (int64_t i = start; i < start + count; ++i)
                places_[i] = static_cast<int32_t>(owner_of_hash(hash_key(distinct_[i], salts[table]), world_size));
        });
    }

    // A stable counting sort by owner; places_ become positions. Returns the number of keys.
    int64_t sort_by_owner(int64_t world_size, int64_t* keys, int32_t* counts) {
        const auto num_tables = static_cast<int64_t>(num_distinct_.size());
        std::fill(counts, counts + world_size * num_tables, 0);
        std::vector<int32_t> next(static_cast<size_t>(world_size) + 1, 0);
        for_each_distinct([&](int64_t, int64_t i) { ++next[at(places_[i]) + 1]; });
        for (size_t rank = 1; rank < next.size(); ++rank) next[rank] += next[rank - 1];
        const int64_t num_distinct = next.back();
        for_each_distinct([&](int64_t table, int64_t i) {
            const int32_t owner = places_[i];
            ++counts[owner * num_tables + table];
            const int32_t position = next[at(owner)]++;
            keys[position] = distinct_[i];
            places_[i] = position;
        });
        return num_distinct;
    }

    void write_positions(int64_t* positions, int32_t num_threads) const {
        const auto num_features = static_cast<int64_t>(kept_starts_.size());
        const int32_t threads = threads_for(num_occurrences(), kKeyBytes, num_threads);
        parallel_for(num_features, 1, threads, [&](int64_t begin, int64_t end) {
            for (int64_t f = begin; f < end; ++f) write_positions_of(f, positions + feature_starts_[at(f)]);
        });
    }

 private:
    static size_t at(int64_t i) { return static_cast<size_t>(i); }

    int64_t num_occurrences() const { return feature_starts_.back(); }

    // The keys of a table without padding, one behind the other. Returns how many.
    int64_t keep(int64_t table) {
        int64_t* kept = keys_ + starts_[at(table)];
        for (int64_t f = first_features_[at(table)]; f < first_features_[at(table) + 1]; ++f) {
            const nestpipe_feature_keys& feature = features_[f];
            kept_starts_[at(f)] = kept - keys_;
            if (feature.num_keys == 0) continue;
            if (feature.has_padding == 0) {
                std::memcpy(kept, feature.keys, at(feature.num_keys) * sizeof *kept);
                kept += feature.num_keys;
                continue;
            }
            for (int64_t i = 0; i < feature.num_keys; ++i) {  // never behind the end: i keys at most were kept before
                *kept = feature.keys[i];
                kept += feature.keys[i] != feature.padding_key;
            }
        }
        return kept - keys_ - starts_[at(table)];
    }

    // use(table, i) for each distinct key i of each table, in order.
    template <typename Use>
    NESTPIPE_INLINE void for_each_distinct(Use&& use) const {
        for (size_t table = 0; table < num_distinct_.size(); ++table)
            for (int64_t i = starts_[table], end = i + num_distinct_[table]; i < end; ++i)
                use(static_cast<int64_t>(table), i);
    }

    void write_positions_of(int64_t f, int64_t* positions) const {
        const nestpipe_feature_keys& feature = features_[f];
        const int64_t* numbers = numbers_ + kept_starts_[at(f)];
        const int32_t* places = places_ + starts_[at(feature.table)];
        if (feature.has_padding == 0) {
            for (int64_t i = 0; i < feature.num_keys; ++i) positions[i] = places[numbers[i]];
            return;
        }
        for (int64_t i = 0; i < feature.num_keys; ++i)
            positions[i] = feature.keys[i] == feature.padding_key ? -1 : places[*numbers++];
    }

    const nestpipe_feature_keys* features_;
    std::vector<int64_t> feature_starts_;  // first occurrence of each feature
    std::vector<int64_t> kept_starts_;     // the same in keys_
    std::vector<int64_t> first_features_;  // of each table
    std::vector<int64_t> starts_;          // where each table begins in the arrays below
    std::vector<int64_t> num_distinct_;    // of each table
    int64_t *keys_, *distinct_, *numbers_;
    int32_t* places_;
};

}  // namespace

Outside find_outside(const nestpipe_feature_keys* features, int64_t num_features) {
    for (int64_t f = 0; f < num_features; ++f) {
        const nestpipe_feature_keys& feature = features[f];
        if (feature.key_limit <= 0) continue;
        const auto limit = static_cast<uint64_t>(feature.key_limit);
        for (int64_t i = 0; i < feature.num_keys; ++i) {
            const bool is_padding = feature.has_padding != 0 && feature.keys[i] == feature.padding_key;
            if (static_cast<uint64_t>(feature.keys[i]) >= limit && !is_padding) return {f, i};
        }
    }
    return {-1, -1};
}

int64_t dedup(const nestpipe_feature_keys* features, int64_t num_features, const uint64_t* salts, int64_t num_tables,
              int64_t world_size, int64_t* keys, int32_t* counts, int64_t* positions, int32_t num_threads) {
    Dedup batch(features, num_features, num_tables);
    batch.find_distinct(salts, world_size, num_threads);
    const int64_t num_distinct = batch.sort_by_owner(world_size, keys, counts);
    batch.write_positions(positions, num_threads);
    return num_distinct;
}

int64_t owner_dedup(const int64_t* keys, const KeyCounts& key_counts, int64_t* distinct, int64_t* slots,
                    int64_t* table_counts, int32_t num_threads) {
    const Runs runs = find_runs(key_counts);
    const std::vector<int64_t> starts = table_starts(runs, key_counts.num_tables);
    int64_t* by_table = scratch<int64_t>(key_memory, key_counts.num_keys);
    int64_t* numbers = scratch<int64_t>(number_memory, key_counts.num_keys);

    std::vector<int64_t> next = starts;
    const int64_t* key = keys;
    for (const Run& run : runs) {
        int64_t& to = next[static_cast<size_t>(run.table)];
        for_each_key(run, [&] { by_table[to++] = *key++; });
    }
    for_each_table(starts, num_threads, [&](int64_t table, int32_t threads) {
        const int64_t start = starts[static_cast<size_t>(table)];
        const int64_t count = starts[static_cast<size_t>(table) + 1] - start;
        table_counts[table] =
            count == 0 ? 0 : unique(by_table + start, count, distinct + start, numbers + start, threads);
    });
    std::vector<int64_t> first_slots(starts.size(), 0);
    for (size_t t = 0; t + 1 < starts.size(); ++t) {
        first_slots[t + 1] = first_slots[t] + table_counts[t];
        std::copy(distinct + starts[t], distinct + starts[t] + table_counts[t], distinct + first_slots[t]);
    }
    next = starts;
    int64_t* slot = slots;
    for (const Run& run : runs) {
        const int64_t first_slot = first_slots[static_cast<size_t>(run.table)];
        int64_t& from = next[static_cast<size_t>(run.table)];
        for_each_key(run, [&] { *slot++ = first_slot + numbers[from++]; });
    }
    return first_slots.back();
}

void cluster_numbers(const KeyCounts& key_counts, const int64_t* bases, int64_t* numbers) {
    const Runs runs = find_runs(key_counts);
    std::vector<int64_t> next(bases, bases + key_counts.num_tables);
    for (const Run& run : runs) {
        int64_t& number = next[static_cast<size_t>(run.table)];
        for_each_key(run, [&] { *numbers++ = number++; });
    }
}

}  // namespace nestpipe
