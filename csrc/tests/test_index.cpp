// The index against std::map: random inserts and erases, hashes at both ends of the range, runs that overflow lines.
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.hpp"
#include "index.hpp"

using nestpipe::Index;

namespace {

void compare(const Index& index, const std::map<uint64_t, uint32_t>& oracle) {
    auto expected = oracle.begin();
    index.for_each(0, UINT64_MAX, [&](uint64_t hash, uint32_t row) {
        CHECK(expected != oracle.end());
        CHECK(hash == expected->first && row == expected->second);
        ++expected;
    });
    CHECK(expected == oracle.end());
    for (const auto& [hash, row] : oracle) {
        CHECK(index.find(hash) == row);
        if (oracle.count(hash + 1) == 0) CHECK(index.find(hash + 1) == Index::kNoRow);
        if (oracle.count(hash - 1) == 0) CHECK(index.find(hash - 1) == Index::kNoRow);
    }
}

void compare_range(const Index& index, const std::map<uint64_t, uint32_t>& oracle, uint64_t first, uint64_t last) {
    auto expected = oracle.lower_bound(first);
    index.for_each(first, last, [&](uint64_t hash, uint32_t) {
        CHECK(expected != oracle.end() && hash == expected->first);
        ++expected;
    });
    CHECK(expected == oracle.upper_bound(last));
}

template <typename Draw>
void random_operations(int num_operations, uint32_t erase_percent, Draw&& draw) {
    std::mt19937_64 random(1);
    Index index;
    std::map<uint64_t, uint32_t> oracle;
    std::vector<uint64_t> drawn;
    for (int i = 0; i < num_operations; ++i) {
        if (!drawn.empty() && random() % 100 < erase_percent) {
            const uint64_t hash = drawn[random() % drawn.size()];
            const auto found = oracle.find(hash);
            CHECK(index.erase(hash) == (found == oracle.end() ? Index::kNoRow : found->second));
            if (found != oracle.end()) oracle.erase(found);
        } else if (const uint64_t hash = draw(random); oracle.count(hash) == 0) {
            index.reserve(oracle.size() + 1);
            index.insert(hash, static_cast<uint32_t>(i));
            oracle[hash] = static_cast<uint32_t>(i);
            drawn.push_back(hash);
        }
        if (i % (num_operations / 5) == 0) compare(index, oracle);
    }
    compare(index, oracle);
    for (int i = 0; i < 100; ++i) {
        const uint64_t a = draw(random), b = draw(random);
        compare_range(index, oracle, a < b ? a : b, a < b ? b : a);
    }
}

}  // namespace

int main() {
    random_operations(60000, 0, [](auto& random) { return random(); });
    random_operations(60000, 45, [](auto& random) { return random(); });
    // All in a few homes: every line overflows into the next ones.
    random_operations(4000, 30, [](auto& random) { return random() % 1500; });
    random_operations(4000, 30, [](auto& random) { return UINT64_MAX - random() % 1500; });
    random_operations(4000, 30, [](auto& random) { return (random() % 7 << 61) + random() % 300; });
    return 0;
}
