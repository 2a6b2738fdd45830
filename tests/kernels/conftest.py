"""Where the kernels of these tests run: on the accelerator, or without one in Triton's interpreter, on this CPU.

The interpreter is asked for in each test alone: what other tests of the same process start must not see it.
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
