// Threads, as ranks, exchange messages through shared memory: smaller and larger than the rings, empty ones, and with
// calls that end before all is done. Fails if `receive` does not ring the bell of a sender whose ring was full: each
// further piece then waits for the end of a call.
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using Bytes = std::vector<uint8_t>;

struct alignas(64) Line {
    uint8_t bytes[64];
};

constexpr int64_t kRing = 4096;

int64_t size_of(int64_t exchange, int64_t from, int64_t to) {
    std::mt19937_64 random(static_cast<uint64_t>((exchange * 64 + from) * 64 + to));
    const int64_t most[] = {0, 1, 100, kRing, kRing + 1, 20 * kRing};
    const int64_t limit = most[random() % 6];
    return limit == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

uint8_t byte_of(int64_t exchange, int64_t from, int64_t to, int64_t i) {
    return static_cast<uint8_t>(exchange * 7 + from * 31 + to * 57 + i * 3 + (i >> 8));
}

void run(Line* memory, int64_t memory_bytes, int64_t rank, int64_t size, int64_t num_exchanges, int64_t timeout_us) {
    for (int64_t exchange = 0; exchange < num_exchanges; ++exchange) {
        std::vector<Bytes> sent, received;
        std::vector<nestpipe_parcel> outgoing, incoming;
        for (int64_t r = 0; r < size; ++r) {
            sent.emplace_back(static_cast<size_t>(size_of(exchange, rank, r)));
            received.emplace_back(static_cast<size_t>(size_of(exchange, r, rank)));
            for (size_t i = 0; i < sent.back().size(); ++i)
                sent.back()[i] = byte_of(exchange, rank, r, static_cast<int64_t>(i));
        }
        for (int64_t r = 0; r < size; ++r) {
            auto &out = sent[static_cast<size_t>(r)], &in = received[static_cast<size_t>(r)];
            outgoing.push_back({out.data(), static_cast<int64_t>(out.size()), 0});
            incoming.push_back({in.data(), static_cast<int64_t>(in.size()), 0});
        }
        int32_t is_done = 0;
        while (is_done == 0)
            OK(nestpipe_mailbox_exchange(memory, memory_bytes, rank, size, kRing, outgoing.data(), incoming.data(),
                                         timeout_us, &is_done));
        for (int64_t r = 0; r < size; ++r)
            for (size_t i = 0; r != rank && i < received[static_cast<size_t>(r)].size(); ++i)
                CHECK(received[static_cast<size_t>(r)][i] == byte_of(exchange, r, rank, static_cast<int64_t>(i)));
    }
}

void test_exchanges(int64_t size, int64_t num_exchanges, int64_t timeout_us) {
    int64_t memory_bytes;
    OK(nestpipe_mailbox_bytes(size, kRing, &memory_bytes));
    std::vector<Line> memory(static_cast<size_t>(memory_bytes) / sizeof(Line) + 1);
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < size; ++rank)
        ranks.emplace_back(run, memory.data(), memory_bytes, rank, size, num_exchanges, timeout_us);
    for (auto& rank : ranks) rank.join();
}

// With calls that may take a minute, a bell that does not ring shows.
void test_every_bell_rings() {
    const auto begin = std::chrono::steady_clock::now();
    test_exchanges(2, 200, 60'000'000);
    test_exchanges(4, 100, 60'000'000);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50));
}

void test_nobody_sends() {
    int64_t memory_bytes;
    OK(nestpipe_mailbox_bytes(2, kRing, &memory_bytes));
    std::vector<Line> memory(static_cast<size_t>(memory_bytes) / sizeof(Line) + 1);
    Bytes target(10);
    nestpipe_parcel outgoing[2]{}, incoming[2]{{}, {target.data(), 10, 0}};
    int32_t is_done = 1;
    OK(nestpipe_mailbox_exchange(memory.data(), memory_bytes, 0, 2, kRing, outgoing, incoming, 1000, &is_done));
    CHECK(is_done == 0 && incoming[1].num_done == 0);
}

void test_refusals() {
    constexpr auto bad = NESTPIPE_INVALID_ARGUMENT;
    int64_t memory_bytes;
    REFUSED(bad, "size is 0", nestpipe_mailbox_bytes(0, kRing, &memory_bytes));
    REFUSED(bad, "multiple of 64", nestpipe_mailbox_bytes(2, 100, &memory_bytes));
    OK(nestpipe_mailbox_bytes(2, kRing, &memory_bytes));
    std::vector<Line> memory(static_cast<size_t>(memory_bytes) / sizeof(Line) + 1);
    nestpipe_parcel none[2]{}, far[2]{{}, {nullptr, 3, 0}}, over[2]{{}, {nullptr, 0, 1}};
    int32_t is_done;
    const auto call = [&](int64_t bytes, int64_t rank, nestpipe_parcel* outgoing) {
        return nestpipe_mailbox_exchange(memory.data(), bytes, rank, 2, kRing, outgoing, none, 0, &is_done);
    };
    REFUSED(bad, "memory must have", call(memory_bytes - 1, 0, none));
    REFUSED(bad, "rank is 2", call(memory_bytes, 2, none));
    REFUSED(bad, "data of a parcel", call(memory_bytes, 0, far));
    REFUSED(bad, "num_done", call(memory_bytes, 0, over));
}

}  // namespace

int main() {
    test_exchanges(1, 3, 0);
    test_exchanges(2, 300, 0);
    test_exchanges(3, 100, 200);
    test_every_bell_rings();
    test_nobody_sends();
    test_refusals();
    return 0;
}
