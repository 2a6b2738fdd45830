"""Tests sums of segments against a loop in the same order, to the bit: nothing is fused or reordered.

Fails, for example, if make_segments never makes pieces, so that a long segment is one sum, or if sum_kernel takes
weight j instead of the one that weight_places names.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.rows import segments as segments_module
from nestpipe.kernels.rows.segments import Segments, make_pieces, make_segments, one_each, sum_segments
from tests.kernels.bits import ALL_DIMS, DTYPES, columns, same_bits

LENGTHS = (3, 0, 1, 15, 16, 0, 17, 5, 48, 100, 2, 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pieces small, since the interpreter is slow."""
    monkeypatch.setattr(segments_module, "PIECE", 16)


def in_order(values: Tensor, segments: Segments, weights: Tensor | None, spacing: tuple[int, int] = (1, 1)) -> Tensor:
    """Sums entry after entry within pieces, then piece after piece."""
    rows, num_segments, size = values.cpu().numpy(), segments.num_segments, segments_module.PIECE
    offsets = range(num_segments + 1) if segments.offsets is None else segments.offsets.tolist()
    ends = offsets[1:] if segments.ends is None else segments.ends.tolist()
    order = None if segments.order is None else segments.order.tolist()
    places = None if segments.weight_places is None else segments.weight_places.tolist()
    weight_values = None if weights is None else weights.cpu().numpy()
    out = torch.zeros(num_segments, values.shape[1], dtype=values.dtype)
    sums = out.numpy()
    for s in range(num_segments):
        for start in range(offsets[s], ends[s], size):
            piece = 0 * sums[s]
            for j in range(start, min(start + size, ends[s])):
                group, place = divmod(j if order is None else order[j], spacing[0])
                row = group * spacing[1] + place
                if row < len(rows):
                    weighted = weight_values is not None
                    piece += weight_values[j if places is None else places[j]] * rows[row] if weighted else rows[row]
            sums[s] += piece
    return out


def sums_of(
    values: Tensor,
    segments: Segments,
    weights: Tensor | None,
    spacing: tuple[int, int] | None = None,
    by_kernels: bool = True,
) -> Tensor:
    """Returns sums by kernels or by plain torch."""
    device = values.device
    out = torch.full((segments.num_segments, values.shape[1]), torch.nan, dtype=values.dtype, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments_module, "runs_triton", lambda *arrays: by_kernels)
        sum_segments(values, segments.to(device), None if weights is None else weights.to(device), out, spacing)
    return out


