"""Tests HSTU and FuXi against a slow version that computes one number at a time: loss, users, and every gradient.

Fails, for example, if a bias is added in the wrong triangle, if max_length is the longest length of the batch, if the
query's own time is used, if a norm has another eps, if the last position does not predict the target, or if the loss is
a mean.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nestpipe.models import HSTU, FuXi
from tests.histories import NUM_ITEMS, embedded, histories
from tests.models import slow_next_item as slow

MAX_LENGTH = 5
SIZES = {"num_heads": 2, "dim_qk": 3, "dim_v": 2}
DIM = 4
LENGTHS = [3, 0, 1, MAX_LENGTH]
CASES = [(HSTU, slow.HstuLayer, {}), (FuXi, slow.FuxiLayer, {"ffn_multiply": 2})]


def make(model_class, options=None, seed: int = 1, **others) -> nn.Module:
    model = model_class(DIM, MAX_LENGTH, **SIZES, seed=seed, **(options or {}) | others).double()
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():  # biases too, and weights large enough to matter
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.eval()


def make_rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(NUM_ITEMS, DIM, generator=torch.Generator().manual_seed(3), dtype=dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks small, so that a history of 5 has 3 blocks."""
    monkeypatch.setattr("nestpipe.ops.attention.BLOCK", 2)
    monkeypatch.setattr("nestpipe.ops.sampled_softmax.BLOCK", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("form", "per"), [("blocked", "position"), ("plain", "sample"), ("blocked", "sample")])
@pytest.mark.parametrize(("model_class", "slow_layer", "options"), CASES)
def test_loss_and_every_gradient_equal_the_slow_version(model_class, slow_layer, options, form: str, per: str) -> None:
    model = make(model_class, options, attention=form, negatives_per=per)
    batch = histories(LENGTHS, MAX_LENGTH, per=per)
    rows = make_rows().requires_grad_()
    embeddings = embedded(batch, rows)
    loss = model(embeddings, batch.inputs)
    loss.backward()

    slow_rows = make_rows().requires_grad_()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    layers = [slow_layer(parameters, n, MAX_LENGTH, *SIZES.values()) for n in range(2)]
    expected, users = slow.loss(parameters, slow_rows, batch, layers, per)
    expected.backward()

    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(rows.grad, slow_rows.grad, rtol=1e-9, atol=1e-11)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad, rtol=1e-9, atol=1e-11, msg=name)
        assert bool(parameter.grad.any()), name
    encoded = model.encode(embeddings, batch.inputs)
    for user, vector in zip(encoded.tolist(), users, strict=True):
        assert user == pytest.approx([a.item() for a in vector] or [0.0] * DIM, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("per", ["position", "sample"])
@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_loss_sums_of_micro_batches_add_up(model_class, per: str) -> None:
    """Fails if a sample depends on the longest history of its batch."""
    model = make(model_class, negatives_per=per)
    lengths = [3, 0, 1, MAX_LENGTH, 2, 2, 0, 4]
    batch = histories(lengths, MAX_LENGTH, per=per)
    rows = make_rows()
    whole = model(embedded(batch, rows), batch.inputs)
    for samples in (
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[0, 1, 2], [3], [4, 5, 6, 7]],
        [[7, 3], [0, 1, 2, 4, 5, 6]],
    ):
        parts = [batch[torch.tensor(part)] for part in samples]
        total = sum(model(embedded(part, rows), part.inputs) for part in parts)
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_predict(model_class, lengths: list[int]) -> None:
    model, rows = make(model_class), make_rows().requires_grad_()
    batch = histories(lengths, MAX_LENGTH)
    loss = model(embedded(batch, rows), batch.inputs)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not rows.grad.any()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert model.encode(embedded(batch, rows), batch.inputs).shape == (len(lengths), DIM)


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_the_same_bits_again_with_dropout(model_class) -> None:
    model = model_class(DIM, MAX_LENGTH, **SIZES, dropout=0.5)
    batch = histories(LENGTHS * 5, MAX_LENGTH)
    torch.use_deterministic_algorithms(True)
    results = []
    try:
        for _ in range(2):
            torch.manual_seed(1)
            model.zero_grad()
            rows = make_rows(torch.float32).requires_grad_()
            loss = model(embedded(batch, rows), batch.inputs)
            loss.backward()
            results.append([loss.detach(), rows.grad, *(p.grad.clone() for p in model.parameters())])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(2)
    assert not torch.equal(model(embedded(batch, rows), batch.inputs), results[0][0])


