#include "row_ops.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "copy.hpp"
#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"
#include "wide.hpp"

namespace nestpipe {

void copy_rows(const RowsAt<const char>& from, const RowsAt<char>& to, int64_t count, int64_t row_bytes,
               int32_t num_threads) {
    const auto bytes = static_cast<uint64_t>(row_bytes);
    const Copy copy = copy_for(static_cast<uint64_t>(count) * bytes);
    const int64_t grain = grain_for(count, 2 * row_bytes + 1, num_threads);
    parallel_for(count, grain, num_threads, [&, from, to](int64_t begin, int64_t end) {
        in_two_steps(
            begin, end, [&](int64_t i) { prefetch_lines(from[i], bytes); },
            [&](int64_t i) { copy(to[i], from[i], bytes); });
        finish_streaming();
    });
}

namespace {

// 0 + x is not x: it turns -0 into 0.
template <typename Real>
NESTPIPE_INLINE void begin_sum(Real* __restrict sum, const Real* __restrict row, int64_t dim) {
    for (int64_t c = 0; c < dim; ++c) sum[c] = Real{0} + row[c];
}

template <typename Real>
NESTPIPE_INLINE void add(Real* __restrict sum, const Real* __restrict row, int64_t dim) {
    for (int64_t c = 0; c < dim; ++c) sum[c] += row[c];
}

// Returns whether a value is NaN or larger in magnitude than the limit. The flag is as wide as the values, so that
// whole vectors are compared.
template <typename Real>
NESTPIPE_INLINE bool exceeds(const Real* values, int64_t dim, Real limit) {
    using Flag = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    Flag any = 0;
    for (int64_t c = 0; c < dim; ++c) any |= std::fabs(values[c]) <= limit ? Flag{0} : Flag{1};
    return any != 0;
}

// The largest number of the type that is not above the limit: no number of the type lies between the two.
template <typename Real>
Real rounded_down(double limit) {
    constexpr auto kMost = static_cast<double>(std::numeric_limits<Real>::max());
    if (std::isinf(limit)) return static_cast<Real>(limit);
    if (std::fabs(limit) > kMost) return limit > 0 ? std::numeric_limits<Real>::max() : Real{-1};
    const auto rounded = static_cast<Real>(limit);
    return static_cast<double>(rounded) > limit ? std::nextafter(rounded, -std::numeric_limits<Real>::infinity())
                                                : rounded;
}

template <bool kWithLimit, typename Real>
bool add_some(const RowsAt<char>& target, const RowsAt<const char>& source, const uint8_t* is_first, int64_t begin,
              int64_t end, int64_t dim, Real limit) {
    bool any = false;
    const auto bytes = static_cast<uint64_t>(dim) * sizeof(Real);
    const auto fetch = [&](int64_t i) {
        prefetch_lines(target[i], bytes);
        prefetch_lines(source[i], bytes);
    };
    const auto add_row = [&](int64_t i) {
        auto* sum = reinterpret_cast<Real*>(target[i]);
        const auto* row = reinterpret_cast<const Real*>(source[i]);
        if (is_first != nullptr && is_first[i] != 0)
            begin_sum(sum, row, dim);
        else
            add(sum, row, dim);
        if (kWithLimit) any |= exceeds(sum, dim, limit);
    };
    in_wide_vectors([&] { in_two_steps(begin, end, fetch, add_row); });
    return any;
}

}  // namespace

template <typename Real>
bool add_rows(const RowsAt<char>& target, const RowsAt<const char>& source, const uint8_t* is_first, int64_t count,
              int64_t dim, bool with_limit, double limit, int32_t num_threads) {
    std::atomic<bool> any{false};
    const auto largest = rounded_down<Real>(limit);
    const int64_t grain = grain_for(count, 3 * dim * static_cast<int64_t>(sizeof(Real)), num_threads);
    parallel_for(count, grain, num_threads, [&](int64_t begin, int64_t end) {
        if (!with_limit)
            add_some<false>(target, source, is_first, begin, end, dim, largest);
        else if (add_some<true>(target, source, is_first, begin, end, dim, largest))
            any = true;
    });
    return any;
}

template <typename Real>
bool any_exceeds(const RowsAt<const char>& rows, int64_t count, int64_t dim, double limit, int32_t num_threads) {
    std::atomic<bool> any{false};
    const auto largest = rounded_down<Real>(limit);
    const int64_t grain = grain_for(count, dim * static_cast<int64_t>(sizeof(Real)), num_threads);
    parallel_for(count, grain, num_threads, [&](int64_t begin, int64_t end) {
        bool is_any = false;
        for (int64_t i = begin; i < end; ++i) is_any |= exceeds(reinterpret_cast<const Real*>(rows[i]), dim, largest);
        if (is_any) any = true;
    });
    return any;
}

template <typename Real>
void sum_rows(const RowsAt<const char>& values, const int64_t* offsets, int64_t num_segments, int64_t dim,
              const RowsAt<char>& out, int32_t num_threads) {
    const auto bytes = static_cast<uint64_t>(dim) * sizeof(Real);
    const int64_t num_rows = num_segments == 0 ? 0 : offsets[num_segments] - offsets[0];
    const int64_t rows_each = 1 + num_rows / std::max<int64_t>(num_segments, 1);
    const int64_t grain =
        grain_for(num_segments, (1 + rows_each) * dim * static_cast<int64_t>(sizeof(Real)), num_threads);
    parallel_for(num_segments, grain, num_threads, [&](int64_t begin, int64_t end) {
        int64_t segment = begin;  // of the next row
        Real* sum = nullptr;
        const auto next_sum = [&] {
            sum = reinterpret_cast<Real*>(out[segment]);
            ++segment;
        };
        const auto add_row = [&](int64_t o) {
            const auto* row = reinterpret_cast<const Real*>(values[o]);
            if (sum != nullptr && o < offsets[segment]) {
                add(sum, row, dim);
                return;
            }
            for (next_sum(); o >= offsets[segment]; next_sum()) std::fill_n(sum, dim, Real{0});
            begin_sum(sum, row, dim);
        };
        const auto fetch = [&](int64_t o) { prefetch_lines(values[o], bytes); };
        in_wide_vectors([&] { in_two_steps(offsets[begin], offsets[end], fetch, add_row); });
        while (segment < end) {
            next_sum();
            std::fill_n(sum, dim, Real{0});
        }
    });
}

template bool add_rows<float>(const RowsAt<char>&, const RowsAt<const char>&, const uint8_t*, int64_t, int64_t, bool,
                              double, int32_t);
template bool add_rows<double>(const RowsAt<char>&, const RowsAt<const char>&, const uint8_t*, int64_t, int64_t, bool,
                               double, int32_t);
template bool any_exceeds<float>(const RowsAt<const char>&, int64_t, int64_t, double, int32_t);
template bool any_exceeds<double>(const RowsAt<const char>&, int64_t, int64_t, double, int32_t);
template void sum_rows<float>(const RowsAt<const char>&, const int64_t*, int64_t, int64_t, const RowsAt<char>&,
                              int32_t);
template void sum_rows<double>(const RowsAt<const char>&, const int64_t*, int64_t, int64_t, const RowsAt<char>&,
                               int32_t);

}  // namespace nestpipe
