// The C boundary of snapshots and of their checksum.
#include "boundary.hpp"
#include "crc32c.hpp"
#include "error.hpp"
#include "nestpipe.h"
#include "store.hpp"
#include "table.hpp"

using namespace nestpipe;

namespace {

Table& the_table(nestpipe_store* store, int32_t table) {
    need(store, "store");
    return store->table(table);
}

Table::Rows rows_of(const Table& table, const nestpipe_rows* rows) {
    need(rows, "rows");
    need_count(rows->capacity, "capacity");
    if (rows->capacity == 0) refuse("capacity is 0, must be at least 1");
    need(rows->keys, "keys");
    need(rows->records, "records");
    need(rows->steps, "steps");
    if (rows->num_columns != table.num_columns())
        refuse("records of table '" + table.name() + "' have " + std::to_string(table.num_columns()) +
               " columns, not " + std::to_string(rows->num_columns));
    return {rows->capacity, rows->keys, static_cast<char*>(rows->records), rows->steps};
}

}  // namespace

nestpipe_status nestpipe_snapshot_begin(nestpipe_store* store, int32_t table, int32_t changed_only, int64_t* num_rows,
                                        int64_t* num_erased) {
    return guarded([&] {
        Table& source = the_table(store, table);
        need(num_rows, "num_rows");
        need(num_erased, "num_erased");
        source.begin_snapshot(changed_only != 0, num_rows, num_erased);
    });
}

nestpipe_status nestpipe_snapshot_erased(nestpipe_store* store, int32_t table, int64_t num_erased, int64_t* keys) {
    return guarded([&] {
        const Table& source = the_table(store, table);
        need_count(num_erased, "num_erased");
        need_array(keys, num_erased, "keys");
        source.copy_erased(num_erased, keys);
    });
}

nestpipe_status nestpipe_snapshot_next(nestpipe_store* store, int32_t table, int64_t num_shards_in_world,
                                       int64_t first_shard, int64_t num_shards, const nestpipe_rows* out,
                                       int64_t* counts, int64_t* num_rows, int32_t* is_done) {
    return guarded([&] {
        Table& source = the_table(store, table);
        need(counts, "counts");
        need(num_rows, "num_rows");
        need(is_done, "is_done");
        if (num_shards_in_world < 1 || num_shards_in_world > NESTPIPE_NUM_BUCKETS)
            refuse("num_shards_in_world is " + std::to_string(num_shards_in_world) + ", must be 1 .. 65536");
        if (first_shard < 0 || num_shards < 1 || first_shard + num_shards > num_shards_in_world)
            refuse("shards " + std::to_string(first_shard) + " .. " + std::to_string(first_shard + num_shards - 1) +
                   " are not a range within the " + std::to_string(num_shards_in_world) + " of the world");
        bool has_ended = false;
        *num_rows =
            source.next_rows({num_shards_in_world, first_shard, num_shards}, rows_of(source, out), counts, &has_ended);
        *is_done = has_ended;
    });
}

nestpipe_status nestpipe_snapshot_preserve(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                                           const nestpipe_rows* out, int64_t* num_rows, int64_t* num_done) {
    return guarded([&] {
        Table& source = the_table(store, table);
        need_count(num_keys, "num_keys");
        need_array(keys, num_keys, "keys");
        need(num_rows, "num_rows");
        need(num_done, "num_done");
        *num_rows = source.preserve(keys, num_keys, rows_of(source, out), num_done);
    });
}

nestpipe_status nestpipe_snapshot_end(nestpipe_store* store, int32_t table) {
    return guarded([&] { the_table(store, table).end_snapshot(); });
}

nestpipe_status nestpipe_crc32c(const void* data, int64_t num_bytes, uint32_t before, uint32_t* checksum) {
    return guarded([&] {
        need_count(num_bytes, "num_bytes");
        need_array(data, num_bytes, "data");
        need(checksum, "checksum");
        *checksum = crc32c(data, static_cast<size_t>(num_bytes), before);
    });
}
