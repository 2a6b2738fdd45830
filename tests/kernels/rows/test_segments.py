"""Tests sums of segments against a loop in the same order, to the bit: nothing is fused or reordered.

Fails, for example, if _pieces always returns None, so that a long segment is one sum, or if sum_kernel takes weight j
instead of the one that weight_places names.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.rows import segments as segments_module
from nestpipe.kernels.rows.segments import Segments, by_row, make_segments, one_each, sum_segments
from tests.kernels.bits import ALL_DIMS, DTYPES, columns, same_bits

LENGTHS = (3, 0, 1, 15, 16, 0, 17, 5, 48, 100, 2, 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes pieces small, since the interpreter is slow."""
    monkeypatch.setattr(segments_module, "PIECE", 16)


def in_order(values: Tensor, segments: Segments, weights: Tensor | None) -> Tensor:
    """Sums entry after entry within pieces, then piece after piece."""
    rows, num_segments, size = values.cpu().numpy(), segments.num_segments, segments_module.PIECE
    offsets = range(num_segments + 1) if segments.offsets is None else segments.offsets.tolist()
    order = None if segments.order is None else segments.order.tolist()
    places = None if segments.weight_places is None else segments.weight_places.tolist()
    weight_values = None if weights is None else weights.cpu().numpy()
    out = torch.zeros(num_segments, values.shape[1], dtype=values.dtype)
    sums = out.numpy()
    for s in range(num_segments):
        for start in range(offsets[s], offsets[s + 1], size):
            piece = 0 * sums[s]
            for j in range(start, min(start + size, offsets[s + 1])):
                row = j if order is None else order[j]
                if row < len(rows):
                    weighted = weight_values is not None
                    piece += weight_values[j if places is None else places[j]] * rows[row] if weighted else rows[row]
            sums[s] += piece
    return out


