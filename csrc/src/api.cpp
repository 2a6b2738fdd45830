// The C boundary: checks every argument, then calls; exceptions become status codes and text.
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "boundary.hpp"
#include "dedup.hpp"
#include "error.hpp"
#include "mix.hpp"
#include "nestpipe.h"
#include "owner.hpp"
#include "store.hpp"
#include "table.hpp"
#include "tables.hpp"

using namespace nestpipe;

namespace {

Table& the_table(nestpipe_store* store, int32_t table) {
    need(store, "store");
    return store->table(table);
}

void need_bytes(const Table& table, int64_t num_rows, int64_t num_columns, int64_t bytes, const char* what) {
    int64_t needed;  // sizes within their limits can still multiply to more than 63 bits
    const bool overflows = __builtin_mul_overflow(num_rows, num_columns * table.item_bytes(), &needed);
    if (overflows) refuse(std::string(what) + " would have more than 2^63 bytes");
    if (bytes != needed)
        refuse(std::string(what) + " of table '" + table.name() + "' has " + std::to_string(bytes) + " bytes; " +
               std::to_string(num_rows) + " rows of " + std::to_string(num_columns) + " columns of " +
               std::to_string(table.item_bytes()) + " bytes need " + std::to_string(needed));
}

void need_apart(const void* a, const void* b, int64_t bytes, const char* what) {
    const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
    const auto distance = first < second ? second - first : first - second;
    if (distance < static_cast<uintptr_t>(bytes)) refuse(std::string(what) + " overlap in memory; give each its own");
}

void need_buckets(int64_t first_bucket, int64_t end_bucket) {
    if (first_bucket < 0 || first_bucket > end_bucket || end_bucket > NESTPIPE_NUM_BUCKETS)
        refuse("buckets [" + std::to_string(first_bucket) + ", " + std::to_string(end_bucket) +
               ") are not a range within 0 .. 65536");
}

void check_initial(const nestpipe_table_spec& spec, const std::string& where) {
    if (!std::isfinite(spec.initial_a) || !std::isfinite(spec.initial_b))
        refuse(where + "the initial distribution has a parameter that is not finite");
    switch (spec.initial) {
        case NESTPIPE_CONSTANT:
            return;
        case NESTPIPE_UNIFORM:
            if (spec.initial_a > spec.initial_b || !std::isfinite(spec.initial_b - spec.initial_a))
                refuse(where + "uniform initial values need low <= high and a finite difference");
            return;
        case NESTPIPE_NORMAL:
        case NESTPIPE_TRUNCATED_NORMAL:
            if (spec.initial_b < 0) refuse(where + "normal initial values need a standard deviation >= 0");
            return;
        default:
            refuse(where + "unknown initial distribution " + std::to_string(spec.initial));
    }
}

void check_spec(const nestpipe_table_spec& spec) {
    constexpr int64_t kMostColumns = int64_t{1} << 20;
    need(spec.name, "table name");
    if (*spec.name == '\0') refuse("a table needs a name");
    const std::string where = "table '" + std::string(spec.name) + "': ";
    if (spec.dim < 1 || spec.dim > kMostColumns)
        refuse(where + "dim is " + std::to_string(spec.dim) + ", must be 1 .. 2^20");
    if (spec.state_width < 0 || spec.state_width > kMostColumns)
        refuse(where + "state_width is " + std::to_string(spec.state_width) + ", must be 0 .. 2^20");
    if (spec.max_rows < 0 || spec.max_rows > nestpipe::kMostRows)
        refuse(where + "max_rows is " + std::to_string(spec.max_rows) + ", must be 0 .. 2^32 - 2");
    if (spec.dtype != NESTPIPE_FLOAT32 && spec.dtype != NESTPIPE_FLOAT64)
        refuse(where + "unknown dtype " + std::to_string(spec.dtype));
    need_array(spec.initial_state, spec.state_width, "initial_state");
    for (int64_t j = 0; j < spec.state_width; ++j)
        if (!std::isfinite(spec.initial_state[j])) refuse(where + "initial_state has a value that is not finite");
    check_initial(spec, where);
}

uint64_t salt_of(const char* table_name) {
    need(table_name, "table name");
    return nestpipe::name_salt(table_name);
}

}  // namespace

