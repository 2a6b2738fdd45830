// A set of slots that comes out in ascending order, in time for its members rather than for all slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nestpipe {

class SlotSet {
 public:
    void reserve(int64_t num_slots) {  // may throw; then nothing has changed
        const auto num_words = static_cast<size_t>((num_slots + 63) / 64);
        words_.reserve(num_words);
        nonzero_.resize((num_words + 63) / 64);
        words_.resize(num_words);
    }

    void add(uint32_t slot) {
        words_[slot / 64] |= bit(slot);
        nonzero_[slot / 4096] |= bit(slot / 64);
    }

    // Calls use(slot) for each member, ascending, and removes all.
    template <typename Use>
    void take_all(Use&& use) {
        for (size_t i = 0; i < nonzero_.size(); ++i) {
            for (uint64_t left = nonzero_[i]; left != 0; left &= left - 1) {
                const size_t number = i * 64 + lowest(left);
                for (uint64_t word = words_[number]; word != 0; word &= word - 1)
                    use(static_cast<uint32_t>(number * 64 + lowest(word)));
                words_[number] = 0;
            }
            nonzero_[i] = 0;
        }
    }

    void clear() {
        take_all([](uint32_t) {});
    }

    uint64_t bytes() const { return (words_.capacity() + nonzero_.capacity()) * sizeof(uint64_t); }

 private:
    static uint64_t bit(uint32_t number) { return uint64_t{1} << (number % 64); }
    static size_t lowest(uint64_t word) { return static_cast<size_t>(__builtin_ctzll(word)); }

    std::vector<uint64_t> words_;    // a bit for each slot
    std::vector<uint64_t> nonzero_;  // a bit for each word that is not zero
};

}  // namespace nestpipe