def drawn(lengths: tuple[int, ...], num_values: int) -> Segments:
    """Draws segments in which about one entry in ten is padding."""
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    order = torch.randint(0, num_values + max(1, num_values // 10), (int(offsets[-1]),)).clamp_(max=num_values)
    return make_segments(order, offsets)


@pytest.mark.usefixtures("small_pieces")
@ALL_DIMS
@pytest.mark.parametrize("is_weighted", [False, True])
def test_against_a_loop(dim: int, dtype: torch.dtype, is_weighted: bool, device: torch.device) -> None:
    torch.manual_seed(dim)
    values, _ = columns(50, dim, dtype, device)
    out, whole = columns(len(LENGTHS), dim, dtype, device)
    segments, weights = drawn(LENGTHS, 50), None
    if is_weighted:
        weights = torch.randn(len(segments.order), dtype=dtype)
        segments = replace(segments, weight_places=torch.randperm(len(weights)))
    before = whole.clone()
    sum_segments(values, segments.to(device), None if weights is None else weights.to(device), out)
    expected = in_order(values, segments, weights)
    assert same_bits(out, expected)
    whole[:, 2 : 2 + dim] = before[:, 2 : 2 + dim]
    assert same_bits(whole, before), "columns outside of out changed"
    assert same_bits(sums_of(values, segments, weights, by_kernels=False), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("size", "distance"), [(1, 1), (1, 3), (2, 3), (4, 4), (5, 6), (7, 20)])
@pytest.mark.parametrize("has_order", [False, True])
def test_rows_in_groups(size: int, distance: int, has_order: bool, device: torch.device) -> None:
    """Rows between the groups hold NaN. Fails if sum_segments sums pieces without `spacing`."""
    torch.manual_seed(size)
    num_rows = 30 * size
    places = torch.arange(num_rows) // size * distance + torch.arange(num_rows) % size
    values = torch.full((29 * distance + size, 9), torch.nan)
    values[places] = torch.randn(num_rows, 9)
    lengths = LENGTHS if has_order else (0, 1, num_rows - 4, 3)
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    order = torch.randint(0, num_rows, (int(offsets[-1]),)) if has_order else None
    segments, weights = make_segments(order, offsets), torch.randn(int(offsets[-1]))
    assert segments.pieces is not None
    for given_weights in (None, weights):
        expected = in_order(values, segments, given_weights, (size, distance))
        assert not expected.isnan().any()
        for by_kernels in (True, False):
            sums = sums_of(values.to(device), segments, given_weights, (size, distance), by_kernels)
            assert same_bits(sums, expected)


@pytest.mark.usefixtures("small_pieces")
def test_segments_that_do_not_touch(device: torch.device) -> None:
    """Entries between segments hold NaN. Fails if Segments.bounds ignores `ends`, or piece_kernel ends pieces at
    `begin + PIECE`."""
    torch.manual_seed(6)
    starts, ends = torch.tensor([90, 3, 40, 0, 1, 20]), torch.tensor([140, 20, 40, 1, 1, 39])
    order = torch.full((160,), 30)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        order[start:end] = torch.randint(0, 30, (end - start,))
    values, weights = torch.randn(31, 9, dtype=torch.float64), torch.randn(160, dtype=torch.float64)
    values[30] = torch.nan
    pieces = make_pieces(starts, ends, int((ends - starts).sum()))
    segments = Segments(len(starts), order, starts, ends, None, pieces)
    for given_weights in (None, weights):
        expected = in_order(values, segments, given_weights)
        assert not expected.isnan().any()
        for by_kernels in (True, False):
            sums = sums_of(values.to(device), segments, given_weights, by_kernels=by_kernels)
            assert same_bits(sums, expected)


@pytest.mark.usefixtures("small_pieces")
def test_each_alone_and_again(device: torch.device) -> None:
    """A sum depends neither on the rest of the launch nor on the run. Fails if piece_kernel begins at
    `begin // PIECE * PIECE`."""
    torch.manual_seed(3)
    values, weights = torch.randn(40, 70, device=device), torch.randn(sum(LENGTHS), device=device)
    segments = drawn(LENGTHS, 40)
    out = [torch.empty(len(LENGTHS), 70, device=device) for _ in range(3)]
    for sums in out:
        sum_segments(values, segments.to(device), weights, sums)
        assert same_bits(sums, out[0])
    for s in range(len(LENGTHS)):
        first, end = segments.offsets[s : s + 2].tolist()
        alone = make_segments(segments.order[first:end], torch.tensor([0, end - first]))
        sum_of_one = torch.empty(1, 70, device=device)
        sum_segments(values, alone.to(device), weights[first:end], sum_of_one)
        assert same_bits(sum_of_one[0], out[0][s])


def test_hot_segment_between_empty_ones(device: torch.device) -> None:
    lengths = (0,) * 300 + (30_003,) + (0,) * 300
    values, segments = torch.randn(30, 2, dtype=torch.float64, device=device), drawn(lengths, 30)
    assert int(segments.pieces.lasts[-1]) == -(-30_003 // 128)
    out = torch.empty(len(lengths), 2, dtype=torch.float64, device=device)
    sum_segments(values, segments.to(device), None, out)
    assert same_bits(out, in_order(values, segments, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_each_and_entries_as_they_stand(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.randn(20, 9, dtype=dtype, device=device)
    index = torch.randint(0, 21, (100,))
    out = torch.empty(100, 9, dtype=dtype, device=device)
    sum_segments(values, one_each(index).to(device), None, out)
    assert same_bits(out.cpu(), torch.cat([values.cpu(), torch.zeros(1, 9, dtype=dtype)])[index])
    in_given_order = make_segments(None, torch.tensor([0, 0, 4, 5, 20]))
    sums = torch.empty(4, 9, dtype=dtype, device=device)
    sum_segments(values, in_given_order.to(device), None, sums)
    assert same_bits(sums, in_order(values, in_given_order, None))


def test_weights_of_padding_count_for_nothing(device: torch.device) -> None:
    """The weight of padding is NaN here. Fails if sum_kernel loads weights where i < length."""
    segments = make_segments(torch.tensor([0, 1, 0]), torch.tensor([0, 3])).to(device)
    out = torch.empty(1, 1, device=device)
    sum_segments(torch.tensor([[2.0]], device=device), segments, torch.tensor([1.0, torch.nan, 3.0]).to(device), out)
    assert out.item() == 8.0


def test_nothing_to_sum(device: torch.device) -> None:
    empty = make_segments(torch.empty(0, dtype=torch.int64), torch.tensor([0])).to(device)
    sum_segments(torch.zeros(3, 4, device=device), empty, None, torch.empty(0, 4, device=device))
    out = torch.ones(2, 4, device=device)
    no_entries = make_segments(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0, 0])).to(device)
    sum_segments(torch.zeros(0, 4, device=device), no_entries, None, out)
    assert not out.any()


PIECE_CASES = {
    "one piece": (128,),
    "two pieces": (129,),
    "short and long": (128, 128, 129, 0, 500, 1),
    "none before": (0, 257),
    "full": (640, 640),
    "no entries": (0, 0),
    "fewer than a piece": (0, 3),
    "more segments than a program has": (*(0,) * 500, 200, *(1,) * 600, 300, 0),
    "more pieces than a program has": (130, 70_000, 129),
}


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("name", PIECE_CASES)
def test_pieces(name: str, by_kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long segments are cut from their starts; pieces that are too many are empty. Fails if count_kernel cuts a segment
    of PIECE entries, or if make_pieces has room for num_entries // PIECE pieces only."""
    monkeypatch.setattr(segments_module, "runs_triton", lambda *arrays: by_kernels)
    offsets = torch.tensor((0, *PIECE_CASES[name])).cumsum(0).to(device)
    pieces = make_pieces(offsets[:-1], offsets[1:], int(offsets[-1]))
    expected = [
        [(start, min(start + 128, end)) for start in range(first, end, 128)] if end - first > 128 else []
        for first, end in pairwise(offsets.tolist())
    ]
    bounds = list(zip(pieces.starts.tolist(), pieces.ends.tolist(), strict=True))
    spans = zip(pieces.firsts.tolist(), pieces.lasts.tolist(), strict=True)
    assert [bounds[first:last] for first, last in spans] == expected
    assert set(bounds[sum(map(len, expected)) :]) <= {(0, 0)}


def test_refusals(device: torch.device) -> None:
    with pytest.raises(ValueError, match="order"):
        make_segments(torch.tensor([0, 1]), torch.tensor([0, 3]))
    segments, values = one_each(torch.tensor([0, 1])).to(device), torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="weights"):
        sum_segments(values, segments, torch.zeros(2, dtype=torch.float64, device=device), torch.empty_like(values))
    with pytest.raises(ValueError, match="weights"):
        sum_segments(values, segments, torch.zeros(1, device=device), torch.empty_like(values))
    with pytest.raises(ValueError, match=r"out has shape \[3, 3\]"):
        sum_segments(values, segments, None, torch.empty(3, 3, device=device))


def test_the_device_is_not_asked(accelerator: torch.device) -> None:
    """Fails if sum_segments asks the device which segments are long, or make_pieces how many pieces there are."""
    values = torch.randn(50, 64, device=accelerator)
    segments = drawn((*LENGTHS, 300), 50).to(accelerator)
    out = torch.empty(len(LENGTHS) + 1, 64, device=accelerator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pieces = make_pieces(*segments.bounds, len(segments.order))
        sum_segments(values, replace(segments, pieces=pieces), None, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_known_limit_of_entries_saves_looking_at_them() -> None:
    """Fails if make_segments makes no pieces where the limit allows long segments, or looks for some where it does
    not."""
    offsets = torch.tensor([0, segments_module.PIECE + 1])
    assert make_segments(None, offsets, longest=segments_module.PIECE + 1).pieces is not None
    assert make_segments(None, offsets, longest=segments_module.PIECE).pieces is None
