/* The host store and its key operations: one C interface, no Python, no torch.
 *
 * A store holds tables. A table maps a 64-bit key to a record (the row, followed by its row state, both of the
 * table's dtype) and to one step number (the step that last wrote the record).
 *
 * Conventions
 *   - Every function returns a nestpipe_status. On anything but NESTPIPE_OK nothing has changed, no output is
 *     meaningful, and nestpipe_last_error() of the calling thread says what was wrong and what to do.
 *   - The caller owns all memory. Arrays are dense and row-major, in native byte order. A pointer may be null only
 *     where this header says so, or where its array has no elements.
 *   - Sizes of record arrays are also passed in bytes, and refused when they are not exactly what the call needs.
 *   - `num_threads` is the number of threads the call may use, the calling thread included (>= 1). Results never
 *     depend on it.
 *
 * Threads
 *   Any function may be called from any thread at any time, except nestpipe_store_destroy, which must be the last
 *   call on its store. Per table, calls that read (gather, find, size, export, count, digest, memory, next and
 *   preserve of a snapshot) run side by side, calls that write (scatter, import, erase, reserve, begin and end of a
 *   snapshot) alone. A reader that comes late may overtake a waiting writer. A forked child may use a store only if no
 *   call on it was under way in another thread at the fork.
 */
#ifndef NESTPIPE_H
#define NESTPIPE_H

#include <stdint.h>

#if defined(__GNUC__)
#define NESTPIPE_API __attribute__((visibility("default")))
#else
#define NESTPIPE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a signature, a struct or a meaning below does; the loader refuses a library of another version. */
#define NESTPIPE_ABI_VERSION 15

/* A bucket is the unit of ownership, export and import: the top 16 bits of a key's hash. */
#define NESTPIPE_NUM_BUCKETS 65536

/* Upper limit of every num_threads. */
#define NESTPIPE_MAX_THREADS 1024

typedef enum nestpipe_status {
    NESTPIPE_OK = 0,
    NESTPIPE_INVALID_ARGUMENT = 1, /* null pointer, wrong size, unknown table, bucket out of range, ... */
    NESTPIPE_OUT_OF_MEMORY = 2,
    NESTPIPE_TABLE_FULL = 3,   /* max_rows would be exceeded */
    NESTPIPE_TABLE_EXISTS = 4, /* a table of that name is already in the store */
    NESTPIPE_CHANGED = 5,      /* the table was written to between two calls that belong together: begin again */
    NESTPIPE_INTERNAL = 6      /* a bug in this library */
} nestpipe_status;

typedef enum nestpipe_dtype { NESTPIPE_FLOAT32 = 0, NESTPIPE_FLOAT64 = 1 } nestpipe_dtype;

/* Initial rows. Column j of a key's initial row is a function of (seed, table name, key, j) and of nothing else. */
typedef enum nestpipe_initial {
    NESTPIPE_CONSTANT = 0,        /* a */
    NESTPIPE_UNIFORM = 1,         /* between a and b */
    NESTPIPE_NORMAL = 2,          /* mean a, standard deviation b */
    NESTPIPE_TRUNCATED_NORMAL = 3 /* mean a, standard deviation b, nothing beyond a +- 2 b */
} nestpipe_initial;

typedef struct nestpipe_table_spec {
    const char* name;            /* UTF-8, not empty */
    int64_t dim;                 /* columns of a row, >= 1 */
    int64_t state_width;         /* columns of its row state, >= 0 */
    const double* initial_state; /* state_width values, the same for every key */
    int64_t max_rows;            /* 1 .. 2^32 - 2; 0: as many as that */
    uint64_t seed;
    double initial_a;
    double initial_b;
    int32_t initial; /* nestpipe_initial */
    int32_t dtype;   /* nestpipe_dtype */
} nestpipe_table_spec;

/* Bytes a table uses. Memory is mapped ahead in large blocks; what was never written costs no physical memory. */
typedef struct nestpipe_memory_report {
    int64_t num_rows;
    int64_t record_bytes;   /* of one record */
    int64_t payload_bytes;  /* num_rows * record_bytes */
    int64_t metadata_bytes; /* step numbers */
    int64_t index_bytes;    /* key -> record, the keys themselves included */
    int64_t erased_bytes;   /* records that were erased and wait to be used again */
    int64_t mapped_bytes;   /* address space, an upper bound of the physical memory */
} nestpipe_memory_report;

/* The rows of each sample of a batch. */
typedef struct nestpipe_occurrences {
    const int64_t* index;   /* [num_occurrences] a row, or num_rows for padding, which is no row */
    const int64_t* offsets; /* [num_samples + 1] sample s has occurrences offsets[s] .. offsets[s + 1] - 1;
                               null: one each, and num_occurrences == num_samples */
    const void* weights;    /* [num_occurrences] of the dtype; null: all are 1 */
    int64_t num_occurrences;
    int64_t num_samples;
    int64_t num_rows;
    int64_t dim;
    int32_t dtype; /* nestpipe_dtype */
} nestpipe_occurrences;

typedef enum nestpipe_optimizer_kind {
    NESTPIPE_SGD = 0,     /* row -= lr * g, with one rounding */
    NESTPIPE_ADAGRAD = 1, /* state [dim] += g^2; row -= lr * g / (sqrt(state) + eps) */
    NESTPIPE_ROWWISE_ADAGRAD =
        2,            /* state [1] += mean(g^2); row -= lr / (sqrt(state) + eps) * g. Of the squares, every
                         16th belongs to one sum; sums i and i + 8 are added, then i and i + 4, and so on. */
    NESTPIPE_ADAM = 3 /* state [2 * dim]: first = beta1 * first + (1 - beta1) * g;
                         second = beta2 * second + (1 - beta2) * g^2;
                         row -= lr * first / (sqrt(second) + eps) */
} nestpipe_optimizer_kind;

