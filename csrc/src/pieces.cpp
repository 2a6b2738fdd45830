// The parts of Table that walk whole ranges of buckets: count, export, import, digest.
#include <cstring>
#include <vector>

#include "copy.hpp"
#include "error.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"
#include "sha256.hpp"
#include "table.hpp"

namespace nestpipe {

namespace {

struct HashRange {
    uint64_t first, last;  // last included: the end of the last bucket is 2^64
};

HashRange hashes_of_buckets(int64_t first_bucket, int64_t end_bucket) {
    return {static_cast<uint64_t>(first_bucket) << 48, (static_cast<uint64_t>(end_bucket) << 48) - 1};
}

// A number modulo 2^256, least significant word first.
struct Sum256 {
    uint64_t words[4] = {0, 0, 0, 0};

    void add(const Sum256& other) {
        unsigned __int128 carry = 0;
        for (int i = 0; i < 4; ++i) {
            carry += static_cast<unsigned __int128>(words[i]) + other.words[i];
            words[i] = static_cast<uint64_t>(carry);
            carry >>= 64;
        }
    }
};

}  // namespace

int64_t Table::count(int64_t first_bucket, int64_t end_bucket) const {
    if (first_bucket >= end_bucket) return 0;
    const auto [first, last] = hashes_of_buckets(first_bucket, end_bucket);
    int64_t num_rows = 0;
    ReadLock lock(mutex_);
    index_.for_each(first, last, [&](uint64_t, uint32_t) { ++num_rows; });
    return num_rows;
}

void Table::export_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rows, int64_t* keys, char* records,
                         int64_t* steps) const {
    std::vector<uint32_t> rows;
    rows.reserve(static_cast<size_t>(num_rows));
    ReadLock lock(mutex_);
    int64_t num_there = 0;
    if (first_bucket < end_bucket) {
        const auto [first, last] = hashes_of_buckets(first_bucket, end_bucket);
        index_.for_each(first, last, [&](uint64_t key_hash, uint32_t row) {
            if (num_there++ >= num_rows) return;
            keys[rows.size()] = key_of_hash(key_hash, salt_);
            rows.push_back(row);
        });
    }
    if (num_there != num_rows)
        refuse("export from table '" + name_ + "': room for " + std::to_string(num_rows) + " rows, but buckets [" +
               std::to_string(first_bucket) + ", " + std::to_string(end_bucket) + ") hold " +
               std::to_string(num_there) + "; was the table written to since the count?");
    in_two_steps(
        0, num_rows,
        [&](int64_t i) {
            prefetch_lines(arena_.record(rows[static_cast<size_t>(i)]), static_cast<uint64_t>(record_bytes_));
            prefetch(arena_.step(rows[static_cast<size_t>(i)]));
        },
        [&](int64_t i) {
            const uint32_t row = rows[static_cast<size_t>(i)];
            std::memcpy(records + i * record_bytes_, arena_.record(row), static_cast<size_t>(record_bytes_));
            steps[i] = *arena_.step(row);
        });
}

void Table::import_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rows, const int64_t* keys,
                         const char* records, const int64_t* steps, int32_t num_threads) {
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t bucket = bucket_of_hash(hash(keys[i]));
        if (bucket < first_bucket || bucket >= end_bucket)
            refuse("import into table '" + name_ + "': key " + std::to_string(keys[i]) + " is of bucket " +
                   std::to_string(bucket) + ", outside [" + std::to_string(first_bucket) + ", " +
                   std::to_string(end_bucket) + "); was the piece exported from a table of another name?");
        if (steps[i] < 0)
            refuse("import into table '" + name_ + "': step " + std::to_string(steps[i]) + " of key " +
                   std::to_string(keys[i]) + " is negative");
    }
    write(keys, num_rows, records, steps, 0, num_threads);
}

void Table::digest(uint8_t* sum, int32_t num_threads) const {
    constexpr int64_t kBucketsAPart = 256;
    std::vector<Sum256> parts(NESTPIPE_NUM_BUCKETS / kBucketsAPart);
    ReadLock lock(mutex_);
    parallel_for(static_cast<int64_t>(parts.size()), 1, num_threads, [&](int64_t first_part, int64_t end_part) {
        const auto [first, last] = hashes_of_buckets(first_part * kBucketsAPart, end_part * kBucketsAPart);
        Sum256& part = parts[static_cast<size_t>(first_part)];
        index_.for_each(first, last, [&](uint64_t key_hash, uint32_t row) {
            const int64_t key = key_of_hash(key_hash, salt_);
            Sha256 sha;
            sha.update(&key, sizeof key);
            sha.update(arena_.record(row), static_cast<size_t>(record_bytes_));
            Sum256 hashed;
            sha.finish(reinterpret_cast<uint8_t*>(hashed.words));
            part.add(hashed);
        });
    });
    Sum256 total;
    for (const Sum256& part : parts) total.add(part);
    std::memcpy(sum, total.words, sizeof total.words);
}

}  // namespace nestpipe
