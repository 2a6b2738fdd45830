"""Table robustness of `bench paper`: a small HSTU that computes, with other row dims, layers and sequence lengths.

The link and the store are slow, but an exchange and a lookup each take less time than the dense compute of the smallest
model. So both can be hidden in every case.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from nestpipe.bench.h200.data import make_batches
from nestpipe.bench.h200.one_rank import DenseOnly, features_of
from nestpipe.bench.harness.pairs import alternate, spread
from nestpipe.bench.harness.ways import Values, Way, medians
from nestpipe.bench.network.loop import SEED, Loop
from nestpipe.bench.paper.workload import Case, NextItem, RealSize, SlowStore, model_size, real_cases
from nestpipe.distributed import World
from nestpipe.embedding.table import make_store, tables_of

Record = dict[str, int | float | str | bool]

SERIAL = "serial"
DENSE = "dense"
COUNTED = 1
"""Counted steps of a turn."""


def robustness_records(size: RealSize, world: World) -> Iterator[Record]:
    base: Record = {}
    for case in real_cases(size):
        record = _record(size, case, world)
        base = base or record
        for name in ("step_over_dense_unsplit", "speedup_vs_serial"):
            record[f"{name}_less_base"] = float(record[name]) - float(base[name])
        yield record


def _record(size: RealSize, case: Case, world: World) -> Record:
    threads = torch.get_num_threads()
    made, shape = model_size(size, case)
    features = features_of(case.dim)
    batches = make_batches(shape, size.num_keys, seed=SEED + world.rank)
    loops = {}
    for way in (Way(SERIAL, 1), Way("nested", size.num_micro_batches)):
        store = make_store(tables_of(features), SEED, threads, SlowStore)
        assert isinstance(store, SlowStore)
        loops[way.schedule] = Loop(way, NextItem(made, shape), features, batches, world, threads, store)
        loops[way.schedule].turn(size.num_batches)  # creates every row and touches all memory
        store.ms_per_key = size.ns_per_byte * store.spec("item").record_bytes / 1e6
    dense = DenseOnly(World(), made, shape, features, batches, 1, autocast=False)
    turns: dict[str, Callable[[], Values]] = {name: partial(loop.turn, COUNTED) for name, loop in loops.items()}
    turns[DENSE] = partial(_dense_turn, dense, world)
    rounds = alternate(turns, size.num_rounds)
    return {
        "table": "robustness",
        "compute": "real",
        "schedule": "nested",
        "varied": case.varied,
        "dim": case.dim,
        "num_layers": case.num_layers,
        "length": case.length,
        "batch_size": shape.batch_size,
        "num_distinct": shape.num_distinct,
        "overlap": shape.overlap,
        "num_micro_batches": size.num_micro_batches,
        "ranks": world.size,
        "threads": threads,
        "num_rounds": size.num_rounds,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": SEED,
        "ns_per_byte": size.ns_per_byte,
        **_figures(rounds),
    }


def _dense_turn(dense: DenseOnly, world: World) -> Values:
    """Returns the time of a step of the slowest rank. All ranks compute at the same time, as they do in the loops."""
    world.control.all_reduce_sum(torch.zeros(1))
    mine = statistics.mean(dense.step_ms(COUNTED + 1)[1:])
    by_rank = world.control.all_to_all_equal(torch.full((world.size, 1), mine, dtype=torch.float64))
    return {"step_ms": float(by_rank.max())}


def _figures(rounds: dict[str, list[Values]]) -> Record:
    nested, serial, dense = (rounds[name] for name in ("nested", SERIAL, DENSE))
    figures: Record = {**medians(nested)}
    figures["dense_unsplit_ms"] = statistics.median(values["step_ms"] for values in dense)
    for name, field in (("serial_step_ms", "step_ms"), ("serial_lookup_ms", "exposed_lookup_ms")):
        figures[name] = statistics.median(values[field] for values in serial)
    figures["serial_exchange_ms"] = statistics.median(values["exposed_exchange_ms"] for values in serial)
    over_dense = [m["step_ms"] / d["step_ms"] for m, d in zip(nested, dense, strict=True)]
    figures |= spread("step_over_dense_unsplit", over_dense)
    return figures | spread(
        "speedup_vs_serial", [s["step_ms"] / m["step_ms"] for m, s in zip(nested, serial, strict=True)]
    )
