"""The oracle's arithmetic: hashes and initial values in plain Python, bit-equal to the native library.

Python's floats are IEEE doubles and its compiler fuses nothing, so the same operations in the same order give the same
bits as csrc/src/initial.cpp.
"""

import math
import struct

from nestpipe.store import init
from nestpipe.store.interface import TableSpec

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

# AS 241, PPND16: numerators and denominators of the three ranges, ascending powers.
_CENTRAL = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_NEAR = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
_BELOW_CUTOFF = 0.022750131948179209
_WITHIN_CUTOFF = 0.95449973610364158


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def name_salt(name: str) -> int:
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & _MASK
    return mix64(value)


def hash_key(key: int, table: str) -> int:
    """Returns mix64(key, table name)."""
    return mix64((key & _MASK) ^ name_salt(table))


def bucket_of(key: int, table: str) -> int:
    return hash_key(key, table) >> 48


def owner_of(key: int, table: str, world_size: int) -> int:
    return bucket_of(key, table) * world_size // 65536


def natural_log(x: float) -> float:
    (bits,) = struct.unpack("<Q", struct.pack("<d", x))
    exponent = (bits >> 52) - 1023
    m: float
    (m,) = struct.unpack("<d", struct.pack("<Q", (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000))
    if m > 1.4142135623730951:
        m = m * 0.5
        exponent += 1
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    total = 0.0
    for k in range(23, 0, -2):
        total = total * s2 + 1.0 / k
    return float(exponent) * 0.6931471805599453 + 2.0 * s * total


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: float) -> tuple[float, float]:
    values = []
    for polynomial in coefficients:
        value = polynomial[7]
        for c in polynomial[6::-1]:
            value = value * x + c
        values.append(value)
    return values[0], values[1]


def normal_quantile(p: float) -> float:
    q = p - 0.5
    if -0.425 <= q <= 0.425:
        top, bottom = _ratio(_CENTRAL, 0.180625 - q * q)
        return q * top / bottom
    r = math.sqrt(-natural_log(p if q < 0.0 else 1.0 - p))
    top, bottom = _ratio(_NEAR, r - 1.6) if r <= 5.0 else _ratio(_FAR, r - 5.0)
    return -(top / bottom) if q < 0.0 else top / bottom


def _value(distribution: init.Distribution, bits: int) -> float:
    u = (float(bits >> 12) + 0.5) * 2.0**-52
    a, b = distribution.parameters
    if isinstance(distribution, init.Uniform):
        return a + (b - a) * u
    if isinstance(distribution, init.Normal):
        return a + b * normal_quantile(u)
    if isinstance(distribution, init.TruncatedNormal):
        z = normal_quantile(_BELOW_CUTOFF + _WITHIN_CUTOFF * u)
        return a + b * min(max(z, -2.0), 2.0)
    return a


def initial_record(spec: TableSpec, key: int) -> list[float]:
    """Returns row and row state in double precision. The caller rounds them once, to the table's dtype."""
    salt = name_salt(spec.name)
    seed = mix64(mix64((spec.seed + _GOLDEN) & _MASK) ^ salt)
    stream = mix64(hash_key(key, spec.name) ^ seed)
    row = [_value(spec.init, mix64((stream + (j + 1) * _GOLDEN) & _MASK)) for j in range(spec.dim)]
    return row + list(spec.full_initial_state)
