#include "use_order.hpp"

#include <functional>

#include "parallel.hpp"

namespace nestpipe {

namespace {
constexpr size_t kSpare = 4096;  // entries beyond twice the number of slots: a small pool is not compacted often
}  // namespace

void UseOrder::reserve(int64_t count, const SlotArray& slots, int32_t num_threads) {
    const size_t most = 2 * static_cast<size_t>(slots.size()) + kSpare;
    const auto num_needed_now = [&] { return entries_.size() + static_cast<size_t>(count); };
    if (num_needed_now() > most) {
        drop_front(slots);
        if (num_dropped() > entries_.size() / 4)
            forget_dropped();  // enough where each batch evicts as much as it needs
    }
    if (num_needed_now() > most) compact(slots, num_threads);
    const size_t num_needed = num_needed_now();
    if (num_needed > entries_.capacity())
        entries_.reserve(std::max(num_needed, std::min(2 * entries_.capacity(), most)));
    if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size() + 16);
}

void UseOrder::drop_front(const SlotArray& slots) {
    for (; first_ < segments_.size(); ++first_) {
        Segment& segment = segments_[first_];
        for (; segment.begin < segment.end; ++segment.begin) {
            prefetch(segment.begin + size_t{kAhead}, segment.end, slots);
            if (slots[entries_[segment.begin]].was_last_used_by(segment.batch)) return;
        }
    }
}

void UseOrder::drop_walked() {
    first_ = cleared_.segment;
    if (first_ < segments_.size()) segments_[first_].begin = std::max(segments_[first_].begin, cleared_.entry);
    begin_walk();
}

void UseOrder::forget_dropped() {
    const size_t count = num_dropped();
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(count));
    segments_.erase(segments_.begin(), segments_.begin() + static_cast<std::ptrdiff_t>(first_));
    begin_at_front();
    for (Segment& segment : segments_) {
        segment.begin -= count;
        segment.end -= count;
    }
}

// Threads share the segments, each of which first closes its own gaps.
void UseOrder::compact(const SlotArray& slots, int32_t num_threads) {
    const auto drop_stale = [&](int64_t first, int64_t end) {
        Segment* const begin = segments_.data() + first_;
        const size_t end_entry = begin[end - 1].end;
        for (Segment* segment = begin + first; segment < begin + end; ++segment) {
            size_t next = segment->begin;
            for (size_t i = segment->begin; i < segment->end; ++i) {
                prefetch(i + size_t{kAhead}, end_entry, slots);
                entries_[next] = entries_[i];
                next += slots[entries_[i]].was_last_used_by(segment->batch);
            }
            segment->end = next;
        }
    };
    const auto num_segments = static_cast<int64_t>(segments_.size() - first_);
    const int32_t num_used = threads_for(static_cast<int64_t>(entries_.size()), kLookBytes, num_threads);
    parallel_for(num_segments, num_segments / (8 * num_used) + 1, num_used, std::cref(drop_stale));

    size_t num_left = 0, num_entries = 0;
    for (size_t s = first_; s < segments_.size(); ++s) {
        const Segment segment = segments_[s];
        if (segment.begin == segment.end) continue;
        std::copy(entries_.begin() + static_cast<std::ptrdiff_t>(segment.begin),
                  entries_.begin() + static_cast<std::ptrdiff_t>(segment.end),
                  entries_.begin() + static_cast<std::ptrdiff_t>(num_entries));
        const size_t count = segment.end - segment.begin;
        segments_[num_left++] = {segment.batch, num_entries, num_entries + count};
        num_entries += count;
    }
    entries_.resize(num_entries);
    segments_.resize(num_left);
    begin_at_front();
}

}  // namespace nestpipe
