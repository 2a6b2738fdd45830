"""Tests DLRM against a slow version in plain Python loops: logits, loss, and every gradient.

Fails, for example, if products of the upper triangle or of the diagonal are taken, if the bottom's output is not handed
to the top, if a ReLU follows the last layer, if a cross layer does not add its input, or if the loss is a mean.
"""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from nestpipe.models import DLRM

NAMES = ("a", "b", "c")
DIM, NUM_DENSE = 4, 5


CROSS = {"interaction": "cross", "cross_layers": 2, "cross_rank": 3}


def make(seed: int = 1, **options) -> DLRM:
    return DLRM(NUM_DENSE, NAMES, DIM, bottom=(6,), top=(7, 3), seed=seed, **options)


def make_inputs(num_samples: int, seed: int = 2) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = {name: torch.randn(num_samples, DIM, generator=generator, dtype=torch.float64) for name in NAMES}
    inputs = {
        "dense": torch.randn(num_samples, NUM_DENSE, generator=generator),
        "click": (torch.rand(num_samples, generator=generator) < 0.5).float(),
    }
    return embeddings, inputs


def slow_layers(parameters: dict[str, list], prefix: str, x: list[float]) -> list[float]:
    numbers = sorted({int(name.split(".")[1]) for name in parameters if name.startswith(prefix)})
    for number in numbers:
        weight, bias = parameters[f"{prefix}.{number}.weight"], parameters[f"{prefix}.{number}.bias"]
        y = [bias[o] + sum(weight[o][i] * x[i] for i in range(len(x))) for o in range(len(bias))]
        x = y if number == numbers[-1] else [max(value, 0.0) for value in y]
    return x


def slow_cross(parameters: dict[str, list], first: list[float]) -> list[float]:
    x = first
    for number in range(CROSS["cross_layers"]):
        v, u, b = (parameters[f"cross.{name}.{number}"] for name in "vub")
        inner = [sum(x[i] * v[i][r] for i in range(len(x))) for r in range(len(u))]
        outer = [b[i] + sum(inner[r] * u[r][i] for r in range(len(u))) for i in range(len(x))]
        x = [first[i] * outer[i] + x[i] for i in range(len(x))]
    return x


def slow_logits(parameters: dict[str, list], embeddings: dict[str, list], dense: list) -> list[float]:
    logits = []
    for sample in range(len(dense)):
        bottom = slow_layers(parameters, "bottom", dense[sample])
        vectors = [bottom, *(embeddings[name][sample] for name in NAMES)]
        if "cross.b.0" in parameters:
            logits.append(slow_layers(parameters, "top", slow_cross(parameters, [x for v in vectors for x in v]))[0])
            continue
        products = [sum(vectors[i][d] * vectors[j][d] for d in range(DIM)) for i in range(4) for j in range(i)]
        logits.append(slow_layers(parameters, "top", bottom + products)[0])
    return logits


def slow_loss(parameters: dict[str, list], embeddings: dict[str, list], inputs: dict[str, list]) -> float:
    logits = slow_logits(parameters, embeddings, inputs["dense"])
    chances = [1 / (1 + math.exp(-logit)) for logit in logits]
    return sum(-math.log(p if click else 1 - p) for p, click in zip(chances, inputs["click"], strict=True))


def as_lists(tensors: dict[str, Tensor]) -> dict[str, list]:
    return {name: tensor.detach().double().tolist() for name, tensor in tensors.items()}


def slope(numbers: list, place: tuple[int, ...], loss, width: float = 1e-6) -> float:
    """Returns the central difference of the loss along one number of a nested list."""
    for i in place[:-1]:
        numbers = numbers[i]
    before, losses = numbers[place[-1]], []
    for shift in (width, -width):
        numbers[place[-1]] = before + shift
        losses.append(loss())
    numbers[place[-1]] = before
    return (losses[0] - losses[1]) / (2 * width)


