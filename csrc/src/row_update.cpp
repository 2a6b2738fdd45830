#include "row_update.hpp"

#include <cmath>
#include <limits>

#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kGrain = 512;  // rows a thread takes at a time

template <typename Real>
void prefetch_elements(const Real* from, int64_t count) {
    prefetch_lines(reinterpret_cast<const char*>(from), static_cast<uint64_t>(count) * sizeof(Real));
}

// update(row, state, gradient) for each row. Slots are scattered in memory, so their records are asked for in advance.
template <typename Real, typename Update>
void for_each_row(const RowUpdate<Real>& arrays, int64_t state_width, int32_t num_threads, Update&& update) {
    const auto row = [&](int64_t at) { return arrays.rows + at * arrays.row_stride; };
    const auto state = [&](int64_t at) { return arrays.state + at * arrays.state_stride; };
    const auto gradient = [&](int64_t i) { return arrays.gradient + i * arrays.dim; };
    const auto fetch_slot = [&](int64_t i) {
        prefetch_elements(row(arrays.slots[i]), arrays.dim);
        prefetch_elements(state(arrays.slots[i]), state_width);
    };
    const auto update_slot = [&](int64_t i) { update(row(arrays.slots[i]), state(arrays.slots[i]), gradient(i)); };
    parallel_for(arrays.num_rows, kGrain, num_threads, [&](int64_t begin, int64_t end) {
        if (arrays.slots != nullptr)
            in_two_steps(begin, end, fetch_slot, update_slot);
        else
            for (int64_t i = begin; i < end; ++i) update(row(i), state(i), gradient(i));
    });
}

// Calls work(divisor). divisor(sum) is sqrt(sum) + eps, or infinity instead of zero, so that what is divided by it
// becomes zero. With eps > 0 it cannot be zero: then the loop in `work` is compiled without the test for zero, which
// would take up to a sixth of its time. A choice between divisors, unlike a choice whether to divide, is made for a
// vector at once.
template <typename Real, typename Work>
void with_divisor(Real eps, Work&& work) {
    if (eps > 0) {
        work([eps](Real sum) { return std::sqrt(sum) + eps; });
    } else {
        work([eps](Real sum) {
            const Real divisor = std::sqrt(sum) + eps;
            return divisor == 0 ? std::numeric_limits<Real>::infinity() : divisor;
        });
    }
}

}  // namespace

template <typename Real>
void adagrad(const RowUpdate<Real>& arrays, Real lr, Real eps, int32_t num_threads) {
    with_divisor(eps, [&](auto divisor) {
        for_each_row(arrays, arrays.dim, num_threads,
                     [=, dim = arrays.dim](Real* __restrict row, Real* __restrict state, const Real* g) {
                         for (int64_t c = 0; c < dim; ++c) {
                             state[c] += g[c] * g[c];
                             row[c] -= lr * g[c] / divisor(state[c]);
                         }
                     });
    });
}

template <typename Real>
void adam(const RowUpdate<Real>& arrays, Decay<Real> first_decay, Decay<Real> second_decay, Real step_size, Real eps,
          int32_t num_threads) {
    with_divisor(eps, [&](auto divisor) {
        for_each_row(arrays, 2 * arrays.dim, num_threads,
                     [=, dim = arrays.dim](Real* __restrict row, Real* __restrict first, const Real* g) {
                         Real* __restrict second = first + dim;
                         for (int64_t c = 0; c < dim; ++c) {
                             first[c] = first_decay.keep * first[c] + first_decay.add * g[c];
                             second[c] = second_decay.keep * second[c] + second_decay.add * (g[c] * g[c]);
                             row[c] -= step_size * first[c] / divisor(second[c]);
                         }
                     });
    });
}

template void adagrad(const RowUpdate<float>&, float, float, int32_t);
template void adagrad(const RowUpdate<double>&, double, double, int32_t);
template void adam(const RowUpdate<float>&, Decay<float>, Decay<float>, float, float, int32_t);
template void adam(const RowUpdate<double>&, Decay<double>, Decay<double>, double, double, int32_t);

}  // namespace nestpipe
