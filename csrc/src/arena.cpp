#include "arena.hpp"

#include <algorithm>

namespace nestpipe {

namespace {
constexpr uint64_t kBlockBytes = uint64_t{64} << 20;  // large, so that blocks are few; what is not written is free
constexpr uint32_t kLeastShift = 4;

uint32_t shift_for(uint64_t record_bytes) {
    uint32_t shift = kLeastShift;
    while ((record_bytes << (shift + 1)) <= kBlockBytes) ++shift;
    return shift;
}

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }
}  // namespace

Arena::Arena(uint64_t record_bytes)
    : record_bytes_(record_bytes),
      shift_(shift_for(record_bytes)),
      mask_((uint64_t{1} << shift_) - 1),
      steps_offset_(round_up(record_bytes << shift_, 64)),
      block_bytes_(round_up(steps_offset_ + (sizeof(int64_t) << shift_), kHugePage)) {}

// One mapping for all blocks that are missing: a table that is far too large fails at once, not after thousands of
// them.
void Arena::reserve(uint64_t rows) {
    const uint64_t num_wanted = (rows + mask_) >> shift_;
    if (num_wanted <= num_blocks()) return;
    const size_t num_new = num_wanted - num_blocks();
    Region region(num_new * block_bytes_);
    mappings_.reserve(std::max(mappings_.size() + 1, 2 * mappings_.size()));
    blocks_.reserve(std::max(num_blocks() + num_new, 2 * num_blocks()));  // nothing below throws
    for (size_t i = 0; i < num_new; ++i) {
        // A small table stays small: no huge pages for the start of its first block and for that block's steps.
        const bool first = blocks_.empty();
        const uint64_t offset = i * block_bytes_;
        region.advise_huge(offset + (first ? kHugePage : 0), offset + (first ? steps_offset_ : block_bytes_));
        char* data = static_cast<char*>(region.data()) + offset;
        blocks_.push_back({data, reinterpret_cast<int64_t*>(data + steps_offset_)});
    }
    mappings_.push_back({std::move(region), num_blocks() - num_new});
}

void Arena::shrink(size_t num_wanted) {
    while (!mappings_.empty() && mappings_.back().first_block >= num_wanted) mappings_.pop_back();
    blocks_.resize(std::min(num_wanted, num_blocks()));
}

uint64_t Arena::mapped_bytes() const { return num_blocks() * block_bytes_; }

}  // namespace nestpipe
