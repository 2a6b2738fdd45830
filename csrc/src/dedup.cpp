// Each thread numbers the distinct keys of its own stretch of the array with a hash table of its own. Then the distinct
// keys of every later stretch are looked up in the tables of the earlier ones, and what is left is numbered on from
// there. The result is the same, whatever the number of threads.
#include "dedup.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "error.hpp"
#include "key_lines.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "region.hpp"
#include "scratch.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kGrain = 8192;  // keys a thread takes at a time

// Numbers distinct keys in the order in which it meets them.
class Numbering : public KeyLines {
 public:
    // lines: num_lines of them, and one more.
    Numbering(Line* lines, int64_t num_lines, int64_t* unique) : KeyLines(lines, num_lines), unique_(unique) {}

    int64_t num_unique() const { return static_cast<int64_t>(num_unique_); }

    // The number of the key, known or new. The table must have room. If nearly every key is new, a branch is cheap;
    // otherwise no processor can predict it, and new and known keys run the same instructions.
    template <bool kMostlyNew>
    NESTPIPE_INLINE uint64_t number(int64_t key, Start at) {
        unique_[num_unique_] = key;  // so that a new key compares equal too
        for (Line* line = at.line;; line = next(line))
            for (unsigned mask = line->candidates(at.tag); mask != 0; mask &= mask - 1) {
                const int slot = __builtin_ctz(mask);
                const uint64_t slot_number = line->number_plus_one[slot];
                if (kMostlyNew && slot_number == 0) {
                    line->tag[slot] = at.tag;
                    line->number_plus_one[slot] = static_cast<uint32_t>(num_unique_ + 1);
                    return num_unique_++;
                }
                const uint64_t if_new = uint64_t{0} - (slot_number == 0);  // all bits, or none
                const uint64_t plus_one = slot_number | ((num_unique_ + 1) & if_new);
                if (unique_[plus_one - 1] != key) continue;  // another key with this tag
                // A known key is written to a spare line: writing it to its own line again would stall the next reader.
                Line* target = choose(if_new, line, lines_ + num_lines_);
                target->tag[slot] = at.tag;
                target->number_plus_one[slot] = static_cast<uint32_t>(plus_one);
                num_unique_ -= if_new;
                return plus_one - 1;
            }
    }

    // The number of a known key, or kNoNumber.
    uint32_t find(int64_t key, Start at) const { return KeyLines::find(key, at, unique_); }

 private:
    // condition ? yes : no, in arithmetic: compilers make a branch of the other form.
    static Line* choose(uint64_t condition, Line* yes, Line* no) {
        const auto a = reinterpret_cast<uintptr_t>(yes), b = reinterpret_cast<uintptr_t>(no);
        return reinterpret_cast<Line*>(b ^ ((a ^ b) & condition));
    }

    int64_t* unique_;
    uint64_t num_unique_ = 0;
};

thread_local Region table_memory, unique_memory, place_memory;

// A stretch [begin, end) of the keys and the numbering of its distinct ones. Its i-th distinct key has the place
// begin + i, a number below that of every place of later stretches.
class Stretch {
 public:
    Stretch(int64_t begin, int64_t end, Line* lines, int64_t* unique)
        : begin_(begin), end_(end), unique_(unique), numbering_(lines, num_lines_for(end - begin), unique) {}

    int64_t begin() const { return begin_; }
    int64_t end() const { return end_; }
    int64_t num_unique() const { return numbering_.num_unique(); }
    const int64_t* uniques() const { return unique_; }

    // inverse[i] = number of keys[i] within the stretch.
    void number(const int64_t* keys, int64_t* inverse) {
        Numbering numbering = numbering_;  // a copy of its own: counting in shared memory is slow
        numbering.clear();
        bool mostly_new = true;
        for (int64_t first = begin_; first < end_; first += kGrain) {
            const int64_t last = std::min(first + kGrain, end_);
            const int64_t num_known = numbering.num_unique();
            if (mostly_new)
                number_some<true>(keys, first, last, numbering, inverse);
            else
                number_some<false>(keys, first, last, numbering, inverse);
            mostly_new = numbering.num_unique() - num_known > (last - first) / 10 * 9;
        }
        numbering_ = numbering;
    }

    // places[i] = place of keys[i] in this stretch, where it was not found in an earlier one and is in this one.
    void find_places(const int64_t* keys, int64_t num_keys, uint32_t* places) const {
        in_order(keys, 0, num_keys, numbering_, [&](int64_t i, Numbering::Start at) {
            if (places[i] != kNoNumber) return;
            const uint32_t number = numbering_.find(keys[i], at);
            if (number != kNoNumber) places[i] = static_cast<uint32_t>(begin_) + number;
        });
    }

