#include "pool.hpp"

#include <algorithm>
#include <type_traits>

#include "copy.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"
#include "wide.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kGrain = 1024;      // samples a thread takes at a time
constexpr int64_t kColumnGrain = 16;  // a cache line of floats: threads do not write to each other's
constexpr int64_t kSummed = 32;       // columns that are summed at a time

template <typename Real>
NESTPIPE_INLINE void add(Real* __restrict to, const Real* __restrict from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

template <typename Real>
NESTPIPE_INLINE void add_times(Real* __restrict to, const Real* __restrict from, Real weight, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += weight * from[i];
}

// use(row, occurrence) for each occurrence of a sample that is not padding, in order.
template <typename Real, typename Use>
NESTPIPE_INLINE void for_rows(const Occurrences<Real>& occurrences, int64_t sample, Use&& use) {
    for (int64_t i = occurrences.first(sample), end = occurrences.first(sample + 1); i < end; ++i)
        if (occurrences.index[i] != occurrences.num_rows) use(occurrences.index[i], i);
}

// True if a sample is a copy of one row.
template <typename Real>
bool is_copy(const Occurrences<Real>& occurrences, int64_t sample) {
    const int64_t first = occurrences.first(sample);
    return occurrences.weights == nullptr && occurrences.first(sample + 1) == first + 1 &&
           occurrences.index[first] != occurrences.num_rows;
}

// The sum of a sample's rows in `count` columns. With a count that the compiler knows, sums stay in registers.
template <int64_t kCount, typename Real>
NESTPIPE_INLINE void sum_columns(const Occurrences<Real>& occurrences, int64_t sample, const Real* rows, Real* out) {
    Real sums[kCount] = {};
    for_rows(occurrences, sample, [&](int64_t row, int64_t i) {
        if (occurrences.weights == nullptr)
            add(sums, rows + row * occurrences.dim, kCount);
        else
            add_times(sums, rows + row * occurrences.dim, occurrences.weights[i], kCount);
    });
    std::copy_n(sums, kCount, out);
}

template <typename Real>
NESTPIPE_INLINE void sum_rows_of(const Occurrences<Real>& occurrences, int64_t sample, const Real* rows, Real* out) {
    int64_t column = 0;
    const auto sum_up_to = [&](auto count) {
        for (; column + count <= occurrences.dim; column += count)
            sum_columns<count>(occurrences, sample, rows + column, out + column);
    };
    sum_up_to(std::integral_constant<int64_t, kSummed>{});
    sum_up_to(std::integral_constant<int64_t, 8>{});
    sum_up_to(std::integral_constant<int64_t, 1>{});
}

}  // namespace

template <typename Real>
void pool(const Occurrences<Real>& occurrences, const Real* rows, Real* out, int64_t stride, int32_t num_threads) {
    const auto bytes = static_cast<uint64_t>(occurrences.dim) * sizeof(Real);
    // Other features fill the gaps of a large output. Reading each of its lines before writing it would cost most.
    const Copy copy = copy_for(static_cast<uint64_t>(occurrences.num_samples * stride) * sizeof(Real));
    const auto fetch = [&](int64_t sample) {
        for_rows(occurrences, sample, [&](int64_t row, int64_t) {
            prefetch_lines(reinterpret_cast<const char*>(rows + row * occurrences.dim), bytes);
        });
    };
    const auto pool_sample = [&](int64_t sample) {
        Real* sum = out + sample * stride;
        if (!is_copy(occurrences, sample)) {
            sum_rows_of(occurrences, sample, rows, sum);
            return;
        }
        const Real* row = rows + occurrences.index[occurrences.first(sample)] * occurrences.dim;
        copy(reinterpret_cast<char*>(sum), reinterpret_cast<const char*>(row), bytes);
    };
    parallel_for(occurrences.num_samples, kGrain, num_threads, [&](int64_t begin, int64_t end) {
        in_wide_vectors([&] { in_two_steps(begin, end, fetch, pool_sample); });
        finish_streaming();
    });
}

// Threads share the columns, so that each sum is one thread's.
template <typename Real>
void pool_backward(const Occurrences<Real>& occurrences, const Real* gradient, int64_t stride, Real* row_gradients,
                   int32_t num_threads) {
    const int64_t share = (occurrences.dim + num_threads - 1) / num_threads;
    const int64_t grain = (share + kColumnGrain - 1) / kColumnGrain * kColumnGrain;
    parallel_for(occurrences.dim, grain, num_threads, [&](int64_t begin, int64_t end) {
        const int64_t width = end - begin;
        for (int64_t row = 0; row < occurrences.num_rows; ++row)
            std::fill_n(row_gradients + row * occurrences.dim + begin, width, Real{0});
        const auto fetch = [&](int64_t sample) {
            prefetch_lines(reinterpret_cast<const char*>(gradient + sample * stride + begin),
                           static_cast<uint64_t>(width) * sizeof(Real));
        };
        const auto add_sample = [&](int64_t sample) {
            const Real* from = gradient + sample * stride + begin;
            for_rows(occurrences, sample, [&](int64_t row, int64_t i) {
                Real* to = row_gradients + row * occurrences.dim + begin;
                if (occurrences.weights == nullptr)
                    add(to, from, width);
                else
                    add_times(to, from, occurrences.weights[i], width);
            });
        };
        in_wide_vectors([&] { in_two_steps(0, occurrences.num_samples, fetch, add_sample); });
    });
}

template void pool(const Occurrences<float>&, const float*, float*, int64_t, int32_t);
template void pool(const Occurrences<double>&, const double*, double*, int64_t, int32_t);
template void pool_backward(const Occurrences<float>&, const float*, int64_t, float*, int32_t);
template void pool_backward(const Occurrences<double>&, const double*, int64_t, double*, int32_t);

}  // namespace nestpipe
