"""HSTU of part one-rank in one micro-batch, with the fewest resident rows."""

import statistics
from collections.abc import Iterator, Mapping

from nestpipe.bench.h200.data import make_batches
from nestpipe.bench.h200.digests import small_digest as digest
from nestpipe.bench.h200.one_rank import (
    QUICK,
    DenseOnly,
    Size,
    features_of,
    filled_store,
    make_trainer,
    spread_keys,
    stretch,
)
from nestpipe.bench.harness.pairs import spread
from nestpipe.bench.harness.report import Record
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.train.trainer import Trainer


def compare(world: World, quick: bool) -> Iterator[Record]:
    """Yields a record for serial and one for nested. torch has no row-wise Adagrad, so plain torch does not run."""
    size = QUICK if quick else Size(steps=16)
    shape, features = size.shapes[0], features_of(size.dim)
    batches = make_batches(shape, size.small_rows)
    spread_keys(batches, size.num_rows // size.small_rows)
    store = filled_store(size, size.num_rows, features)
    trainers = {name: make_trainer(world, size, shape, features, store, name, 1) for name in ("serial", "nested")}
    dense = DenseOnly(world, size, shape, features, batches, 1)
    rounds = turns_with_dense(trainers, dense, batches, size)
    for schedule in trainers:
        mine = rounds[schedule]
        figures = over_dense(mine, rounds["dense"])
        if schedule == "nested":
            pairs = zip(mine, rounds["serial"], strict=True)
            figures |= spread("nested_vs_serial", [n["step_ms"] / s["step_ms"] for n, s in pairs])
            figures["digests_equal"] = int(digest(world, "serial") == digest(world, "nested"))
        identity = {"ranks": 1, "num_micro_batches": 1, "num_rows": size.num_rows, "batch_size": shape.batch_size}
        yield {"schedule": schedule, "model": "hstu", **identity, **figures}


def turns_with_dense(
    trainers: Mapping[str, Trainer], dense: DenseOnly, batches: list[Batch], size: Size
) -> dict[str, list[dict[str, float]]]:
    """Returns means by round: those of each trainer, and "dense", the dense part alone. The first round warms up."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ("dense", *trainers)}
    for number in range(size.num_rounds + 1):
        means = {name: stretch(trainer, batches, size, is_first=number == 0) for name, trainer in trainers.items()}
        means["dense"] = {"step_ms": statistics.mean(dense.step_ms(size.steps)[size.left_out :])}
        if number > 0:
            for name, fields in means.items():
                rounds[name].append(fields)
    return rounds


def over_dense(mine: list[dict[str, float]], dense: list[dict[str, float]]) -> dict[str, float]:
    """Returns the medians of a trainer's fields, and its step relative to the dense part of the same round."""
    figures = {field: statistics.median(r[field] for r in mine) for field in mine[0]}
    figures["dense_unsplit_ms"] = statistics.median(r["step_ms"] for r in dense)
    ratios = [m["step_ms"] / d["step_ms"] for m, d in zip(mine, dense, strict=True)]
    return figures | spread("step_over_dense_unsplit", ratios)
