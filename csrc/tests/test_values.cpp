// Hashes, initial values and SHA-256 against golden values: the same on every machine.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "initial.hpp"
#include "mix.hpp"
#include "sha256.hpp"

namespace {

std::string hex(const std::vector<uint8_t>& bytes) {
    std::string text;
    for (uint8_t byte : bytes) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

std::string sha256(const std::string& data, size_t piece, bool portable) {
    nestpipe::Sha256 sha(portable);
    for (size_t at = 0; at < data.size(); at += piece) sha.update(data.data() + at, std::min(piece, data.size() - at));
    std::vector<uint8_t> digest(32);
    sha.finish(digest.data());
    return hex(digest);
}

void test_sha256() {
    for (bool portable : {false, true}) {
        CHECK(sha256("abc", 1, portable) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        CHECK(sha256("", 1, portable) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        const std::string million(1000000, 'a');  // FIPS 180-4's third example
        for (size_t piece : {1000000, 64, 63, 7})
            CHECK(sha256(million, piece, portable) ==
                  "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
    for (size_t length = 0; length < 200; ++length)
        CHECK(sha256(std::string(length, 'x'), 64, false) == sha256(std::string(length, 'x'), 3, true));
}

void test_hashes() {
    const uint64_t salt = nestpipe::name_salt("item");
    CHECK(salt == 0x8d296af5c645f6bbu);
    CHECK(nestpipe::hash_key(0, salt) == 0x7facef6db7836bc3u);
    CHECK(nestpipe::hash_key(-1, salt) == 0x859bf321ca36b6d8u);
    for (int64_t key : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX})
        CHECK(nestpipe::key_of_hash(nestpipe::hash_key(key, salt), salt) == key);
}

// Rows of table "item", seed 7, keys 0, -1, 2^40: compared as bits.
void test_initial(nestpipe_initial kind, double a, double b, const std::vector<uint64_t>& golden) {
    nestpipe_table_spec spec = small_table("item", 4);
    spec.dtype = NESTPIPE_FLOAT64;
    spec.initial = kind;
    spec.initial_a = a;
    spec.initial_b = b;
    const uint64_t salt = nestpipe::name_salt("item");
    const nestpipe::InitialRecord initial(spec, salt);
    size_t at = 0;
    for (int64_t key : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
        double row[4];
        initial.write(nestpipe::hash_key(key, salt), reinterpret_cast<char*>(row), 4);
        uint64_t bits[4];
        std::memcpy(bits, row, sizeof row);
        for (uint64_t word : bits) CHECK(word == golden[at++]);
    }
}

}  // namespace

int main() {
    test_sha256();
    test_hashes();
    test_initial(NESTPIPE_CONSTANT, 0.25, 0.0,
                 {0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u,
                  0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u,
                  0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u, 0x3fd0000000000000u});
    test_initial(NESTPIPE_UNIFORM, -0.05, 0.1,
                 {0xbf94e859989494c8u, 0xbf80935b548c98bcu, 0x3fa51f5b56c1cf8au, 0xbf770a9088920210u,
                  0x3fa0aa241fa5a06eu, 0x3fa7b5c73e50533au, 0xbf9a019e0435f785u, 0x3f87c428f36134c8u,
                  0x3f9a9236c134876cu, 0x3fb1ae7a0902832eu, 0x3fb251bb89fe248eu, 0x3fb17428035b4f7au});
    test_initial(NESTPIPE_NORMAL, 0.5, 0.02,
                 {0x3fdee8f1ffcb7ed2u, 0x3fdf406831224e1du, 0x3fe02d10f06f72cau, 0x3fdf503920cdee63u,
                  0x3fe014b8952d8520u, 0x3fe03ba1d4e8f533u, 0x3fdebf820e9b3f54u, 0x3fdfb6069bbcc497u,
                  0x3fe00298c184a935u, 0x3fe0864a58828617u, 0x3fe090132224eae5u, 0x3fe082e8e8accf11u});
    test_initial(NESTPIPE_TRUNCATED_NORMAL, 0.0, 0.02,
                 {0xbf9071ef32373f2cu, 0xbf86bc98e6dc3b0cu, 0x3f757bbfb53b53e9u, 0xbf84e0e2cdf6849eu,
                  0x3f63c604eb41a4c4u, 0x3f7c66fcc33d1990u, 0xbf92ccfb97482233u, 0xbf71a37da8f8644au,
                  0x3f33d40e54dcb55fu, 0x3f8fb003b2697d35u, 0x3f90f722bcd91e81u, 0x3f8ee8b729e2eecdu});
    // The far tail, which no row of a test reaches.
    CHECK(nestpipe::normal_quantile(0x1p-54) == -0x1.095b059d67c4cp+3);
    CHECK(nestpipe::normal_quantile(1e-12) == -0x1.c234fba57a32ap+2);
    return 0;
}
