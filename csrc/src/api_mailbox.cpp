// The C boundary of messages between the ranks of one host.
#include <string>

#include "boundary.hpp"
#include "feature_checks.hpp"
#include "mailbox.hpp"
#include "nestpipe.h"

using namespace nestpipe;

namespace {

constexpr int64_t kLine = 64;

void need_mailbox(int64_t size, int64_t ring_bytes) {
    need_range(size, 1, 4096, "size");
    need_range(ring_bytes, kLine, int64_t{1} << 30, "ring_bytes");
    if (ring_bytes % kLine != 0) refuse("ring_bytes is " + std::to_string(ring_bytes) + ", must be a multiple of 64");
}

void need_parcels(const nestpipe_parcel* parcels, int64_t size, int64_t rank, const char* what) {
    need(parcels, what);
    for (int64_t r = 0; r < size; ++r) {
        if (r == rank) continue;
        need_count(parcels[r].num_bytes, "num_bytes of a parcel");
        need_range(parcels[r].num_done, 0, parcels[r].num_bytes, "num_done of a parcel");
        if (parcels[r].num_bytes > 0) need(parcels[r].data, "data of a parcel");
    }
}

}  // namespace

nestpipe_status nestpipe_mailbox_bytes(int64_t size, int64_t ring_bytes, int64_t* num_bytes) {
    return guarded([&] {
        need_mailbox(size, ring_bytes);
        need(num_bytes, "num_bytes");
        *num_bytes = Mailbox::num_bytes(size, ring_bytes);
    });
}

nestpipe_status nestpipe_mailbox_exchange(void* memory, int64_t memory_bytes, int64_t rank, int64_t size,
                                          int64_t ring_bytes, nestpipe_parcel* outgoing, nestpipe_parcel* incoming,
                                          int64_t timeout_us, int32_t* is_done) {
    return guarded([&] {
        need_mailbox(size, ring_bytes);
        need_range(rank, 0, size - 1, "rank");
        need(memory, "memory");
        if (memory_bytes != Mailbox::num_bytes(size, ring_bytes) || reinterpret_cast<uintptr_t>(memory) % kLine != 0)
            refuse("memory must have " + std::to_string(Mailbox::num_bytes(size, ring_bytes)) +
                   " bytes at a multiple of 64, got " + std::to_string(memory_bytes));
        need_parcels(outgoing, size, rank, "outgoing");
        need_parcels(incoming, size, rank, "incoming");
        need_count(timeout_us, "timeout_us");
        need(is_done, "is_done");
        Mailbox mailbox(memory, rank, size, ring_bytes);
        *is_done = mailbox.exchange(outgoing, incoming, timeout_us) ? 1 : 0;
    });
}
