"""Short lists on their way to a device, by a kernel.

On a device, fails if `upload` does not remember what it has lent: the host memory of a list whose stream is late is
then that of the lists after it.
"""

import pytest
import torch

from nestpipe.kernels.rows.keep_alive import num_kept_alive
from nestpipe.kernels.rows.upload import upload


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (1023,), (1025,), (3, 700)])
def test_fetch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    from nestpipe.kernels.rows import triton_upload

    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=dtype)
    there = torch.full_like(numbers, 7, device=device)
    triton_upload.fetch(numbers.pin_memory() if device.type == "cuda" else numbers, there)
    assert torch.equal(there.cpu(), numbers)


def test_a_late_stream_gets_every_list(accelerator: torch.device) -> None:
    lists = [torch.full((n,), n) for n in range(0, 4000, 40)]
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    there = [upload(numbers, accelerator) for numbers in lists]
    assert num_kept_alive() >= len(lists) - 1, "the device was not late"
    for numbers, found in zip(lists, there, strict=True):
        assert torch.equal(found.cpu(), numbers)
    upload(lists[1], accelerator)
    assert num_kept_alive() == 1, "what was read is given back"


def test_host_memory_stays(device: torch.device) -> None:
    numbers = torch.arange(5)
    assert upload(numbers, torch.device("cpu")) is numbers