@pytest.mark.parametrize("form", ["blocked", "plain"])
@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_autocast(model_class, form: str) -> None:
    """Results are as precise as bfloat16; loss, gradients and users stay in float32."""
    batch = histories(LENGTHS * 5, MAX_LENGTH)
    results = []
    for is_on in (False, True):
        model, rows = make(model_class, attention=form).float(), make_rows(torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            loss = model(embedded(batch, rows), batch.inputs)
            users = model.encode(embedded(batch, rows), batch.inputs)
        loss.backward()
        results.append(
            [loss.detach(), users.detach(), rows.grad, *(parameter.grad for parameter in model.parameters())]
        )
    for expected, got in zip(*results, strict=True):
        assert got.dtype == torch.float32
        assert float((got - expected).norm() / expected.norm()) < 0.1
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("model_class", [HSTU, FuXi])
def test_parameters_depend_on_the_seed_alone(model_class) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one = model_class(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    same, other = model_class(seed=1).state_dict(), model_class(seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if not name.endswith("bias"))


@pytest.mark.parametrize(
    ("model_class", "widths", "others"),
    [(HSTU, 200, {"out.weight": (50, 50)}), (FuXi, 300, {"w0.weight": (50, 150), "w1.weight": (50, 50)})],
)
def test_defaults_and_initial_parameters(model_class, widths: int, others: dict) -> None:
    state = model_class().state_dict()
    assert state["positions"].shape == (211, 50)
    assert state["positions"].abs().max() <= 2 * 50**-0.5 < 1.05 * state["positions"].abs().max()
    for number in range(2):
        layer = SimpleNamespace(**{name: state[f"layers.{number}.{name}"] for name in ("w_uvqk", "w_pos", "w_ts")})
        assert [layer.w_uvqk.shape, layer.w_pos.shape, layer.w_ts.shape] == [(50, widths), (399,), (129,)]
        for weights in (layer.w_uvqk, layer.w_pos, layer.w_ts):
            assert float(weights.std()) == pytest.approx(0.02, rel=0.2)
        for name, shape in others.items():
            weight = state[f"layers.{number}.{name}"]
            bound = (6 / sum(shape)) ** 0.5
            assert weight.shape == shape
            assert 0.9 * bound < float(weight.abs().max()) <= bound
    assert all(not value.any() for name, value in state.items() if name.endswith("bias"))


def test_refusals() -> None:
    batch, rows = histories([2, 1], MAX_LENGTH), make_rows()
    embeddings = embedded(batch, rows)
    model = make(HSTU)
    with pytest.raises(ValueError, match=r"times must have max_length \+ 1 = 6 columns, got \[2, 5\]"):
        model(embeddings, {"times": batch.inputs["times"][:, :5]})
    with pytest.raises(ValueError, match="'history', 'target' and 'negatives' must share one table"):
        model(embeddings | {"negatives": replace(embeddings["negatives"], table_name="other")}, batch.inputs)
    with pytest.raises(ValueError, match="'history' must be a sequence of dim 4, got one that is pooled"):
        model(embeddings | {"history": rows}, batch.inputs)
    with pytest.raises(ValueError, match="'target' must be a sequence of dim 4, got one that is of dim 3"):
        model(embeddings | {"target": embedded(batch, rows[:, :3])["target"]}, batch.inputs)
    with pytest.raises(ValueError, match="'target' has 4 items for 2 samples"):
        model(embeddings | {"target": embedded(histories([0] * 4, 5), rows)["target"]}, batch.inputs)
    for options, text in (
        ({"negatives_per": "batch"}, "negatives_per is 'batch'"),
        ({"attention": "fast"}, "attention is 'fast'"),
        ({"max_length": 0}, "max_length is 0"),
    ):
        for model_class in (HSTU, FuXi):
            with pytest.raises(ValueError, match=text):
                model_class(**options)
