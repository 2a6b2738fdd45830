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
#include <vector>

#include "lookahead.hpp"
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

    // Calls visit(slot) for slots whose last use is a batch before end_batch, least recently used first and within a
    // batch in the order in which they were appended, until it returns false.
    template <typename Visit>
    void for_each_before(int64_t end_batch, const SlotArray& slots, Visit&& visit);

    void clear() {
        entries_.clear();
        segments_.clear();
        first_ = 0;
    }

    uint64_t bytes() const { return entries_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment); }

 private:
    struct Segment {
        int64_t batch;
        size_t begin, end;  // of its entries
    };

    size_t num_dropped() const { return first_ < segments_.size() ? segments_[first_].begin : entries_.size(); }
    void forget_dropped();
    void compact(const SlotArray& slots, int32_t num_threads);
    void prefetch(size_t entry, size_t end, const SlotArray& slots) const {
        if (entry < end) slots.prefetch(entries_[entry]);
    }

    std::vector<uint32_t> entries_;
    std::vector<Segment> segments_;
    size_t first_ = 0;  // segment; those before it are empty
};

template <typename Visit>
void UseOrder::for_each_before(int64_t end_batch, const SlotArray& slots, Visit&& visit) {
    bool is_front = true;  // no entry so far counts
    for (size_t s = first_; s < segments_.size() && segments_[s].batch < end_batch; ++s) {
        Segment& segment = segments_[s];
        for (size_t i = segment.begin; i < segment.end; ++i) {
            prefetch(i + size_t{kAhead}, entries_.size(), slots);
            if (slots[entries_[i]].last_use == segment.batch) {
                is_front = false;
                if (!visit(entries_[i])) return;
            } else if (is_front) {
                segment.begin = i + 1;
            }
        }
        if (is_front) first_ = s + 1;
    }
}

}  // namespace nestpipe
