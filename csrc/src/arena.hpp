// The memory of records: blocks of address space that never move, and a step number for each record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "region.hpp"

namespace nestpipe {

class Arena {
 public:
    explicit Arena(uint64_t record_bytes);

    char* record(uint32_t row) const { return block(row).records + (row & mask_) * record_bytes_; }
    int64_t* step(uint32_t row) const { return block(row).steps + (row & mask_); }

    // Makes rows [0, rows) addressable. May throw; then nothing has changed.
    void reserve(uint64_t rows);

    size_t num_blocks() const { return blocks_.size(); }
    void shrink(size_t num_wanted);  // undoes what was reserved since there were num_wanted blocks

    uint64_t mapped_bytes() const;

 private:
    struct Block {
        char* records;
        int64_t* steps;
    };
    struct Mapping {
        Region region;
        size_t first_block;
    };
    const Block& block(uint32_t row) const { return blocks_[row >> shift_]; }

    uint64_t record_bytes_;
    uint32_t shift_;  // a block has 2^shift records
    uint64_t mask_;
    uint64_t steps_offset_;  // within a block
    uint64_t block_bytes_;
    std::vector<Block> blocks_;
    std::vector<Mapping> mappings_;
};

}  // namespace nestpipe