/* A row optimizer. Constants, 1 - beta1 and 1 - beta2 among them, are computed in double and rounded once to the dtype;
 * those that a kind does not have are ignored. */
typedef struct nestpipe_optimizer {
    int32_t kind; /* nestpipe_optimizer_kind */
    double lr;
    double eps;
    double beta1;
    double beta2;
} nestpipe_optimizer;

/* Arguments of a row optimizer: rows, state and gradient, each with its stride. Slots without a gradient do not
 * change. If one of `slots` is not in 0 .. num_slots - 1, nothing does. */
typedef struct nestpipe_row_update {
    void* rows;           /* [num_slots, dim], a row every row_stride elements */
    void* state;          /* [num_slots, as many columns as the optimizer needs], every state_stride elements */
    const void* gradient; /* [num_rows, dim], dense */
    const int64_t* slots; /* [num_rows] distinct: the slot whose row and state gradient i changes; null: slot i */
    int64_t num_rows;
    int64_t num_slots; /* >= num_rows */
    int64_t dim;
    int64_t row_stride;
    int64_t state_stride;
    int32_t dtype; /* nestpipe_dtype */
} nestpipe_row_update;

typedef struct nestpipe_store nestpipe_store;

NESTPIPE_API int32_t nestpipe_abi_version(void);

/* Text of the last error in the calling thread; valid until this thread's next call. Never null. */
NESTPIPE_API const char* nestpipe_last_error(void);

/* ---- store and tables -------------------------------------------------------------------------------------- */

NESTPIPE_API nestpipe_status nestpipe_store_create(nestpipe_store** store);
NESTPIPE_API nestpipe_status nestpipe_store_destroy(nestpipe_store* store); /* null is allowed */

/* `table` receives the number by which all other calls name the table. */
NESTPIPE_API nestpipe_status nestpipe_table_create(nestpipe_store* store, const nestpipe_table_spec* spec,
                                                   int32_t* table);

NESTPIPE_API nestpipe_status nestpipe_table_size(nestpipe_store* store, int32_t table, int64_t* num_rows);

/* Makes room for num_rows rows in all, so that later inserts do not stop to grow. Never shrinks. */
NESTPIPE_API nestpipe_status nestpipe_table_reserve(nestpipe_store* store, int32_t table, int64_t num_rows);

NESTPIPE_API nestpipe_status nestpipe_table_memory(nestpipe_store* store, int32_t table,
                                                   nestpipe_memory_report* report);

/* ---- records ----------------------------------------------------------------------------------------------- */

/* Copies the records of `keys` (any order, repeats allowed) to `out`, and never inserts: a missing key gets its
 * initial row and state.
 *   num_columns  dim (rows only) or dim + state_width (whole records)
 *   out          [num_keys, num_columns], out_bytes bytes
 *   found        [num_keys] 1 where the key was there, 0 where it was missing; may be null
 *   steps        [num_keys] step that last wrote the record, -1 where missing; may be null */
NESTPIPE_API nestpipe_status nestpipe_gather(nestpipe_store* store, int32_t table, const int64_t* keys,
                                             int64_t num_keys, int64_t num_columns, void* out, int64_t out_bytes,
                                             uint8_t* found, int64_t* steps, int32_t num_threads);

/* Writes whole records, inserting keys that are missing and overwriting the others; of a repeated key the last
 * occurrence stays.
 *   records  [num_keys, dim + state_width], records_bytes bytes
 *   step     stored with every one of them, >= 0 */
NESTPIPE_API nestpipe_status nestpipe_scatter(nestpipe_store* store, int32_t table, const int64_t* keys,
                                              int64_t num_keys, const void* records, int64_t records_bytes,
                                              int64_t step, int32_t num_threads);

/* found: [num_keys], as in nestpipe_gather. */
NESTPIPE_API nestpipe_status nestpipe_find(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                                           uint8_t* found, int32_t num_threads);

/* Removes keys; missing and repeated keys are allowed. num_erased: number of keys that existed; may be null. */
NESTPIPE_API nestpipe_status nestpipe_erase(nestpipe_store* store, int32_t table, const int64_t* keys, int64_t num_keys,
                                            int64_t* num_erased);

/* Calls on several tables at once. Their keys are ordered by table: table tables[t] has keys offsets[t] ..
 * offsets[t + 1] - 1. Threads share the keys of all tables. A call happens to all tables at one moment: a reader sees
 * all of a writer's call or nothing, and a writer that is refused has changed no table.
 *   tables   [num_tables] in any order, each at most once
 *   offsets  [num_tables + 1] ascending, from 0 to num_keys */

/* As nestpipe_gather for each table, into an array of num_out records, of which some are written: those of `keys` at
 * `places`. All tables have records of the same number of columns and the same dtype.
 *   places  [num_keys] distinct, 0 .. num_out - 1; null: 0 .. num_keys - 1, num_keys <= num_out
 *   stride  elements from one record to the next, >= num_columns; what lies between them is left alone */
NESTPIPE_API nestpipe_status nestpipe_gather_tables(nestpipe_store* store, const int32_t* tables,
                                                    const int64_t* offsets, int64_t num_tables, const int64_t* keys,
                                                    int64_t num_keys, const int64_t* places, int64_t num_columns,
                                                    void* out, int64_t num_out, int64_t stride, uint8_t* found,
                                                    int32_t num_threads);

/* As nestpipe_scatter for each table, from an array of num_records records, of which those at `places` are read. Tables
 * and stride: as in nestpipe_gather_tables.
 *   places  [num_keys], 0 .. num_records - 1; null: 0 .. num_keys - 1, num_keys <= num_records
 *   steps   [num_keys] stored with each of them, >= 0; null: `step` is stored with all */
