"""Tests that check_split ignores dropout by a device's own kernels and does not advance its generator.

Fails if FixedNoise does not know native_dropout, if OFF has no "dropout_p", or if fixed_noise does not restore the
device's generator.
"""

import pytest
import torch

from tests.train.test_fixed_noise import NOISY, WIDTH, results


@pytest.mark.parametrize("name", [name for name in NOISY if name not in ("own generator", "layer drop")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
def test_noise_does_not_count(device: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    device_module = torch.get_device_module(device)
    where = torch.device(device, torch.accelerator.current_device_index())
    module = NOISY[name]().train().to(where)
    x = torch.randn(6, 5, WIDTH, device=where)
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype == torch.bfloat16):
        assert not torch.equal(module(x), module(x))
        before = device_module.get_rng_state()
        whole, parts = results(module, x)
    assert torch.equal(before, device_module.get_rng_state())
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(whole, parts, rtol=tolerance, atol=20 * tolerance)


def test_recurrent_layers_train_as_without_the_check(device: str) -> None:
    """cuDNN keeps one random state for the whole process. Fails if fixed_noise lets cuDNN make or use it."""
    torch.manual_seed(0)
    layers = torch.nn.GRU(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True).to(device)
    x = torch.randn(6, 5, WIDTH, device=device)
    results(NOISY["gru"]().to(device), x)
    outputs = torch.stack([layers(x)[0] for _ in range(2)])
    assert bool(outputs.isfinite().all())
    assert not torch.equal(outputs[0], outputs[1])  # it has dropout
