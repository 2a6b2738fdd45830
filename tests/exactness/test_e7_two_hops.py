"""E7: with the same hosts, an exchange in two hops has the same bits in every schedule; without, up to rounding.

Hosts are two of two ranks, whose messages take shared memory, or gloo. Fails if a relay asks for a row with the first
micro-batch of one of its host's ranks (`by_key[starts[:-1]]` in hop_keys._uses_of_any), if it keeps the places of all
keys for the sums of a part (`places=travel.places` in hop_plan._from_sums), if late gradients leave with the sums of
the last micro-batch (`self._between.return_late_gradients()` in TwoHopBatch), if a relay keeps it to itself that an
owner has failed (`error is not None` for `has_failed` in compare_by_hosts), or if the sums of a host may be larger than
the form of gradients (`num_added = 1` in TwoHopBatch).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from nestpipe import Batch, Pooled, Table, World, optim
from nestpipe.data import Jagged
from nestpipe.embedding.cluster import CLUSTER_METHODS
from nestpipe.pipelining import NonFiniteError
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store import init
from tests.exactness.cases import LAYOUTS, OPTIMIZERS, Case, PlainTorch, global_batches, make_trainer, train
from tests.exactness.test_e1_bit_identical import STREAMS, keys_batch, stream_batches
from tests.exactness.test_e1_rounded import DTYPES
from tests.exactness.test_e3_plain_torch import compare
from tests.exactness.test_x_across_batches import EVENTS, SHARED, batches_of, interrupted
from tests.ranks import run_ranks
from tests.store.native.key_batches import owner

RANKS, HOSTS = 4, 2

Run = tuple[str, tuple[str | None, str | None], Case]
"""A stream, the forms of rows and gradients, and all other settings."""


def digests(world: World, runs: list[Run], schedules: list[Sequence[str]]) -> list[list[str]]:
    """Returns the digests of some schedules, for each run."""
    results = []
    for (stream, (row_dtype, gradient_dtype), case), chosen in zip(runs, cycle(schedules), strict=False):
        batches, found = batches_in(stream, world), []
        for schedule in chosen:
            forms = {"row_dtype": row_dtype, "gradient_dtype": gradient_dtype}
            trainer = make_trainer(world, replace(case, schedule=schedule), **forms)
            trainer.check_split = False
            trainer.fit(batches)
            found.append(trainer.digest())
        results.append(found)
    return results


def batches_in(stream: str, world: World) -> list[Batch]:
    return batches_of(stream, world) if stream in SHARED else stream_batches(stream, world)


ALL_STREAMS = [*STREAMS, *SHARED]
FEW_STREAMS = [stream for stream in ALL_STREAMS if stream not in ("sparse_random", "none", "most", "all")]
FORMS = [(None, None), *DTYPES]
SIZES = 1, 2, 5, 8


def runs_of(streams: Sequence[str], first: int) -> list[Run]:
    """Combines each stream with other settings than the one before."""
    kinds, sizes, methods, layouts, forms = map(cycle, ([*OPTIMIZERS], SIZES, CLUSTER_METHODS, LAYOUTS, FORMS))
    rows = cycle((torch.float64, torch.float32, torch.float64))
    runs = []
    for number in range(first + len(streams)):
        case = Case(next(kinds), next(layouts), next(sizes), method=next(methods), dtype=next(rows))
        if number >= first:
            runs.append((streams[number - first], next(forms), case))
    return runs


SOME = [("serial", "nested"), ("serial", "nested", "inter"), ("serial", "nested"), ("serial", "intra")]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_schedules_agree(shared_memory: bool, half: int) -> None:
    runs = runs_of(FEW_STREAMS, 0)[half::2]
    first, *others = run_ranks(RANKS, digests, runs, SOME, hosts=HOSTS, shared_memory=shared_memory)
    assert all(other == first for other in others)
    for run, results in zip(runs, first, strict=True):
        assert len(set(results)) == 1, run


@pytest.mark.slow
@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("first", range(1, 7))
def test_schedules_agree_everywhere(size: int, hosts: int, first: int) -> None:
    """Three hosts of two ranks, and two of three, too."""
    runs = runs_of(ALL_STREAMS, first)
    for results in run_ranks(size, digests, runs, [SCHEDULES], hosts=hosts, timeout=150):
        assert [run for run, each in zip(runs, results, strict=True) if len(set(each)) > 1] == []


# ---- one hop, and plain torch ----


CASES = [Case("adagrad", "pooled_mean", 4, schedule="nested")]
ALL_CASES = [Case(*each) for each in product(OPTIMIZERS, LAYOUTS, (1, 4))]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in ALL_CASES)], ids=str)
def test_equals_plain_torch_up_to_rounding(case: Case) -> None:
    case = replace(case, steps=10)
    plain = PlainTorch(case)
    losses = [plain.step(batch) for batch in global_batches(case.steps)]
    compare(tuple(run_ranks(RANKS, train, case, hosts=HOSTS)), plain, losses)


def summed(world: World, gradients: list[float]) -> float:
    """Returns the sum of gradients of one row, of which each rank has one."""
    item = Table("item", 1, init.Constant(0.0), optim.SGD(1.0), dtype=torch.float64)
    batch = Batch({"items": Jagged.one_each(torch.tensor([7]))}, weight=1.0)
    with Pipeline({"items": Pooled(item)}, [batch], world=world) as steps:
        for step in steps:
            for micro_batch in step:
                for rows in micro_batch.rows:
                    rows.grad = torch.full_like(rows, gradients[world.rank])
            step.update_rows()
        store = steps.store
    return -sum(float(record) for record in store.export_piece("item", 0, 65536).records.flatten())


LARGE = 2.0**53
"""Plus 1 is itself."""


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([1.0, LARGE, 1.0, -LARGE], 1.0),  # 0 if they were added one after another
        pytest.param([LARGE, 1.0, -LARGE, 0.0, 0.0, 0.0], 0.0, marks=pytest.mark.slow),  # 1 in another order
        pytest.param([LARGE, -LARGE, 1.0, 0.0, 0.0, 0.0], 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_order_of_summation(gradients: list[float], expected: float) -> None:
    """Each host adds its ranks' gradients in order of rank; the owner adds those of the hosts. Fails if a relay hands
    on one of them (`lengths = torch.ones_like(...)` in hop_plan._relay_sums), or adds them in another order."""
    assert sum(run_ranks(len(gradients), summed, gradients, hosts=HOSTS)) == expected


# ---- bytes ----


def sent_bytes(world: World, stream: list[torch.Tensor], num_micro_batches: int) -> list[tuple[int, int]]:
    """Returns the bytes of rows and gradients that this rank sends to other hosts, by step."""
    trainer = make_trainer(world, Case("sgd", "shared", num_micro_batches, schedule="nested"))
    trainer.check_split = False
    result = trainer.fit([keys_batch(keys[world.rank :: world.size].contiguous()) for keys in stream])
    fields = "exchanged_row_bytes_per_step", "exchanged_gradient_bytes_per_step"
    return [tuple(int(times.sizes[field]) for field in fields) for times in result.times]


def crossing_keys(keys: torch.Tensor) -> int:
    """Returns how often a key crosses the network: once to each host that uses it and is not its owner's."""
    num_keys = 0
    for host in range(HOSTS):
        parts = [keys[rank::RANKS] for rank in (2 * host, 2 * host + 1)]
        used = set(torch.cat([*parts, *(part % 60 for part in parts)]).tolist())
        num_keys += sum(owner(key, "item", RANKS) // 2 != host for key in used)
    return num_keys


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_row_crosses_once_for_a_host(num_micro_batches: int) -> None:
    """Fails if relayed keys are not distinct, or if a relay stays silent for its own host's owners."""
    generator = torch.Generator().manual_seed(1)
    stream = [torch.randint(90, (200,), generator=generator) for _ in range(3)]
    ranks = run_ranks(RANKS, sent_bytes, stream, num_micro_batches, hosts=HOSTS)
    for step, keys in enumerate(stream):
        for way in (0, 1):
            assert sum(rank[step][way] for rank in ranks) == crossing_keys(keys) * 5 * 8


# ---- what happens at a boundary of batches ----


@pytest.mark.parametrize(
    "event", [pytest.param(e, marks=[] if e in ("save", "all fail") else pytest.mark.slow) for e in EVENTS]
)
def test_an_event_at_every_step(event: str, tmp_path: Path) -> None:
    for results in run_ranks(RANKS, interrupted, event, tmp_path, hosts=HOSTS):
        assert [at for at, is_equal in results if not is_equal] == []


def too_large(world: World, scale: float) -> bool:
    """Returns whether a step counts in which the gradient of each rank is this part of the largest float16."""
    item = Table("item", 1, init.Constant(0.0), optim.SGD(1.0))
    batches = [Batch({"items": Jagged.one_each(torch.tensor([7]))}, weight=1.0)] * 2
    try:
        with Pipeline({"items": Pooled(item)}, batches, world=world, gradient_dtype="float16") as steps:
            for step in steps:
                for micro_batch in step:
                    for rows in micro_batch.rows:
                        rows.grad = torch.full_like(rows, scale * torch.finfo(torch.float16).max)
                step.update_rows()
            records = steps.store.export_piece("item", 0, 65536).records
    except NonFiniteError:
        return False
    assert bool(records.isfinite().all())
    return True


@pytest.mark.parametrize(("scale", "counts"), [(0.45, True), (0.9, False)])
def test_sums_of_a_host_fit_the_form_of_gradients(scale: float, counts: bool) -> None:
    """The sum of two ranks is too large for float16, although neither gradient is."""
    assert run_ranks(RANKS, too_large, scale, hosts=HOSTS) == [counts] * RANKS