NESTPIPE_API nestpipe_status nestpipe_scatter_tables(nestpipe_store* store, const int32_t* tables,
                                                     const int64_t* offsets, int64_t num_tables, const int64_t* keys,
                                                     int64_t num_keys, const int64_t* places, const void* records,
                                                     int64_t num_records, int64_t stride, const int64_t* steps,
                                                     int64_t step, int32_t num_threads);

/* Applies a row optimizer to the records of several tables where they are stored, and stores `step` with them. A
 * missing key is inserted with its initial record first. If a table is full, nothing changes. keys      those of the
 * tables, as in nestpipe_scatter_tables; all tables have the row state of the optimizer gradient  [num_keys, dim],
 * dense */
NESTPIPE_API nestpipe_status nestpipe_update_tables(nestpipe_store* store, const int32_t* tables,
                                                    const int64_t* offsets, int64_t num_tables, const int64_t* keys,
                                                    int64_t num_keys, const nestpipe_optimizer* optimizer,
                                                    const void* gradient, int64_t step, int32_t num_threads);

/* As nestpipe_find for each table; tables of any kind. */
NESTPIPE_API nestpipe_status nestpipe_find_tables(nestpipe_store* store, const int32_t* tables, const int64_t* offsets,
                                                  int64_t num_tables, const int64_t* keys, int64_t num_keys,
                                                  uint8_t* found, int32_t num_threads);

/* sizes: [num_tables], as nestpipe_table_size for each table, one after the other; repeats allowed. */
NESTPIPE_API nestpipe_status nestpipe_table_sizes(nestpipe_store* store, const int32_t* tables, int64_t num_tables,
                                                  int64_t* sizes);

/* Where the keys of a list occur in another list, table by table. Needs no store.
 *   before, before_offsets  [num_before] and [num_tables + 1], as above; distinct within a table
 *   keys, key_offsets       [num_keys] and [num_tables + 1]
 *   places                  [num_keys] keys[i] == before[places[i]], within the same table; -1 where there is none
 * The arrays must not overlap. The calling thread keeps the memory it worked in for its next call. */
NESTPIPE_API nestpipe_status nestpipe_match_tables(const int64_t* before, int64_t num_before,
                                                   const int64_t* before_offsets, const int64_t* keys, int64_t num_keys,
                                                   const int64_t* key_offsets, int64_t num_tables, int64_t* places,
                                                   int32_t num_threads);

/* ---- pieces: the rows of buckets [first_bucket, end_bucket), in ascending order of the keys' hashes ----------
 * Each call passes once over the index of the whole table, so few large pieces are cheaper than many small ones. */

NESTPIPE_API nestpipe_status nestpipe_count(nestpipe_store* store, int32_t table, int64_t first_bucket,
                                            int64_t end_bucket, int64_t* num_rows);

/* Writes *num_rows rows to arrays of `capacity` rows: at least as many as nestpipe_count says, and more while other
 * threads write. NESTPIPE_CHANGED when that does not suffice: count again.
 *   keys [capacity], records [capacity, dim + state_width] in records_bytes bytes, steps [capacity] */
NESTPIPE_API nestpipe_status nestpipe_export(nestpipe_store* store, int32_t table, int64_t first_bucket,
                                             int64_t end_bucket, int64_t capacity, int64_t* keys, void* records,
                                             int64_t records_bytes, int64_t* steps, int64_t* num_rows);

/* Inserts or overwrites the rows of an exported piece; refused when a key is in another bucket or a step is
 * negative. */
NESTPIPE_API nestpipe_status nestpipe_import(nestpipe_store* store, int32_t table, int64_t first_bucket,
                                             int64_t end_bucket, int64_t num_rows, const int64_t* keys,
                                             const void* records, int64_t records_bytes, const int64_t* steps,
                                             int32_t num_threads);

/* Sum modulo 2^256 of SHA-256(key, row, row state) over all records, each hash read as a little-endian number;
 * key as 8 bytes, everything little-endian. Parts of several ranks add up. digest: 32 bytes, little-endian. */
NESTPIPE_API nestpipe_status nestpipe_digest(nestpipe_store* store, int32_t table, uint8_t digest[32],
                                             int32_t num_threads);

/* ---- snapshots ----------------------------------------------------------------------------------------------- */

/* A snapshot copies the rows of a table as they are when it begins, while other threads go on writing to the table.
 * At most one is under way for a table. One caller takes the rows of the pass by `next`, until it is done. Whoever is
 * about to scatter, import or erase keys first calls `preserve` with them, which copies those that the pass has not
 * reached. Together the two give each row of the snapshot once.
 *
 * The first snapshot of a table must be complete. From then on every scatter, import and erase marks what it changes,
 * and a later one may have the rows that were written since the one before began, and the keys erased since then. A
 * key that was erased and written again is in both: apply the erased keys first. */

/* Arrays that receive rows. */
typedef struct nestpipe_rows {
    int64_t* keys;       /* [capacity] */
    void* records;       /* [capacity, num_columns] */
    int64_t* steps;      /* [capacity] */
    int64_t capacity;    /* >= 1 */
    int64_t num_columns; /* dim + state_width */
} nestpipe_rows;

/* num_rows, num_erased: of the snapshot. changed_only: 0 for a complete one. */
NESTPIPE_API nestpipe_status nestpipe_snapshot_begin(nestpipe_store* store, int32_t table, int32_t changed_only,
                                                     int64_t* num_rows, int64_t* num_erased);

/* keys [num_erased], as many as `begin` said. */
NESTPIPE_API nestpipe_status nestpipe_snapshot_erased(nestpipe_store* store, int32_t table, int64_t num_erased,
                                                      int64_t* keys);

/* Copies the next rows of the pass, ordered by shard. The buckets are divided evenly among num_shards_in_world shards:
 * bucket b is in shard b * num_shards_in_world / 65536. All rows must be in the num_shards shards from first_shard on.
 *   counts  [num_shards] rows of each shard
 *   is_done 1 when the pass has reached the end; before that, even a call that copies nothing is no end */
