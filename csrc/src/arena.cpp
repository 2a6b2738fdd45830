#include "arena.hpp"

namespace nestpipe {

namespace {
constexpr uint64_t kBlockBytes = uint64_t{64} << 20;  // large, so that blocks are few; what is not written is free
constexpr uint32_t kLeastShift = 4;

uint32_t shift_for(uint64_t record_bytes) {
    uint32_t shift = kLeastShift;
    while ((record_bytes << (shift + 1)) <= kBlockBytes) ++shift;
    return shift;
}

uint64_t aligned_to_line(uint64_t bytes) { return (bytes + 63) / 64 * 64; }
}  // namespace

Arena::Arena(uint64_t record_bytes)
    : record_bytes_(record_bytes), shift_(shift_for(record_bytes)), mask_((uint64_t{1} << shift_) - 1) {}

void Arena::reserve(uint64_t rows) {
    while ((uint64_t{blocks_.size()} << shift_) < rows) {
        const uint64_t records = aligned_to_line(record_bytes_ << shift_);
        Region region(records + (sizeof(int64_t) << shift_));
        const bool first = blocks_.empty();  // a small table stays small: no huge page for its start and its steps
        region.advise_huge(first ? kHugePage : 0, first ? records : region.bytes());
        char* data = static_cast<char*>(region.data());
        regions_.push_back(std::move(region));
        blocks_.push_back({data, reinterpret_cast<int64_t*>(data + records)});
    }
}

uint64_t Arena::mapped_bytes() const {
    uint64_t bytes = 0;
    for (const Region& region : regions_) bytes += region.bytes();
    return bytes;
}

}  // namespace nestpipe
