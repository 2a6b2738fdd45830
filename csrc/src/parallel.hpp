// parallel_for: one loop cut into pieces, shared between the calling thread and the helpers of a process-wide pool.
#pragma once

#include <cstdint>
#include <functional>

namespace nestpipe {

// Calls body(begin, end) for pieces of [0, count) of at most `grain`, on up to num_threads threads, the caller's
// included, and returns when all are done. The caller works too, so a busy pool delays but never blocks. The body must
// not throw: allocate before the loop.
void parallel_for(int64_t count, int64_t grain, int32_t num_threads,
                  const std::function<void(int64_t begin, int64_t end)>& body);

// The number of items that a thread takes at a time, if each touches item_bytes of memory: several pieces per thread,
// so that all end at about the same time; all items if waking other threads would take as long as the work.
int64_t grain_for(int64_t count, int64_t item_bytes, int32_t num_threads);

// The number of threads that the work is worth, 1 .. num_threads.
int32_t threads_for(int64_t count, int64_t item_bytes, int32_t num_threads);

// The same for work that is cut into pieces already, each large enough for a thread.
int32_t threads_for_bytes(int64_t num_bytes, int32_t num_threads);

}  // namespace nestpipe
