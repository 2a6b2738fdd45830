// The parts of Table that walk whole ranges of buckets: count, export, import, digest.
#include <cstring>
#include <numeric>
#include <vector>

#include "copy.hpp"
#include "error.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"
#include "sha256.hpp"
#include "table.hpp"
#include "tables.hpp"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digests are defined on little-endian bytes"
#endif

namespace nestpipe {

namespace {

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

// The buckets are spread over the index, so a piece costs a pass over all of it: 20 bytes a row of the table.
template <typename Visit>
void Table::for_each_of(int64_t first_bucket, int64_t end_bucket, Visit&& visit) const {
    index_.for_each(0, UINT64_MAX, [&](uint64_t place, uint32_t row) {
        const uint64_t hash = hash_of_place(place);
        const int64_t bucket = bucket_of_hash(hash);
        if (bucket >= first_bucket && bucket < end_bucket) visit(bucket - first_bucket, hash, row);
    });
}

int64_t Table::count(int64_t first_bucket, int64_t end_bucket) const {
    int64_t num_rows = 0;
    ReadLock lock(mutex_);
    for_each_of(first_bucket, end_bucket, [&](int64_t, uint64_t, uint32_t) { ++num_rows; });
    return num_rows;
}

// Within a bucket the index has the order of the hashes already, so sorting by bucket, stably, sorts by hash.
int64_t Table::export_piece(int64_t first_bucket, int64_t end_bucket, int64_t capacity, int64_t* keys, char* records,
                            int64_t* steps) const {
    std::vector<int64_t> next(static_cast<size_t>(end_bucket - first_bucket) + 1, 0);
    std::vector<uint32_t> rows(static_cast<size_t>(capacity));
    ReadLock lock(mutex_);
    for_each_of(first_bucket, end_bucket, [&](int64_t b, uint64_t, uint32_t) { ++next[static_cast<size_t>(b) + 1]; });
    std::partial_sum(next.begin(), next.end(), next.begin());
    const int64_t num_rows = next.back();
    if (num_rows > capacity)
        throw Error(NESTPIPE_CHANGED, "export from table '" + name_ + "': room for " + std::to_string(capacity) +
                                          " rows, but buckets [" + std::to_string(first_bucket) + ", " +
                                          std::to_string(end_bucket) + ") hold " + std::to_string(num_rows) +
                                          "; count again");
    for_each_of(first_bucket, end_bucket, [&](int64_t b, uint64_t hash, uint32_t row) {
        const int64_t i = next[static_cast<size_t>(b)]++;
        keys[i] = key_of_hash(hash, salt_);
        rows[static_cast<size_t>(i)] = row;
    });
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
    return num_rows;
}

void Table::import_piece(int64_t first_bucket, int64_t end_bucket, int64_t num_rows, const int64_t* keys,
                         const char* records, const int64_t* steps, int32_t num_threads) {
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t bucket = bucket_of_hash(hash_key(keys[i], salt_));
        if (bucket < first_bucket || bucket >= end_bucket)
            refuse("import into table '" + name_ + "': key " + std::to_string(keys[i]) + " is in bucket " +
                   std::to_string(bucket) + ", outside [" + std::to_string(first_bucket) + ", " +
                   std::to_string(end_bucket) + "); was the piece exported from a table of another name?");
        if (steps[i] < 0)
            refuse("import into table '" + name_ + "': step " + std::to_string(steps[i]) + " of key " +
                   std::to_string(keys[i]) + " is negative");
    }
    Tables(*this, keys, num_rows).write({records, nullptr, record_bytes_}, steps, 0, num_threads);
}

void Table::digest(uint8_t* sum, int32_t num_threads) const {
    constexpr int kPartBits = 8;
    std::vector<Sum256> parts(size_t{1} << kPartBits);
    ReadLock lock(mutex_);
    const auto digest_part = [&](uint64_t part) {
        const uint64_t first = part << (64 - kPartBits), last = first + (~uint64_t{0} >> kPartBits);
        index_.for_each(first, last, [&](uint64_t place, uint32_t row) {
            const int64_t key = key_of_place(place);
            Sha256 sha;
            sha.update(&key, sizeof key);
            sha.update(arena_.record(row), static_cast<size_t>(record_bytes_));
            Sum256 hashed;
            sha.finish(reinterpret_cast<uint8_t*>(hashed.words));
            parts[part].add(hashed);
        });
    };
    parallel_for(static_cast<int64_t>(parts.size()), 1, num_threads, [&](int64_t first, int64_t end) {
        for (int64_t part = first; part < end; ++part) digest_part(static_cast<uint64_t>(part));
    });
    Sum256 total;
    for (const Sum256& part : parts) total.add(part);
    std::memcpy(sum, total.words, sizeof total.words);
}

}  // namespace nestpipe
