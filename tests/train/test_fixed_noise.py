"""Dropout and other noise must not affect a comparison of two forwards, wherever the model gets it from.

Fails, for example, if FIXED has no "bernoulli", if seed_alike does nothing, or if fixed_noise does not restore
the generators.
"""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe.train.fixed_noise import fixed_noise, seed_alike

CPU = torch.device("cpu")
WIDTH = 8


class DropPath(nn.Module):
    """Noise that a user draws for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1, 1).bernoulli_(0.7) if self.training else x


class Uniform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.2) + torch.rand(x.shape, device=x.device) + torch.randn_like(x) * 0.1


class LayerDrop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x if random.random() < 0.5 else 2 * x) * (1 if numpy.random.rand() < 0.5 else 2)


class Called(nn.Module):
    """Calls a function with the input and the training mode."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full(x.shape, 0.5), generator=self.generator)


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
        return self.layers(x)[0].sum() + self.layers(packed)[0].data.sum()


NOISY = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True),
    "attention": lambda: Attention(True),
    "attention without weights": lambda: Attention(False),
    "scaled dot product": lambda: Called(lambda x, on: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 * on)),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "rnn": lambda: Recurrent(nn.RNN),
    "F.dropout": lambda: Called(lambda x, on: F.dropout(x, 0.3, on)),
    "F.dropout in place": lambda: Called(lambda x, on: F.dropout(x + 0, 0.3, on, inplace=True)),
    "torch.dropout": lambda: Called(lambda x, on: torch.dropout(x, 0.3, on)),
    "native_dropout": lambda: Called(lambda x, on: torch.native_dropout(x, 0.3, on)[0].add_(1)),
    "dropout1d": lambda: Called(lambda x, on: F.dropout1d(x, 0.3, on)),
    "dropout2d": lambda: Called(lambda x, on: F.dropout2d(x[:, None], 0.3, on)),
    "dropout3d": lambda: Called(lambda x, on: F.dropout3d(x[:, None, None], 0.3, on)),
    "alpha_dropout": lambda: Called(lambda x, on: F.alpha_dropout(x, 0.3, on)),
    "feature_alpha_dropout": lambda: Called(lambda x, on: F.feature_alpha_dropout(x, 0.3, on)),
    "rrelu": lambda: Called(lambda x, on: F.rrelu(x, training=on)),
    "gumbel": lambda: Called(lambda x, on: F.gumbel_softmax(x)),
    "normal": lambda: Called(lambda x, on: torch.normal(x, 0.5) + x.clone().normal_()),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)), backend="eager"),
    "drop path": DropPath,
    "uniform": Uniform,
    "layer drop": LayerDrop,
    "own generator": OwnGenerator,
}


def results(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs for the whole batch, and for its samples one by one."""
    with torch.no_grad(), fixed_noise(x.device) as noise:
        outputs = []
        for part in (x, *x.split(1)):
            seed_alike(x.device)
            with noise:
                outputs.append(module(part).sum())
    assert noise.drawn == set()
    return outputs[0], torch.stack(outputs[1:]).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
@pytest.mark.parametrize("name", NOISY)
def test_noise_does_not_count_and_leaves_generators_alone(name: str) -> None:
    torch.manual_seed(0)
    module = NOISY[name]().train()
    x = torch.randn(6, 5, WIDTH)
    with torch.no_grad():
        assert not torch.equal(module(x), module(x)) or name == "layer drop"  # there is noise without the mode
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    whole, parts = results(module, x)
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    if name == "own generator":
        before = module.generator.get_state()
        results(module, x)
        assert torch.equal(before, module.generator.get_state())


class Shuffled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x[torch.randperm(len(x))]


def test_what_has_no_fixed_value_is_named() -> None:
    with torch.no_grad(), fixed_noise(CPU) as noise, noise:
        Shuffled()(torch.randn(6, 5))
    assert noise.drawn == {"randperm"}
