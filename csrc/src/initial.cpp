// Compiled with -ffp-contract=off: a fused multiply-add would round once where other machines round twice.
#include "initial.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "mix.hpp"

namespace nestpipe {

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// Natural logarithm of a positive normal number, without libm, whose last bits differ between versions. With x = m 2^e
// and 1/sqrt(2) <= m < sqrt(2): log x = e log 2 + 2 atanh(s), s = (m - 1) / (m + 1). |s| < 0.172, so the series of
// atanh up to s^23 is good to the last bit or two.
double natural_log(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double m;
    std::memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m = m * 0.5;
        exponent += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double sum = 0.0;
    for (int k = 23; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
    return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * s * sum;
}

double polynomial(const double (&c)[8], double x) {
    double sum = c[7];
    for (int i = 6; i >= 0; --i) sum = sum * x + c[i];
    return sum;
}

// AS 241: numerators and denominators of the three ranges, ascending powers.
constexpr double kCentralTop[8] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                                   1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                   3.3430575583588128105e+4, 2.5090809287301226727e+3};
constexpr double kCentralBottom[8] = {1.0,
                                      4.2313330701600911252e+1,
                                      6.8718700749205790830e+2,
                                      5.3941960214247511077e+3,
                                      2.1213794301586595867e+4,
                                      3.9307895800092710610e+4,
                                      2.8729085735721942674e+4,
                                      5.2264952788528545610e+3};
constexpr double kNearTop[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                2.27238449892691845833e-2, 7.74545014278341407640e-4};
constexpr double kNearBottom[8] = {1.0,
                                   2.05319162663775882187e0,
                                   1.67638483018380384940e0,
                                   6.89767334985100004550e-1,
                                   1.48103976427480074590e-1,
                                   1.51986665636164571966e-2,
                                   5.47593808499534494600e-4,
                                   1.05075007164441684324e-9};
constexpr double kFarTop[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                               2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                               2.71155556874348757815e-5, 2.01033439929228813265e-7};
constexpr double kFarBottom[8] = {1.0,
                                  5.99832206555887937690e-1,
                                  1.36929880922735805310e-1,
                                  1.48753612908506148525e-2,
                                  7.86869131145613259100e-4,
                                  1.84631831751005468180e-5,
                                  1.42151175831644588870e-7,
                                  2.04426310338993978564e-15};

constexpr double kCutoff = 2.0;                        // of the truncated normal, in standard deviations
constexpr double kBelowCutoff = 0.022750131948179209;  // normal distribution function at -2
constexpr double kWithinCutoff = 0.95449973610364158;  // ... at 2, less that

// In (0, 1), never an end of it: 52 bits, each in the middle of its cell; 53 would round the last cell up to 1.
double open_uniform(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

}  // namespace

double normal_quantile(double p) {
    const double q = p - 0.5;
    if (q >= -0.425 && q <= 0.425) {
        const double r = 0.180625 - q * q;
        return q * polynomial(kCentralTop, r) / polynomial(kCentralBottom, r);
    }
    const double r = std::sqrt(-natural_log(q < 0.0 ? p : 1.0 - p));
    const double x = r <= 5.0 ? polynomial(kNearTop, r - 1.6) / polynomial(kNearBottom, r - 1.6)
                              : polynomial(kFarTop, r - 5.0) / polynomial(kFarBottom, r - 5.0);
    return q < 0.0 ? -x : x;
}

InitialRecord::InitialRecord(const nestpipe_table_spec& spec, uint64_t salt)
    : kind_(spec.initial),
      dtype_(spec.dtype),
      dim_(spec.dim),
      a_(spec.initial_a),
      b_(spec.initial_b),
      seed_(mix64(mix64(spec.seed + kGolden) ^ salt)),
      state_(spec.initial_state, spec.initial_state + spec.state_width) {}

double InitialRecord::value(uint64_t stream, int64_t column) const {
    const double u = open_uniform(mix64(stream + static_cast<uint64_t>(column + 1) * kGolden));
    switch (kind_) {
        case NESTPIPE_UNIFORM:
            return a_ + (b_ - a_) * u;
        case NESTPIPE_NORMAL:
            return a_ + b_ * normal_quantile(u);
        case NESTPIPE_TRUNCATED_NORMAL: {
            const double z = normal_quantile(kBelowCutoff + kWithinCutoff * u);
            return a_ + b_ * std::min(std::max(z, -kCutoff), kCutoff);
        }
        default:
            return a_;
    }
}

template <typename Real>
void InitialRecord::write_as(uint64_t hash, Real* record, int64_t num_columns) const {
    const uint64_t stream = mix64(hash ^ seed_);
    for (int64_t j = 0; j < num_columns; ++j)
        record[j] = static_cast<Real>(j < dim_ ? value(stream, j) : state_[static_cast<size_t>(j - dim_)]);
}

void InitialRecord::write(uint64_t hash, char* record, int64_t num_columns) const {
    if (dtype_ == NESTPIPE_FLOAT32)
        write_as(hash, reinterpret_cast<float*>(record), num_columns);
    else
        write_as(hash, reinterpret_cast<double*>(record), num_columns);
}

}  // namespace nestpipe
