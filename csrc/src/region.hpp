// A range of zeroed virtual memory. Physical memory arrives, zeroed, when a page is first written.
#pragma once

#include <cstddef>
#include <utility>

namespace nestpipe {

constexpr size_t kHugePage = size_t{2} << 20;

class Region {
 public:
    Region() = default;
    explicit Region(size_t bytes);  // throws Error(NESTPIPE_OUT_OF_MEMORY)
    ~Region();
    Region(Region&& other) noexcept { swap(other); }
    Region& operator=(Region&& other) noexcept {
        swap(other);
        return *this;
    }

    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

    // Asks for huge pages in [first, end), rounded inwards: fewer TLB misses under random access. Only advice: a
    // kernel that has none to give serves small pages.
    void advise_huge(size_t first, size_t end) const;

    // Gives the physical memory before `offset` back to the kernel; the contents there are lost.
    void release_before(size_t offset);

 private:
    void swap(Region& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(released_, other.released_);
    }

    void* data_ = nullptr;
    size_t bytes_ = 0;
    size_t released_ = 0;
};

}  // namespace nestpipe
