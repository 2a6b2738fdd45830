#include "parallel.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace nestpipe {

namespace {

constexpr int64_t kWorthBytes = int64_t{4} << 20;    // less is done before a helper is awake
constexpr int64_t kPieceBytes = int64_t{128} << 10;  // some microseconds of work
constexpr int64_t kPiecesAThread = 8;
constexpr int64_t kLeastItems = 64, kMostItems = 4096;
constexpr auto kMoment = std::chrono::microseconds(100);
constexpr int32_t kManyCores = 8;

struct Loop {
    const std::function<void(int64_t, int64_t)>& body;
    int64_t count;
    int64_t grain;
    std::atomic<int64_t> next{0};
    std::atomic<int32_t> num_helping{0};  // changes under the pool's mutex

    void work() {
        for (int64_t begin; (begin = next.fetch_add(grain)) < count;) body(begin, std::min(begin + grain, count));
    }
};

class Pool {
 public:
    void run(Loop& loop, int32_t num_helpers) {
        try {
            std::lock_guard lock(mutex_);
            num_wanted_ += num_helpers;
            start_threads(std::max(num_helpers, std::min(num_wanted_, num_cores_ - 1)));
            for (int32_t i = 0; i < num_helpers; ++i) waiting_.push_back(&loop);
            num_open_ += num_helpers;
        } catch (const std::exception&) {  // no thread or no memory: fewer helpers, and the same work
        }
        for (int32_t i = num_watching_; i < num_helpers; ++i) wake_.notify_one();
        loop.work();
        for_a_moment([&] { return loop.num_helping == 0; });
        std::unique_lock lock(mutex_);
        num_wanted_ -= num_helpers;
        waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &loop), waiting_.end());
        if (waiting_.empty()) num_open_ = 0;
        helped_.wait(lock, [&] { return loop.num_helping == 0; });
    }

 private:
    // Waits as long as it would take to go to sleep and to be woken: helpers are at their last pieces, and a loop is
    // often followed by another. With few cores, another thread may need this one.
    template <typename IsDone>
    void for_a_moment(IsDone&& is_done) const {
        if (num_cores_ < kManyCores) return;
        const auto end = std::chrono::steady_clock::now() + kMoment;
        while (!is_done() && std::chrono::steady_clock::now() < end) {
        }
    }

    // Whether there was a place for a helper. It is taken, so that others who watch do not come in vain.
    bool take_open() {
        int32_t num_open = num_open_;
        return num_open > 0 && num_open_.compare_exchange_strong(num_open, num_open - 1);
    }

    void start_threads(int32_t num_threads) {
        while (num_started_ < num_threads) {
            std::thread([this] { help_forever(); }).detach();  // lives as long as the process
            ++num_started_;
        }
    }

    void help_forever() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return !waiting_.empty(); });
            Loop* loop = waiting_.front();
            waiting_.pop_front();
            if (waiting_.empty()) num_open_ = 0;
            ++loop->num_helping;
            lock.unlock();
            loop->work();
            lock.lock();
            if (--loop->num_helping == 0) helped_.notify_all();
            lock.unlock();
            ++num_watching_;
            for_a_moment([&] { return take_open(); });
            --num_watching_;
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, helped_;
    std::deque<Loop*> waiting_;
    std::atomic<int32_t> num_open_{0};      // about as many as are waiting: a hint for those who watch
    std::atomic<int32_t> num_watching_{0};  // helpers who look for the next loop before they go to sleep
    const int32_t num_cores_ = static_cast<int32_t>(std::thread::hardware_concurrency());
    int32_t num_wanted_ = 0;  // by the loops that run now: each finds helpers, as long as there are cores
    int32_t num_started_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// Never destroyed: helpers may outlive static destructors. A forked child has no helpers, so it starts its own pool.
Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    });
    return *pool;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int32_t num_threads,
                  const std::function<void(int64_t, int64_t)>& body) {
    const int64_t num_pieces = (count + grain - 1) / grain;
    const auto num_helpers = static_cast<int32_t>(std::min<int64_t>(num_threads, num_pieces)) - 1;
    if (num_helpers <= 0) {
        if (count > 0) body(0, count);
        return;
    }
    Loop loop{body, count, grain};
    the_pool().run(loop, num_helpers);
}

int64_t grain_for(int64_t count, int64_t item_bytes, int32_t num_threads) {
    if (count <= kWorthBytes / item_bytes) return std::max<int64_t>(count, 1);
    const int64_t num_pieces = kPiecesAThread * num_threads;
    const int64_t least = std::clamp(kPieceBytes / item_bytes, kLeastItems, kMostItems);
    return std::clamp((count + num_pieces - 1) / num_pieces, least, kMostItems);
}

int32_t threads_for(int64_t count, int64_t item_bytes, int32_t num_threads) {
    const int64_t num_pieces = count / grain_for(count, item_bytes, num_threads);
    return static_cast<int32_t>(std::clamp<int64_t>(num_pieces, 1, num_threads));
}

int32_t threads_for_bytes(int64_t num_bytes, int32_t num_threads) {
    if (num_bytes <= kWorthBytes) return 1;
    return static_cast<int32_t>(std::clamp<int64_t>(num_bytes / kPieceBytes, 1, num_threads));
}

}  // namespace nestpipe
