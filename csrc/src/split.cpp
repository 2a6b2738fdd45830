// A batch cut into parts.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "error.hpp"
#include "lookahead.hpp"
#include "plan.hpp"
#include "runs.hpp"
#include "scratch.hpp"

namespace nestpipe {

namespace {

thread_local Region number_memory, position_memory, row_memory, mark_memory, earlier_memory, occurrence_memory;

// The parts of a batch, one after the other; see nestpipe_split. A position has a number in the order (table,
// position), in which all rows are listed. Padding has the number -1, and all arrays by number have a place for it.
class Split {
 public:
    Split(const SplitInput& input, const SplitOutput& output)
        : input_(input),
          output_(output),
          num_distinct_(input.distinct.num_keys),
          num_tables_(input.distinct.num_tables) {
        const Runs runs = find_runs(input.distinct);
        starts_ = table_starts(runs, num_tables_);
        numbers_ = scratch<int32_t>(number_memory, num_distinct_ + 1) + 1;
        positions_ = scratch<int32_t>(position_memory, num_distinct_ + kBeyond);
        rows_ = scratch<int32_t>(row_memory, 1 + num_distinct_ + kBeyond) + 1;
        marks_ = scratch<uint8_t>(mark_memory, 1 + num_distinct_ + kBeyond) + 1;
        earlier_ = scratch<uint8_t>(earlier_memory, num_distinct_ + kBeyond);
        int64_t most_keys = 0;
        for (int64_t f = 0; f < input.num_features; ++f) {
            num_occurrences_ += input.features[f].num_keys;
            most_keys = std::max(most_keys, input.features[f].num_keys);
        }
        occurrences_ = scratch<int64_t>(occurrence_memory, most_keys + kUnasked);
        number_positions(runs);
    }

    void run() {
        std::memset(earlier_, 0, static_cast<size_t>(num_distinct_));
        for (int64_t part = 0; part < input_.num_parts; ++part) {
            if (part % 8 == 0) std::memset(marks_ - 1, 0, static_cast<size_t>(1 + num_distinct_ + kBeyond));
            const int64_t first = num_entries_;
            copy_occurrences(part);
            if (input_.num_parts == 1)
                list_all_rows();
            else
                list_rows(part);
            number_rows(part, first);
            if (part % 8 == 7 || part + 1 == input_.num_parts) write_uses(part / 8);
        }
        const auto lacks = std::find(earlier_, earlier_ + num_distinct_, 0);
        if (lacks != earlier_ + num_distinct_)
            refuse("position " + std::to_string(positions_[lacks - earlier_]) +
                   " is not among the positions of the occurrences; each must be");
        output_.index_offsets[input_.num_parts * input_.num_features] = num_entries_;
        *output_.num_rows = num_rows_;
    }

 private:
    static constexpr int64_t kWord = 8;
    // This many rows of a word, or keys of a sample, are written even if there are fewer, and the next ones overwrite
    // the surplus: the processor could not predict a branch.
    static constexpr int64_t kUnasked = 4;
    static constexpr int64_t kBeyond = kWord + kUnasked;       // room for the surplus
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);  // word_of_marks reads eight as one number

    void number_positions(Runs runs) {
        std::vector<int32_t> next(starts_.begin(), starts_.end());
        int32_t position = 0;
        for (const Run& run : runs) {
            int32_t& number = next[static_cast<size_t>(run.table)];
            for_each_key(run, [&] {
                positions_[number] = position;
                numbers_[position++] = number++;
            });
        }
        numbers_[-1] = -1;
    }

    // The numbers of a part's occurrences, to `index`, and their marks. Rows come later.
    void copy_occurrences(int64_t part) {
        const int64_t begin = input_.part_offsets[part], end = input_.part_offsets[part + 1];
        const auto bit = static_cast<uint8_t>(1u << (part % 8));
        int64_t first_occurrence = 0;  // of the feature
        for (int64_t f = 0; f < input_.num_features; ++f) {
            const int64_t* offsets = input_.features[f].offsets;
            *index_offsets_at(part, f) = num_entries_;
            *next_offset_++ = 0;
            if (input_.samples == nullptr) {
                for (int64_t s = begin; s < end; ++s) *next_offset_++ = offsets[s + 1] - offsets[begin];
                copy_range(first_occurrence + offsets[begin], first_occurrence + offsets[end], bit);
            } else {
                copy_samples(begin, end, offsets, first_occurrence, bit);
            }
            first_occurrence += input_.features[f].num_keys;
        }
    }

    // Successive occurrences, one of each entry.
    void copy_range(int64_t begin, int64_t end, uint8_t bit) {
        copy_entries(end - begin, bit, [begin](int64_t i) { return begin + i; });
    }

    // The samples in places [begin, end), of a feature whose occurrences start at first_occurrence.
    void copy_samples(int64_t begin, int64_t end, const int64_t* offsets, int64_t first_occurrence, uint8_t bit) {
        int64_t count = 0;
        for (int64_t place = begin; place < end; ++place) {
            const int64_t s = input_.samples[place], num_keys = offsets[s + 1] - offsets[s];
            int64_t* to = occurrences_ + count;
            for (int64_t k = 0; k < kUnasked; ++k) to[k] = first_occurrence + offsets[s] + k;
            for (int64_t k = kUnasked; k < num_keys; ++k) to[k] = first_occurrence + offsets[s] + k;
            *next_offset_++ = count += num_keys;
        }
        copy_entries(count, bit, [this](int64_t i) { return occurrences_[i]; });
    }

