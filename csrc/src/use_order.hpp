// The order in which slots were last used.
//
// Every batch appends the slots that it uses to one list, and the list is cut into a segment for each batch. A slot
// that is used again gets another entry; an entry counts only if its batch is the slot's last use, so that a slot has
// at most one that does, and nothing has to be removed when a slot is used again, evicted or freed. Entries that no
// longer count are dropped at the front, and everywhere once the list is twice as long as the array of slots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "lookahead.hpp"
#include "parallel.hpp"
#include "slot_array.hpp"

namespace nestpipe {

class UseOrder {
 public:
    // Makes room for `count` entries, at most one for each slot. May throw; then nothing has changed.
    void reserve(int64_t count, const SlotArray& slots, int32_t num_threads);

    // Appends slots whose last use becomes the batch, and was another one. Batches ascend. Room for `most` entries is
    // reserved. write(uint32_t* slots) writes up to as many, and returns their number.
    template <typename Write>
    void append(int64_t batch, int64_t most, Write&& write) {
        if (segments_.size() == first_ || segments_.back().batch != batch)
            segments_.push_back({batch, entries_.size(), entries_.size()});
        size_t& end = segments_.back().end;
        entries_.resize(end + static_cast<size_t>(most));
        end += static_cast<size_t>(write(entries_.data() + end));
        entries_.resize(end);
        if (segments_.back().begin == end) segments_.pop_back();
    }

    // Classes of a slot, for a walk.
    static constexpr uint8_t kGone = 0;   // is not visited: no longer counts, or was visited before
    static constexpr uint8_t kStays = 1;  // is not visited, and may be by a later walk
    static constexpr uint8_t kFirstClass = 2;

    // Begins a walk through the slots, least recently used first and within a batch in the order in which they were
    // appended.
    void begin_walk() { walk_ = cleared_ = {first_, 0}; }

    // Goes on with the walk: calls visit(slot, class_of(slot)) for the next num_wanted slots whose last use is a batch
    // before end_batch and that are to be visited. Returns their number. Threads share the look at the slots.
    template <typename ClassOf, typename Visit>
    int64_t walk(int64_t end_batch, const SlotArray& slots, int64_t num_wanted, int32_t num_threads,
                 const ClassOf& class_of, Visit&& visit);

    // The slots visited by the last call of `walk` are not visited again. Without this, the next call repeats it.
    void commit_walk() {
        walk_ = reached_;
        cleared_ = next_cleared_;
    }

    // Forgets the entries of all visited slots, up to the first that was not. None of them counts any more.
    void drop_walked();

    void clear() {
        entries_.clear();
        segments_.clear();
        begin_at_front();
    }

    uint64_t bytes() const { return entries_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment); }

 private:
    struct Segment {
        int64_t batch;
        size_t begin, end;  // of its entries
    };

    struct Position {
        size_t segment, entry;

        bool operator==(const Position& other) const { return segment == other.segment && entry == other.entry; }
    };

    static constexpr size_t kLeastLooks = 256, kMostLooks = 65536;  // at a time
    static constexpr size_t kChunk = 1024;                          // of looks
    static constexpr int64_t kLookBytes = 256;  // a look at a slot takes as long as copying this much

    // An entry, from the first one looked at, and the class of its slot.
    struct Seen {
        uint32_t entry;
        uint8_t its_class;
    };

    // seen_ gets what is not gone of each kChunk entries, from the place of the first one on, and num_seen_ its number.
    template <typename ClassOf>
    void look(const Segment& segment, size_t first, size_t end, const SlotArray& slots, int32_t num_threads,
              const ClassOf& class_of);
    void drop_front(const SlotArray& slots);  // entries before the first that counts
    size_t num_dropped() const { return first_ < segments_.size() ? segments_[first_].begin : entries_.size(); }
    void forget_dropped();
    void compact(const SlotArray& slots, int32_t num_threads);
    void prefetch(size_t entry, size_t end, const SlotArray& slots) const {
        if (entry < end) slots.prefetch(entries_[entry]);
    }
    void begin_at_front() {
        first_ = 0;
        walk_ = cleared_ = {0, 0};
    }

