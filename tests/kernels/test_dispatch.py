"""Tests which form of an operation runs, in which precision, and that only a launch of a kernel needs Triton."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from nestpipe.kernels import dispatch
from nestpipe.kernels.dispatch import (
    ELEMENTS_ON_DEVICE,
    adds_in_order,
    compiles_triton,
    elements_at_a_time,
    product_dtype,
    runs_triton,
    without_autocast,
)
from nestpipe.ops.attention import takes_kernels

WITHOUT_TRITON = """
import sys, torch, nestpipe
from nestpipe.kernels.keys import owners, runs
from nestpipe.kernels.rows import copy, pooling, segments, updates
assert "triton" not in sys.modules
sys.modules["triton"] = None  # as if it were not installed
target = torch.zeros(3, 2)
copy.copy_rows(torch.ones(1, 2), None, target, torch.tensor([2]))
updates.sgd(target, target[:, :0], torch.ones(3, 2), 0.5)
vectors = segments.make_segments(torch.tensor([2, 0, 3]), torch.tensor([0, 2, 3]))
(sums,) = pooling.pool(pooling.DeviceOccurrences(vectors, None), target, 1)
assert sums.tolist() == [[0.0, 0.0], [0.0, 0.0]] and target.tolist() == [[-0.5, -0.5], [-0.5, -0.5], [0.5, 0.5]]
marked = runs.mark_runs(runs.SortedKeys(torch.tensor([4, 4, 9]), torch.tensor([0, 2, 1]), None, None, 1))
assert marked.is_first_use.tolist() == [1, 1, 0]
"""


def test_without_triton() -> None:
    """Nothing imports it, and nothing needs it. Fails if copy.py imports triton_copy at its top, or runs.py triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=environment, check=True, timeout=50)


def test_which_form_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU kernels run only if the interpreter is asked for."""
    assert runs_triton(torch.zeros(1, device=device))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert runs_triton(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not runs_triton(torch.zeros(1, device="meta"))


def test_kernels_are_compiled_on_cuda_alone(device: torch.device) -> None:
    """This holds even if the interpreter is asked for. Fails if compiles_triton is runs_triton."""
    assert compiles_triton(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not compiles_triton(torch.zeros(1), torch.zeros(1, device="meta"))


def test_how_torch_works_on_each_device() -> None:
    """Fails if other memory counts as host memory; meta stands for a device."""
    in_host_memory, on_device = torch.zeros(1), torch.zeros(1, device="meta")
    assert adds_in_order(in_host_memory)
    assert not adds_in_order(on_device)
    assert elements_at_a_time(in_host_memory, 7) == 7
    assert elements_at_a_time(on_device, 7) == ELEMENTS_ON_DEVICE


def test_precision_of_products() -> None:
    """Fails if product_dtype does not ask whether autocast is on, or if without_autocast leaves it on."""
    x = torch.ones(2, 2)
    assert product_dtype(x) == (x @ x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x) == (x @ x).dtype == torch.bfloat16
        with without_autocast(x):
            assert product_dtype(x) == (x @ x).dtype == torch.float32
        assert product_dtype(x) == torch.bfloat16


def test_a_missing_triton_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if dispatch falls back to torch on CUDA without a word. The array stands for one on CUDA."""
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    dispatch._warn_of_slow_forms.cache_clear()
    array = SimpleNamespace(is_cuda=True, is_cpu=False)
    with pytest.warns(UserWarning, match=r"much slower: Triton is not installed; .* pip install 'nestpipe\[cuda\]'"):
        assert not runs_triton(array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_triton(array), "it warns once"
    dispatch._warn_of_slow_forms.cache_clear()
    message = r"attention 'kernel' needs a CUDA device and Triton; .*pip install 'nestpipe\[cuda\]', or use 'blocked'"
    with pytest.raises(ValueError, match=message):
        takes_kernels(torch.zeros(1), torch.float32, 4, 4, "kernel")