    // The i-th of `count` entries is occurrence(i).
    template <typename Occurrence>
    NESTPIPE_INLINE void copy_entries(int64_t count, uint8_t bit, Occurrence&& occurrence) {
        int64_t* index = output_.index + num_entries_;
        for (int64_t i = 0; i < count; ++i) {
            const int32_t number = numbers_[input_.positions[occurrence(i)]];
            marks_[number] = static_cast<uint8_t>(marks_[number] | bit);
            index[i] = number;
        }
        if (output_.sources != nullptr)
            for (int64_t i = 0; i < count; ++i) output_.sources[num_entries_ + i] = occurrence(i);
        num_entries_ += count;
    }

    // The rows of a part, from the marks; rows_[number] = row within its table.
    void list_rows(int64_t part) {
        const int shift = static_cast<int>(part % 8);
        const unsigned earlier_bits = (1u << shift) - 1;
        int64_t* row_counts = output_.row_counts + part * num_tables_;
        for (size_t table = 0; table + 1 < starts_.size(); ++table) {
            int32_t row = 0;
            for (int64_t begin = starts_[table], end = starts_[table + 1]; begin < end; begin += kWord) {
                unsigned mask = word_of_marks(begin, shift);
                if (end - begin < kWord) mask &= (1u << (end - begin)) - 1;
                if (mask == 0) continue;
                int64_t* positions = output_.row_positions + num_rows_;
                uint8_t* is_first = output_.is_first + num_rows_;
                unsigned left = mask | 0xf00u;  // these four bits write beyond the word, or are overwritten
                const auto list_next = [&](int64_t k) {
                    const int64_t number = begin + __builtin_ctz(left);
                    left &= left - 1;
                    positions[k] = positions_[number];
                    is_first[k] = earlier_[number] == 0 && (marks_[number] & earlier_bits) == 0;
                    rows_[number] = row + static_cast<int32_t>(k);
                };
                const int64_t count = count_bits(mask);
                int64_t num_listed = 0;
                if (num_rows_ + kUnasked <= num_occurrences_)
                    for (; num_listed < kUnasked; ++num_listed) list_next(num_listed);
                for (; num_listed < count; ++num_listed) list_next(num_listed);
                row += static_cast<int32_t>(count);
                num_rows_ += count;
            }
            row_counts[table] = row;
        }
    }

    // Bit i is set if number begin + i has the mark.
    unsigned word_of_marks(int64_t begin, int shift) const {
        uint64_t word;
        std::memcpy(&word, marks_ + begin, sizeof word);
        word = word >> shift & 0x0101010101010101u;
        return static_cast<unsigned>(word * 0x0102040810204080u >> 56);
    }

    // The same where there is one part, which uses all keys.
    void list_all_rows() {
        for (size_t table = 0; table + 1 < starts_.size(); ++table) {
            const int64_t begin = starts_[table], end = starts_[table + 1];
            output_.row_counts[table] = end - begin;
            for (int64_t i = begin; i < end; ++i) {
                output_.row_positions[i] = positions_[i];
                rows_[i] = static_cast<int32_t>(i - begin);
            }
        }
        if (num_distinct_ > 0) std::memset(output_.is_first, 1, static_cast<size_t>(num_distinct_));
        num_rows_ = num_distinct_;
    }

    // Turns the numbers of a part, entries from `first` on, into rows.
    void number_rows(int64_t part, int64_t first) {
        for (int64_t f = 0; f < input_.num_features; ++f) {
            const int64_t end = f + 1 < input_.num_features ? *index_offsets_at(part, f + 1) : num_entries_;
            rows_[-1] = static_cast<int32_t>(output_.row_counts[part * num_tables_ + input_.features[f].table]);
            for (int64_t i = first; i < end; ++i) output_.index[i] = rows_[output_.index[i]];
            first = end;
        }
    }

    void write_uses(int64_t byte) {
        const int64_t num_bytes = (input_.num_parts + 7) / 8;
        for (int64_t i = 0; i < num_distinct_; ++i) {
            output_.uses[positions_[i] * num_bytes + byte] = marks_[i];
            earlier_[i] = static_cast<uint8_t>(earlier_[i] | marks_[i]);
        }
    }

    int64_t* index_offsets_at(int64_t part, int64_t f) const {
        return output_.index_offsets + part * input_.num_features + f;
    }

    const SplitInput& input_;
    const SplitOutput output_;
    const int64_t num_distinct_, num_tables_;
    std::vector<int64_t> starts_;  // first number of each table
    int32_t *numbers_, *positions_;
    int32_t* rows_;         // by number, in the last part that uses it
    uint8_t* marks_;        // by number: which of eight parts use it
    uint8_t* earlier_;      // by number: not 0 where a part before those eight uses it
    int64_t* occurrences_;  // of a part's entries, feature by feature
    int64_t num_occurrences_ = 0, num_entries_ = 0, num_rows_ = 0;
    int64_t* next_offset_ = output_.offsets;
};

}  // namespace

void split(const SplitInput& input, const SplitOutput& output) { Split(input, output).run(); }

}  // namespace nestpipe
