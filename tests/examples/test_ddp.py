"""A loop whose dense gradients DDP sums: it runs under torchrun as its docstring says, and trains the same bits.

With two ranks a sum has one order, so DDP and DenseReducer give the same bits. Fails if the example averages gradients
(`future.value()[0] / 2`), if it commits without the loss, or if Step.finish_commit does not write the sum to it.
"""

import importlib
import os
import re
import runpy
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nestpipe import DenseReducer, World
from nestpipe.pipelining.pipeline import Pipeline
from nestpipe.train.digest import digest
from tests.examples.test_own_model import run
from tests.forked import run_forked
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
STEPS = 4


def run_rank(rank: int, port: int) -> None:
    """Runs the example with the environment that torchrun gives a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def outputs_of_two_ranks() -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: run_forked(run_rank, rank, port), range(2)))
    assert [done.returncode for done in results] == [0, 0], [done.stderr for done in results]
    return [done.stdout for done in results]


def test_two_ranks() -> None:
    output, other_output = outputs_of_two_ranks()
    assert other_output == ""  # rank 0 alone prints
    check_losses(output)


@pytest.mark.slow
@pytest.mark.timeout(150)  # two ranks beside the other tests that run at the same time
def test_under_torchrun() -> None:
    check_losses(run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)))


def check_losses(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 2  # printed by rank 0 alone
    assert losses[-1] < 0.6  # guessing costs 0.69


def train(world: World, schedule: str, by_ddp: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """The digest of the rows, the losses, and the dense parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        ddp, own = importlib.import_module("ddp"), importlib.import_module("own_model")
    torch.manual_seed(0)
    plain = own.Ranker()
    model = ddp.in_parallel(plain, world) if by_ddp else plain
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    reducer = None if by_ddp else DenseReducer(plain, world)
    losses = []
    options = {"num_micro_batches": 3, "schedule": schedule}
    with Pipeline(own.features, own.batches(world.rank, STEPS), world=world, **options) as pipeline:
        for step in pipeline:
            if reducer is None:
                losses.append(ddp.train_step(model, step, adam))
                continue
            total = torch.zeros((), dtype=torch.float64)
            for micro_batch in step:
                loss = model(micro_batch.embeddings, micro_batch.inputs) / step.weight
                loss.backward()
                total += loss.detach()
            reducer.finish(step, total)
            adam.step()
            adam.zero_grad()
            step.update_rows()
            losses.append(float(total))
    tables = [feature.table for feature in own.features.values()]
    return digest(tables, pipeline.store, STEPS, world), losses, plain.state_dict()


def train_both_ways(world: World) -> list[tuple[str, list[float], dict[str, Tensor]]]:
    ways = [("serial", False), ("serial", True), ("nested", True)]
    return [train(world, *way) for way in ways]


def test_same_bits_as_with_our_reducer() -> None:
    first, second = run_ranks(2, train_both_ways)
    expected, losses, parameters = first[0]
    assert len(losses) == STEPS
    for digest_, of_steps, dense in (*first, *second):
        assert (digest_, of_steps) == (expected, losses)
        assert all(torch.equal(dense[name], value) for name, value in parameters.items())
