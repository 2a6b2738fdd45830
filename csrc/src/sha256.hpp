// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <cstdint>

namespace nestpipe {

class Sha256 {
 public:
    explicit Sha256(bool portable = false);  // portable: without the processor's SHA instructions; for tests

    void update(const void* data, size_t bytes);
    void finish(uint8_t digest[32]);

 private:
    void (*compress_)(uint32_t state[8], const uint8_t* block, size_t num_blocks);
    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t buffer_[64];
    size_t buffered_ = 0;
    uint64_t total_bytes_ = 0;
};

}  // namespace nestpipe
