"""Tests uploads of short lists by a kernel that reads pinned host memory.

On a device, fails if `upload` does not keep the host memory of a list alive: later lists would overwrite the memory of
a list whose stream is late.
"""

import pytest
import torch

from nestpipe.kernels.rows.pinned import num_kept_alive, upload


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (1023,), (1025,), (3, 700)])
def test_fetch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    from nestpipe.kernels.rows import triton_copy

    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=dtype)
    target = torch.full_like(numbers, 7, device=device)
    triton_copy.fetch(numbers.pin_memory() if device.type == "cuda" else numbers, target)
    assert torch.equal(target.cpu(), numbers)


def test_a_late_stream_gets_every_list(accelerator: torch.device) -> None:
    lists = [torch.full((n,), n) for n in range(0, 4000, 40)]
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    uploads = [upload(numbers, accelerator) for numbers in lists]
    assert num_kept_alive() >= len(lists) - 1, "the device was not late"
    for numbers, uploaded in zip(lists, uploads, strict=True):
        assert torch.equal(uploaded.cpu(), numbers)
    upload(lists[1], accelerator)
    assert num_kept_alive() == 1, "memory that was read is freed"


def test_host_memory_stays(device: torch.device) -> None:
    numbers = torch.arange(5)
    assert upload(numbers, torch.device("cpu")) is numbers
