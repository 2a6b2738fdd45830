"""Codecs that round: what they write is what the formula says, whatever the shape of rows and messages.

Fails if rows of an odd number of columns share a word (`dim * itemsize // 4` in Cast._words), if chunks after the first
are written at the start of the message, or if padding is sent as it was.
"""

import pytest
import torch
from torch import Tensor

from nestpipe import PipelineOptions
from nestpipe.embedding.exchange.codec import PLAIN, Codecs
from nestpipe.embedding.exchange.rounding import ROUNDING, codec_of
from nestpipe.embedding.group import group_features
from nestpipe.embedding.host_memory import HostMemory
from nestpipe.embedding.table import Pooled, Table
from nestpipe.embedding.travel import message_unit

DTYPES = (torch.float32, torch.float64)
FORMULAS = {
    "float32": lambda rows: rows.float().to(rows.dtype),
    "bfloat16": lambda rows: rows.bfloat16().to(rows.dtype),
    "float16": lambda rows: rows.half().to(rows.dtype),
    "int8": lambda rows: torch.stack([in_int8(row) for row in rows]) if len(rows) > 0 else rows,
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def in_int8(row: Tensor) -> Tensor:
    scale = (row.abs().max() / 127).float().to(row.dtype)
    return (row / scale).round() * scale if scale > 0 else torch.zeros_like(row)


def rows_of(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Returns rows of many magnitudes, one of them 0, with gaps between them."""
    generator = torch.Generator().manual_seed(num_rows + dim)
    records = torch.randn(num_rows, dim + 2, generator=generator, dtype=dtype)
    records *= 10.0 ** torch.randint(-4, 4, (num_rows, 1), generator=generator)
    records[num_rows // 2] = 0
    return records[:, :dim]


@pytest.mark.parametrize("dim", [1, 3, 8, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUNDING)
def test_messages_have_what_the_formula_says(
    name: str, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestpipe.embedding.exchange.codec.CHUNK_BYTES", 5 * dim * dtype.itemsize)  # 5 rows
    codec, memory, rows = ROUNDING[name], HostMemory(), rows_of(23, dim, dtype)
    (group,) = group_features({"a": Pooled(Table("a", dim, dtype=dtype))}).groups
    width, expected = codec.row_bytes(group), FORMULAS[name](rows)
    for places in (None, torch.randperm(23)[:18]):
        sent = rows if places is None else rows[places]
        for is_spread in (False, True):
            message = torch.full((len(sent) * 3 * width,), 99, dtype=torch.uint8)
            step = 2 * width // message_unit(width)
            in_message = torch.randperm(len(sent)) * step if is_spread else None
            codec.write(memory, rows, places, message, in_message)
            back, to_places = torch.zeros(30, dim, dtype=dtype), torch.randperm(30)[: len(sent)]
            codec.read(memory, message, in_message, back, to_places)
            assert torch.equal(back[to_places], expected if places is None else expected[places])
        copied = torch.empty(len(sent), dim, dtype=dtype)
        codec.copy(memory, group, rows, places, copied, None)
        assert torch.equal(copied, expected if places is None else expected[places])


class UsedMemory(HostMemory):
    """Memory with other bytes in it each time."""

    def __init__(self, filling: int) -> None:
        self.filling = filling

    def empty_rows(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        rows = super().empty_rows(num_rows, dim, dtype)
        rows.view(torch.uint8).fill_(self.filling)
        return rows


@pytest.mark.parametrize("name", ROUNDING)
def test_the_same_rows_are_the_same_bytes(name: str) -> None:
    rows = rows_of(9, 3, torch.float64)
    (group,) = group_features({"a": Pooled(Table("a", 3, dtype=torch.float64))}).groups
    messages = []
    for filling in (0, 85):
        message = torch.zeros(9 * ROUNDING[name].row_bytes(group), dtype=torch.uint8)
        ROUNDING[name].write(UsedMemory(filling), rows, None, message, None)
        messages.append(message)
    assert torch.equal(*messages)


def test_rows_of_the_same_form_are_not_touched() -> None:
    (group,) = group_features({"a": Pooled(Table("a", 3))}).groups
    assert ROUNDING["float32"].row_bytes(group) == 12
    rows = torch.tensor([[1 / 3, float("inf"), -0.0]])
    copied = torch.empty(1, 3)
    ROUNDING["float32"].copy(HostMemory(), group, rows, None, copied, None)
    assert torch.equal(copied, rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ROUNDING)
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    rows = torch.tensor([[1.0, value, 2.0]])
    (group,) = group_features({"a": Pooled(Table("a", 3))}).groups
    copied = torch.empty(1, 3)
    ROUNDING[name].copy(HostMemory(), group, rows, None, copied, None)
    assert not copied.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUNDING)
def test_the_largest_number_is_finite(name: str, dtype: torch.dtype) -> None:
    """Numbers at the limit of a sum arrive, and so does their sum over all ranks."""
    codecs, (group,) = Codecs(PLAIN, ROUNDING[name]), group_features({"a": Pooled(Table("a", 3, dtype=dtype))}).groups
    for size in (1, 3):
        limit = torch.full((1, 3), codecs.sum_limit(dtype, size), dtype=dtype)
        copied = torch.empty(1, 3, dtype=dtype)
        codecs.gradients.copy(HostMemory(), group, limit, None, copied, None)
        assert (copied * size).isfinite().all()


def test_a_small_row_in_int8() -> None:
    """A scale that is too small for float32 becomes 0, and so does the row; none of its numbers is NaN."""
    (group,) = group_features({"a": Pooled(Table("a", 3))}).groups
    copied = torch.empty(2, 3)
    rows = torch.tensor([[1e-45, 0.0, -1e-45], [1e-40, 5e-41, 0.0]])
    ROUNDING["int8"].copy(HostMemory(), group, rows, None, copied, None)
    assert copied.isfinite().all()
    assert (copied - rows).abs().max() <= 1e-42


def test_names() -> None:
    assert codec_of(None) is PLAIN
    with pytest.raises(ValueError, match=r"row_dtype is 'half', must be one of 'float32', 'bfloat16'"):
        PipelineOptions(row_dtype="half")
    with pytest.raises(ValueError, match="gradient_dtype is a dtype, must be a name or a Codec"):
        PipelineOptions(gradient_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match='row_dtype needs window="once"'):
        PipelineOptions(row_dtype="bfloat16", window="resend")
