// Lists of the keys that travel with each part.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "error.hpp"
#include "group.hpp"
#include "lookahead.hpp"
#include "plan.hpp"
#include "runs.hpp"

namespace nestpipe {

namespace {

// use(part) for the first, the last or all parts whose bits are set, ascending. False if there is none. kBytes: the
// number of bytes, or 0 if num_bytes has it.
template <nestpipe_which_parts kWhich, int64_t kBytes, typename Use>
NESTPIPE_INLINE bool for_parts(const uint8_t* bits, int64_t num_bytes, Use&& use) {
    const int64_t count = kBytes != 0 ? kBytes : num_bytes;
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t byte = kWhich == NESTPIPE_LAST_PART ? count - 1 - i : i;
        for (unsigned left = bits[byte]; left != 0; left &= left - 1) {
            any = true;
            if (kWhich == NESTPIPE_LAST_PART) {
                use(8 * byte + 31 - __builtin_clz(left));
                return true;
            }
            use(8 * byte + __builtin_ctz(left));
            if (kWhich == NESTPIPE_FIRST_PART) return true;
        }
    }
    return any;
}

template <nestpipe_which_parts kWhich, int64_t kBytes>
void list_parts(const ExchangeInput& input, int64_t* places, int64_t capacity, int64_t* offsets, int64_t* counts) {
    const int64_t num_bytes = (input.num_parts + 7) / 8, num_ranks = input.num_ranks;
    std::vector<int64_t> num_by_part(static_cast<size_t>(input.num_parts));
    std::fill(counts, counts + input.num_parts * num_ranks, 0);
    int64_t key = 0, own_begin = 0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
        if (rank == input.own_rank) own_begin = key;
        if (input.rank_counts[rank] == 0) continue;
        std::fill(num_by_part.begin(), num_by_part.end(), 0);
        for (const int64_t end = key + input.rank_counts[rank]; key < end; ++key) {
            const bool any = for_parts<kWhich, kBytes>(input.uses + key * num_bytes, num_bytes,
                                                       [&](int64_t part) { ++num_by_part[static_cast<size_t>(part)]; });
            if (!any && kWhich != NESTPIPE_ALL_PARTS) refuse("no part uses key " + std::to_string(key));
        }
        for (int64_t part = 0; part < input.num_parts; ++part)
            counts[part * num_ranks + rank] = num_by_part[static_cast<size_t>(part)];
    }
    const int64_t own_end = own_begin + input.rank_counts[input.own_rank];

    offsets[0] = 0;
    for (int64_t part = 0; part < input.num_parts; ++part) {
        int64_t* part_counts = counts + part * num_ranks;
        const int64_t num_own = part_counts[input.own_rank];
        part_counts[input.own_rank] = 0;
        int64_t num_others = 0;
        for (int64_t rank = 0; rank < num_ranks; ++rank) num_others += part_counts[rank];
        offsets[2 * part + 1] = offsets[2 * part] + num_others;
        offsets[2 * part + 2] = offsets[2 * part + 1] + num_own;
    }
    if (places == nullptr) return;
    if (offsets[2 * input.num_parts] > capacity)
        refuse("places has room for " + std::to_string(capacity) + " of " +
               std::to_string(offsets[2 * input.num_parts]) + " keys");

    std::vector<int64_t> next(static_cast<size_t>(input.num_parts));
    const auto list = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for_parts<kWhich, kBytes>(input.uses + i * num_bytes, num_bytes,
                                      [&](int64_t part) { places[next[static_cast<size_t>(part)]++] = i; });
    };
    for (size_t part = 0; part < next.size(); ++part) next[part] = offsets[2 * part];
    list(0, own_begin);
    list(own_end, input.num_keys);
    for (size_t part = 0; part < next.size(); ++part) next[part] = offsets[2 * part + 1];
    list(own_begin, own_end);
}

template <nestpipe_which_parts kWhich>
void list_parts(const ExchangeInput& input, int64_t* places, int64_t capacity, int64_t* offsets, int64_t* counts) {
    if (input.num_parts <= 8)
        list_parts<kWhich, 1>(input, places, capacity, offsets, counts);
    else
        list_parts<kWhich, 0>(input, places, capacity, offsets, counts);
}

// Bits beyond the last part would be counted and listed beyond the ends of arrays.
void need_no_bits_beyond(const ExchangeInput& input) {
    const int64_t num_bytes = (input.num_parts + 7) / 8;
    if (input.num_parts % 8 == 0) return;
    const auto allowed = (1u << (input.num_parts % 8)) - 1;
    unsigned used = 0;
    for (int64_t i = num_bytes - 1; i < input.num_keys * num_bytes; i += num_bytes) used |= input.uses[i];
    if ((used & ~allowed) != 0)
        refuse("uses has bits of parts beyond the last, " + std::to_string(input.num_parts - 1));
}

// Where a list has a key: those of other ranks come first. Keys begin .. end - 1 are this rank's own.
class OwnLast {
 public:
    OwnLast(int64_t begin, int64_t end, int64_t count) : begin_(begin), end_(end), shift_(count - end) {}
    int64_t operator()(int64_t key) const {
        if (key < begin_) return key;
        return key < end_ ? key + shift_ : key - (end_ - begin_);
    }

 private:
    int64_t begin_, end_, shift_;
};

template <typename Count>
OwnLast own_last(const Count* counts, int64_t per_rank, int64_t own_rank, int64_t count) {
    const Count* own = counts + own_rank * per_rank;
    const int64_t begin = std::accumulate(counts, own, int64_t{0});
    return {begin, std::accumulate(own, own + per_rank, begin), count};
}

}  // namespace

void list_one_part(const OnePart& input, const OnePartLists& lists) {
    const KeyCounts& requests = input.requests;
    const Runs runs = find_runs(requests);
    std::vector<int64_t> next = table_starts(runs, requests.num_tables);
    const OwnLast place_in = own_last(requests.counts, requests.num_tables, input.own_rank, requests.num_keys);
    int64_t position = 0;
    for (const Run& run : runs) {
        int64_t& row = next[static_cast<size_t>(run.table)];
        for_each_key(run, [&] { lists.rows_in[place_in(position++)] = row++; });
    }
    if (!group_by_row(input.key_index, input.num_entries, nullptr, input.num_entries, input.num_keys, lists.offsets,
                      nullptr, lists.order) ||
        lists.offsets[input.num_keys] != input.num_entries)
        refuse("key_index has values outside of 0 .. " + std::to_string(input.num_keys - 1));
    const OwnLast place_out = own_last(input.entry_counts, 1, input.own_rank, input.num_entries);
    for (int64_t entry = 0; entry < input.num_entries; ++entry) {
        const int64_t place = place_out(entry);
        lists.rows_out[place] = input.key_index[entry];
        lists.entries[place] = entry;
    }
}

void exchange_lists(const ExchangeInput& input, int64_t* places, int64_t capacity, int64_t* offsets, int64_t* counts) {
    need_no_bits_beyond(input);
    switch (input.which) {
        case NESTPIPE_FIRST_PART:
            return list_parts<NESTPIPE_FIRST_PART>(input, places, capacity, offsets, counts);
        case NESTPIPE_LAST_PART:
            return list_parts<NESTPIPE_LAST_PART>(input, places, capacity, offsets, counts);
        case NESTPIPE_ALL_PARTS:
            return list_parts<NESTPIPE_ALL_PARTS>(input, places, capacity, offsets, counts);
    }
}

}  // namespace nestpipe
