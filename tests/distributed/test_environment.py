"""A Trainer or pipeline without a world uses the environment's, and prints it once.

Fails, for example, if World.given_or_found returns World(), or if from_environment takes the CPU although there is an
accelerator.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nestpipe import World
from nestpipe.distributed import world as world_module
from nestpipe.pipelining.pipeline import pipeline
from tests.exactness.cases import Case, features_of, global_batches, make_trainer, on_ranks, share_of

CASE = Case("adam", "shared")
SCRIPT = """
import torch
import nestpipe
from tests.exactness.cases import Case, SmallModel, features_of, global_batches, share_of
features = features_of(Case("adam", "shared"))
model = SmallModel({name: feature.table.dim for name, feature in features.items()})
trainers = [
    nestpipe.Trainer(model, features, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1), seed=3) for _ in range(2)
]
world = trainers[0].world
assert trainers[1].world is world
trainers[0].fit(share_of(global_batches(2), world))
print("RESULT", world.rank, world.size, trainers[0].store.size("item"), flush=True)
world.close()
"""


@pytest.mark.slow
def test_a_trainer_under_torchrun(tmp_path: Path) -> None:
    """In version 0.1 each rank trained alone, and held all the rows."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    root = str(Path(__file__).parent.parent.parent)
    environment = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=55, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    results = sorted(line.split()[1:] for line in done.stdout.splitlines() if "RESULT" in line)
    assert [result[:2] for result in results] == [["0", "2"], ["1", "2"]]
    num_rows = [int(result[2]) for result in results]
    assert min(num_rows) > 0
    assert sum(num_rows) == len(
        {int(key) for batch in global_batches(2) for j in batch.keys.values() for key in j.values} - {-7}
    )
    assert done.stderr.count("nestpipe: 2 ranks, shared memory between them, on cpu") == 1


def takes_this_world(world: World) -> tuple[bool, bool]:
    """Returns whether a pipeline and a Trainer without a world use this one."""
    batches = share_of(global_batches(1), world)
    return pipeline(features_of(CASE), batches).world is world, make_trainer(None, CASE).world is world


def test_the_existing_world_is_used() -> None:
    assert on_ranks(2, takes_this_world) == [(True, True)] * 2


def test_alone_and_printed_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_has_printed", False)
    monkeypatch.setattr(world_module, "default_device", lambda: "meta")  # stands for an accelerator
    monkeypatch.setattr(world_module, "device_of_rank", lambda name, rank: torch.device(name))
    monkeypatch.setattr(world_module, "full_device", torch.device)
    worlds = [World.from_environment() for _ in range(2)]
    assert [(world.size, world.device.type) for world in worlds] == [(1, "meta")] * 2
    assert World.from_environment(device="cpu").device.type == "cpu"
    assert capfd.readouterr().err == "nestpipe: 1 rank, on meta\n"
