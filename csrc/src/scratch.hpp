// Memory to work in, kept from call to call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "region.hpp"

namespace nestpipe {

// Address space for `count` elements; only what is written costs memory. Each thread keeps its own, a thread_local
// Region, for its next call: a fresh page costs more than all the work done on it.
template <typename Element>
Element* scratch(Region& region, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(Element);
    if (region.bytes() < bytes) {
        region = Region(bytes);
        region.advise_huge(0, region.bytes());
    }
    return static_cast<Element*>(region.data());
}

}  // namespace nestpipe
