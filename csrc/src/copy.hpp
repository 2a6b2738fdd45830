// Copying one record of any size, through the processor's caches or past them.
#pragma once

#include <cstdint>

namespace nestpipe {

using Copy = void (*)(char* to, const char* from, uint64_t bytes);

// Writes whole cache lines without reading them first and without displacing what the caches hold: for data that is not
// read again soon it saves one of three memory transfers a line. Lines that are only partly ours are written the
// ordinary way. Chosen once for this processor; call finish_streaming() before another thread may read.
Copy streaming_copy();
void finish_streaming();

// Returns the copy to use for an output of this size. Beyond a few MiB the output would not stay in a cache.
Copy copy_for(uint64_t total_bytes);

}  // namespace nestpipe
