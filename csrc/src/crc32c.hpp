// CRC-32C (Castagnoli), the checksum of blocks in a checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nestpipe {

// The checksum of the bytes behind those whose checksum is `before`; 0 for the first ones.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The same without the processor's own instruction; for tests.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace nestpipe
