#include "row_update.hpp"

#include <cmath>
#include <limits>

#include "lookahead.hpp"
#include "parallel.hpp"
#include "prefetch.hpp"
#include "wide.hpp"

namespace nestpipe {

namespace {

constexpr int64_t kGrain = 512;  // rows a thread takes at a time
constexpr int64_t kLanes = 16;   // sums of squares, which are then added in pairs: an order that suits all vectors

template <typename Real>
using UpdateRow = void (*)(const UpdateConstants<Real>& constants, Real* row, Real* state, const Real* gradient,
                           int64_t dim);

template <typename Real, UpdateRow<Real> update>
void on_bytes(const RowOptimizer& optimizer, char* row, char* state, const char* gradient, int64_t dim) {
    update(optimizer.constants<Real>(), reinterpret_cast<Real*>(row), reinterpret_cast<Real*>(state),
           reinterpret_cast<const Real*>(gradient), dim);
}

template <typename Real, UpdateRow<Real> update>
void on_wide_bytes(const RowOptimizer& optimizer, char* row, char* state, const char* gradient, int64_t dim) {
    in_wide_vectors([&] { on_bytes<Real, update>(optimizer, row, state, gradient, dim); });
}

// sqrt(sum) + eps, or infinity instead of zero, so that what is divided by it becomes zero. With eps > 0 it cannot be
// zero: then loops are compiled without the test, which would take up to a sixth of their time.
template <typename Real, bool kHasEps>
NESTPIPE_INLINE Real divisor(Real sum, Real eps) {
    const Real root = std::sqrt(sum) + eps;
    if (kHasEps) return root;
    return root == 0 ? std::numeric_limits<Real>::infinity() : root;
}

// A fused multiply-add, as torch has in `sub_(gradient, alpha=lr)`.
template <typename Real>
NESTPIPE_INLINE void subtract(const UpdateConstants<Real>& constants, Real* __restrict row,
                              const Real* __restrict gradient, int64_t dim) {
    const Real factor = -constants.lr;
    for (int64_t c = 0; c < dim; ++c) row[c] = std::fma(factor, gradient[c], row[c]);
}

template <typename Real>
void sgd(const UpdateConstants<Real>& constants, Real* row, Real*, const Real* gradient, int64_t dim) {
    subtract(constants, row, gradient, dim);
}

#if defined(__x86_64__)
template <typename Real>
__attribute__((target("avx2,fma"))) void sgd_by_instruction(const UpdateConstants<Real>& constants, Real* row, Real*,
                                                            const Real* gradient, int64_t dim) {
    subtract(constants, row, gradient, dim);
}
#endif

template <typename Real, bool kHasEps>
void adagrad(const UpdateConstants<Real>& constants, Real* __restrict row, Real* __restrict state,
             const Real* __restrict gradient, int64_t dim) {
    for (int64_t c = 0; c < dim; ++c) {
        state[c] += gradient[c] * gradient[c];
        row[c] -= constants.lr * gradient[c] / divisor<Real, kHasEps>(state[c], constants.eps);
    }
}

template <typename Real>
NESTPIPE_INLINE Real sum_of_squares(const Real* __restrict values, int64_t count) {
    Real sums[kLanes] = {};
    int64_t first = 0;
    for (; first + kLanes <= count; first += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += values[first + lane] * values[first + lane];
    for (int64_t c = first; c < count; ++c) sums[c - first] += values[c] * values[c];
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

template <typename Real, bool kHasEps>
void rowwise_adagrad(const UpdateConstants<Real>& constants, Real* __restrict row, Real* __restrict state,
                     const Real* __restrict gradient, int64_t dim) {
    *state += sum_of_squares(gradient, dim) / static_cast<Real>(dim);
    const Real rate = constants.lr / divisor<Real, kHasEps>(*state, constants.eps);
    for (int64_t c = 0; c < dim; ++c) row[c] -= rate * gradient[c];
}

template <typename Real, bool kHasEps>
void adam(const UpdateConstants<Real>& constants, Real* __restrict row, Real* __restrict first,
          const Real* __restrict gradient, int64_t dim) {
    Real* __restrict second = first + dim;
    for (int64_t c = 0; c < dim; ++c) {
        first[c] = constants.keep1 * first[c] + constants.add1 * gradient[c];
        second[c] = constants.keep2 * second[c] + constants.add2 * (gradient[c] * gradient[c]);
        row[c] -= constants.lr * first[c] / divisor<Real, kHasEps>(second[c], constants.eps);
    }
}

template <typename Real>
auto sgd_for_this_processor() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return on_bytes<Real, sgd_by_instruction<Real>>;
#endif
    return on_bytes<Real, sgd<Real>>;
}

template <typename Real>
auto update_for(int32_t kind, bool has_eps) {
    switch (kind) {
        case NESTPIPE_ADAGRAD:
            return has_eps ? on_wide_bytes<Real, adagrad<Real, true>> : on_wide_bytes<Real, adagrad<Real, false>>;
        case NESTPIPE_ROWWISE_ADAGRAD:
            return has_eps ? on_wide_bytes<Real, rowwise_adagrad<Real, true>>
                           : on_wide_bytes<Real, rowwise_adagrad<Real, false>>;
        case NESTPIPE_ADAM:
            return has_eps ? on_wide_bytes<Real, adam<Real, true>> : on_wide_bytes<Real, adam<Real, false>>;
        default:
            return sgd_for_this_processor<Real>();
    }
}

// 1 - beta is taken in double. In float, it would cancel: beta = 0.999999 would give a number that is 1.3% off.
template <typename Real>
UpdateConstants<Real> rounded(const nestpipe_optimizer& optimizer) {
    return {static_cast<Real>(optimizer.lr),    static_cast<Real>(optimizer.eps),
            static_cast<Real>(optimizer.beta1), static_cast<Real>(1 - optimizer.beta1),
            static_cast<Real>(optimizer.beta2), static_cast<Real>(1 - optimizer.beta2)};
}

}  // namespace

RowOptimizer::RowOptimizer(const nestpipe_optimizer& optimizer, int32_t dtype)
    : kind_(optimizer.kind), single_(rounded<float>(optimizer)), double_(rounded<double>(optimizer)) {
    update_ = dtype == NESTPIPE_FLOAT32 ? update_for<float>(kind_, single_.eps > 0)
                                        : update_for<double>(kind_, double_.eps > 0);
}

int64_t RowOptimizer::state_width(int64_t dim) const {
    switch (kind_) {
        case NESTPIPE_ADAGRAD:
            return dim;
        case NESTPIPE_ROWWISE_ADAGRAD:
            return 1;
        case NESTPIPE_ADAM:
            return 2 * dim;
        default:
            return 0;
    }
}

// Slots are scattered in memory, so their records are asked for in advance.
void update_rows(const RowOptimizer& optimizer, const RowUpdate& arrays, int32_t num_threads) {
    const auto bytes = static_cast<uint64_t>(arrays.dim * arrays.item_bytes);
    const auto state_bytes = static_cast<uint64_t>(optimizer.state_width(arrays.dim) * arrays.item_bytes);
    const auto state = [&](int64_t at) { return state_bytes == 0 ? nullptr : arrays.state + at * arrays.state_stride; };
    const auto update = [&](int64_t at, int64_t i) {
        optimizer(arrays.rows + at * arrays.row_stride, state(at), arrays.gradient + static_cast<uint64_t>(i) * bytes,
                  arrays.dim);
    };
    const auto fetch_slot = [&](int64_t i) {
        prefetch_lines(arrays.rows + arrays.slots[i] * arrays.row_stride, bytes);
        prefetch_lines(state(arrays.slots[i]), state_bytes);
    };
    parallel_for(arrays.num_rows, kGrain, num_threads, [&](int64_t begin, int64_t end) {
        if (arrays.slots != nullptr)
            in_two_steps(begin, end, fetch_slot, [&](int64_t i) { update(arrays.slots[i], i); });
        else
            for (int64_t i = begin; i < end; ++i) update(i, i);
    });
}

}  // namespace nestpipe
