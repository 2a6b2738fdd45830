"""Part overlap of `bench network`: exchange across batches, with consecutive batches that share some of their keys."""

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nestpipe.bench.harness.pairs import alternate
from nestpipe.bench.harness.ways import Rounds, Shares, Way, medians, ratios
from nestpipe.bench.network.loop import FEATURE, MODELS, SEED, Loop, Paced, Size, make_features
from nestpipe.data.batch import Batch, Jagged
from nestpipe.distributed import World
from nestpipe.embedding.cluster import BY_KEYS
from nestpipe.embedding.dedup import dedup_batch
from nestpipe.embedding.group import group_features
from nestpipe.embedding.plan import requester_lists

Record = dict[str, int | float | str | bool]

OVERLAPS = (0.0, 0.3, 0.6)
NUM_MICRO_BATCHES = (1, 2, 4, 8)
REAL_OVERLAP = 0.3
REAL_NUM_MICRO_BATCHES = (1, 2)
PACE = 1.45
"""Time of paced dense compute, relative to serial's exchange time."""


@dataclass(frozen=True)
class KeySize:
    """Sizes for which a row exchange, or a gradient return, takes a tenth of a second on a link of 1 gbit."""

    num_keys: int = 12_000
    """Distinct keys of a rank's batch."""
    num_batches: int = 4
    num_rounds: int = 5


QUICK_KEYS = KeySize(num_keys=600, num_batches=4, num_rounds=2)


