"""Targets: the records that they apply to, formulas, and misses."""

from pathlib import Path

import pytest

from nestpipe.bench.harness.targets import TARGETS, Target, evaluate, find_misses, load_targets

RECORDS = [
    {"dim": 64, "threads": 1, "speed": 0.9, "head": 0.1, "tail": 0.2},
    {"dim": 128, "threads": 1, "speed": 1.1, "head": 0.1, "tail": 0.2},
    {"method": "zipf", "bytes": 31},
]


@pytest.mark.parametrize(
    ("target", "num_misses"),
    [
        (Target("b", "speed", ">=", 0.8), 0),
        (Target("b", "speed", ">=", 1.0), 1),
        (Target("b", "speed", ">=", 1.0, {"dim": 128}), 0),
        (Target("b", "speed", ">=", 1.0, {"dim": 64, "threads": 1}), 1),
        (Target("b", "speed", ">=", 1.0, {"dim": 32}), 1),  # nothing answers it
        (Target("b", "sped", ">=", 1.0), 1),
        (Target("b", "bytes", "<=", 31), 0),
        (Target("b", "bytes", "<", 31), 1),
        (Target("b", "speed", "<=", "(head + tail) / 2 + 0.9"), 1),
        (Target("b", "speed", "<=", "(head + tail) * 3 - -0.3"), 0),
        (Target("b", "bytes", "==", "31"), 0),
        (Target("b", "speed", ">=", "min(1, 0.5 + head)"), 0),
        (Target("b", "speed", ">=", "max(1, 0.5 + head)"), 1),
    ],
)
def test_misses(target: Target, num_misses: int) -> None:
    assert len(find_misses([target], RECORDS)) == num_misses


def test_a_miss_names_target_and_record() -> None:
    (miss,) = find_misses([Target("b", "speed", ">=", 1.0, {"dim": 64})], RECORDS)
    assert miss.startswith("speed >= 1.0 (dim = 64): got 0.9 against 1 in {'dim': 64")


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "pow(2, 3)", "speed ** 2", "speed if 1 else 2", "'a' + 'b'", "nosuch + 1"]
)
def test_formulas_are_arithmetic_only(formula: str) -> None:
    with pytest.raises(ValueError, match=r"only numbers|no field"):
        evaluate(formula, RECORDS[0])


def test_bad_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="op '=>' is none of"):
        Target("b", "speed", "=>", 1.0)
    with pytest.raises(FileNotFoundError, match="run from a clone"):
        load_targets("store", tmp_path / "targets.toml")


def test_every_target_of_the_project_loads() -> None:
    assert TARGETS.exists()
    assert len(load_targets("store")) >= 7
