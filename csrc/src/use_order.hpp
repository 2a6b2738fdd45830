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

    // Begins a walk through the slots, least recently used first and within a batch in the order in which they were
    // appended.
    void begin_walk() { walk_ = {first_, 0}; }

    // Goes on with the walk: calls visit(slot, class_of(slot)) for slots whose last use is a batch before end_batch and
    // whose class is not 0, until it returns false. num_wanted: about so many will be visited. Threads share the look
    // at the slots.
    template <typename ClassOf, typename Visit>
    void walk(int64_t end_batch, const SlotArray& slots, int64_t num_wanted, int32_t num_threads,
              const ClassOf& class_of, Visit&& visit);

    void clear() {
        entries_.clear();
        segments_.clear();
        first_ = 0;
        walk_ = {0, 0};
    }

    uint64_t bytes() const { return entries_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment); }

 private:
    struct Segment {
        int64_t batch;
        size_t begin, end;  // of its entries
    };

    static constexpr size_t kLeastLooks = 256, kMostLooks = 32768;  // at a time
    static constexpr int64_t kLookBytes = 256;    // a look at a slot takes as long as copying this much
    static constexpr uint8_t kStale = UINT8_MAX;  // beside the classes: the entry no longer counts

    // classes_[i] becomes the class of the slot of entry first + i.
    template <typename ClassOf>
    void look(const Segment& segment, size_t first, size_t end, const SlotArray& slots, int32_t num_threads,
              const ClassOf& class_of);
    // The entries looked at next, from `first` on in a segment. num_looks: for the next time.
    static size_t end_of_looks(const Segment& segment, size_t first, size_t& num_looks) {
        const size_t end = std::min(first + num_looks, segment.end);
        num_looks = std::min(2 * num_looks, kMostLooks);
        return end;
    }
    void drop_front(const SlotArray& slots, int32_t num_threads);  // entries before the first that counts
    size_t num_dropped() const { return first_ < segments_.size() ? segments_[first_].begin : entries_.size(); }
    void forget_dropped();
    void compact(const SlotArray& slots, int32_t num_threads);
    void prefetch(size_t entry, size_t end, const SlotArray& slots) const {
        if (entry < end) slots.prefetch(entries_[entry]);
    }

    std::vector<uint32_t> entries_;
    std::vector<Segment> segments_;
    size_t first_ = 0;  // segment; those before it are empty
    struct {
        size_t segment, entry;
    } walk_{0, 0};  // where it goes on; if entries have moved, at the front
    std::vector<uint8_t> classes_ = std::vector<uint8_t>(kMostLooks);
};

template <typename ClassOf, typename Visit>
void UseOrder::walk(int64_t end_batch, const SlotArray& slots, int64_t num_wanted, int32_t num_threads,
                    const ClassOf& class_of, Visit&& visit) {
    bool is_front = walk_.segment == first_ && walk_.entry == 0;  // no entry so far counts
    size_t num_looks = std::clamp(static_cast<size_t>(num_wanted), kLeastLooks, kMostLooks);
    for (; walk_.segment < segments_.size() && segments_[walk_.segment].batch < end_batch; ++walk_.segment) {
        Segment& segment = segments_[walk_.segment];
        for (size_t first = std::max(walk_.entry, segment.begin), end; first < segment.end; first = end) {
            end = end_of_looks(segment, first, num_looks);
            look(segment, first, end, slots, num_threads, class_of);
            for (size_t i = first; i < end; ++i) {
                const uint8_t its_class = classes_[i - first];
                is_front &= its_class == kStale;
                if (is_front) segment.begin = i + 1;
                if (its_class == 0 || its_class == kStale || visit(entries_[i], its_class)) continue;
                walk_.entry = i + 1;
                return;
            }
        }
        if (is_front) first_ = walk_.segment + 1;
    }
}

template <typename ClassOf>
void UseOrder::look(const Segment& segment, size_t first, size_t end, const SlotArray& slots, int32_t num_threads,
                    const ClassOf& class_of) {
    const uint32_t* const entries = entries_.data() + first;
    const auto some = [&](int64_t begin, int64_t last) {
        in_two_steps(
            begin, last, [&](int64_t i) { slots.prefetch(entries[i]); },
            [&](int64_t i) {
                const Slot& slot = slots[entries[i]];
                classes_[static_cast<size_t>(i)] = slot.last_use == segment.batch ? class_of(slot) : kStale;
            });
    };
    const auto count = static_cast<int64_t>(end - first);
    parallel_for(count, grain_for(count, kLookBytes, num_threads), num_threads, std::cref(some));
}

}  // namespace nestpipe
