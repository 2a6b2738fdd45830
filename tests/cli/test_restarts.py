"""A run whose rank is killed under `torchrun --max-restarts` goes on from its newest checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = ("train.steps=40", "train.batch_size=64", "evaluate.num_samples=0", "model.dim=4", "checkpoint.every=5")


def command(folder: Path, result: Path) -> list[str]:
    settings = [part for text in (*SETTINGS, f"checkpoint.dir={folder}") for part in ("--set", text)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    return [*torchrun, "--standalone", "-m", "nestpipe", "train", *settings, "--json", str(result)]


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    """Fails if open_folders does not look for a checkpoint when torchrun has restarted the ranks."""
    digests = []
    for name, is_killed in (("whole", False), ("killed", True)):
        folder, result = tmp_path / name, tmp_path / f"{name}.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command(folder, result), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            while is_killed and run.poll() is None and not (folder / "step-00000010").exists():
                time.sleep(0.05)
            if is_killed:
                os.kill(ranks_of(run.pid)[-1], signal.SIGKILL)
            output = run.communicate()[0]
        assert run.returncode == 0, output
        summary = json.loads(result.read_text())
        assert (summary["resumed_from_step"] >= 10) == is_killed, output
        digests.append(summary["digest"])
    assert digests[0] == digests[1]
