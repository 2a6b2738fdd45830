// Builds a hash table for each table's keys of `before`, one behind the other in one stretch of memory; then looks
// `keys` up. Threads share the tables in the first pass and the keys in the second.
#include <algorithm>
#include <string>

#include "dedup.hpp"
#include "error.hpp"
#include "key_lines.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kKeyBytes = 256;  // adding or finding a key takes as long as copying this much

thread_local Region match_memory;

// The keys of `before`, by table, and the hash tables over them.
class Before {
 public:
    Before(const int64_t* keys, const int64_t* offsets, int64_t num_tables)
        : keys_(keys),
          offsets_(offsets),
          num_tables_(num_tables),
          lines_(scratch<Line>(match_memory, first_line(num_tables))) {}

    void add_all(int32_t num_threads) const {
        const int64_t num_keys = offsets_[num_tables_], grain = grain_for(num_keys, kKeyBytes, num_threads);
        parallel_for(num_keys, grain, num_threads, [&](int64_t begin, int64_t end) {
            const int64_t* last = offsets_ + num_tables_;
            const int64_t* first_table = std::lower_bound(offsets_, last, begin);  // the tables that begin in the piece
            const int64_t* end_table = std::lower_bound(first_table, last, end);
            for (int64_t t = first_table - offsets_; t < end_table - offsets_; ++t) add(t);
        });
    }

    // places[i] for begin <= i < end, all of table t.
    void find(int64_t t, const int64_t* keys, int64_t begin, int64_t end, int64_t* places) const {
        const int64_t first = offsets_[t];
        if (first == offsets_[t + 1]) {
            std::fill(places + begin, places + end, -1);
            return;
        }
        const KeyLines lines = lines_of(t);
        KeyLines::Start started[kRing];
        in_two_steps(
            begin, end, [&](int64_t i) { started[ring(i)] = lines.start(keys[i]); },
            [&](int64_t i) {
                const uint32_t number = lines.find(keys[i], started[ring(i)], keys_ + first);
                places[i] = number == kNoNumber ? -1 : first + number;
            });
    }

 private:
    // The first line of table t. At least num_lines_for its keys come before that of the next table.
    int64_t first_line(int64_t t) const { return offsets_[t] / 5 + 2 * t; }
    KeyLines lines_of(int64_t t) const { return {lines_ + first_line(t), first_line(t + 1) - first_line(t)}; }

    void add(int64_t t) const {
        KeyLines lines = lines_of(t);
        lines.clear();
        const int64_t first = offsets_[t];
        KeyLines::Start started[kRing];
        in_two_steps(
            first, offsets_[t + 1], [&](int64_t i) { started[ring(i)] = lines.start(keys_[i]); },
            [&](int64_t i) { lines.add(static_cast<uint32_t>(i - first), started[ring(i)]); });
    }

    const int64_t* keys_;
    const int64_t* offsets_;
    int64_t num_tables_;
    Line* lines_;
};

}  // namespace

void match_tables(const int64_t* before, const int64_t* before_offsets, const int64_t* keys, const int64_t* key_offsets,
                  int64_t num_tables, int64_t* places, int32_t num_threads) {
    if (before_offsets[num_tables] > kMostUniqueKeys)
        refuse("match of " + std::to_string(before_offsets[num_tables]) +
               " keys: at most 2^31 at a time; cut the batch");
    const Before known(before, before_offsets, num_tables);
    known.add_all(num_threads);
    const int64_t num_keys = key_offsets[num_tables];
    parallel_for(num_keys, grain_for(num_keys, kKeyBytes, num_threads), num_threads, [&](int64_t begin, int64_t end) {
        int64_t t = std::upper_bound(key_offsets, key_offsets + num_tables, begin) - key_offsets - 1;
        for (; begin < end; ++t) {
            const int64_t last = std::min(end, key_offsets[t + 1]);
            if (begin < last) known.find(t, keys, begin, last, places);
            begin = last;
        }
    });
}

}  // namespace nestpipe