NESTPIPE_API nestpipe_status nestpipe_snapshot_next(nestpipe_store* store, int32_t table, int64_t num_shards_in_world,
                                                    int64_t first_shard, int64_t num_shards, const nestpipe_rows* out,
                                                    int64_t* counts, int64_t* num_rows, int32_t* is_done);

/* Copies the rows of the first *num_done keys that the snapshot still needs: all keys, or as many as `out` has room
 * for. Without a snapshot it does nothing. */
NESTPIPE_API nestpipe_status nestpipe_snapshot_preserve(nestpipe_store* store, int32_t table, const int64_t* keys,
                                                        int64_t num_keys, const nestpipe_rows* out, int64_t* num_rows,
                                                        int64_t* num_done);

/* Ends a snapshot, done or not. Without one it does nothing. */
NESTPIPE_API nestpipe_status nestpipe_snapshot_end(nestpipe_store* store, int32_t table);

/* CRC-32C of bytes that follow others, whose checksum is `before`; 0 for the first ones. */
NESTPIPE_API nestpipe_status nestpipe_crc32c(const void* data, int64_t num_bytes, uint32_t before, uint32_t* checksum);

/* ---- key operations that need no store ----------------------------------------------------------------------- */

/* Distinct keys in order of first occurrence.
 *   unique   [num_keys] room; the first *num_unique are written
 *   inverse  [num_keys] keys[i] == unique[inverse[i]]
 * The three arrays must not overlap. The calling thread keeps the memory it worked in for its next call. */
NESTPIPE_API nestpipe_status nestpipe_unique(const int64_t* keys, int64_t num_keys, int64_t* unique, int64_t* inverse,
                                             int64_t* num_unique, int32_t num_threads);

/* Stable grouping by owner rank: owner = bucket * world_size / 65536.
 *   order   [num_keys] positions of `keys`, those of owner 0 first, in their given order within an owner
 *   counts  [world_size] keys of each owner */
NESTPIPE_API nestpipe_status nestpipe_group_by_owner(const char* table_name, const int64_t* keys, int64_t num_keys,
                                                     int32_t world_size, int64_t* order, int64_t* counts);

/* hashes: [num_keys] mix64(key, table name); the bucket is its top 16 bits. */
NESTPIPE_API nestpipe_status nestpipe_hash(const char* table_name, const int64_t* keys, int64_t num_keys,
                                           uint64_t* hashes);

/* ---- slots of a row pool --------------------------------------------------------------------------------------- */

/* A row pool keeps records of keys in numbered slots, outside of this library. nestpipe_slots knows which key of which
 * table each slot holds. A slot is
 *   free      it belongs to no one;
 *   taken     it belongs to a batch, which has not filled it yet;
 *   resident  it holds a key, which nestpipe_slots_find finds.
 * A batch is admitted (use, assign), then its missing keys are filled, then its outcome is settled:
 *   use       finds the keys of the batch. Those that are resident keep their slots.
 *   assign    gives slots to the others: free ones, lowest first, and those of victims: the least recently used ones
 *             that no batch in flight uses. Clean victims leave at once. Dirty victims, whose records are newer than
 *             the store's, stay resident.
 *   evict     after the records of dirty victims are in the store: they leave, and their slots are taken.
 *   fill      after the records of missing keys are in their slots: the keys enter.
 *   release   where that is given up: taken slots are free again. Victims that were not evicted stay as they were.
 *   claim     counts the keys that the batch would create.
 *   settle    the outcome is known: what the batch has changed is dirty, or its claims are dropped.
 * A key exists if the store has a record of it (it is stored) or if its slot is dirty. All functions may be called from
 * any thread at any time, except nestpipe_slots_destroy, and run one at a time. Keys are given as in
 * nestpipe_gather_tables, with offsets for all tables, and are distinct within a table. Lists of slots must have no
 * slot twice. A call that is refused has changed nothing, except that claim, settle and clean only leave out the slots
 * for which they are refused. */
typedef struct nestpipe_slots nestpipe_slots;

typedef struct nestpipe_slot_counts {
    int64_t num_slots;
    int64_t num_free;
    int64_t num_resident;
    int64_t num_dirty;
    int64_t memory_bytes; /* of the index and of what is known of each slot */
} nestpipe_slot_counts;

/* Room for slots and their keys, table after table. */
typedef struct nestpipe_slot_records {
    int64_t* slots;   /* [capacity] */
    int64_t* keys;    /* [capacity] */
    int64_t* steps;   /* [capacity] step that last changed the record */
    int64_t* offsets; /* [num_tables + 1] table t has entries offsets[t] .. offsets[t + 1] - 1 */
    int64_t capacity;
} nestpipe_slot_records;

/* An index without slots.
 *   salts        [num_tables] as of nestpipe_table_salt; 1 .. 65536 tables
 *   num_threads  that later calls may use, except
 *   num_beside   for assign, evict and fill, which may run beside other work */
NESTPIPE_API nestpipe_status nestpipe_slots_create(const uint64_t* salts, int64_t num_tables, int32_t num_threads,
                                                   int32_t num_beside, nestpipe_slots** slots);
NESTPIPE_API nestpipe_status nestpipe_slots_destroy(nestpipe_slots* slots); /* null is allowed */

NESTPIPE_API nestpipe_status nestpipe_slots_counts(nestpipe_slots* slots, nestpipe_slot_counts* counts);

/* Adds free slots, so that there are num_slots in all, 2^32 - 2 at most. */
NESTPIPE_API nestpipe_status nestpipe_slots_grow(nestpipe_slots* slots, int64_t num_slots);

/* key_slots: [num_keys] the slot of each key; -1 if it is not resident. Changes nothing. */
NESTPIPE_API nestpipe_status nestpipe_slots_find(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys,
                                                 int64_t num_keys, int64_t* key_slots);

