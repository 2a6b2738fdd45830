"""Initial rows: they have golden bits, equal the oracle's, and depend on (seed, table name, key) alone (E4).

Fails, for example, if `hash` instead of `hash ^ seed_` starts the stream in InitialRecord::write_as; and, compiled for
a processor that fuses multiply and add, without -ffp-contract=off.
"""

import math
import struct
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.store import DictStore, HostStore, TableSpec, init
from nestpipe.store.oracle_values import natural_log, normal_quantile

KEYS = torch.tensor([0, -1, 2**40])
DISTRIBUTIONS = [init.Constant(0.25), init.Uniform(-0.05, 0.1), init.Normal(0.02, 0.5), init.TruncatedNormal(0.02)]
# Table "item", seed 7, dim 2, keys 0, -1 and 2^40, as the bits of doubles and of floats.
GOLDEN = {
    ("Constant", torch.float32): ["3e800000", "3e800000", "3e800000", "3e800000", "3e800000", "3e800000"],
    ("Constant", torch.float64): [
        "3fd0000000000000",
        "3fd0000000000000",
        "3fd0000000000000",
        "3fd0000000000000",
        "3fd0000000000000",
        "3fd0000000000000",
    ],
    ("Uniform", torch.float32): ["bca742cd", "bc049adb", "3d055121", "3d3dae3a", "3cd491b6", "3d8d73d0"],
    ("Uniform", torch.float64): [
        "bf94e859989494c8",
        "bf80935b548c98bc",
        "3fa0aa241fa5a06e",
        "3fa7b5c73e50533a",
        "3f9a9236c134876c",
        "3fb1ae7a0902832e",
    ],
    ("Normal", torch.float32): ["3ef74790", "3efa0342", "3f00a5c5", "3f01dd0f", "3f0014c6", "3f043253"],
    ("Normal", torch.float64): [
        "3fdee8f1ffcb7ed2",
        "3fdf406831224e1d",
        "3fe014b8952d8520",
        "3fe03ba1d4e8f533",
        "3fe00298c184a935",
        "3fe0864a58828617",
    ],
    ("TruncatedNormal", torch.float32): ["bc838f7a", "bc35e4c7", "3b1e3027", "3be337e6", "399ea073", "3c7d801e"],
    ("TruncatedNormal", torch.float64): [
        "bf9071ef32373f2c",
        "bf86bc98e6dc3b0c",
        "3f63c604eb41a4c4",
        "3f7c66fcc33d1990",
        "3f33d40e54dcb55f",
        "3f8fb003b2697d35",
    ],
}


def bits(rows: torch.Tensor) -> list[str]:
    code = "<d" if rows.dtype == torch.float64 else "<f"
    return [struct.pack(code, value)[::-1].hex() for value in rows.flatten().tolist()]


@pytest.mark.parametrize("store_class", [HostStore, DictStore])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(store_class: type, distribution: init.Distribution, dtype: torch.dtype) -> None:
    store = store_class()
    store.create_table(TableSpec("item", 2, init=distribution, dtype=dtype, seed=7))
    assert bits(store.gather("item", KEYS).records) == GOLDEN[type(distribution).__name__, dtype]


def rows_of(spec: TableSpec, keys: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
    store = HostStore(num_threads)
    store.create_table(spec)
    return store.gather(spec.name, keys).records


def test_depends_on_seed_name_and_key_only() -> None:
    spec = TableSpec("item", 8, init=init.Normal(1.0), seed=3)
    keys = torch.arange(-5000, 5000)
    rows = rows_of(spec, keys)
    order = torch.randperm(len(keys))
    assert torch.equal(rows_of(spec, keys[order], num_threads=3), rows[order])
    used = HostStore()
    used.create_table(spec)
    used.scatter("item", keys[::2].contiguous(), rows[::2].contiguous() + 1, step=0)
    assert torch.equal(used.gather("item", keys[1::2].contiguous()).records, rows[1::2])
    assert used.erase("item", keys) == 5000
    assert torch.equal(used.gather("item", keys).records, rows)
    assert not torch.equal(rows_of(TableSpec("item", 8, init=init.Normal(1.0), seed=4), keys), rows)
    assert not torch.equal(rows_of(TableSpec("item2", 8, init=init.Normal(1.0), seed=3), keys), rows)
    assert len(rows.unique()) == pytest.approx(rows.numel(), rel=1e-2)  # neither keys nor columns repeat


@pytest.mark.parametrize(
    ("distribution", "mean", "std", "low", "high"),
    [
        (init.Uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), -1.0, 3.0),
        (init.Normal(2.0, 0.5), 0.5, 2.0, -math.inf, math.inf),
        (init.TruncatedNormal(2.0, 0.5), 0.5, 2.0 * 0.8796, -3.5, 4.5),
    ],
)
def test_moments(distribution: init.Distribution, mean: float, std: float, low: float, high: float) -> None:
    rows = rows_of(TableSpec("item", 16, init=distribution, dtype=torch.float64), torch.arange(20_000))
    assert rows.mean().item() == pytest.approx(mean, abs=0.02)
    assert rows.std().item() == pytest.approx(std, rel=0.01)
    assert low <= rows.min().item() < rows.max().item() <= high


def test_the_last_cell_is_not_rounded_up() -> None:
    """This key's first 52 bits are all ones. Taken as 53 bits they would round to exactly 1, which has no quantile."""
    keys = torch.tensor([3209682245378672051])
    assert rows_of(TableSpec("item", 1, init=init.Uniform(0, 1), dtype=torch.float64, seed=7), keys).item() < 1
    assert 8 < rows_of(TableSpec("item", 1, init=init.Normal(1.0), dtype=torch.float64, seed=7), keys).item() < 9


@given(st.floats(2.0**-54, 1 - 2.0**-53))
def test_quantile_is_that_of_the_standard_library(p: float) -> None:
    assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-14, abs=1e-15)


@given(st.floats(1e-300, 1e300))
def test_logarithm(x: float) -> None:
    assert natural_log(x) == pytest.approx(math.log(x), rel=1e-14, abs=1e-15)
