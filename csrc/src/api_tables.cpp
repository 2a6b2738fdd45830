// The C boundary of calls on several tables at once.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "boundary.hpp"
#include "dedup.hpp"
#include "nestpipe.h"
#include "optimizer_checks.hpp"
#include "store.hpp"
#include "table.hpp"
#include "tables.hpp"

using namespace nestpipe;

namespace {

std::vector<Table*> tables_of(nestpipe_store* store, const int32_t* numbers, int64_t num_tables) {
    need(store, "store");
    need_count(num_tables, "num_tables");
    need_array(numbers, num_tables, "tables");
    std::vector<Table*> tables;
    tables.reserve(static_cast<size_t>(num_tables));
    std::lock_guard lock(store->mutex);
    for (int64_t t = 0; t < num_tables; ++t) tables.push_back(&store->table_unlocked(numbers[t]));
    return tables;
}

// The tables of one call, in the caller's order, and sorted by number, the order of locking.
class TablesOfCall {
 public:
    TablesOfCall(nestpipe_store* store, const int32_t* numbers, int64_t num_tables)
        : tables_(tables_of(store, numbers, num_tables)) {
        const int32_t* end = numbers + num_tables;
        if (std::adjacent_find(numbers, end, [](int32_t a, int32_t b) { return a >= b; }) == end) return;
        std::vector<int32_t> ascending(numbers, end);
        std::sort(ascending.begin(), ascending.end());
        const auto twice = std::adjacent_find(ascending.begin(), ascending.end());
        if (twice != ascending.end())
            refuse("table '" + tables_[static_cast<size_t>(std::find(numbers, end, *twice) - numbers)]->name() +
                   "' is given twice; give each table once, with all its keys");
        sorted_ = tables_of(store, ascending.data(), num_tables);
    }

    // All have records of the same size: a row of one array fits each of them.
    void need_same_records() const {
        const auto text = [](const Table& table) {
            return "table '" + table.name() + "' has " + std::to_string(table.num_columns()) + " columns of " +
                   std::to_string(table.item_bytes()) + " bytes";
        };
        for (const Table* table : tables_)
            if (table->num_columns() != tables_[0]->num_columns() || table->item_bytes() != tables_[0]->item_bytes())
                refuse("tables of one call need records of one size: " + text(*tables_[0]) + ", " + text(*table));
    }

    const std::vector<Table*>& all() const { return tables_; }
    Table* const* in_order() const { return sorted_.empty() ? tables_.data() : sorted_.data(); }

    Tables with(const int64_t* offsets, const int64_t* keys) const {
        return {tables_.data(), in_order(), static_cast<int64_t>(tables_.size()), offsets, keys};
    }

 private:
    std::vector<Table*> tables_;
    std::vector<Table*> sorted_;  // empty where the order given is that of the numbers
};

void need_row_state(const Table& table, const RowOptimizer& optimizer) {
    const int64_t width = optimizer.state_width(table.dim());
    if (table.num_columns() != table.dim() + width)
        refuse("table '" + table.name() + "' has " + std::to_string(table.num_columns() - table.dim()) +
               " columns of row state, the row optimizer needs " + std::to_string(width));
}

}  // namespace

nestpipe_status nestpipe_gather_tables(nestpipe_store* store, const int32_t* tables, const int64_t* offsets,
                                       int64_t num_tables, const int64_t* keys, int64_t num_keys, const int64_t* places,
                                       int64_t num_columns, void* out, int64_t num_out, int64_t stride, uint8_t* found,
                                       int32_t num_threads) {
    return guarded([&] {
        const TablesOfCall sources(store, tables, num_tables);
        need_table_offsets(offsets, num_tables, num_keys, "offsets");
        need_array(keys, num_keys, "keys");
        need_threads(num_threads);
        if (num_tables == 0) return;
        sources.need_same_records();
        for (const Table* source : sources.all()) need_columns(*source, num_columns);
        const Table& first = *sources.all()[0];
        need_records(first, out, num_out, num_columns, stride, places, num_keys, "out");
        const RecordsAt<char> target{static_cast<char*>(out), places, stride * first.item_bytes()};
        sources.with(offsets, keys).gather(num_columns, target, found, nullptr, num_threads, &store->last_found);
    });
}

