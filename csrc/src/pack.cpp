// The keys of a batch in the form in which an accelerator gets them.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "error.hpp"
#include "parallel.hpp"
#include "plan.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kBytesPerKey = sizeof(int64_t) + sizeof(int16_t);
constexpr int64_t kPieceBytes = int64_t{1} << 18;  // what a thread takes at a time, of several lists at once

// Cuts lists of these sizes into pieces, and calls body(list, begin, end) for each, on several threads.
template <typename Body>
void for_pieces(const std::vector<int64_t>& sizes, int64_t item_bytes, int32_t num_threads, const Body& body) {
    struct Piece {
        size_t list;
        int64_t begin, end;
    };
    std::vector<Piece> pieces;
    const int64_t most = std::max<int64_t>(1, kPieceBytes / item_bytes);
    for (size_t list = 0; list < sizes.size(); ++list)
        for (int64_t begin = 0; begin < sizes[list]; begin += most)
            pieces.push_back({list, begin, std::min(begin + most, sizes[list])});
    const auto count = static_cast<int64_t>(pieces.size());
    const int64_t num_bytes = item_bytes * std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    parallel_for(count, 1, threads_for_bytes(num_bytes, num_threads), [&](int64_t begin, int64_t end) {
        for (auto p = static_cast<size_t>(begin); p < static_cast<size_t>(end); ++p)
            body(pieces[p].list, pieces[p].begin, pieces[p].end);
    });
}

void pack(const nestpipe_feature_keys& feature, int64_t begin, int64_t end, int16_t padding, int64_t* keys,
          int16_t* tables) {
    if (keys != nullptr)
        std::memcpy(keys + begin, feature.keys + begin, static_cast<size_t>(end - begin) * sizeof(int64_t));
    if (tables == nullptr) return;
    const auto table = static_cast<int16_t>(feature.table);
    if (feature.has_padding == 0) {
        std::fill(tables + begin, tables + end, table);
        return;
    }
    for (int64_t i = begin; i < end; ++i) tables[i] = feature.keys[i] == feature.padding_key ? padding : table;
}

// The occurrences of one feature in one part: where its samples end, and where they come from.
struct Block {
    const int64_t* offsets;  // of the feature
    const int64_t* samples;  // of the part; null if they are consecutive
    int64_t first_sample, num_samples;
    int64_t first_source;  // first occurrence of the feature

    int64_t sample(int64_t place) const { return samples == nullptr ? first_sample + place : samples[place]; }

    int64_t num_keys() const {
        if (samples == nullptr) return offsets[first_sample + num_samples] - offsets[first_sample];
        int64_t total = 0;
        for (int64_t i = 0; i < num_samples; ++i) total += offsets[samples[i] + 1] - offsets[samples[i]];
        return total;
    }

    // Returns the largest number of keys of a sample.
    int64_t lay_out(int64_t begin, int64_t* ends, int64_t* sources) const {
        int64_t longest = 0, end = begin;
        for (int64_t i = 0; i < num_samples; ++i) {
            const int64_t* bounds = offsets + sample(i);
            const int64_t length = bounds[1] - bounds[0];
            if (sources != nullptr) sources[i] = first_source + bounds[0];
            ends[i] = end += length;
            longest = std::max(longest, length);
        }
        return longest;
    }
};

// Refuses offsets that fall.
void need_rising(const nestpipe_feature_samples* features, int64_t num_features, int64_t num_samples,
                 int32_t num_threads) {
    std::vector<uint8_t> falls(static_cast<size_t>(num_features), 0);
    const std::vector<int64_t> sizes(static_cast<size_t>(num_features), num_samples);
    for_pieces(sizes, sizeof(int64_t), num_threads, [&](size_t f, int64_t begin, int64_t end) {
        const int64_t* offsets = features[f].offsets;
        bool is_falling = false;
        for (int64_t s = begin; s < end; ++s) is_falling |= offsets[s + 1] < offsets[s];
        if (is_falling) __atomic_store_n(&falls[f], uint8_t{1}, __ATOMIC_RELAXED);
    });
    const auto falling = std::find(falls.begin(), falls.end(), 1);
    if (falling != falls.end()) refuse("feature " + std::to_string(falling - falls.begin()) + ": offsets fall");
}

}  // namespace

