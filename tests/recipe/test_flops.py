"""Floating-point operations of a step in the summary, and the share of the peak where the device's is known."""

import pytest
import torch

from nestpipe import World
from nestpipe.device.peak import peak_flops
from nestpipe.kernels.flops import FlopCount, counting
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config

SMALL = (
    *("model.dim=4", "train.batch_size=16", "train.steps=2", "evaluate.num_samples=0", "store.num_threads=1"),
    *("runtime.dense_threads=1", "runtime.device=cpu", "pipeline.num_micro_batches=2"),
)


def run_small(*settings: str) -> Summary:
    return run(load_config(None, (*SMALL, *settings)).resolved(1, 1), World())


def test_operations_of_a_step() -> None:
    """Fails if micro-batches, steps or samples are counted twice, or if counting changes the training.

    The first layer has no gradient of its input, so a step takes a little less than three forwards.
    """
    counted = run_small()
    with counting() as steps:  # on a CPU the backward runs in this thread, too
        uncounted = run_small("pipeline.check_split=false", "pipeline.schedule=serial")
    assert "model_flops_per_step" not in uncounted
    assert counted["digest"] == uncounted["digest"]
    assert 1.0 <= counted["model_flops_per_step"] / (steps.total / 2) < 1.1
    assert "model_flop_utilisation" not in counted


def test_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the time of a step is not in seconds, or the peak is not that of the dtype in use."""
    asked = []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        asked.append((device.type, dtype))
        return 1e9

    monkeypatch.setattr("nestpipe.recipe.flops.peak_flops", peak)
    summary = run_small()
    speed = summary["model_flops_per_step"] / (summary["step_ms"] / 1e3)
    assert summary["model_flop_utilisation"] == pytest.approx(speed / 1e9)
    assert asked == [("cpu", torch.float32)]


def test_a_model_that_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a model that does not run while it is counted is not trained."""

    def broken(self: FlopCount, *others: object) -> None:
        raise RuntimeError("not while counting")

    monkeypatch.setattr(FlopCount, "__torch_dispatch__", broken)
    summary = run_small()
    assert summary["steps"] == 2
    assert "model_flops_per_step" not in summary


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989e12),
        ("NVIDIA H100 PCIe", torch.float32, 51e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 NVL", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-80GB", torch.float64, None),
    ],
)
def test_known_peaks(name: str, dtype: torch.dtype, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a device has the peak of another one, or a dtype that of another one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), dtype) == expected
    assert peak_flops(torch.device("cpu"), dtype) is None
