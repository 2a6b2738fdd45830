"""Tests the kernels of the sampled softmax against the plain form in float64, and that samples are independent.

Fails, for example, if softmax_kernel counts a negative that is the next item, if load_positives never loads the target,
if unit_backward leaves out `along` or its condition, if padding slots have a loss, or if negative_gradients stops after
the first unit of a sample.
"""

import pytest
import torch
from torch import Tensor

from nestpipe import Batch, Table
from nestpipe.embedding.device_memory import DeviceMemory
from nestpipe.embedding.features import Embeddings
from nestpipe.embedding.group import group_features
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.ops.sampled_softmax import sampled_softmax
from nestpipe.ops.sequences import Sequences
from tests.histories import NUM_ITEMS, embedded, histories
from tests.histories import features as declared
from tests.kernels.attention.cases import DEVICE, import_triton
from tests.kernels.bits import same_bits

import_triton()

Outcome = dict[str, Tensor]


def features(batch: Batch, rows: Tensor) -> Embeddings:
    """Returns features as the embedding part hands them over on a device. Row i is that of key i."""
    groups, memory = group_features(declared(Table("item", rows.shape[1]))), DeviceMemory(DEVICE, is_staged=False)
    (group,) = memory.upload_batch(memory.prepare_batch(groups, batch, 1, 1)).groups
    return Embeddings(groups, [group], 0, [ModelRows(rows[group.keys.to(DEVICE)])])


def make_batch(lengths: list[int], num_negatives: int) -> Batch:
    return histories(lengths, max([1, *lengths]), num_negatives, per="sample")


def make_arrays(num_tokens: int, dim: int) -> dict[str, Tensor]:
    """Makes arrays in float64 on the CPU, of values that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(dim)
    shapes = {"outputs": num_tokens, "rows": NUM_ITEMS}
    return {name: torch.randn(n, dim, generator=generator).bfloat16().double() for name, n in shapes.items()}


def kernel_loss(outputs: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    lengths = batch.keys["history"].offsets.diff().tolist()
    sequences = Sequences(batch.keys["history"].offsets.to(DEVICE), batch.inputs["times"].to(DEVICE), lengths)
    return sampled_softmax(outputs, **features(batch, rows), sequences=sequences, negatives_per="sample", form="kernel")


def kernel_outcome(arrays: dict[str, Tensor], batch: Batch, dtype: torch.dtype = torch.float32) -> Outcome:
    outputs, rows = arrays["outputs"].to(DEVICE, dtype), arrays["rows"].to(DEVICE, torch.float32)
    outputs.requires_grad_()
    rows.requires_grad_()
    loss = kernel_loss(outputs, rows, batch)
    (loss / 7).backward()
    return {"loss": loss.detach(), "outputs": outputs.grad, "rows": rows.grad}


def plain_outcome(arrays: dict[str, Tensor], batch: Batch) -> Outcome:
    outputs, rows = (arrays[name].clone().requires_grad_() for name in ("outputs", "rows"))
    sequences = Sequences(batch.keys["history"].offsets, batch.inputs["times"])
    loss = sampled_softmax(outputs, **embedded(batch, rows), sequences=sequences, negatives_per="sample", form="plain")
    (loss / 7).backward()
    return {"loss": loss.detach(), "outputs": outputs.grad, "rows": rows.grad}


def assert_near(got: Outcome, expected: Outcome, tolerance: float) -> None:
    for name, value in expected.items():
        error = (got[name].cpu().double() - value).norm() / value.norm()
        assert float(error) < tolerance, (name, float(error))


@pytest.mark.parametrize(
    ("lengths", "num_negatives", "dim", "dtype", "tolerance"),
    [
        ([0, 1, 64, 65, 0, 33, 32, 2], 5, 6, torch.float32, 2e-6),
        ([3, 70], 130, 50, torch.float32, 2e-6),
        ([130, 0, 1, 64, 65], 1, 3, torch.bfloat16, 5e-3),
        ([1], 8, 513, torch.bfloat16, 5e-3),
    ],
)
def test_loss_and_gradients(lengths, num_negatives: int, dim: int, dtype: torch.dtype, tolerance: float) -> None:
    batch, arrays = make_batch(lengths, num_negatives), make_arrays(sum(lengths), dim)
    got, expected = kernel_outcome(arrays, batch, dtype), plain_outcome(arrays, batch)
    assert got["outputs"].dtype == dtype
    assert got["loss"].dtype == got["rows"].dtype == torch.float32
    assert_near(got, expected, tolerance)
    assert float((got["loss"].cpu() - expected["loss"]).abs() / expected["loss"]) < 2e-6


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    got = kernel_outcome(make_arrays(0, 4), make_batch(lengths, 3))
    assert float(got["loss"]) == 0.0
    assert got["outputs"].shape == (0, 4)
    assert not got["rows"].any()


def test_only_the_next_item_among_the_negatives_costs_nothing() -> None:
    """Fails if softmax_kernel compares with the token's own item, or leaves out the target."""
    batch, arrays = make_batch([2, 1], 3), make_arrays(3, 4)
    for name, keys in (("history", [1, 4, 2]), ("target", [4, 4]), ("negatives", [4] * 6)):
        batch.keys[name].values.copy_(torch.tensor(keys))
    got = kernel_outcome(arrays, batch)
    assert float(got["loss"]) == 0.0
    assert not got["rows"].any()
    assert not got["outputs"].any()