nestpipe_status nestpipe_scatter_tables(nestpipe_store* store, const int32_t* tables, const int64_t* offsets,
                                        int64_t num_tables, const int64_t* keys, int64_t num_keys,
                                        const int64_t* places, const void* records, int64_t num_records, int64_t stride,
                                        const int64_t* steps, int64_t step, int32_t num_threads) {
    return guarded([&] {
        const TablesOfCall targets(store, tables, num_tables);
        need_table_offsets(offsets, num_tables, num_keys, "offsets");
        need_array(keys, num_keys, "keys");
        need_threads(num_threads);
        if (num_tables == 0) return;
        targets.need_same_records();
        const Table& first = *targets.all()[0];
        if (steps != nullptr)
            need_steps(steps, num_keys);
        else
            need_step(first, step);
        need_records(first, records, num_records, first.num_columns(), stride, places, num_keys, "records");
        const RecordsAt<const char> source{static_cast<const char*>(records), places, stride * first.item_bytes()};
        targets.with(offsets, keys).write(source, steps, step, num_threads, &store->last_found);
    });
}

nestpipe_status nestpipe_update_tables(nestpipe_store* store, const int32_t* tables, const int64_t* offsets,
                                       int64_t num_tables, const int64_t* keys, int64_t num_keys,
                                       const nestpipe_optimizer* optimizer, const void* gradient, int64_t step,
                                       int32_t num_threads) {
    return guarded([&] {
        const TablesOfCall targets(store, tables, num_tables);
        need_table_offsets(offsets, num_tables, num_keys, "offsets");
        need_array(keys, num_keys, "keys");
        need_array(gradient, num_keys, "gradient");
        need_threads(num_threads);
        if (num_tables == 0) return;
        targets.need_same_records();
        const Table& first = *targets.all()[0];
        need_step(first, step);
        const RowOptimizer with =
            optimizer_of(optimizer, first.item_bytes() == 4 ? NESTPIPE_FLOAT32 : NESTPIPE_FLOAT64);
        for (const Table* target : targets.all()) need_row_state(*target, with);
        targets.with(offsets, keys)
            .update(with, static_cast<const char*>(gradient), step, num_threads, &store->last_found);
    });
}

nestpipe_status nestpipe_find_tables(nestpipe_store* store, const int32_t* tables, const int64_t* offsets,
                                     int64_t num_tables, const int64_t* keys, int64_t num_keys, uint8_t* found,
                                     int32_t num_threads) {
    return guarded([&] {
        const TablesOfCall sources(store, tables, num_tables);
        need_table_offsets(offsets, num_tables, num_keys, "offsets");
        need_array(keys, num_keys, "keys");
        need_array(found, num_keys, "found");
        need_threads(num_threads);
        sources.with(offsets, keys).find(found, num_threads);
    });
}

nestpipe_status nestpipe_table_sizes(nestpipe_store* store, const int32_t* tables, int64_t num_tables, int64_t* sizes) {
    return guarded([&] {
        const std::vector<Table*> sources = tables_of(store, tables, num_tables);
        need_array(sizes, num_tables, "sizes");
        std::transform(sources.begin(), sources.end(), sizes, [](const Table* table) { return table->size(); });
    });
}

nestpipe_status nestpipe_match_tables(const int64_t* before, int64_t num_before, const int64_t* before_offsets,
                                      const int64_t* keys, int64_t num_keys, const int64_t* key_offsets,
                                      int64_t num_tables, int64_t* places, int32_t num_threads) {
    return guarded([&] {
        need_table_offsets(before_offsets, num_tables, num_before, "before_offsets");
        need_table_offsets(key_offsets, num_tables, num_keys, "key_offsets");
        need_array(before, num_before, "before");
        need_array(keys, num_keys, "keys");
        need_array(places, num_keys, "places");
        need_threads(num_threads);
        match_tables(before, before_offsets, keys, key_offsets, num_tables, places, num_threads);
    });
}
