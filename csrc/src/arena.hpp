// Where records live: blocks of address space that never move, and a step number beside each record.
#pragma once

#include <cstdint>
#include <vector>

#include "region.hpp"

namespace nestpipe {

class Arena {
 public:
    explicit Arena(uint64_t record_bytes);

    char* record(uint32_t row) const { return block(row).records + (row & mask_) * record_bytes_; }
    int64_t* step(uint32_t row) const { return block(row).steps + (row & mask_); }

    // Makes rows [0, rows) addressable. May throw; then nothing has changed that a caller could see.
    void reserve(uint64_t rows);

    uint64_t mapped_bytes() const;

 private:
    struct Block {
        char* records;
        int64_t* steps;
    };
    const Block& block(uint32_t row) const { return blocks_[row >> shift_]; }

    uint64_t record_bytes_;
    uint32_t shift_;  // a block has 2^shift records
    uint64_t mask_;
    std::vector<Block> blocks_;
    std::vector<Region> regions_;
};

}  // namespace nestpipe