/* The missing keys of a batch, table after table. */
typedef struct nestpipe_missing_keys {
    int64_t* indices; /* in the list of the batch's keys, ascending */
    int64_t* keys;
    int64_t* offsets; /* [num_tables + 1] table t has entries offsets[t] .. offsets[t + 1] - 1 */
} nestpipe_missing_keys;

/* Notes that a batch uses its resident keys, and lists the others.
 *   batch      >= 1 and at least that of every call before it
 *   key_slots  [num_keys] the slot of each key that is resident
 *   missing    room for num_keys: keys that are not */
NESTPIPE_API nestpipe_status nestpipe_slots_use(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys,
                                                int64_t num_keys, int64_t batch, int64_t* key_slots,
                                                const nestpipe_missing_keys* missing);

/* Gives slots to missing keys of a batch, all of them or some at a time: free slots, then those of clean victims, then
 * those of dirty ones, each ascending, the last table after table.
 *   batch            of the last call of nestpipe_slots_use
 *   first_in_flight  0 .. batch: victims are slots last used by a batch before it, and not claimed
 *   missing          [num_missing] indices of the keys, as nestpipe_slots_use lists them
 *   missing_slots    [num_missing]
 *   key_slots        [num_keys] of all keys of the batch: those of missing keys are written
 *   leaving          room for num_missing: dirty victims. The last missing keys have their slots, in the same order,
 *                    once they are evicted. Slots of all other missing keys are taken. */
NESTPIPE_API nestpipe_status nestpipe_slots_assign(nestpipe_slots* slots, int64_t batch, int64_t first_in_flight,
                                                   const int64_t* missing, int64_t num_missing, int64_t* missing_slots,
                                                   int64_t* key_slots, int64_t num_keys,
                                                   const nestpipe_slot_records* leaving);

/* Takes the slots of dirty victims, whose records are in the store now. */
NESTPIPE_API nestpipe_status nestpipe_slots_evict(nestpipe_slots* slots, const int64_t* list, int64_t num_slots);

/* Makes keys resident in taken slots, which hold their records now. Refused if a key is resident already.
 *   key_slots  [num_keys]
 *   is_stored  [num_keys] 1 where the record came from the store, 0 where it is the initial one
 *   batch      as in nestpipe_slots_use: it has used the slots */
NESTPIPE_API nestpipe_status nestpipe_slots_fill(nestpipe_slots* slots, const int64_t* offsets, const int64_t* keys,
                                                 int64_t num_keys, const int64_t* key_slots, const uint8_t* is_stored,
                                                 int64_t batch);

/* Frees taken slots. */
NESTPIPE_API nestpipe_status nestpipe_slots_release(nestpipe_slots* slots, const int64_t* list, int64_t num_slots);

/* Claims the keys of a batch that do not exist. Each batch claims its slots once, and settles them.
 *   num_rows  [num_tables] keys that exist and are not stored, and keys that are claimed */
NESTPIPE_API nestpipe_status nestpipe_slots_claim(nestpipe_slots* slots, const int64_t* list, int64_t num_slots,
                                                  int64_t* num_rows);

/* Settles the outcome of a batch. Drops its claims: a key that other batches have claimed, too, stays claimed until one
 * of them is applied or all are settled.
 *   step  >= 0: the batch was applied. Its slots are dirty, and its keys exist; -1: it was not */
NESTPIPE_API nestpipe_status nestpipe_slots_settle(nestpipe_slots* slots, const int64_t* list, int64_t num_slots,
                                                   int64_t step);

/* Lists all dirty slots, ascending within a table. NESTPIPE_CHANGED when they are more than the capacity. */
NESTPIPE_API nestpipe_status nestpipe_slots_dirty(nestpipe_slots* slots, const nestpipe_slot_records* records);

/* Dirty slots are clean: their records are in the store now. */
NESTPIPE_API nestpipe_status nestpipe_slots_clean(nestpipe_slots* slots, const int64_t* list, int64_t num_slots);

/* Forgets all keys, and the number of the last batch. All slots are free. */
NESTPIPE_API nestpipe_status nestpipe_slots_clear(nestpipe_slots* slots);

/* ---- samples that share keys ----------------------------------------------------------------------------------- */

typedef enum nestpipe_cluster_method {
    NESTPIPE_SPECTRAL =
        0, /* close in the second eigenvector of the graph of samples and keys; then moved where it helps */
    NESTPIPE_MINHASH = 1 /* sorted by three smallest hashes of their keys: faster, finds less */
} nestpipe_cluster_method;

/* One feature: the keys of all samples, one sample's behind the other's.
 *   index    [num_keys] the number of each key among the distinct keys of the batch; negative: padding, left out
 *   offsets  [num_samples + 1] sample s has index[offsets[s] .. offsets[s + 1]) */
typedef struct nestpipe_key_lists {
    const int64_t* index;
    const int64_t* offsets;
    int64_t num_keys;
} nestpipe_key_lists;

/*   cost          [num_samples] above 0, finite: what the parts between the first and the last are balanced by
 *   num_distinct  of all tables together; at most 2^31 of everything */
typedef struct nestpipe_batch {
    const nestpipe_key_lists* features;
    const double* cost;
    int64_t num_samples;
    int64_t num_distinct;
    int32_t num_features;
} nestpipe_batch;

/* Upper limit of num_parts. */
#define NESTPIPE_MAX_PARTS 4096

/* Distributes the samples over parts such that samples which share keys come together, and the first and the last part
 * (0.45 times the cost of the others, where there are at least three) use few keys. The result is a function of the
 * arguments alone. With fewer samples than parts some parts are empty, the first and the last before others.
 *   order         [num_samples] samples of part 0, of part 1, ..., ascending within a part
 *   part_offsets  [num_parts + 1]
 * One thread. The calling thread keeps the memory it worked in for its next call. */
