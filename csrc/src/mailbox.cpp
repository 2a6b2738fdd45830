#include "mailbox.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>

namespace nestpipe {

namespace {
constexpr int64_t kLine = 64;                        // bytes of a cache line: what two ranks write is never in one
constexpr int64_t kPieceBytes = int64_t{128} << 10;  // the receiver begins while the sender still copies
using Clock = std::chrono::steady_clock;
}  // namespace

// Bytes since the beginning: those between `taken` and `filled` are in the ring.
struct Mailbox::Ring {
    alignas(kLine) std::atomic<int64_t> filled;  // written by the sender
    alignas(kLine) std::atomic<int64_t> taken;   // written by the receiver
    alignas(kLine) uint8_t data[1];
};

struct Mailbox::Bell {
    alignas(kLine) std::atomic<uint32_t> count;
    std::atomic<uint32_t> is_awaited;
};

static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

namespace {
constexpr int64_t kRingHead = 2 * kLine;
}

int64_t Mailbox::num_bytes(int64_t size, int64_t ring_bytes) {
    return size * kLine + size * size * (kRingHead + ring_bytes);
}

Mailbox::Mailbox(void* memory, int64_t rank, int64_t size, int64_t ring_bytes)
    : memory_(static_cast<uint8_t*>(memory)), rank_(rank), size_(size), ring_bytes_(ring_bytes) {}

Mailbox::Bell& Mailbox::bell(int64_t rank) const { return *reinterpret_cast<Bell*>(memory_ + rank * kLine); }

Mailbox::Ring& Mailbox::ring(int64_t from, int64_t to) const {
    const int64_t number = from * size_ + to;
    return *reinterpret_cast<Ring*>(memory_ + size_ * kLine + number * (kRingHead + ring_bytes_));
}

bool Mailbox::exchange(nestpipe_parcel* outgoing, nestpipe_parcel* incoming, int64_t timeout_us) {
    const auto end = Clock::now() + std::chrono::microseconds(timeout_us);
    for (;;) {
        const uint32_t heard = bell(rank_).count.load();  // before looking: what comes later rings again
        bool is_done = true, has_moved = false;
        for (int64_t shift = 1; shift < size_; ++shift) {  // each rank begins with another one
            const int64_t to = (rank_ + shift) % size_, from = (rank_ + size_ - shift) % size_;
            has_moved |= send(outgoing[to], to);
            has_moved |= receive(incoming[from], from);
            is_done &= outgoing[to].num_done == outgoing[to].num_bytes;
            is_done &= incoming[from].num_done == incoming[from].num_bytes;
        }
        if (is_done) return true;
        if (has_moved) continue;
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - Clock::now()).count();
        if (left <= 0) return false;
        sleep(heard, left);
    }
}

bool Mailbox::send(nestpipe_parcel& parcel, int64_t to) const {
    Ring& out = ring(rank_, to);
    const int64_t filled = out.filled.load(std::memory_order_relaxed);
    const int64_t room = ring_bytes_ - (filled - out.taken.load());
    const int64_t first = filled % ring_bytes_;
    const int64_t number = std::min({parcel.num_bytes - parcel.num_done, room, ring_bytes_ - first, kPieceBytes});
    if (number <= 0) return false;
    std::memcpy(out.data + first, static_cast<uint8_t*>(parcel.data) + parcel.num_done, static_cast<size_t>(number));
    parcel.num_done += number;
    out.filled.store(filled + number);
    ring_bell(to);
    return true;
}

bool Mailbox::receive(nestpipe_parcel& parcel, int64_t from) const {
    Ring& in = ring(from, rank_);
    const int64_t taken = in.taken.load(std::memory_order_relaxed);
    const int64_t present = in.filled.load(std::memory_order_acquire) - taken;
    const int64_t first = taken % ring_bytes_;
    const int64_t number = std::min({parcel.num_bytes - parcel.num_done, present, ring_bytes_ - first, kPieceBytes});
    if (number <= 0) return false;
    std::memcpy(static_cast<uint8_t*>(parcel.data) + parcel.num_done, in.data + first, static_cast<size_t>(number));
    parcel.num_done += number;
    in.taken.store(taken + number);
    // The sender sleeps for room only if the ring was full. Sequentially consistent: if it has filled the ring
    // meanwhile, either this load sees it, or the sender sees the room.
    if (in.filled.load() - taken == ring_bytes_) ring_bell(from);
    return true;
}

// Sequentially consistent, as in `sleep`: either the sleeper sees the new count, or it is seen to be awaiting.
void Mailbox::ring_bell(int64_t rank) const {
    Bell& theirs = bell(rank);
    theirs.count.fetch_add(1);
    if (theirs.is_awaited.load() != 0)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&theirs.count), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void Mailbox::sleep(uint32_t heard, int64_t timeout_us) const {
    Bell& mine = bell(rank_);
    const timespec limit{timeout_us / 1'000'000, timeout_us % 1'000'000 * 1'000};
    mine.is_awaited.store(1);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&mine.count), FUTEX_WAIT, heard, &limit, nullptr, 0);
    mine.is_awaited.store(0);
}

}  // namespace nestpipe
