"""A requester's sum that is finite, but so large that the sum over all ranks might not be, stops the step on all ranks.

Fails if sum_limit leaves out the number of ranks or the 2, if LocalBatch._collect or Requester.collect does not check
the only micro-batch, or if HostMemory.add_rows leaves out the limit.
"""

import math
from itertools import product

import pytest
import torch

from nestpipe import Batch, Pooled, Table, World
from nestpipe.data import Jagged
from nestpipe.embedding.cluster import GIVEN_ORDER
from nestpipe.embedding.exchange.codec import EXACT
from nestpipe.embedding.optim import SGD
from nestpipe.embedding.plan import WINDOWS
from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.store import init
from tests.exactness.cases import on_ranks

TABLES = [
    Table(name, dim, init=init.Constant(0.0), optimizer=SGD(lr), dtype=dtype)
    for name, dim, dtype, lr in (
        ("a", 3, torch.float32, 1e-38),
        ("b", 3, torch.float32, 1e-38),
        ("c", 5, torch.float64, 1e-300),
    )
]
FEATURES = {table.name: Pooled(table) for table in TABLES}


def limits(table: Table, size: int) -> tuple[float, float]:
    """Returns the largest sum that is allowed, and the next number."""
    edge = torch.tensor(EXACT.sum_limit(table.dtype, size), dtype=table.dtype)
    if float(edge) > EXACT.sum_limit(table.dtype, size):
        edge = edge.nextafter(edge.new_zeros(()))
    return float(edge), float(edge.nextafter(edge.new_full((), math.inf)))


def make_batches() -> list[Batch]:
    """Two equal samples, one for each of two micro-batches; key 5 is in every batch and table."""
    return [Batch({name: Jagged.from_lists([[5, 6 + step]] * 2) for name in FEATURES}) for step in range(3)]


def digests(
    world: World, options: dict[str, object], scales: dict[str, float], at_step: int | None, steps: int
) -> tuple[list[str], str]:
    """Trains with gradients that add up to 1, or in one step to these scales. Returns digests and the error's text."""
    raised = ""
    pipeline = Pipeline(FEATURES, make_batches()[:steps], world=world, clustering=GIVEN_ORDER, seed=3, **options)
    try:
        with pipeline:
            for step in pipeline:
                for micro_batch in step:
                    for name, value in micro_batch.embeddings.items():
                        assert isinstance(value, torch.Tensor)
                        scale = scales[name] if step.number == at_step else 1.0
                        (value[:, 0].sum() * (scale / 2)).backward()  # half from each sample
                step.update_rows()
    except NonFiniteError as error:
        raised = str(error)
    return [pipeline.store.digest_part(name) for name in FEATURES], raised


def outcomes(world: World) -> list[tuple[str, str, int, str, bool, bool]]:
    """Returns, for every schedule, window and table, the error below and above the limit and whether rows changed."""
    results = []
    is_last = world.rank == world.size - 1
    for schedule, window, num_micro_batches in product(SCHEDULES, WINDOWS, (1, 2)):
        options = {"schedule": schedule, "window": window, "num_micro_batches": num_micro_batches}
        before, _ = digests(world, options, {}, None, 1)
        below = {table.name: limits(table, world.size)[0] for table in TABLES}
        after, raised = digests(world, options, below, 1, 2)
        results.append((schedule, window, num_micro_batches, raised, after == before, True))
        for table in TABLES:
            above = below | ({table.name: -limits(table, world.size)[1]} if is_last else {})
            after, raised = digests(world, options, above, 1, 3)
            results.append((schedule, window, num_micro_batches, raised, after == before, False))
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_too_large_a_sum(size: int) -> None:
    """A sum is too large in one table of one rank, in the second of three steps."""
    for results in on_ranks(size, outcomes):
        assert len(results) == len(SCHEDULES) * len(WINDOWS) * 2 * (1 + len(TABLES))
        for *options, raised, is_unchanged, is_below in results:
            what = f"{options}: {raised}"
            if is_below:
                assert raised == "", what
                assert not is_unchanged, what
            else:
                assert raised.startswith("step 1: a loss or a gradient is not finite on some rank"), what
                assert is_unchanged, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 1536])
def test_sums_below_the_limit_add_up(dtype: torch.dtype, size: int) -> None:
    """The sum over all ranks stays finite, with room for rounding."""
    edge = torch.tensor(EXACT.sum_limit(dtype, size), dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for _ in range(size):
        total = total + edge
    assert bool(total.isfinite())
    assert float(total) == pytest.approx(torch.finfo(dtype).max / 2, rel=1e-3)