def drawn(lengths: tuple[int, ...], num_values: int) -> Segments:
    """Draws segments in which about one entry in ten is padding."""
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    order = torch.randint(0, num_values + max(1, num_values // 10), (int(offsets[-1]),)).clamp_(max=num_values)
    return make_segments(order, offsets)


@pytest.mark.usefixtures("small_pieces")
@ALL_DIMS
@pytest.mark.parametrize("is_weighted", [False, True])
def test_against_a_loop(dim: int, dtype: torch.dtype, is_weighted: bool, device: torch.device, monkeypatch) -> None:
    torch.manual_seed(dim)
    values, _ = columns(50, dim, dtype, device)
    out, whole = columns(len(LENGTHS), dim, dtype, device)
    segments, weights = drawn(LENGTHS, 50), None
    if is_weighted:
        weights = torch.randn(len(segments.order), dtype=dtype)
        segments = replace(segments, weight_places=torch.randperm(len(weights)))
    on_device, device_weights = segments.to(device), None if weights is None else weights.to(device)
    before = whole.clone()
    sum_segments(values, on_device, device_weights, out)
    expected = in_order(values, segments, weights)
    assert same_bits(out, expected)
    whole[:, 2 : 2 + dim] = before[:, 2 : 2 + dim]
    assert same_bits(whole, before), "columns outside of out changed"
    by_reference = torch.empty_like(out)
    monkeypatch.setattr("nestpipe.kernels.rows.segments.runs_triton", lambda *arrays: False)
    sum_segments(values, on_device, device_weights, by_reference)
    assert same_bits(by_reference, expected)


@pytest.mark.usefixtures("small_pieces")
def test_each_alone_and_again(device: torch.device) -> None:
    """A sum depends neither on the rest of the launch nor on the run. Fails if _pieces cuts at multiples of PIECE."""
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
    assert len(segments.pieces.starts) == -(-30_003 // 128)
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


@pytest.mark.parametrize("has_offsets", [False, True])
def test_by_row(has_offsets: bool) -> None:
    """A row has its occurrences in order. Fails if padding stays, or order has occurrences instead of samples."""
    torch.manual_seed(4)
    num_rows, num_samples = 6, 40_000
    lengths = torch.randint(0, 3, (num_samples,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) if has_offsets else None
    index = torch.randint(0, num_rows + 1, (int(lengths.sum()) if has_offsets else num_samples,))
    sample_of = torch.arange(num_samples).repeat_interleave(lengths) if has_offsets else torch.arange(num_samples)
    segments = by_row(index, offsets, num_rows, has_weights=True)
    assert segments.num_segments == num_rows
    assert int(segments.offsets[-1]) == int((index < num_rows).sum())
    for row in range(num_rows):
        entries = slice(*segments.offsets[row : row + 2].tolist())
        expected = (index == row).nonzero().flatten()
        assert torch.equal(segments.weight_places[entries], expected)
        assert torch.equal(segments.order[entries], sample_of[expected])
    assert by_row(index, offsets, num_rows).weight_places is None
    for start, end in zip(segments.pieces.starts, segments.pieces.ends, strict=True):
        assert 0 < end - start <= segments_module.PIECE


def sorted_by_torch(index: Tensor, offsets: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns offsets of the rows, samples and occurrences."""
    occurrences = torch.sort(index, stable=True)[1]
    counts = torch.bincount(index, minlength=num_rows + 1)[:num_rows]
    occurrences = occurrences[: int(counts.sum())]
    samples = occurrences if offsets is None else torch.repeat_interleave(offsets.diff())[occurrences]
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), samples, occurrences


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("kind", ["empty", "one row", "all equal", "all padding", "descending", "random", "few rows"])
def test_by_row_as_torch_sorts(kind: str, has_offsets: bool) -> None:
    """Fails if group_by_row goes through the samples backwards, or leaves out the shift of row_offsets at its end."""
    torch.manual_seed(5)
    num_rows = {"one row": 1, "few rows": 3}.get(kind, 500)
    index = {
        "empty": torch.empty(0, dtype=torch.int64),
        "all equal": torch.full((700,), 499),
        "all padding": torch.full((700,), 500),
        "descending": torch.arange(500, -1, -1),
    }.get(kind, torch.randint(0, num_rows + 1, (5000,)))
    cuts = torch.randint(0, len(index) + 1, (300,)).sort()[0]  # some samples are empty
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([len(index)])]) if has_offsets else None
    row_offsets, samples, occurrences = sorted_by_torch(index, offsets, num_rows)
    for has_weights in (False, True):
        segments = by_row(index, offsets, num_rows, has_weights)
        made = make_segments(samples, row_offsets, occurrences if has_weights else None)
        assert segments.num_segments == made.num_segments
        arrays = zip(_arrays(segments), _arrays(made), strict=True)
        assert all(torch.equal(one, other) for one, other in arrays)


def _arrays(segments: Segments) -> list[Tensor]:
    arrays: list[Tensor] = []
    segments.map(lambda array: arrays.append(array) or array)
    return arrays


def test_by_row_of_nothing() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    segments = by_row(nothing, None, 3)
    assert (segments.offsets.tolist(), segments.order.tolist(), segments.pieces) == ([0, 0, 0, 0], [], None)
    assert by_row(nothing, torch.tensor([0, 0]), 0).num_segments == 0


def test_refusals(device: torch.device) -> None:
    for index in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"outside 0 \.\. 3"):
            by_row(index, None, 3)
    for offsets in (torch.tensor([0, 3]), torch.tensor([0, 1]), torch.tensor([0, -1, 2]), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="offsets do not rise"):
            by_row(torch.tensor([0, 1]), offsets, 3)
    with pytest.raises(ValueError, match=r"index is torch\.int32"):
        by_row(torch.tensor([0, 1], dtype=torch.int32), None, 3)
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
    """Fails if sum_segments asks the device which segments are long."""
    values = torch.randn(50, 64, device=accelerator)
    segments = drawn(LENGTHS, 50).to(accelerator)
    out = torch.empty(len(LENGTHS), 64, device=accelerator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_segments(values, segments, None, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