NESTPIPE_API nestpipe_status nestpipe_cluster(const nestpipe_batch* batch, int32_t num_parts,
                                              nestpipe_cluster_method method, uint64_t seed, int64_t* order,
                                              int64_t* part_offsets);

/* ---- rows at the occurrences of keys ------------------------------------------------------------------------- */

/* The occurrences of each row, in order; padding is left out. The arrays do not overlap.
 *   index        [num_occurrences] a row, or num_rows for padding
 *   offsets      [num_samples + 1] of samples, as in nestpipe_occurrences; null: one each
 *   row_offsets  [num_rows + 1] row r has entries row_offsets[r] .. row_offsets[r + 1] - 1 of what follows
 *   occurrences  [num_occurrences] room, numbers of occurrences; may be null
 *   samples      [num_occurrences] room, the sample of each; may be null */
NESTPIPE_API nestpipe_status nestpipe_group_by_row(const int64_t* index, int64_t num_occurrences,
                                                   const int64_t* offsets, int64_t num_samples, int64_t num_rows,
                                                   int64_t* row_offsets, int64_t* occurrences, int64_t* samples);

/* The weighted sums of each sample's rows, in order of occurrence; zeros for a sample without rows. Features stand side
 * by side.
 *   features  [num_features] occurrences of each, all of one dtype and number of samples
 *   rows      [num_features] rows of each feature, [num_rows, dim]
 *   out       [num_samples, sum of dims], a sample every `stride` elements */
NESTPIPE_API nestpipe_status nestpipe_pool(const nestpipe_occurrences* features, int64_t num_features,
                                           const void* const* rows, void* out, int64_t stride, int32_t num_threads);

/* The weighted sums of each row's gradients, in order of occurrence.
 *   gradient       [num_samples, sum of dims], a sample every `stride` elements
 *   row_gradients  [num_features] those of each feature, [num_rows, dim], overwritten; null for a feature whose rows
 *                  have no gradient */
NESTPIPE_API nestpipe_status nestpipe_pool_backward(const nestpipe_occurrences* features, int64_t num_features,
                                                    const void* gradient, int64_t stride, void* const* row_gradients,
                                                    int32_t num_threads);

/* ---- row optimizers, in place, each row alone ------------------------------------------------------------------ */

/* Applies a row optimizer. Where a divisor is zero (only possible with eps = 0, or one that is zero in the dtype), the
 * element of the row does not change. */
NESTPIPE_API nestpipe_status nestpipe_update_rows(const nestpipe_optimizer* optimizer,
                                                  const nestpipe_row_update* update, int32_t num_threads);

/* ---- the keys of a batch: distinct ones, their owners, their parts -------------------------------------------- */

/* These calls work on all tables and all ranks at once. Matrices of counts are [num_ranks, num_tables]; together all
 * counts of one are below 2^31. Output arrays overlap neither each other nor any input. The calling thread keeps the
 * memory it worked in for its next call. */

/* salt: number with which the keys of a table are hashed; hash = mix64(key ^ salt). */
NESTPIPE_API nestpipe_status nestpipe_table_salt(const char* table_name, uint64_t* salt);

/* The keys of one feature, in order of occurrence. Every field has 64 bits. */
typedef struct nestpipe_feature_keys {
    const int64_t* keys; /* [num_keys] */
    int64_t num_keys;
    int64_t table;       /* ascending from feature to feature */
    int64_t has_padding; /* not 0: occurrences of padding_key are left out */
    int64_t padding_key;
    int64_t key_limit; /* above 0: other keys than padding must be 0 .. key_limit - 1 */
} nestpipe_feature_keys;

/* Distinct keys of each table, ordered by (owner, table, first occurrence); the place of a key there is its position.
 *   salts         [num_tables]
 *   world_size    1 .. 65536
 *   keys          [occurrences of all features] room; the first *num_distinct are written
 *   counts        [world_size, num_tables] distinct keys
 *   positions     [occurrences of all features] features one behind the other; -1 for padding
 *   num_distinct  of all tables
 *   outside       [2] the first feature with a key outside of its limit and the first such occurrence in it, and then
 *                 nothing else is meaningful; -1, -1 if there is none */
NESTPIPE_API nestpipe_status nestpipe_dedup(const nestpipe_feature_keys* features, int64_t num_features,
                                            const uint64_t* salts, int64_t num_tables, int64_t world_size,
                                            int64_t* keys, int32_t* counts, int64_t* positions, int64_t* num_distinct,
                                            int64_t* outside, int32_t num_threads);

/* The occurrences of a feature in each sample. Every field has 64 bits. */
typedef struct nestpipe_feature_samples {
    const int64_t* offsets; /* [num_samples + 1] sample s has occurrences offsets[s] .. offsets[s + 1] - 1 */
    int64_t num_keys;
    int64_t table;
} nestpipe_feature_samples;

/* The keys of all features, one behind the other, for an accelerator to dedup.
 *   keys      [occurrences of all features]; may be null
 *   tables    [occurrences of all features] table of each; num_tables for padding; may be null
 *   outside   [2] as of nestpipe_dedup; if there is such a key, nothing else is written */
NESTPIPE_API nestpipe_status nestpipe_pack_keys(const nestpipe_feature_keys* features, int64_t num_features,
                                                int64_t num_tables, int64_t* keys, int16_t* tables, int64_t* outside,
                                                int32_t num_threads);

/* An array that is copied into a larger one. Every field has 64 bits. */
typedef struct nestpipe_array_copy {
    const void* source; /* [num_bytes] */
    int64_t num_bytes;
    int64_t offset; /* where it goes in the target */
} nestpipe_array_copy;

/* Copies many arrays into one, with several threads.
 *   target   [num_bytes] the arrays do not overlap in it */
