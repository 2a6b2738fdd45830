// The free slots of a row pool, as a bitmap: the lowest one is taken first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace nestpipe {

class FreeSlots {
 public:
    int64_t count() const { return count_; }
    uint64_t bytes() const { return words_.capacity() * sizeof(uint64_t); }

    void reserve(int64_t num_slots) {  // may throw; then nothing has changed
        const size_t num_words = words_for(num_slots);
        if (num_words > words_.capacity()) words_.reserve(std::max(num_words, 2 * words_.capacity()));
    }

    // Slots from the present number on become free. Their room is reserved.
    void grow(int64_t num_slots) {
        words_.resize(words_for(num_slots), 0);
        for (int64_t slot = num_slots_; slot < num_slots;) {
            const int64_t end = std::min((slot / 64 + 1) * 64, num_slots);
            const uint64_t ones = end - slot == 64 ? ~uint64_t{0} : (uint64_t{1} << (end - slot)) - 1;
            words_[static_cast<size_t>(slot / 64)] |= ones << (slot % 64);
            slot = end;
        }
        count_ += num_slots - num_slots_;
        first_ = std::min(first_, static_cast<size_t>(num_slots_ / 64));
        num_slots_ = num_slots;
    }

    // Calls use(slot) for the lowest `count` slots, ascending. There must be as many.
    template <typename Use>
    void take(int64_t count, Use&& use) {
        count_ -= count;
        while (count > 0) {
            uint64_t& word = words_[first_];
            for (; word != 0 && count > 0; word &= word - 1, --count) use(slot_of(first_, word));
            if (word == 0) ++first_;
        }
    }

    void put(uint32_t slot) {
        words_[slot / 64] |= uint64_t{1} << (slot % 64);
        first_ = std::min(first_, size_t{slot / 64});
        ++count_;
    }

    void put_all() {
        const int64_t num_slots = num_slots_;
        words_.clear();
        num_slots_ = count_ = 0;
        grow(num_slots);
    }

    // Calls use(slot) for all slots that are not free, ascending.
    template <typename Use>
    void for_each_used(Use&& use) const {
        for (size_t i = 0; i < words_.size(); ++i) {
            const int64_t num_left = num_slots_ - static_cast<int64_t>(i) * 64;
            const uint64_t all = num_left >= 64 ? ~uint64_t{0} : (uint64_t{1} << num_left) - 1;
            for (uint64_t word = ~words_[i] & all; word != 0; word &= word - 1) use(slot_of(i, word));
        }
    }

 private:
    static size_t words_for(int64_t num_slots) { return static_cast<size_t>((num_slots + 63) / 64); }
    static uint32_t slot_of(size_t number, uint64_t word) {
        return static_cast<uint32_t>(number * 64) + static_cast<uint32_t>(__builtin_ctzll(word));
    }

    std::vector<uint64_t> words_;  // a bit is set where a slot is free
    size_t first_ = 0;             // no word before it has a free slot
    int64_t num_slots_ = 0;
    int64_t count_ = 0;
};

}  // namespace nestpipe