void pack_keys(const nestpipe_feature_keys* features, int64_t num_features, int64_t num_tables, int64_t* keys,
               int16_t* tables, int32_t num_threads) {
    std::vector<int64_t> sizes, starts;
    int64_t num_keys = 0;
    for (int64_t f = 0; f < num_features; num_keys += features[f++].num_keys) {
        sizes.push_back(features[f].num_keys);
        starts.push_back(num_keys);
    }
    if (keys == nullptr && tables == nullptr) return;
    for_pieces(sizes, kBytesPerKey, num_threads, [&](size_t f, int64_t begin, int64_t end) {
        pack(features[f], begin, end, static_cast<int16_t>(num_tables), keys == nullptr ? nullptr : keys + starts[f],
             tables == nullptr ? nullptr : tables + starts[f]);
    });
}

void copy_arrays(const nestpipe_array_copy* arrays, int64_t num_arrays, uint8_t* target, int32_t num_threads) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < num_arrays; ++i) sizes.push_back(arrays[i].num_bytes);
    for_pieces(sizes, 1, num_threads, [&](size_t i, int64_t begin, int64_t end) {
        const auto* source = static_cast<const uint8_t*>(arrays[i].source);
        std::memcpy(target + arrays[i].offset + begin, source + begin, static_cast<size_t>(end - begin));
    });
}

void find_ranges(const nestpipe_array_copy* arrays, int64_t num_arrays, uint8_t* is_range, int32_t num_threads) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < num_arrays; ++i)
        sizes.push_back(arrays[i].num_bytes / static_cast<int64_t>(sizeof(int64_t)));
    std::fill(is_range, is_range + num_arrays, uint8_t{1});
    for_pieces(sizes, sizeof(int64_t), num_threads, [&](size_t i, int64_t begin, int64_t end) {
        const auto* numbers = static_cast<const int64_t*>(arrays[i].source);
        uint64_t differs = 0;
        for (int64_t j = begin; j < end; ++j) differs |= static_cast<uint64_t>(numbers[j] ^ j);
        if (differs != 0) __atomic_store_n(is_range + i, uint8_t{0}, __ATOMIC_RELAXED);
    });
}

int64_t lay_out(const nestpipe_feature_samples* features, int64_t num_features, const int64_t* samples,
                const int64_t* part_offsets, int64_t num_parts, int64_t* bounds, int64_t* sources,
                int32_t num_threads) {
    const int64_t num_blocks = num_parts * num_features;
    need_rising(features, num_features, part_offsets[num_parts], num_threads);
    std::vector<Block> blocks(static_cast<size_t>(num_blocks));
    for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t first = part_offsets[part], number = part_offsets[part + 1] - first;
        int64_t first_source = 0;
        for (int64_t f = 0; f < num_features; first_source += features[f++].num_keys)
            blocks[static_cast<size_t>(part * num_features + f)] = {
                features[f].offsets, samples == nullptr ? nullptr : samples + first, first, number, first_source};
    }
    // Two passes, so that threads can share the second: first the places where blocks begin.
    std::vector<int64_t> begins(static_cast<size_t>(num_blocks)), segments(begins), longest(begins);
    int64_t num_keys = 0, num_segments = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
        begins[b] = num_keys;
        segments[b] = num_segments;
        num_keys += blocks[b].num_keys();
        num_segments += blocks[b].num_samples;
    }
    bounds[0] = 0;
    const int64_t num_bytes = 2 * static_cast<int64_t>(sizeof(int64_t)) * num_segments;
    parallel_for(num_blocks, 1, threads_for_bytes(num_bytes, num_threads), [&](int64_t begin, int64_t end) {
        for (auto b = static_cast<size_t>(begin); b < static_cast<size_t>(end); ++b) {
            int64_t* from = sources == nullptr ? nullptr : sources + segments[b];
            longest[b] = blocks[b].lay_out(begins[b], bounds + 1 + segments[b], from);
        }
    });
    return num_blocks == 0 ? 0 : *std::max_element(longest.begin(), longest.end());
}

}  // namespace nestpipe