int32_t nestpipe_abi_version(void) { return NESTPIPE_ABI_VERSION; }

const char* nestpipe_last_error(void) { return last_error; }

nestpipe_status nestpipe_store_create(nestpipe_store** store) {
    return guarded([&] {
        need(store, "store");
        *store = new nestpipe_store;
    });
}

nestpipe_status nestpipe_store_destroy(nestpipe_store* store) {
    return guarded([&] { delete store; });
}

nestpipe_status nestpipe_table_create(nestpipe_store* store, const nestpipe_table_spec* spec, int32_t* table) {
    return guarded([&] {
        need(store, "store");
        need(spec, "table spec");
        need(table, "table");
        check_spec(*spec);
        auto created = std::make_unique<Table>(*spec);
        std::lock_guard lock(store->mutex);
        for (const auto& other : store->tables)
            if (other->name() == created->name())
                throw Error(NESTPIPE_TABLE_EXISTS,
                            "the store already has a table '" + created->name() + "'; give the new one another name");
        store->tables.push_back(std::move(created));
        *table = static_cast<int32_t>(store->tables.size()) - 1;
    });
}

nestpipe_status nestpipe_table_size(nestpipe_store* store, int32_t table, int64_t* num_rows) {
    return guarded([&] {
        need(num_rows, "num_rows");
        *num_rows = the_table(store, table).size();
    });
}

nestpipe_status nestpipe_table_reserve(nestpipe_store* store, int32_t table, int64_t num_rows) {
    return guarded([&] { the_table(store, table).reserve(num_rows); });
}

nestpipe_status nestpipe_table_memory(nestpipe_store* store, int32_t table, nestpipe_memory_report* report) {
    return guarded([&] {
        need(report, "report");
        *report = the_table(store, table).memory();
    });
}

nestpipe_status nestpipe_gather(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                                int64_t num_columns, void* out, int64_t out_bytes, uint8_t* found, int64_t* steps,
                                int32_t num_threads) {
    return guarded([&] {
        Table& source = the_table(store, table);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(out, num_keys, "out");
        need_threads(num_threads);
        need_columns(source, num_columns);
        need_bytes(source, num_keys, num_columns, out_bytes, "out");
        const RecordsAt<char> target{static_cast<char*>(out), nullptr, num_columns * source.item_bytes()};
        Tables(source, keys, num_keys).gather(num_columns, target, found, steps, num_threads);
    });
}

nestpipe_status nestpipe_scatter(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                                 const void* records, int64_t records_bytes, int64_t step, int32_t num_threads) {
    return guarded([&] {
        Table& target = the_table(store, table);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(records, num_keys, "records");
        need_threads(num_threads);
        need_bytes(target, num_keys, target.num_columns(), records_bytes, "records");
        const RecordsAt<const char> source{static_cast<const char*>(records), nullptr,
                                           target.num_columns() * target.item_bytes()};
        need_step(target, step);
        Tables(target, keys, num_keys).write(source, nullptr, step, num_threads);
    });
}

nestpipe_status nestpipe_find(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                              uint8_t* found, int32_t num_threads) {
    return guarded([&] {
        Table& source = the_table(store, table);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(found, num_keys, "found");
        need_threads(num_threads);
        Tables(source, keys, num_keys).find(found, num_threads);
    });
}

nestpipe_status nestpipe_erase(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                               int64_t* num_erased) {
    return guarded([&] {
        Table& target = the_table(store, table);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        const int64_t count = target.erase(keys, num_keys);
        if (num_erased != nullptr) *num_erased = count;
    });
}