NESTPIPE_API nestpipe_status nestpipe_copy_arrays(const nestpipe_array_copy* arrays, int64_t num_arrays, void* target,
                                                  int64_t num_bytes, int32_t num_threads);

/* Which arrays of int64 are 0, 1, 2 and so on.
 *   arrays     offsets are not read
 *   is_range   [num_arrays] */
NESTPIPE_API nestpipe_status nestpipe_find_ranges(const nestpipe_array_copy* arrays, int64_t num_arrays,
                                                  uint8_t* is_range, int32_t num_threads);

/* Where the samples of a batch lie if its occurrences are ordered by (part, feature, place, occurrence).
 *   samples, part_offsets  as of nestpipe_split
 *   bounds    [num_features * num_samples + 1] for each part, feature and sample of the part, the place of its first
 *             occurrence in this order; then the number of occurrences
 *   sources   [num_features * num_samples] the same occurrence, counted through all features in the order of the
 *             batch; may be null
 *   longest   the most keys that a sample has of one feature */
NESTPIPE_API nestpipe_status nestpipe_lay_out(const nestpipe_feature_samples* features, int64_t num_features,
                                              const int64_t* samples, const int64_t* part_offsets, int64_t num_parts,
                                              int64_t num_samples, int64_t* bounds, int64_t* sources, int64_t* longest,
                                              int32_t num_threads);

/* Cuts the samples of a batch into parts, and numbers the rows that each part uses.
 *   positions      [occurrences of all features] as of nestpipe_dedup; every position occurs
 *   counts         [num_ranks, num_tables] as of nestpipe_dedup
 *   num_distinct   their sum
 *   samples        [num_samples] the sample in each place, each once; null: 0 .. num_samples - 1
 *   part_offsets   [num_parts + 1] part p has places part_offsets[p] .. part_offsets[p + 1] - 1, together all of them
 *   uses           [num_distinct, (num_parts + 7) / 8] bit p % 8 (the least significant is 0) of byte p / 8 is set
 *                  where part p uses the key
 *   row_positions  [num_distinct if num_parts == 1, else occurrences of all features] room: for each part, one behind
 *                  the other, the positions it uses, ordered by (table, position): its rows
 *   is_first       same room: 1 where no earlier part uses the position
 *   row_counts     [num_parts, num_tables] rows of each part
 *   num_rows       of all parts
 *   index          [occurrences of all features] ordered by (part, feature, place, occurrence): the row, counted within
 *                  the part's rows of that table; their number for padding
 *   index_offsets  [num_parts * num_features + 1] where each feature of each part begins in index
 *   offsets        [num_features * (num_samples + num_parts)] for each part and feature, where each of its samples
 *                  begins and the last one ends, counted from 0
 *   sources        [occurrences of all features] for each entry of index the occurrence that it came from, counted
 *                  through all features; may be null */
NESTPIPE_API nestpipe_status nestpipe_split(const nestpipe_feature_samples* features, int64_t num_features,
                                            const int64_t* positions, const int32_t* counts, int64_t num_ranks,
                                            int64_t num_tables, int64_t num_distinct, const int64_t* samples,
                                            const int64_t* part_offsets, int64_t num_parts, int64_t num_samples,
                                            uint8_t* uses, int64_t* row_positions, uint8_t* is_first,
                                            int64_t* row_counts, int64_t* num_rows, int64_t* index,
                                            int64_t* index_offsets, int64_t* offsets, int64_t* sources);

/* Distinct keys that all ranks ask for.
 *   keys          [num_keys] ordered by (rank, table)
 *   counts        [num_ranks, num_tables] of keys
 *   distinct      [num_keys] room: ordered by (table, first occurrence)
 *   slots         [num_keys] keys[i] is distinct[slots[i]], of the same table
 *   table_counts  [num_tables] distinct keys
 *   num_distinct  their sum */
NESTPIPE_API nestpipe_status nestpipe_owner_dedup(const int64_t* keys, int64_t num_keys, const int32_t* counts,
                                                  int64_t num_ranks, int64_t num_tables, int64_t* distinct,
                                                  int64_t* slots, int64_t* table_counts, int64_t* num_distinct,
                                                  int32_t num_threads);

typedef enum nestpipe_which_parts {
    NESTPIPE_FIRST_PART = 0, /* the first part that uses a key */
    NESTPIPE_LAST_PART = 1,
    NESTPIPE_ALL_PARTS = 2
} nestpipe_which_parts;

/* The keys of each part: first those of other ranks, ascending, then those of own_rank, ascending.
 *   uses         [num_keys, (num_parts + 7) / 8] as of nestpipe_split; no bits beyond num_parts
 *   which        nestpipe_which_parts; every key needs a part where it is not NESTPIPE_ALL_PARTS
 *   rank_counts  [num_ranks] keys of each rank, which are ordered by rank
 *   places       [capacity] room: numbers of keys; null: only offsets and counts are written
 *   offsets      [2 * num_parts + 1] part p has others' keys offsets[2 p] .. offsets[2 p + 1] - 1 and own ones
 *                offsets[2 p + 1] .. offsets[2 p + 2] - 1
 *   counts       [num_parts, num_ranks] keys of each rank in each part, 0 for own_rank */
NESTPIPE_API nestpipe_status nestpipe_exchange_lists(const uint8_t* uses, int64_t num_keys, int64_t num_parts,
                                                     int32_t which, const int64_t* rank_counts, int64_t num_ranks,
                                                     int64_t own_rank, int64_t* places, int64_t capacity,
                                                     int64_t* offsets, int64_t* counts);

