"""Tests that padding tokens to a round number changes neither outputs nor gradients, and what graphs depend on.

Fails if padding blocks are left out of Tiles (their tokens would keep old memory), or if their first tile is 0.
"""

import copy
import pickle

import pytest
import torch

from nestpipe.kernels.attention.tiles import round_up
from nestpipe.models import HSTU, FuXi
from nestpipe.models.stack import _settings, run
from tests.kernels.attention.cases import (
    DEVICE,
    import_triton,
    interpreted,  # noqa: F401 (a fixture)
    make_sequences,
)

import_triton()


def outcome(model, x, sequences, is_padded: bool):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = (model._stack if is_padded else run)(model.layers, x, sequences)
    assert out.shape == x.shape
    (out * torch.linspace(0, 1, out.numel(), device=DEVICE).view_as(out)).sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in model.layers.named_parameters()}


@pytest.mark.parametrize(
    ("model_class", "lengths"),
    [
        *(pytest.param(model, [33, 34], marks=pytest.mark.slow) for model in (HSTU, FuXi)),
        (FuXi, [30, 0, 3]),
        (HSTU, [1]),
    ],
)
def test_padding_changes_nothing(model_class, lengths: list[int]) -> None:
    model = model_class(4, 34, 2, num_heads=2, dim_qk=3, dim_v=2, dropout=0.0, attention="kernel").to(DEVICE)
    for layer in model.layers:
        if hasattr(layer, "out"):
            torch.nn.init.ones_(layer.out.bias)  # so that padding is not zero in the second layer
    sequences = make_sequences(lengths, 34)
    x = torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = outcome(model, x, sequences, False)
    for name, value in outcome(model, x, sequences, True).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_round_sizes() -> None:
    """Sizes grow by at most a sixteenth, and there are few of them."""
    rounded = [round_up(number) for number in range(1, 4097)]
    assert all(number <= up <= number * 17 / 16 for number, up in enumerate(rounded, 1))
    assert len(set(rounded[2048:])) <= 17
    assert round_up(0) == 0


def test_a_copy_has_graphs_of_its_own() -> None:
    model = HSTU(4, 5, 1, num_heads=1, dim_qk=2, dim_v=2, attention="plain")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._stack is not model._stack


def test_settings_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of any setting leads to another recording or to none. Fails if _settings leaves one out."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    layers = HSTU(4, 5, 2, num_heads=1, dim_qk=2, dim_v=2, dropout=0.1).layers
    seen = {_settings(layers)}
    layer = layers[0]
    for change in (
        lambda: layer.w_ts.requires_grad_(False),
        lambda: setattr(layer.w_ts, "data", layer.w_ts.data.clone()),
        lambda: setattr(layer, "w_pos", torch.nn.Parameter(layer.w_pos.data)),
        lambda: setattr(layer.dropout, "p", 0.2),
        lambda: setattr(layer, "out", torch.nn.Linear(2, 4)),
        lambda: layers.append(HSTU(4, 5, 1, num_heads=1, dim_qk=2, dim_v=2).layers[0]),
        lambda: layers.register_buffer("more", torch.zeros(1)),
        lambda: monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
    ):
        change()
        settings = _settings(layers)
        assert settings is not None
        assert settings not in seen
        seen.add(settings)
    hook = layer.out.register_forward_hook(lambda *_: None)
    assert _settings(layers) is None
    hook.remove()
    layer.dropout.eval()
    assert _settings(layers) is None
    layer.dropout.train()
    layers.append(layer)
    assert _settings(layers) is None
