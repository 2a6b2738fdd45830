// One bit for each record of a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nestpipe {

class RowBits {
 public:
    // Bits of rows beyond the size are 0.
    bool test(uint32_t row) const { return row / 64 < words_.size() && (words_[row / 64] >> row % 64 & 1) != 0; }

    // The row must be within the size. Several threads may set bits at the same time.
    void set(uint32_t row) {
        uint64_t& word = words_[row / 64];
        const uint64_t bit = uint64_t{1} << row % 64;
        if ((__atomic_load_n(&word, __ATOMIC_RELAXED) & bit) == 0) __atomic_fetch_or(&word, bit, __ATOMIC_RELAXED);
    }

    void clear(uint32_t row) {
        if (row / 64 < words_.size()) words_[row / 64] &= ~(uint64_t{1} << row % 64);
    }

    // Makes room for rows [0, num_rows); new bits are 0. Never shrinks. May throw; then nothing has changed.
    void resize(int64_t num_rows) {
        const auto num_words = static_cast<size_t>((num_rows + 63) / 64);
        if (num_words > words_.capacity()) words_.reserve(num_words + num_words / 2);
        if (num_words > words_.size()) words_.resize(num_words);
    }

    // Sets the bits of rows [0, num_rows), which must be within the size.
    void set_first(int64_t num_rows) {
        for (size_t w = 0; w < static_cast<size_t>(num_rows / 64); ++w) words_[w] = ~uint64_t{0};
        if (num_rows % 64 != 0) words_[static_cast<size_t>(num_rows / 64)] |= (uint64_t{1} << num_rows % 64) - 1;
    }

    int64_t count() const {
        int64_t num_set = 0;
        for (const uint64_t word : words_) num_set += __builtin_popcountll(word);
        return num_set;
    }

    size_t bytes() const { return words_.capacity() * sizeof(uint64_t); }

 private:
    std::vector<uint64_t> words_;
};

}  // namespace nestpipe