@pytest.mark.parametrize("size", [0.0, 5e-7, 2e-6])
def test_short_vectors(size: float) -> None:
    """Vectors shorter than SMALLEST_NORM are only scaled. Fails if unit_backward ignores the length."""
    batch, arrays = make_batch([3, 2], 3), make_arrays(5, 4)
    for array in arrays.values():
        array[::2] *= size / array[::2].norm(dim=1, keepdim=True)
    assert_near(kernel_outcome(arrays, batch), plain_outcome(arrays, batch), 1e-5)


def unit_by_unit(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Replaces torch.bmm, whose bits depend on the number of units and on addresses."""
    for unit in range(len(out)):
        out[unit] = a[unit].clone() @ b[unit].clone()
    return out


def test_bits_of_a_sample_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other samples hold NaN. Fails if load_tokens ignores the length, or if negative_gradients continues into the next
    sample."""
    monkeypatch.setattr(torch, "bmm", unit_by_unit)
    lengths = [2, 40, 1]
    batch, arrays = make_batch(lengths, 3), make_arrays(sum(lengths), 5)
    own_keys = torch.arange(NUM_ITEMS // 2)
    for sample, mine in enumerate((False, True, False)):  # rows that no other sample has
        for keys in batch.keys.values():
            values = keys.values[keys.offsets[sample] : keys.offsets[sample + 1]]
            values.remainder_(NUM_ITEMS // 2).add_(0 if mine else NUM_ITEMS // 2)
    part = slice(2, 42)
    expected = kernel_outcome(arrays | {"outputs": arrays["outputs"][part]}, batch[torch.tensor([1])])
    assert bool(expected["rows"].any())
    for poison in (None, float("nan")):
        if poison is not None:
            arrays["outputs"][:2], arrays["outputs"][42:] = poison, poison
            arrays["rows"][NUM_ITEMS // 2 :] = poison
        together = kernel_outcome(arrays, batch)
        assert same_bits(together["outputs"][part], expected["outputs"])
        assert same_bits(together["rows"][own_keys], expected["rows"][own_keys])


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_few_units_at_a_time(monkeypatch: pytest.MonkeyPatch, num_units: int) -> None:
    """Fails if negative_gradients does not continue from the stored sum, or per_token is not offset by first_unit."""
    monkeypatch.setattr(torch, "bmm", unit_by_unit)
    lengths = [0, 100, 1, 70, 0]
    batch, arrays = make_batch(lengths, 3), make_arrays(sum(lengths), 5)
    expected = kernel_outcome(arrays, batch)
    monkeypatch.setattr("nestpipe.kernels.softmax.sampled_softmax.GATHERED_ELEMENTS", 3 * 32 * num_units)
    got = kernel_outcome(arrays, batch)
    assert all(same_bits(got[name], value) for name, value in expected.items())


def test_without_gradients() -> None:
    """The loss is the same and takes one product. Fails if is_trained ignores torch.no_grad."""
    batch, arrays = make_batch([3, 33], 3), make_arrays(36, 5)
    expected = kernel_outcome(arrays, batch)["loss"]
    outputs, rows = (array.to(DEVICE, torch.float32).requires_grad_() for array in arrays.values())
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        products = []
        bmm = torch.bmm
        patch.setattr(torch, "bmm", lambda *arguments, out: products.append(bmm(*arguments, out=out)))
        assert same_bits(kernel_loss(outputs, rows, batch), expected)
        assert len(products) == 1


def test_autocast_changes_nothing_but_the_size_of_blocks() -> None:
    """Fails if a product uses bmm without `out`, which autocast rounds to bfloat16."""
    batch, arrays = make_batch([3, 33], 3), make_arrays(36, 5)
    expected = plain_outcome(arrays, batch)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        got = kernel_outcome(arrays, batch)
    assert_near(got, expected, 2e-6)


def test_refusals() -> None:
    from nestpipe.kernels.softmax.sampled_softmax import sampled_softmax_kernel

    tiles = Sequences(torch.tensor([0, 2]), torch.zeros(1, 4, dtype=torch.int64)).in_tiles(32)
    values, index = (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(3, 4)), (torch.arange(2),) * 3
    with pytest.raises(ValueError, match="rows must be float32"):
        sampled_softmax_kernel((*values[:3], values[3].double()), index, tiles, 0.05)
    with pytest.raises(ValueError, match="there are 1 outputs and 2 tokens"):
        sampled_softmax_kernel((values[0][:1], *values[1:]), index, tiles, 0.05)
