"""One rank of `bench simulate`, on its own host: traces that costs are fitted to, and steps that are to be predicted.

Rank 0 prints one record per line, as JSON.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.bench.harness.pairs import alternate
from nestpipe.bench.harness.ways import Way, medians
from nestpipe.bench.network.loop import FEATURE, MODELS, QUICK, SEED, Loop, Paced, Size, make_batches, make_features
from nestpipe.bench.network.rank import PACE
from nestpipe.data.batch import Batch
from nestpipe.distributed import World
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.embedding.plan import requester_lists
from nestpipe.recipe.trace_file import write_trace
from nestpipe.store.cores import usable_cores

Record = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Effort:
    rounds: int
    """Rounds in which all ways take turns."""
    paces: int
    """Turns that set the pace of paced compute."""
    traced_steps: int


SIZE = Size(dim=256)
"""Half the columns of `bench network`, so that all of it takes two minutes."""
EFFORTS = {"paced": Effort(7, 2, 8), "real": Effort(3, 0, 8)}
QUICK_EFFORT = Effort(1, 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    world = World.from_environment(device="cpu")
    torch.set_num_threads(max(1, usable_cores() // world.size))
    size = QUICK if options.quick else SIZE
    for compute, effort in EFFORTS.items():
        for record in _records(size, QUICK_EFFORT if options.quick else effort, compute, world, options.traces):
            if world.rank == 0:
                print(json.dumps(record), flush=True)
    world.control.all_reduce_sum(torch.zeros(1))
    os._exit(0)  # does not wait for lanes, which wait for further steps


def _records(size: Size, effort: Effort, compute: str, world: World, traces: Path) -> Iterator[Record]:
    many = size.num_micro_batches
    fitted = [Way("serial", 1), Way("serial", many)]
    crossing = [Way("nested", num, cross_batch=True) for num in (1, many)]
    ways = [*fitted, Way("inter", 1), Way("intra", many), Way("nested", many), *crossing]
    all_batches = [make_batches(size, rank, world.size) for rank in range(world.size)]
    batches = all_batches[world.rank]
    features, threads = make_features(size.dim), torch.get_num_threads()
    loops = {way: Loop(way, MODELS[compute](size), features, batches, world, threads) for way in ways}
    for loop in loops.values():
        loop.turn(size.num_batches)  # creates every row and touches all memory
    if compute == "paced":
        _set_pace(loops, loops[fitted[0]], size, effort)
    rounds = alternate({way: partial(loop.turn, size.counted) for way, loop in loops.items()}, effort.rounds, 0)
    for way in ways:
        yield {
            "compute": compute,
            "schedule": way.schedule,
            "cross_batch": way.cross_batch,
            "num_micro_batches": way.num_micro_batches,
            **(overlap_of(all_batches, size, way.num_micro_batches) if way.cross_batch else {}),
            "ranks": world.size,
            "threads": threads,
            "dim": size.dim,
            "batch_size": size.batch_size,
            "num_rounds": effort.rounds,
            "seed": SEED,
            **medians(rounds[way]),
        }
    for way in fitted:
        loops[way].turn(effort.traced_steps)
        write_trace(loops[way].spans, world, traces / f"{compute}-{way.num_micro_batches}.json")


def overlap_of(batches: Sequence[Sequence[Batch]], size: Size, num_micro_batches: int) -> dict[str, float]:
    """Returns what the cluster's key_overlap, head_overlap and tail_overlap are for batches that come again and again,
    given by rank. Nothing has to run for it: the keys say so."""
    windows = [torch.cat([batch.keys[FEATURE].values for batch in together]) for together in zip(*batches, strict=True)]
    features, num_ranks = group_features(make_features(size.dim)), len(batches)
    shared: dict[str, list[Tensor]] = {"key_overlap": [], "head_overlap": [], "tail_overlap": []}
    for rank, mine in enumerate(batches):
        for number, batch in enumerate(mine):
            dedup = dedup_batch(features, batch, num_micro_batches, num_ranks, 1, BY_KEYS).groups[0]
            before, after = windows[number - 1], windows[(number + 1) % len(windows)]
            rows_in, gradients_out = requester_lists(dedup, "once", rank)
            last = num_micro_batches - 1
            head = torch.cat([rows_in.others(0), rows_in.own(0)])
            tail = torch.cat([gradients_out.others(last), gradients_out.own(last)])
            shared["key_overlap"] += [torch.isin(dedup.keys, before), torch.isin(dedup.keys, after)]
            shared["head_overlap"].append(torch.isin(dedup.keys[head], before))
            shared["tail_overlap"].append(torch.isin(dedup.keys[tail], after))
    return {name: float(torch.cat(marks).double().mean()) for name, marks in shared.items()}


def _set_pace(loops: dict[Way, Loop], serial: Loop, size: Size, effort: Effort) -> None:
    turns = [serial.turn(size.num_batches) for _ in range(effort.paces)]
    sleep_ms = PACE * statistics.median(fields["exposed_exchange_ms"] for fields in turns)
    for loop in loops.values():
        assert isinstance(loop.model, Paced)
        loop.model.sleep_ms = sleep_ms


if __name__ == "__main__":
    main()
