#include "region.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>

#include "error.hpp"

#if !defined(__linux__)
#error "the host store uses Linux virtual memory (mmap, madvise); build it on Linux"
#endif

namespace nestpipe {

namespace {
size_t page() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
}  // namespace

Region::Region(size_t bytes) {
    if (bytes > std::numeric_limits<size_t>::max() / 2) throw Error(NESTPIPE_OUT_OF_MEMORY, "region too large");
    bytes_ = round_up(bytes, page());
    // Map up to one huge page more than needed and cut it to a huge page's boundary: only aligned 2 MiB can be huge.
    const size_t alignment = bytes_ >= kHugePage ? kHugePage : page();
    const size_t mapped = bytes_ + alignment - page();
    void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        throw Error(NESTPIPE_OUT_OF_MEMORY, "out of memory: the system refused " + std::to_string(mapped) +
                                                " bytes of address space; lower max_rows, use more ranks, or raise "
                                                "the process's memory limit");
    char* begin = static_cast<char*>(address);
    char* aligned =
        begin + (round_up(reinterpret_cast<uintptr_t>(begin), alignment) - reinterpret_cast<uintptr_t>(begin));
    if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
    const size_t behind = mapped - static_cast<size_t>(aligned - begin) - bytes_;
    if (behind > 0) munmap(aligned + bytes_, behind);
    data_ = aligned;
}

Region::~Region() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

void Region::advise_huge(size_t first, size_t end) const {
    first = round_up(first, kHugePage);
    end = end / kHugePage * kHugePage;
    if (first < end) (void)madvise(static_cast<char*>(data_) + first, end - first, MADV_HUGEPAGE);
}

void Region::release_before(size_t offset) {
    offset = offset / kHugePage * kHugePage;
    if (offset <= released_) return;
    (void)madvise(static_cast<char*>(data_) + released_, offset - released_, MADV_DONTNEED);
    released_ = offset;
}

}  // namespace nestpipe
