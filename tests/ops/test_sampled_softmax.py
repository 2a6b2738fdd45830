"""Sampled softmax: the blocked form against the plain one, and its order of summation.

Fails, for example, if a negative that is the next item is not left out, if the tokens that fill up a block count, or if
the gradient of the next item's row is forgotten. tests/models/test_next_item.py has a slow version.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Jagged
from nestpipe.ops.sampled_softmax import sampled_softmax
from nestpipe.ops.sequences import Sequences
from tests.histories import NUM_ITEMS, embedded, histories

LENGTHS = [0, 1, 70, 3, 64, 0, 130]
MAX_LENGTH = 130
DIM = 6


def make(per: str, lengths: list[int] = LENGTHS) -> tuple[dict[str, Tensor], dict]:
    batch = histories(lengths, MAX_LENGTH, num_negatives=5, per=per)
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    leaves = {
        "outputs": torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64),
        "rows": torch.randn(NUM_ITEMS, DIM, generator=generator, dtype=torch.float64),
    }
    rest = {
        "batch": batch,
        "sequences": Sequences(batch.keys["history"].offsets, batch.inputs["times"]),
        "negatives_per": per,
    }
    return leaves, rest


def loss_of(outputs: Tensor, rows: Tensor, batch: Batch, **others) -> Tensor:
    return sampled_softmax(outputs, **embedded(batch, rows), **others)


def with_keys(batch: Batch, key: int) -> Batch:
    """The same key everywhere."""
    keys = {name: Jagged(torch.full_like(of.values, key), of.offsets) for name, of in batch.keys.items()}
    return replace(batch, keys=keys)


def outcome(leaves: dict[str, Tensor], rest: dict, form: str) -> dict[str, Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    loss = loss_of(**leaves, **rest, form=form)
    (loss / 7).backward()
    return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, the last one smaller."""
    monkeypatch.setattr("nestpipe.ops.sampled_softmax.GATHERED_ELEMENTS", 5 * 64 * 2)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("per", ["position", "sample"])
def test_blocked_equals_plain(per: str) -> None:
    leaves, rest = make(per)
    blocked, plain = (outcome(leaves, rest, form) for form in ("blocked", "plain"))
    for name, expected in plain.items():
        torch.testing.assert_close(blocked[name], expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(loss_of(**leaves, **rest), blocked["loss"])


@pytest.mark.parametrize("per", ["position", "sample"])
def test_the_sums_of_samples_add_up(per: str) -> None:
    leaves, rest = make(per)
    whole = outcome(leaves, rest, "blocked")
    offsets, times = rest["sequences"].offsets, rest["sequences"].times
    total = {name: torch.zeros_like(value) for name, value in whole.items()}
    for sample in range(len(LENGTHS)):
        first, end = offsets[sample : sample + 2].tolist()
        own = {
            "batch": rest["batch"][torch.tensor([sample])],
            "sequences": Sequences(torch.tensor([0, end - first]), times[sample][None]),
            "negatives_per": per,
        }
        part = outcome({"outputs": leaves["outputs"][first:end], "rows": leaves["rows"]}, own, "blocked")
        total["loss"] += part["loss"]
        total["rows"] += part["rows"]
        total["outputs"][first:end] = part["outputs"]
    for name, expected in whole.items():
        torch.testing.assert_close(total[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per", ["position", "sample"])
def test_only_the_next_item_among_the_negatives_costs_nothing(per: str) -> None:
    leaves, rest = make(per, [2, 1])
    result = outcome(leaves, rest | {"batch": with_keys(rest["batch"], 4)}, "blocked")
    assert float(result["loss"]) == pytest.approx(0, abs=1e-12)
    assert float(result["rows"].abs().max()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("per", ["position", "sample"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(per: str, lengths: list[int]) -> None:
    leaves, rest = make(per, lengths)
    result = outcome(leaves, rest, "blocked")
    assert float(result["loss"]) == 0.0
    assert not result["rows"].any()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("per", ["position", "sample"])
def test_the_same_bits_again(per: str) -> None:
    leaves, rest = make(per)
    leaves = {name: leaf.float() for name, leaf in leaves.items()}
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (outcome(leaves, rest, "blocked") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", ["blocked", "plain"])
@pytest.mark.parametrize("per", ["position", "sample"])
def test_autocast_changes_nothing(per: str, form: str) -> None:
    """It is computed in the rows' dtype. Fails if sampled_softmax leaves autocast as it is."""
    leaves, rest = make(per)
    leaves = {"outputs": leaves["outputs"].bfloat16(), "rows": leaves["rows"].float()}
    expected = outcome(leaves | {"outputs": leaves["outputs"].float()}, rest, form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = outcome(leaves, rest, form)
    assert got["outputs"].dtype == torch.bfloat16
    assert torch.equal(got["loss"], expected["loss"])
    if form == "blocked":  # whose backward has only to scale
        torch.testing.assert_close(got["rows"], expected["rows"])
        torch.testing.assert_close(got["outputs"].float(), expected["outputs"], rtol=1e-2, atol=1e-5)


def test_refusals() -> None:
    leaves, rest = make("position", [2, 1])
    keys = rest["batch"].keys
    fewer = keys | {"negatives": Jagged(keys["negatives"].values[:14], torch.tensor([0, 10, 14]))}
    with pytest.raises(ValueError, match="there are 14 negatives for 3 positions"):
        loss_of(**leaves, **rest | {"batch": replace(rest["batch"], keys=fewer)})
    with pytest.raises(ValueError, match="negatives_per is 'batch', must be 'position' or 'sample'"):
        loss_of(**leaves, **rest | {"negatives_per": "batch"})
    with pytest.raises(ValueError, match="form is 'fast', must be one of 'blocked', 'kernel', 'plain'"):
        loss_of(**leaves, **rest, form="fast")
    with pytest.raises(ValueError, match=r"got negatives of each position, torch.float64 and torch.float64; use 'bl"):
        loss_of(**leaves, **rest, form="kernel")


def test_kernels_are_not_taken_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    leaves, rest = make("sample", [2, 1])
    with pytest.raises(ValueError, match="form 'kernel' needs a CUDA device and Triton"):
        loss_of(**{name: leaf.float() for name, leaf in leaves.items()}, **rest, form="kernel")
