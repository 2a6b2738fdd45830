"""Which form runs, and that nothing needs Triton before a kernel is launched."""

import os
import subprocess
import sys

import pytest
import torch

from nestpipe.kernels.dispatch import (
    ELEMENTS_ON_DEVICE,
    adds_in_order,
    compiles_triton,
    elements_at_a_time,
    runs_triton,
)

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch, nestpipe
from nestpipe.kernels.rows import copy, pooling, segments, updates
target = torch.zeros(3, 2)
copy.copy_rows(torch.ones(1, 2), None, target, torch.tensor([2]))
updates.sgd(target, target[:, :0], torch.ones(3, 2), 0.5)
sums = pooling.pool([pooling.make_occurrences(torch.tensor([2, 0, 3]), torch.tensor([0, 2, 3]), None, 3)], [target])
assert sums.tolist() == [[0.0, 0.0], [0.0, 0.0]] and target.tolist() == [[-0.5, -0.5], [-0.5, -0.5], [0.5, 0.5]]
"""
NOT_IMPORTED = """
import sys, nestpipe
from nestpipe.kernels.rows import copy, pooling, segments, updates
assert "triton" not in sys.modules
"""


@pytest.mark.parametrize("script", [WITHOUT_TRITON, NOT_IMPORTED])
def test_without_triton(script: str) -> None:
    """Fails if copy.py imports triton_copy at its top."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=50)


def test_which_form_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors on a CPU the kernels only if the interpreter was asked for."""
    assert runs_triton(torch.zeros(1, device=device))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert runs_triton(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not runs_triton(torch.zeros(1, device="meta"))


def test_kernels_are_compiled_on_cuda_alone(device: torch.device) -> None:
    """Even where the interpreter is asked for. Fails if compiles_triton is runs_triton."""
    assert compiles_triton(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not compiles_triton(torch.zeros(1), torch.zeros(1, device="meta"))


def test_how_torch_works_where_an_array_is() -> None:
    """Fails if memory that is not the host's counts as such; meta stands for it."""
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    assert adds_in_order(here)
    assert not adds_in_order(there)
    assert elements_at_a_time(here, 7) == 7
    assert elements_at_a_time(there, 7) == ELEMENTS_ON_DEVICE
