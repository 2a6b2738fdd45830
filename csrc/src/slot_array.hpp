// What the host knows of each slot of a row pool, in memory that grows without moving.
#pragma once

#include <cstdint>

#include "arena.hpp"
#include "prefetch.hpp"

namespace nestpipe {

// Half a cache line. A slot of zeros is free.
struct Slot {
    enum State : uint8_t {
        kTaken = 1,     // belongs to a batch and holds no key
        kResident = 2,  // holds a key, which is in the index
        kStored = 4,    // the store has a record of the key
        kDirty = 8,     // the slot's record is newer than the store's
        kLeaving = 16,  // an admission waits for the slot; no later batch has used it
    };

    uint64_t place;      // of its key in the index
    int64_t last_use;    // batch
    int64_t step;        // that last changed the record, if it is dirty
    uint32_t waiting;    // number of the admission that waits for the slot, if it is leaving
    uint16_t table;      // of its key
    uint8_t num_claims;  // batches in flight that create the key if they are applied; 0 if it exists
    uint8_t state;       // if the slot is taken, nothing else has a meaning

    bool is(State flag) const { return (state & flag) != 0; }
    bool exists() const { return (state & (kStored | kDirty)) != 0; }
    bool is_unstored() const { return (state & (kStored | kDirty)) == kDirty; }  // exists, but not in the store

    // Whether the entry of a batch in the order of uses is the slot's last one.
    bool was_last_used_by(int64_t batch) const { return is(kResident) && last_use == batch; }

    bool is_awaited_by(uint32_t admission) const { return is(kLeaving) && waiting == admission; }
    void leave_for(uint32_t admission) {
        state |= kLeaving;
        waiting = admission;
    }

    void take() { state = kTaken; }
    void hold(uint64_t key_place, uint32_t key_table, int64_t batch, bool is_stored) {
        *this = Slot{key_place,
                     batch,
                     0,
                     0,
                     static_cast<uint16_t>(key_table),
                     0,
                     static_cast<uint8_t>(kResident | (is_stored ? kStored : 0))};
    }
};
static_assert(sizeof(Slot) == 32);

class SlotArray {
 public:
    SlotArray() : arena_(sizeof(Slot)) {}

    int64_t size() const { return size_; }
    Slot& operator[](uint32_t slot) const { return *reinterpret_cast<Slot*>(arena_.record(slot)); }
    void prefetch(uint32_t slot) const { nestpipe::prefetch(arena_.record(slot)); }
    void prefetch_to_write(uint32_t slot) const { nestpipe::prefetch_to_write(arena_.record(slot)); }

    // A batch uses a slot. Returns whether it had not before; num_stayed: one more if the slot was leaving. Atomic,
    // because a key that occurs twice, against the rules, may be at hand in two threads.
    bool use(uint32_t number, int64_t batch, int64_t& num_stayed) const {
        constexpr auto kOthers = static_cast<uint8_t>(~Slot::kLeaving);
        Slot& slot = (*this)[number];
        if ((__atomic_load_n(&slot.state, __ATOMIC_RELAXED) & Slot::kLeaving) != 0)
            num_stayed += (__atomic_fetch_and(&slot.state, kOthers, __ATOMIC_RELAXED) & Slot::kLeaving) != 0;
        return __atomic_exchange_n(&slot.last_use, batch, __ATOMIC_RELAXED) != batch;
    }

    // Adds slots that are free. May throw; then nothing has changed.
    void grow(int64_t size) {
        arena_.reserve(static_cast<uint64_t>(size));
        size_ = size;
    }

    uint64_t bytes() const { return static_cast<uint64_t>(size_) * sizeof(Slot); }

 private:
    Arena arena_;  // its own step numbers are never written, so they cost no memory
    int64_t size_ = 0;
};

}  // namespace nestpipe
