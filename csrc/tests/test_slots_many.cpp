// The slots of a row pool: long lists, which threads share; memory that is bounded, and memory that runs out.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "slot_pool.hpp"

namespace {
std::atomic<int64_t> allocations_left{INT64_MAX};
}

// Not inlined: GCC would take the pair for one that does not match.
#define NOT_INLINED __attribute__((noinline))
NOT_INLINED void* operator new(size_t bytes) {
    if (allocations_left.fetch_sub(1) <= 0) throw std::bad_alloc();
    if (void* memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
NOT_INLINED void* operator new[](size_t bytes) { return operator new(bytes); }
NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, size_t) noexcept { std::free(memory); }
NOT_INLINED void operator delete[](void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

// Lists that several threads share: the results are those of one.
void test_many_keys() {
    constexpr int64_t kKeys = 40000, kSlots = 100000;
    Pool one(kSlots, 3, 1), three(kSlots, 3, 3);
    std::vector<Admission> admissions;
    for (int64_t batch = 1; batch <= 9; ++batch) {
        const auto keys_of = [&](int64_t table) {  // overlaps those of the batches before and behind
            return range(batch * 9000 + table, batch * 9000 + table + kKeys / 2 - table * 7000);
        };
        const Keys keys({keys_of(0), keys_of(1), keys_of(2)});
        for (const Pool* pool : {&one, &three}) {
            admissions.push_back(pool->retrieve(keys, batch, batch - 1, batch % 2 == 0));
            const Admission& admission = admissions.back();
            CHECK(pool->find(keys) == admission.slots);
            const List num_rows = pool->claim(admission.slots);
            OK(pool->settle(admission.slots, batch % 3 == 0 ? -1 : batch));
            if (batch == 5) OK(pool->clean(pool->dirty().slots));
            admissions.back().leaving.steps.insert(admissions.back().leaving.steps.end(), num_rows.begin(),
                                                   num_rows.end());
        }
        const size_t last = admissions.size() - 1;
        CHECK(admissions[last] == admissions[last - 1] && one.dirty() == three.dirty());
        CHECK(one.counts().num_resident == three.counts().num_resident);
        // A key that occurs twice: nothing of the list enters.
        const Keys others({range(-kKeys, 0), {}, {}});
        Keys twice = others;
        twice.keys.back() = -kKeys + 5;
        for (const Pool* pool : {&one, &three}) {
            const Admission admission = pool->admit(others, batch, batch);
            OK(pool->evict(admission.leaving.slots));
            REFUSED(NESTPIPE_INVALID_ARGUMENT, "keys[39999] is -39995, a key of table 0",
                    pool->fill(twice, admission.slots, batch));
            CHECK(pool->find(others) == List(at(kKeys), -1));
            OK(pool->release(admission.slots));
        }
        CHECK(one.dirty() == three.dirty() && one.find(keys) == three.find(keys));
    }
}

// Small batches that always find their keys, and batches that evict: the order of uses does not grow.
void test_bounded_memory() {
    Pool pool(64);
    pool.retrieve(one(range(0, 60)), 1, 1);
    int64_t memory_bytes = 0;
    for (int64_t batch = 2; batch <= 60000; ++batch) {
        if (batch % 10 == 0)
            pool.retrieve(one({batch, -batch}), batch, batch);
        else
            pool.admit(one({0, 1, 2}), batch, batch);
        if (batch == 20000) memory_bytes = pool.counts().memory_bytes;
    }
    CHECK(pool.counts().memory_bytes == memory_bytes && memory_bytes < 400000);
    CHECK(pool.counts().num_resident + pool.counts().num_free == 64);
    Pool large(1000000);
    large.retrieve(one(range(0, 1000000)), 1, 1);
    CHECK(large.counts().memory_bytes < 1000000 * (40 + 24));
}

// Address space of the process.
rlim_t used_bytes() {
    unsigned long num_pages = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    CHECK(file != nullptr && std::fscanf(file, "%lu", &num_pages) == 1);
    std::fclose(file);
    return num_pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

// A pool with clean and dirty victims for the next batch.
struct Trained : Pool {
    const Keys next{{range(-4000, 0), range(-1500, -1400)}}, all{{range(-4000, 6000), range(-1500, 2000)}};
    const std::vector<uint8_t> is_stored = std::vector<uint8_t>(4100, 1);
    Admission admission{{}, {}, Records(0, 0)};

    Trained() : Pool(9000, 2, 2) {
        OK(settle(retrieve(Keys({range(0, 3000), range(0, 2000)}), 1, 1, false).slots, 4));
        retrieve(Keys({range(2000, 6000), range(0, 500)}), 2, 2);  // the others of batch 1 are dirty
        admission = Admission::room(4100, 2);
    }
    nestpipe_status admit_next() { return admit_into(admission, next, 3, 3); }
    nestpipe_status fill_next() {
        return nestpipe_slots_fill(slots, next.offsets.data(), next.keys.data(), 4100, admission.slots.data(),
                                   is_stored.data(), 3);
    }
    void admitted() {
        OK(admit_next());
        admission.cut();
        CHECK(!admission.leaving.slots.empty());
    }
    void evicted() {
        admitted();
        OK(evict(admission.leaving.slots));
    }
};

using Prepare = std::function<void(Trained&)>;
using Call = std::function<nestpipe_status(Trained&)>;

// Returns whether a call succeeds with little memory. If it does not, it has changed nothing, and succeeds afterwards.
bool try_without_memory(const Prepare& prepare, const Call& call, const std::function<void(bool)>& set_limit) {
    Trained pool;
    prepare(pool);
    const State before = state(pool, pool.all);
    set_limit(true);
    const nestpipe_status status = call(pool);
    set_limit(false);
    if (status == NESTPIPE_OK) return true;
    CHECK(status == NESTPIPE_OUT_OF_MEMORY && state(pool, pool.all) == before && call(pool) == NESTPIPE_OK);
    return false;
}

// Fails the first, second, ... allocation; then lets the process have ever more address space. Returns the number of
// allocations.
int64_t fail_each_allocation(const Prepare& prepare, const Call& call) {
    int64_t k = 0;
    while (!try_without_memory(prepare, call, [&](bool is_limited) { allocations_left = is_limited ? k : INT64_MAX; }))
        CHECK(++k < 1000);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need terabytes of it
    rlimit unlimited;
    getrlimit(RLIMIT_AS, &unlimited);
    rlim_t room = 0;
    while (!try_without_memory(prepare, call, [&](bool is_limited) {
        rlimit limit = unlimited;
        if (is_limited) limit.rlim_cur = used_bytes() + room;
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    }))
        room += room / 4 + (1 << 14);
#endif
    return k;
}

void test_no_memory() {
    const auto nothing = [](Trained&) {};
    fail_each_allocation(nothing, [](Trained& pool) { return pool.admit_next(); });
    CHECK(0 < fail_each_allocation(nothing, [](Trained& pool) { return nestpipe_slots_grow(pool.slots, 30000000); }));
    CHECK(0 < fail_each_allocation(nothing, [](Trained& pool) { return nestpipe_slots_clear(pool.slots); }));
    fail_each_allocation([](Trained& pool) { pool.admitted(); },
                         [](Trained& pool) { return pool.evict(pool.admission.leaving.slots); });
    fail_each_allocation([](Trained& pool) { pool.evicted(); }, [](Trained& pool) { return pool.fill_next(); });
}

// A batch that runs out of memory may have used slots. They can be given to another batch later, as all others.
void test_no_slot_is_lost() {
    nestpipe_status status = NESTPIPE_OUT_OF_MEMORY;
    for (int64_t k = 0; status != NESTPIPE_OK; ++k) {
        Pool pool(100);
        pool.retrieve(one(range(0, 100)), 1, 1);
        const Keys keys = one(range(20, 90));
        Admission room = Admission::room(70, 1);
        allocations_left = k;
        status = pool.admit_into(room, keys, 2, 2);
        allocations_left = INT64_MAX;
        CHECK(k < 1000 && size_of(pool.admit(one(range(100, 200)), 3, 3).missing) == 100);
    }
}

// One thread trains, others look and grow: no one sees half a call.
void test_threads() {
    Pool pool(30000, 2, 2);
    std::atomic<bool> is_done{false};
    const auto train = [&] {
        for (int64_t batch = 1; batch <= 12; ++batch) {
            const Keys keys({range(batch * 5000, batch * 5000 + 9000), range(-9000 - batch * 700, -batch * 700)});
            const Admission admission = pool.retrieve(keys, batch, batch - 1, false);
            pool.claim(admission.slots);
            OK(pool.settle(admission.slots, batch));
        }
        is_done = true;
    };
    const auto look = [&] {
        while (!is_done) {
            const nestpipe_slot_counts counts = pool.counts();
            CHECK(counts.num_resident + counts.num_free <= counts.num_slots);
            Records records(counts.num_slots, 2);
            const nestpipe_slot_records room = records.native();
            OK(nestpipe_slots_dirty(pool.slots, &room));
            for (const int64_t slot : pool.find(Keys({range(20000, 40000), {}}))) CHECK(slot < 40000);
        }
    };
    const auto grow = [&] {
        for (int64_t num_slots = 30000; !is_done; num_slots = std::min<int64_t>(num_slots + 10, 40000))
            OK(nestpipe_slots_grow(pool.slots, num_slots));
    };
    std::thread threads[] = {std::thread(train), std::thread(look), std::thread(grow)};
    for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
    test_many_keys();
    test_bounded_memory();
    test_no_memory();
    test_no_slot_is_lost();
    test_threads();
    return 0;
}