    std::vector<uint32_t> entries_;
    std::vector<Segment> segments_;
    size_t first_ = 0;                             // segment; those before it are empty
    Position walk_{0, 0};                          // where it goes on; if entries have moved, at the front
    Position cleared_{0, 0};                       // what is before it is gone, or was visited
    Position reached_{0, 0}, next_cleared_{0, 0};  // the two after the last call of `walk`
    std::vector<Seen> seen_ = std::vector<Seen>(kMostLooks);
    std::vector<uint32_t> num_seen_ = std::vector<uint32_t>(kMostLooks / kChunk);
};

template <typename ClassOf, typename Visit>
int64_t UseOrder::walk(int64_t end_batch, const SlotArray& slots, int64_t num_wanted, int32_t num_threads,
                       const ClassOf& class_of, Visit&& visit) {
    Position at = walk_;
    bool is_clear = walk_ == cleared_;
    int64_t num_visited = 0, num_looks = 0;
    next_cleared_ = cleared_;
    while (num_visited < num_wanted && at.segment < segments_.size() && segments_[at.segment].batch < end_batch) {
        const Segment& segment = segments_[at.segment];
        at.entry = std::max(at.entry, segment.begin);
        if (at.entry == segment.end) {
            ++at.segment;
            continue;
        }
        // As many entries as will do, if there are as many among them to be visited as there were so far.
        const int64_t num_left = num_wanted - num_visited;
        const int64_t num_likely = num_visited == 0 ? num_left : num_left * num_looks / num_visited;
        const size_t first = at.entry;
        const size_t count = std::clamp(static_cast<size_t>(num_likely), kLeastLooks, kMostLooks);
        const size_t end = std::min(first + count, segment.end);
        look(segment, first, end, slots, num_threads, class_of);
        num_looks += static_cast<int64_t>(end - first);
        at.entry = end;
        for (size_t chunk = 0; chunk * kChunk < end - first && num_visited < num_wanted; ++chunk) {
            const Seen* const seen = seen_.data() + chunk * kChunk;
            for (size_t i = 0; i < num_seen_[chunk]; ++i) {
                if (seen[i].its_class == kStays) {
                    if (is_clear) next_cleared_ = {at.segment, first + seen[i].entry};
                    is_clear = false;
                    continue;
                }
                visit(entries_[first + seen[i].entry], seen[i].its_class);
                if (++num_visited < num_wanted) continue;
                at.entry = first + seen[i].entry + 1;
                break;
            }
        }
    }
    reached_ = at;
    if (is_clear) next_cleared_ = at;
    return num_visited;
}

template <typename ClassOf>
void UseOrder::look(const Segment& segment, size_t first, size_t end, const SlotArray& slots, int32_t num_threads,
                    const ClassOf& class_of) {
    const uint32_t* const entries = entries_.data() + first;
    const auto some = [&](int64_t begin, int64_t last) {
        for (int64_t chunk = begin; chunk < last; chunk += kChunk) {
            Seen* const seen = seen_.data() + chunk;
            uint32_t num_seen = 0;
            in_two_steps(
                chunk, std::min<int64_t>(chunk + kChunk, last), [&](int64_t i) { slots.prefetch(entries[i]); },
                [&](int64_t i) {  // no branch: the processor could not predict it
                    const Slot& slot = slots[entries[i]];
                    const uint8_t its_class = slot.was_last_used_by(segment.batch) ? class_of(slot) : kGone;
                    seen[num_seen] = {static_cast<uint32_t>(i), its_class};
                    num_seen += its_class != kGone;
                });
            num_seen_[static_cast<size_t>(chunk) / kChunk] = num_seen;
        }
    };
    const auto count = static_cast<int64_t>(end - first), chunk = static_cast<int64_t>(kChunk);
    const int64_t grain = (grain_for(count, kLookBytes, num_threads) + chunk - 1) / chunk * chunk;
    parallel_for(count, grain, num_threads, std::cref(some));
}

}  // namespace nestpipe
