"""The example runs as its docstring says, alone and under torchrun, and learns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=140)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str, rank: int) -> list[float]:
    return [float(loss) for loss in re.findall(rf"rank {rank}, step \d+: its share of the loss ([\d.]+)", output)]


def test_alone() -> None:
    done = run_script(EXAMPLE)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert losses(output, 0)[-1] < 0.55  # guessing costs 0.69
    assert re.search(r"rank 0 owns 1000 item rows and 9600 user rows", output)


@pytest.mark.slow
@pytest.mark.timeout(150)  # two ranks beside the other tests that run at the same time
def test_under_torchrun() -> None:
    output = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE))
    assert losses(output, 0)[-1] + losses(output, 1)[-1] < 0.55
    owned = [tuple(map(int, found)) for found in re.findall(r"owns (\d+) item rows and (\d+) user rows", output)]
    assert sum(items for items, _ in owned) == 1000
    assert sum(users for _, users in owned) == 2 * 9600
