"""The device of these tests: the accelerator, or without one the CPU, where Triton's interpreter runs the kernels.

Each test sets the interpreter's variable for itself, so that processes started by other tests do not inherit it.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    pytest.importorskip("triton", reason="the kernels need Triton, which the dev extra has on Linux")
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture
def accelerator(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs an accelerator: runs where torch.cuda.is_available()")
    return device