 private:
    template <bool kMostlyNew>
    static NESTPIPE_INLINE void number_some(const int64_t* keys, int64_t begin, int64_t end, Numbering& numbering,
                                            int64_t* inverse) {
        in_order(keys, begin, end, numbering, [&](int64_t i, Numbering::Start at) {
            inverse[i] = static_cast<int64_t>(numbering.number<kMostlyNew>(keys[i], at));
        });
    }

    template <typename Use>
    static NESTPIPE_INLINE void in_order(const int64_t* keys, int64_t begin, int64_t end, const Numbering& numbering,
                                         Use&& use) {
        Numbering::Start started[kRing];
        in_two_steps(
            begin, end, [&](int64_t i) { started[ring(i)] = numbering.start(keys[i]); },
            [&](int64_t i) { use(i, started[ring(i)]); });
    }

    int64_t begin_, end_;
    int64_t* unique_;
    Numbering numbering_;
};

std::vector<Stretch> cut_into_stretches(int64_t num_keys, int64_t num_stretches, int64_t* unique) {
    const int64_t length = (num_keys + num_stretches - 1) / num_stretches;
    const int64_t stretch_lines = num_lines_for(length) + 1;
    Line* lines = scratch<Line>(table_memory, stretch_lines * num_stretches);
    int64_t* uniques = num_stretches > 1 ? scratch<int64_t>(unique_memory, num_keys) : nullptr;
    std::vector<Stretch> stretches;
    for (int64_t begin = 0; begin < num_keys || begin == 0; begin += std::max<int64_t>(length, 1))
        stretches.emplace_back(begin, std::min(begin + length, num_keys),
                               lines + static_cast<int64_t>(stretches.size()) * stretch_lines,
                               begin == 0 ? unique : uniques + begin);  // the first one's numbers are final
    return stretches;
}

// places[stretch.begin() + i] = the place where the stretch's i-th distinct key occurs first.
void find_first_places(const std::vector<Stretch>& stretches, const Stretch& stretch, uint32_t* places,
                       int32_t num_threads) {
    parallel_for(stretch.num_unique(), kGrain, num_threads, [&](int64_t begin, int64_t end) {
        uint32_t* next = places + stretch.begin() + begin;
        std::fill(next, next + (end - begin), kNoNumber);
        for (const Stretch& earlier : stretches) {
            if (earlier.begin() == stretch.begin()) break;
            earlier.find_places(stretch.uniques() + begin, end - begin, next);
        }
        for (int64_t i = begin; i < end; ++i)
            if (*next++ == kNoNumber) next[-1] = static_cast<uint32_t>(stretch.begin() + i);
    });
}

// Turns the places of a stretch into final numbers, in order; those of earlier stretches are final already.
int64_t number_places(const Stretch& stretch, uint32_t* places, int64_t* unique, int64_t num_unique) {
    for (int64_t i = 0; i < stretch.num_unique(); ++i) {
        const int64_t place = stretch.begin() + i;
        const bool is_new = places[place] == place;
        const uint32_t known = places[places[place]];  // meaningless for a new one
        unique[num_unique] = stretch.uniques()[i];
        places[place] = is_new ? static_cast<uint32_t>(num_unique) : known;
        num_unique += is_new;
    }
    return num_unique;
}

}  // namespace

int64_t unique(const int64_t* keys, int64_t num_keys, int64_t* unique, int64_t* inverse, int32_t num_threads) {
    if (num_keys > kMostUniqueKeys)
        refuse("unique of " + std::to_string(num_keys) + " keys: at most 2^31 at a time; cut the batch");
    const int64_t num_stretches = std::clamp<int64_t>(num_keys / kGrain, 1, num_threads);
    std::vector<Stretch> stretches = cut_into_stretches(num_keys, num_stretches, unique);
    const auto count = static_cast<int64_t>(stretches.size());
    parallel_for(count, 1, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) stretches[static_cast<size_t>(s)].number(keys, inverse);
    });
    int64_t num_unique = stretches[0].num_unique();
    if (count == 1) return num_unique;

    uint32_t* places = scratch<uint32_t>(place_memory, num_keys);
    std::iota(places, places + num_unique, 0u);
    for (size_t s = 1; s < stretches.size(); ++s) {
        const Stretch& stretch = stretches[s];
        find_first_places(stretches, stretch, places, num_threads);
        num_unique = number_places(stretch, places, unique, num_unique);
        parallel_for(stretch.end() - stretch.begin(), kGrain, num_threads, [&](int64_t begin, int64_t end) {
            int64_t* number = inverse + stretch.begin();
            for (int64_t i = begin; i < end; ++i) number[i] = places[stretch.begin() + number[i]];
        });
    }
    return num_unique;
}

}  // namespace nestpipe
