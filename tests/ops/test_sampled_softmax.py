"""Tests the blocked form of the sampled softmax against the plain one, and its order of summation.

Fails, for example, if a negative that is the next item is not left out, if padding of a block counts, or if the
gradient of the next item's row is left out. tests/models/test_next_item.py has a slow version.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Jagged
from nestpipe.ops.sampled_softmax import add_in_order, add_sorted, sampled_softmax
from nestpipe.ops.sequences import Sequences
from tests.histories import NUM_ITEMS, embedded, histories

LENGTHS = [0, 1, 70, 3, 64, 0, 130]
MAX_LENGTH = 130
DIM = 6


def make(per: str, lengths: list[int] = LENGTHS) -> tuple[dict[str, Tensor], dict]:
    batch = histories(lengths, MAX_LENGTH, num_negatives=5, per=per)
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    arrays = {
        "outputs": torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64),
        "rows": torch.randn(NUM_ITEMS, DIM, generator=generator, dtype=torch.float64),
    }
    rest = {
        "batch": batch,
        "sequences": Sequences(batch.keys["history"].offsets, batch.inputs["times"]),
        "negatives_per": per,
    }
    return arrays, rest


def loss_of(outputs: Tensor, rows: Tensor, batch: Batch, **others) -> Tensor:
    return sampled_softmax(outputs, **embedded(batch, rows), **others)


def with_keys(batch: Batch, key: int) -> Batch:
    """Returns the batch with the same key everywhere."""
    keys = {name: Jagged(torch.full_like(jagged.values, key), jagged.offsets) for name, jagged in batch.keys.items()}
    return replace(batch, keys=keys)


def outcome(arrays: dict[str, Tensor], rest: dict, form: str) -> dict[str, Tensor]:
    arrays = {name: array.clone().requires_grad_() for name, array in arrays.items()}
    loss = loss_of(**arrays, **rest, form=form)
    (loss / 7).backward()
    return {"loss": loss.detach()} | {name: array.grad for name, array in arrays.items()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes several parts, the last one smaller."""
    monkeypatch.setattr("nestpipe.ops.sampled_softmax.GATHERED_ELEMENTS", 5 * 64 * 2)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("per", ["position", "sample"])
def test_blocked_equals_plain(per: str) -> None:
    arrays, rest = make(per)
    blocked, plain = (outcome(arrays, rest, form) for form in ("blocked", "plain"))
    for name, expected in plain.items():
        torch.testing.assert_close(blocked[name], expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(loss_of(**arrays, **rest), blocked["loss"])


@pytest.mark.parametrize("per", ["position", "sample"])
def test_the_sums_of_samples_add_up(per: str) -> None:
    arrays, rest = make(per)
    whole = outcome(arrays, rest, "blocked")
    offsets, times = rest["sequences"].offsets, rest["sequences"].times
    total = {name: torch.zeros_like(value) for name, value in whole.items()}
    for sample in range(len(LENGTHS)):
        first, end = offsets[sample : sample + 2].tolist()
        own = {
            "batch": rest["batch"][torch.tensor([sample])],
            "sequences": Sequences(torch.tensor([0, end - first]), times[sample][None]),
            "negatives_per": per,
        }
        part = outcome({"outputs": arrays["outputs"][first:end], "rows": arrays["rows"]}, own, "blocked")
        total["loss"] += part["loss"]
        total["rows"] += part["rows"]
        total["outputs"][first:end] = part["outputs"]
    for name, expected in whole.items():
        torch.testing.assert_close(total[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per", ["position", "sample"])
def test_only_the_next_item_among_the_negatives_costs_nothing(per: str) -> None:
    arrays, rest = make(per, [2, 1])
    result = outcome(arrays, rest | {"batch": with_keys(rest["batch"], 4)}, "blocked")
    assert float(result["loss"]) == pytest.approx(0, abs=1e-12)
    assert float(result["rows"].abs().max()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("per", ["position", "sample"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(per: str, lengths: list[int]) -> None:
    arrays, rest = make(per, lengths)
    result = outcome(arrays, rest, "blocked")
    assert float(result["loss"]) == 0.0
    assert not result["rows"].any()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("per", ["position", "sample"])
def test_the_same_bits_again(per: str) -> None:
    arrays, rest = make(per)
    arrays = {name: array.float() for name, array in arrays.items()}
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (outcome(arrays, rest, "blocked") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", ["blocked", "plain"])
@pytest.mark.parametrize("per", ["position", "sample"])
def test_autocast_changes_nothing(per: str, form: str) -> None:
    """The loss is computed in the rows' dtype. Fails if sampled_softmax leaves autocast on."""
    arrays, rest = make(per)
    arrays = {"outputs": arrays["outputs"].bfloat16(), "rows": arrays["rows"].float()}
    expected = outcome(arrays | {"outputs": arrays["outputs"].float()}, rest, form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = outcome(arrays, rest, form)
    assert got["outputs"].dtype == torch.bfloat16
    assert torch.equal(got["loss"], expected["loss"])
    if form == "blocked":  # its backward only scales
        torch.testing.assert_close(got["rows"], expected["rows"])
        torch.testing.assert_close(got["outputs"].float(), expected["outputs"], rtol=1e-2, atol=1e-5)


def test_refusals() -> None:
    arrays, rest = make("position", [2, 1])
    keys = rest["batch"].keys
    fewer = keys | {"negatives": Jagged(keys["negatives"].values[:14], torch.tensor([0, 10, 14]))}
    with pytest.raises(ValueError, match="there are 14 negatives for 3 positions"):
        loss_of(**arrays, **rest | {"batch": replace(rest["batch"], keys=fewer)})
    with pytest.raises(ValueError, match="negatives_per is 'batch', must be 'position' or 'sample'"):
        loss_of(**arrays, **rest | {"negatives_per": "batch"})
    with pytest.raises(ValueError, match="form is 'fast', must be one of 'blocked', 'kernel', 'plain'"):
        loss_of(**arrays, **rest, form="fast")
    with pytest.raises(ValueError, match=r"got negatives of each position, torch.float64 and torch.float64; use 'bl"):
        loss_of(**arrays, **rest, form="kernel")


def test_kernels_are_refused_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arrays, rest = make("sample", [2, 1])
    with pytest.raises(ValueError, match="form 'kernel' needs a CUDA device and Triton"):
        loss_of(**{name: array.float() for name, array in arrays.items()}, **rest, form="kernel")


def test_sums_in_the_order_of_the_index() -> None:
    """Compares the sums of an accelerator with a CPU's where the order shows. Fails if sorted sums run backwards."""
    source = torch.tensor([1e8, 1.0, -1e8, 1.0]).repeat(50).repeat(3, 1).t().contiguous()
    index = torch.tensor([4, 1, 4, 4, 1, 0, 0]).repeat(29)[: len(source)]
    expected, got = torch.zeros(6, 3), torch.zeros(6, 3)
    add_in_order(expected, index, source)
    add_sorted(got, index, source)
    assert torch.equal(got, expected)
    backwards = torch.zeros(6, 3)
    add_in_order(backwards, index.flip(0), source.flip(0))
    assert not torch.equal(backwards, expected)


def test_sums_are_added_to_the_target() -> None:
    target = torch.tensor([[1.0], [2.0], [3.0]])
    add_sorted(target, torch.tensor([2, 2, 0]), torch.tensor([[0.5], [0.25], [4.0]]))
    assert target.tolist() == [[5.0], [2.0], [3.75]]
    add_sorted(target, torch.tensor([], dtype=torch.int64), torch.zeros(0, 1))
    assert target.tolist() == [[5.0], [2.0], [3.75]]