/* The lists of a batch with one part, of both ways: requests of this rank, and entries, which are the keys that each
 * rank asks this one for. In all of them other ranks come first, ascending, then own_rank.
 *   counts        [num_ranks, num_tables] requests, which are ordered by (rank, table)
 *   key_index     [num_entries] of the entries, which are ordered by rank: a number below num_keys
 *   entry_counts  [num_ranks] entries of each rank
 *   rows_in       [num_requests] place of each request when they are ordered by (table, rank)
 *   rows_out      [num_entries] key_index of each entry
 *   entries       [num_entries] numbers of the entries
 *   order         [num_entries] numbers of the entries of each key, ascending
 *   offsets       [num_keys + 1] key k has entries offsets[k] .. offsets[k + 1] - 1 of `order` */
NESTPIPE_API nestpipe_status nestpipe_one_part_lists(const int32_t* counts, int64_t num_ranks, int64_t num_tables,
                                                     int64_t num_requests, const int64_t* key_index,
                                                     const int64_t* entry_counts, int64_t num_entries, int64_t num_keys,
                                                     int64_t own_rank, int64_t* rows_in, int64_t* rows_out,
                                                     int64_t* entries, int64_t* order, int64_t* offsets);

/* numbers: [num_positions] bases[table] and on, for the positions of each table, which are ordered by (rank, table) and
 * counted by `counts`. */
NESTPIPE_API nestpipe_status nestpipe_cluster_numbers(const int32_t* counts, int64_t num_ranks, int64_t num_tables,
                                                      const int64_t* bases, int64_t num_positions, int64_t* numbers);

/* ---- rows and bytes from one array to another ------------------------------------------------------------------ */

/* Copies num_runs runs of bytes; the arrays do not overlap.
 *   from_offsets, to_offsets, sizes  [num_runs] in bytes */
NESTPIPE_API nestpipe_status nestpipe_copy_runs(const void* from, int64_t from_bytes, const int64_t* from_offsets,
                                                void* to, int64_t to_bytes, const int64_t* to_offsets,
                                                const int64_t* sizes, int64_t num_runs);

/* In what follows a row with place p begins p * stride bytes behind the start of its array and must end within it. A
 * stride may be smaller than a row; rows that are written must not overlap. Without places row i has place i. */

/* Row to_places[i] of `to` becomes row from_places[i] of `from`; the arrays do not overlap.
 *   from_places, to_places  [count]; each may be null */
NESTPIPE_API nestpipe_status nestpipe_copy_rows(const void* from, int64_t from_bytes, int64_t from_stride,
                                                const int64_t* from_places, void* to, int64_t to_bytes,
                                                int64_t to_stride, const int64_t* to_places, int64_t count,
                                                int64_t row_bytes, int32_t num_threads);

/* Row places[i] of `target` += row i of `source`; where is_first[i], it becomes 0 + row i. The arrays do not overlap.
 *   places    [count] distinct; may be null
 *   is_first  [count]; null: none is
 *   exceeds   becomes 1 where a result is NaN or its absolute value above `limit`, else stays; may be null */
NESTPIPE_API nestpipe_status nestpipe_add_rows(void* target, int64_t target_bytes, int64_t target_stride,
                                               const int64_t* places, const void* source, int64_t source_bytes,
                                               int64_t source_stride, const uint8_t* is_first, int64_t count,
                                               int64_t dim, int32_t dtype, double limit, int32_t* exceeds,
                                               int32_t num_threads);

/* `exceeds` becomes 1 if an element of one of `count` rows is NaN or its absolute value above `limit`, else stays. */
NESTPIPE_API nestpipe_status nestpipe_check_rows(const void* rows, int64_t bytes, int64_t stride, int64_t count,
                                                 int64_t dim, int32_t dtype, double limit, int32_t* exceeds,
                                                 int32_t num_threads);

/* Row s of `out` = ((0 + row order[o]) + row order[o + 1]) + ... of `values`, o = offsets[s] .. offsets[s + 1] - 1, in
 * the dtype itself. The arrays do not overlap.
 *   order    [num_entries] places; null: 0 .. num_entries - 1
 *   offsets  [num_segments + 1] rising, within 0 .. num_entries */
NESTPIPE_API nestpipe_status nestpipe_sum_rows(const void* values, int64_t values_bytes, int64_t value_stride,
                                               const int64_t* order, int64_t num_entries, const int64_t* offsets,
                                               int64_t num_segments, int64_t dim, int32_t dtype, void* out,
                                               int64_t out_bytes, int64_t out_stride, int32_t num_threads);

/* ---- mailboxes: messages between the ranks of one host, through shared memory --------------------------------- */

/* What a rank sends to another one, or receives from it. */
typedef struct nestpipe_parcel {
    void* data;
    int64_t num_bytes;
    int64_t num_done; /* bytes sent or received so far: 0 before the first call of an exchange */
} nestpipe_parcel;

/* num_bytes receives the size of the memory of a mailbox of `size` ranks, 1 .. 4096, with ring_bytes, a multiple of 64
 * up to 2^30, between any two of them. */
NESTPIPE_API nestpipe_status nestpipe_mailbox_bytes(int64_t size, int64_t ring_bytes, int64_t* num_bytes);

/* Sends outgoing[r] to rank r and receives incoming[r] from it, for all ranks but the own, and waits for at most
 * timeout_us. is_done receives 0 if there is more to do: call again with the same parcels, which say how far they are.
 * All ranks call it for the same exchanges in the same order, with sizes that agree; one thread of a rank at a time.
 *   memory    mapped by all ranks, zero when the first of them maps it, aligned to 64 bytes
 *   outgoing  [size]
 *   incoming  [size] */
NESTPIPE_API nestpipe_status nestpipe_mailbox_exchange(void* memory, int64_t memory_bytes, int64_t rank, int64_t size,
                                                       int64_t ring_bytes, nestpipe_parcel* outgoing,
                                                       nestpipe_parcel* incoming, int64_t timeout_us, int32_t* is_done);

#ifdef __cplusplus
}
#endif

#endif