@pytest.mark.parametrize("options", [{}, CROSS], ids=["dot", "cross"])
def test_logits_and_loss_equal_the_slow_version(options: dict) -> None:
    model = make(**options).double()
    for parameter in model.parameters():  # biases too
        nn.init.uniform_(parameter, -0.5, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    embeddings, inputs = make_inputs(9)
    parameters = as_lists(dict(model.named_parameters()))
    expected = slow_logits(parameters, as_lists(embeddings), as_lists(inputs)["dense"])
    assert model.predict(embeddings, inputs).tolist() == pytest.approx(expected, rel=1e-12)
    loss = model(embeddings, inputs)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(slow_loss(parameters, as_lists(embeddings), as_lists(inputs)), rel=1e-12)


@pytest.mark.parametrize("options", [{}, CROSS], ids=["dot", "cross"])
def test_every_gradient_equals_that_of_the_slow_version(options: dict) -> None:
    model = make(**options).double()
    embeddings, inputs = make_inputs(3)
    arrays = {name: value.requires_grad_() for name, value in embeddings.items()}
    model(arrays, inputs).backward()
    tensors = dict(model.named_parameters()) | arrays
    numbers = as_lists(tensors)
    slow_inputs = as_lists(inputs)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        for place in product(*map(range, tensor.shape)):
            expected = slope(numbers[name], place, lambda: slow_loss(numbers, numbers, slow_inputs))
            assert float(tensor.grad[place]) == pytest.approx(expected, rel=1e-5, abs=1e-7), (name, place)
    assert all(bool(array.grad.abs().sum() > 0) for array in arrays.values())


def test_float32_and_an_empty_micro_batch() -> None:
    model = make()
    embeddings, inputs = make_inputs(8)
    single = {name: value.float() for name, value in embeddings.items()}
    exact = make().double().predict(embeddings, inputs)
    torch.testing.assert_close(model.predict(single, inputs).double(), exact, rtol=1e-4, atol=1e-5)
    empty = {name: value[:0].requires_grad_() for name, value in single.items()}
    loss = model(empty, {name: value[:0] for name, value in inputs.items()})
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one = make(seed=1, **CROSS).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    same, other = make(seed=1, **CROSS).state_dict(), make(seed=2, **CROSS).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    weights = [name for name in one if name.endswith("weight") or name.startswith(("cross.u", "cross.v"))]
    assert len(weights) == 5 + 2 * CROSS["cross_layers"]
    assert not any(torch.equal(one[name], other[name]) for name in weights)
    assert not one["top.0.weight"].isnan().any()


def test_shapes_and_state() -> None:
    shapes = {
        name: list(value.shape) for name, value in DLRM(13, [f"f{i}" for i in range(26)], 16).state_dict().items()
    }
    assert shapes["bottom.0.weight"] == [128, 13]
    assert shapes["bottom.2.weight"] == [16, 128]
    assert shapes["top.0.weight"] == [256, 16 + 27 * 26 // 2]
    assert shapes["top.4.weight"] == [1, 128]
    assert len(shapes) == 10  # the list of pairs is a constant, not state


def test_refusals() -> None:
    with pytest.raises(ValueError, match="interaction is 'sum', must be 'dot' or 'cross'"):
        make(interaction="sum")
    with pytest.raises(ValueError, match="cross_layers is 0 and cross_rank is 512"):
        make(interaction="cross", cross_layers=0)
    embeddings, inputs = make_inputs(2)
    for wrong, text in ((torch.zeros(2, DIM + 1), r"\[2, 5\]"), ([0.0], "list")):
        with pytest.raises(ValueError, match=f"feature 'b' must be pooled and of dim 4, got {text}"):
            make().double().predict(embeddings | {"b": wrong}, inputs)


def test_weights_of_samples() -> None:
    """A sample of weight 2 counts as two samples, and one of weight 0 does not count."""
    model = make().double()
    embeddings, inputs = make_inputs(4)
    weighted = model(embeddings, inputs | {"weight": torch.tensor([1.0, 2.0, 0.0, 1.0])})
    again = torch.tensor([0, 1, 1, 3])
    repeated = model(
        {name: rows[again] for name, rows in embeddings.items()},
        {name: values[again] for name, values in inputs.items()},
    )
    assert weighted.item() == pytest.approx(repeated.item(), rel=1e-12)
