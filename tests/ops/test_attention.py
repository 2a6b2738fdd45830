"""Tests the blocked form of attention against the plain one, and its order of summation.

Fails, for example, if `distance * self.size` is left out of Blocks.position_index, if _causal masks nothing, if a
gradient is not scaled by max_length, or if _add_time_gradient is given the heads' gradients unsummed.
"""

import pytest
import torch
from torch import Tensor

from nestpipe.ops.attention import fuxi_attention, hstu_attention
from nestpipe.ops.sequences import Sequences, time_bounds, time_buckets
from tests.histories import histories

OPS = [hstu_attention, fuxi_attention]
LENGTHS = [0, 1, 63, 64, 65, 150, 0, 200, 2]
MAX_LENGTH = 200
NAMES = ("q", "k", "v", "w_pos", "w_ts")


def make_sequences(lengths: list[int], max_length: int = MAX_LENGTH, seed: int = 0) -> Sequences:
    batch = histories(lengths, max_length, seed=seed)
    return Sequences(batch.keys["history"].offsets, batch.inputs["times"])


def make_arrays(
    num_tokens: int, max_length: int = MAX_LENGTH, dtype=torch.float64, heads: int = 2
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, 5), (num_tokens, heads, 5), (num_tokens, heads, 3), (2 * max_length - 1,), (129,)]
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return dict(zip(NAMES, values, strict=True))


def outcome(op, arrays: dict[str, Tensor], sequences: Sequences, form: str, slopes: Tensor | None = None):
    """Returns the output and the gradients of all inputs."""
    arrays = {name: array.clone().requires_grad_() for name, array in arrays.items()}
    out = op(**arrays, sequences=sequences, form=form)
    if slopes is None:
        slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    (out * slopes).sum().backward()
    return {"out": out.detach()} | {name: array.grad for name, array in arrays.items()}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", [1, 2])
def test_blocked_equals_plain(op, heads: int) -> None:
    sequences = make_sequences(LENGTHS)
    arrays = make_arrays(sum(LENGTHS), heads=heads)
    blocked, plain = (outcome(op, arrays, sequences, form) for form in ("blocked", "plain"))
    for name, expected in plain.items():
        assert bool(expected.abs().sum() > 0), name
        torch.testing.assert_close(blocked[name], expected, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [3, 0, 3]])
