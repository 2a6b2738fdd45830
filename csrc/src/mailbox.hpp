// Messages between the ranks of one host, in memory that all of them have mapped.
//
// For each pair of ranks there is a ring of bytes, which the sender fills and the receiver empties. Each rank has a
// bell: whoever fills or empties a ring rings the bell of the rank at its other end. A rank that can do nothing more
// sleeps until its bell rings. So a message may be larger than its ring, and no thread works behind the caller's back.
#pragma once

#include <cstdint>

#include "nestpipe.h"

namespace nestpipe {

class Mailbox {
 public:
    static int64_t num_bytes(int64_t size, int64_t ring_bytes);

    // memory: num_bytes(...) bytes at a multiple of 64, zero when the first rank maps them.
    Mailbox(void* memory, int64_t rank, int64_t size, int64_t ring_bytes);

    // Sends outgoing[r] to rank r and receives incoming[r] from it, as far as that is possible within the time. Returns
    // whether all is done; if not, the next call goes on. All ranks call it with sizes that agree.
    bool exchange(nestpipe_parcel* outgoing, nestpipe_parcel* incoming, int64_t timeout_us);

 private:
    struct Ring;
    struct Bell;
    Ring& ring(int64_t from, int64_t to) const;
    Bell& bell(int64_t rank) const;
    bool send(nestpipe_parcel& parcel, int64_t to) const;
    bool receive(nestpipe_parcel& parcel, int64_t from) const;
    void ring_bell(int64_t rank) const;
    void sleep(uint32_t heard, int64_t timeout_us) const;

    uint8_t* memory_;
    int64_t rank_, size_, ring_bytes_;
};

}  // namespace nestpipe