class Ring:
    """Batches that go round in a ring of keys. Each has the keys of a window, which moves on by those not shared."""

    def __init__(self, size: Size, keys: KeySize, overlap: float, world_size: int) -> None:
        self._size, self._keys, self._world_size = size, keys, world_size
        window = keys.num_keys * world_size
        self._distance = round(window * (1 - overlap) / world_size) * world_size
        self._numbers = np.random.default_rng(SEED).permutation(self._distance * keys.num_batches)

    def window(self, number: int) -> Tensor:
        """Returns the keys of a global batch; the first one follows the last."""
        first = number % self._keys.num_batches * self._distance
        places = np.arange(first, first + self._keys.num_keys * self._world_size) % len(self._numbers)
        return torch.from_numpy(self._numbers[places])

    def batches(self, rank: int) -> list[Batch]:
        return [self._batch(number, rank) for number in range(self._keys.num_batches)]

    def _batch(self, number: int, rank: int) -> Batch:
        """Makes a rank's part: each of its keys once, and half of them again. Input `share` is a sample's share."""
        random = np.random.default_rng([SEED, number, rank])
        mine = self.window(number)[rank :: self._world_size].numpy()
        keys = np.concatenate([random.permutation(mine), random.choice(mine, len(mine) // 2)])
        bounds = np.sort(random.integers(0, len(keys) + 1, self._size.batch_size - 1))
        offsets = torch.from_numpy(np.concatenate([[0], bounds, [len(keys)]]))
        label = torch.from_numpy(random.integers(0, 2, self._size.batch_size)).float()
        share = offsets.diff().double() / len(keys)
        return Batch({FEATURE: Jagged(torch.from_numpy(keys), offsets)}, {"label": label, "share": share})

    def shares(self, batches: Sequence[Batch], num_micro_batches: int, world: World) -> Shares:
        """Returns, of all (rank, key), the share that the first micro-batch is sent and the batch before has, too, and
        the share that the last one returns and the batch after has."""
        counts, features = torch.zeros(3, dtype=torch.float64), group_features(make_features(self._size.dim))
        for number, batch in enumerate(batches):
            dedup = dedup_batch(features, batch, num_micro_batches, world.size, 1, BY_KEYS).groups[0]
            rows_in, gradients_out = requester_lists(dedup, "once", world.rank)
            last = num_micro_batches - 1
            head = torch.cat([rows_in.others(0), rows_in.own(0)])
            tail = torch.cat([gradients_out.others(last), gradients_out.own(last)])
            counts[0] += torch.isin(dedup.keys[head], self.window(number - 1)).sum()
            counts[1] += torch.isin(dedup.keys[tail], self.window(number + 1)).sum()
            counts[2] += len(dedup.keys)
        head_keys, tail_keys, num_keys = world.control.all_to_all_equal(counts.expand(world.size, -1)).sum(0).tolist()
        return Shares(head_keys / num_keys, tail_keys / num_keys)


class OverlapPart:
    def __init__(self, size: Size, keys: KeySize, world: World, threads: int) -> None:
        self._size, self._keys, self._world, self._threads = size, keys, world, threads

    def records(self) -> Iterator[Record]:
        for overlap in OVERLAPS:
            yield from self._paced(overlap)
        yield self._real()

    def _paced(self, overlap: float) -> Iterator[Record]:
        serial = [Way("serial", number) for number in NUM_MICRO_BATCHES]
        nested = [Way("nested", number, cross_batch=True) for number in NUM_MICRO_BATCHES]
        ring, rounds, exchange_ms = self._measured(overlap, "paced", [*serial, Way("inter", 1), *nested])
        sleep_ms = PACE * exchange_ms
        measured_ms = statistics.median(values["exposed_exchange_ms"] for values in rounds[serial[0]])
        for way in nested:
            shares = ring.shares(ring.batches(self._world.rank), way.num_micro_batches, self._world)
            pace: Record = {"paced_ms": sleep_ms, "paced_over_exchange": sleep_ms / measured_ms}
            yield self._record(way, overlap, "paced", rounds, shares) | pace

    def _real(self) -> Record:
        """Returns the record of the number of micro-batches that is fastest with real dense compute."""
        serial = [Way("serial", number) for number in REAL_NUM_MICRO_BATCHES]
        nested = [Way("nested", number, cross_batch=True) for number in REAL_NUM_MICRO_BATCHES]
        ring, rounds, _ = self._measured(REAL_OVERLAP, "real", [*serial, Way("inter", 1), *nested])
        best = min(nested, key=lambda way: statistics.median(values["step_ms"] for values in rounds[way]))
        shares = ring.shares(ring.batches(self._world.rank), best.num_micro_batches, self._world)
        return self._record(best, REAL_OVERLAP, "real", rounds, shares)

    def _measured(self, overlap: float, compute: str, ways: Sequence[Way]) -> tuple[Ring, Rounds, float]:
        """Returns the rounds of all ways, and serial's exchange time before them, which sets the pace."""
        ring = Ring(self._size, self._keys, overlap, self._world.size)
        batches, features = ring.batches(self._world.rank), make_features(self._size.dim)
        loops = {
            way: Loop(way, MODELS[compute](self._size), features, batches, self._world, self._threads) for way in ways
        }
        for loop in loops.values():
            loop.turn(self._keys.num_batches)  # creates every row and touches all memory
        exchange_ms = self._paced_by(loops) if compute == "paced" else 0.0
        turns = {way: partial(loop.turn, self._size.counted) for way, loop in loops.items()}
        rounds = alternate(turns, self._keys.num_rounds, warm_up_rounds=0)
        for loop in loops.values():
            loop.close()
        del loops, loop, turns
        gc.collect()  # their stores need the memory of the next ones
        return ring, rounds, exchange_ms

    def _paced_by(self, loops: dict[Way, Loop]) -> float:
        serial = loops[Way("serial", 1)]
        times = [serial.turn(self._keys.num_batches)["exposed_exchange_ms"] for _ in range(3)]
        for loop in loops.values():
            assert isinstance(loop.model, Paced)
            loop.model.sleep_ms = PACE * statistics.median(times)
        return statistics.median(times)

    def _record(self, way: Way, overlap: float, compute: str, rounds: Rounds, shares: Shares) -> Record:
        fields = ratios(way, rounds, shares, compute)
        blocked = {"head_blocked_share": fields.pop("head_share"), "tail_urgent_share": fields.pop("tail_share")}
        return {
            "part": "overlap",
            "compute": compute,
            "overlap": overlap,
            "cross_batch": way.cross_batch,
            "schedule": way.schedule,
            "num_micro_batches": way.num_micro_batches,
            "window": way.window,
            "method": way.method,
            "ranks": self._world.size,
            "threads": self._threads,
            "dim": self._size.dim,
            "batch_size": self._size.batch_size,
            "keys_per_rank": self._keys.num_keys,
            "num_rounds": self._keys.num_rounds,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "seed": SEED,
            **medians(rounds[way]),
            **blocked,
            **fields,
        }