def test_short_and_empty(op, lengths: list[int]) -> None:
    sequences = make_sequences(lengths, max_length=3)
    arrays = make_arrays(sum(lengths), max_length=3)
    blocked, plain = (outcome(op, arrays, sequences, form) for form in ("blocked", "plain"))
    for name, expected in plain.items():
        torch.testing.assert_close(blocked[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_bits_of_a_sample_do_not_depend_on_others(op, dtype: torch.dtype) -> None:
    """Compares output and gradients of q, k, v. Fails if Blocks.pairs runs backwards for an even `most_blocks`."""
    sequences = make_sequences(LENGTHS)
    arrays = make_arrays(sum(LENGTHS), dtype=dtype)
    width = 3 if op is hstu_attention else 9
    slopes = torch.randn(sum(LENGTHS), 2, width, generator=torch.Generator().manual_seed(7), dtype=dtype)
    together = outcome(op, arrays, sequences, "blocked", slopes)
    for sample in (2, 4, 5):
        part = slice(*sequences.offsets[sample : sample + 2].tolist())
        own = {name: array if name.startswith("w") else array[part] for name, array in arrays.items()}
        offsets = torch.tensor([0, LENGTHS[sample]])
        alone = outcome(op, own, Sequences(offsets, sequences.times[sample][None]), "blocked", slopes[part])
        for name in ("out", "q", "k", "v"):
            assert torch.equal(alone[name], together[name][part]), (sample, name)


@pytest.mark.parametrize("op", OPS)
def test_the_same_bits_again(op) -> None:
    sequences = make_sequences(LENGTHS)
    arrays = make_arrays(sum(LENGTHS), dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (outcome(op, arrays, sequences, "blocked") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", ["blocked", "plain"])
@pytest.mark.parametrize("op", OPS)
def test_bfloat16_is_computed_in_float32(op, form: str) -> None:
    """Gradients of w_pos and w_ts, in float32, are as precise as with tokens in float32. Fails without `wide`."""
    sequences = make_sequences(LENGTHS)
    arrays = make_arrays(sum(LENGTHS), dtype=torch.float32)
    tokens = {name: arrays[name].bfloat16() for name in "qkv"}
    width = 3 if op is hstu_attention else 9
    slopes = torch.randn(sum(LENGTHS), 2, width, generator=torch.Generator().manual_seed(7)).bfloat16()
    low = outcome(op, arrays | tokens, sequences, form, slopes)
    exact = {name: array.double() for name, array in (arrays | tokens).items()}
    expected = outcome(op, exact, sequences, "plain", slopes.double())
    for name, value in expected.items():
        is_weight = name.startswith("w")
        assert low[name].dtype == (torch.float32 if is_weight else torch.bfloat16)
        error = float((low[name].double() - value).norm() / value.norm())
        assert error < (1e-6 if is_weight else 4e-3), (name, error)


@pytest.mark.parametrize("form", ["blocked", "plain"])
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op, form: str) -> None:
    """This holds for backward too where it is our own. Fails without `without_autocast`."""
    sequences = make_sequences(LENGTHS)
    arrays = make_arrays(sum(LENGTHS), dtype=torch.float32)
    expected = outcome(op, arrays, sequences, form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = outcome(op, arrays, sequences, form)
    assert all(torch.equal(got[name], expected[name]) for name in (expected if form == "blocked" else ["out"]))


def test_times_after_the_target_are_not_read() -> None:
    sequences = make_sequences([2, 3], max_length=6)
    arrays = make_arrays(5, max_length=6)
    times = sequences.times.clone()
    times[0, 3:], times[1, 4:] = 10**9, -5
    for op in OPS:
        for form in ("blocked", "plain"):
            one, other = (
                op(**arrays, sequences=s, form=form) for s in (sequences, Sequences(sequences.offsets, times))
            )
            assert torch.equal(one, other)


def test_time_buckets() -> None:
    differences = torch.tensor([0, 1, -1, 2, 3, -3, 60, 3600, 86400 * 365, 2**62])
    assert time_buckets(differences).tolist() == [0, 0, 0, 2, 3, 3, 13, 27, 57, 128]


def test_time_bounds() -> None:
    """The number of bounds up to a difference is its bucket, around every bound."""
    bounds = time_bounds(torch.device("cpu"))
    assert len(bounds) == 128
    differences = torch.cat([bounds + shift for shift in range(-1000, 1001)]).clamp_(min=0)
    assert torch.equal(torch.searchsorted(bounds, differences, right=True), time_buckets(differences))


def test_lengths_may_be_given() -> None:
    """Given lengths, offsets are not read, which may be on a device; here they are a meta tensor, which cannot be."""
    times = torch.zeros(3, 4, dtype=torch.int64)
    offsets = torch.tensor([0, 2, 2, 5], device="meta")
    assert Sequences(offsets, times, [2, 0, 3]).num_tokens == 5
    with pytest.raises(ValueError, match="there are 2 lengths for 3 samples"):
        Sequences(offsets, times, [2, 3])


def test_refusals() -> None:
    sequences, arrays = make_sequences([2, 3], max_length=6), make_arrays(5, max_length=6)
    with pytest.raises(ValueError, match="attention is 'fast', must be one of 'blocked', 'kernel', 'plain'"):
        hstu_attention(**arrays, sequences=sequences, form="fast")
    with pytest.raises(ValueError, match="for a max_length of 5, but times has 7 columns"):
        hstu_attention(**arrays | {"w_pos": torch.zeros(9)}, sequences=sequences)
    with pytest.raises(ValueError, match="a sequence has 7 tokens; the longest allowed has 6"):
        Sequences(torch.tensor([0, 7, 8]), sequences.times)
    with pytest.raises(ValueError, match="times must have a line for each of 3 samples"):
        Sequences(torch.tensor([0, 1, 2, 3]), sequences.times)
    with pytest.raises(ValueError, match="times must be integers"):
        Sequences(sequences.offsets, sequences.times.double())
