// mix64: the one hash of the system. It places keys in the index, in buckets, on owners, and seeds initial values.
#pragma once

#include <cstdint>
#include <string_view>

namespace nestpipe {

// Stafford's "mix 13", a bijection of 64-bit numbers whose every output bit depends on every input bit.
constexpr uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

constexpr uint64_t unmix64(uint64_t x) {
    x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3u;  // the multipliers' inverses modulo 2^64
    x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
    return x ^ (x >> 30) ^ (x >> 60);
}

static_assert(unmix64(mix64(0)) == 0 && unmix64(mix64(1)) == 1 && unmix64(mix64(~0ull)) == ~0ull);
static_assert(unmix64(mix64(0x0123456789abcdefu)) == 0x0123456789abcdefu);

// FNV-1a over the bytes of the name, mixed once: tables of similar names must not place a key alike.
constexpr uint64_t name_salt(std::string_view name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return mix64(hash);
}

// mix64(key, table name) of the contracts. Being a bijection of the key, the hash can stand for it.
constexpr uint64_t hash_key(int64_t key, uint64_t salt) { return mix64(static_cast<uint64_t>(key) ^ salt); }
constexpr int64_t key_of_hash(uint64_t hash, uint64_t salt) { return static_cast<int64_t>(unmix64(hash) ^ salt); }

// The index is ordered by the hash with its bucket last. A rank owns whole buckets, a checkpoint brings them one after
// the other: whichever they are, their keys are spread evenly by the other 48 bits.
constexpr uint64_t place_of_hash(uint64_t hash) { return hash << 16 | hash >> 48; }
constexpr uint64_t hash_of_place(uint64_t place) { return place >> 16 | place << 48; }

constexpr int64_t bucket_of_hash(uint64_t hash) { return static_cast<int64_t>(hash >> 48); }
constexpr int64_t owner_of_hash(uint64_t hash, int64_t world_size) { return bucket_of_hash(hash) * world_size / 65536; }

}  // namespace nestpipe