nestpipe_status nestpipe_count(nestpipe_store* store, int32_t table, int64_t first_bucket, int64_t end_bucket,
                               int64_t* num_rows) {
    return guarded([&] {
        const Table& source = the_table(store, table);
        need(num_rows, "num_rows");
        need_buckets(first_bucket, end_bucket);
        *num_rows = source.count(first_bucket, end_bucket);
    });
}

nestpipe_status nestpipe_export(nestpipe_store* store, int32_t table, int64_t first_bucket, int64_t end_bucket,
                                int64_t capacity, int64_t* keys, void* records, int64_t records_bytes, int64_t* steps,
                                int64_t* num_rows) {
    return guarded([&] {
        const Table& source = the_table(store, table);
        need_buckets(first_bucket, end_bucket);
        need_count(capacity, "capacity");
        need_array(keys, capacity, "keys");
        need_array(records, capacity, "records");
        need_array(steps, capacity, "steps");
        need(num_rows, "num_rows");
        need_bytes(source, capacity, source.num_columns(), records_bytes, "records");
        *num_rows = source.export_piece(first_bucket, end_bucket, capacity, keys, static_cast<char*>(records), steps);
    });
}

nestpipe_status nestpipe_import(nestpipe_store* store, int32_t table, int64_t first_bucket, int64_t end_bucket,
                                int64_t num_rows, const int64_t* keys, const void* records, int64_t records_bytes,
                                const int64_t* steps, int32_t num_threads) {
    return guarded([&] {
        Table& target = the_table(store, table);
        need_buckets(first_bucket, end_bucket);
        need_count(num_rows, "num_rows");
        need_array(keys, num_rows, "keys");
        need_array(records, num_rows, "records");
        need_array(steps, num_rows, "steps");
        need_threads(num_threads);
        need_bytes(target, num_rows, target.num_columns(), records_bytes, "records");
        target.import_piece(first_bucket, end_bucket, num_rows, keys, static_cast<const char*>(records), steps,
                            num_threads);
    });
}

nestpipe_status nestpipe_digest(nestpipe_store* store, int32_t table, uint8_t digest[32], int32_t num_threads) {
    return guarded([&] {
        const Table& source = the_table(store, table);
        need(digest, "digest");
        need_threads(num_threads);
        source.digest(digest, num_threads);
    });
}

nestpipe_status nestpipe_unique(const int64_t* keys, int64_t num_keys, int64_t* unique, int64_t* inverse,
                                int64_t* num_unique, int32_t num_threads) {
    return guarded([&] {
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(unique, num_keys, "unique");
        need_array(inverse, num_keys, "inverse");
        need(num_unique, "num_unique");
        need_threads(num_threads);
        const int64_t bytes = num_keys * static_cast<int64_t>(sizeof(int64_t));
        need_apart(keys, unique, bytes, "keys and unique");
        need_apart(keys, inverse, bytes, "keys and inverse");
        need_apart(unique, inverse, bytes, "unique and inverse");
        *num_unique = nestpipe::unique(keys, num_keys, unique, inverse, num_threads);
    });
}

nestpipe_status nestpipe_group_by_owner(const char* table_name, const int64_t* keys, int64_t num_keys,
                                        int32_t world_size, int64_t* order, int64_t* counts) {
    return guarded([&] {
        const uint64_t salt = salt_of(table_name);
        if (world_size < 1 || world_size > NESTPIPE_NUM_BUCKETS)
            refuse("world_size is " + std::to_string(world_size) + ", must be 1 .. 65536");
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(order, num_keys, "order");
        need(counts, "counts");
        nestpipe::group_by_owner(salt, keys, num_keys, world_size, order, counts);
    });
}

nestpipe_status nestpipe_hash(const char* table_name, const int64_t* keys, int64_t num_keys, uint64_t* hashes) {
    return guarded([&] {
        const uint64_t salt = salt_of(table_name);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need_array(hashes, num_keys, "hashes");
        for (int64_t i = 0; i < num_keys; ++i) hashes[i] = nestpipe::hash_key(keys[i], salt);
    });
}
