"""A batch that is planned on a device against the same batch planned in host memory: the same distinct keys in the same
order, the same rows for each micro-batch, the same embeddings and the same sums of gradients.

Without an accelerator the plan is made of CPU tensors: in plain torch, and by the kernels in Triton's interpreter.

Fails, for example, if _FoundKeys.of sorts keys without stable=True, if it leaves out the sort by table, if number_runs
numbers runs in the order of their keys, if _order_by_owner leaves positions in the order of first use, if
_split_rows takes the rows of the whole batch, or if _Entries.sort takes the occurrences of a row in another order.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe import Batch, Pooled, Sequence, Table
from nestpipe.data import Jagged
from nestpipe.device.transfer import host_bytes
from nestpipe.embedding.batch_copy import copied_source
from nestpipe.embedding.cluster import GIVEN_ORDER, Clustering
from nestpipe.embedding.dedup import BatchDedup, RequesterDedup, dedup_batch
from nestpipe.embedding.device_dedup import dedup_on_device
from nestpipe.embedding.features import Embeddings, SequenceEmbedding
from nestpipe.embedding.group import FeatureGroups, group_features
from nestpipe.embedding.model_rows import ModelRows
from nestpipe.embedding.optim import SGD
from nestpipe.embedding.packed import pack_batch
from nestpipe.kernels.rows import segments
from nestpipe.kernels.rows.pooling import StoredRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PADDING = -7
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, PADDING]


@pytest.fixture(params=["torch", "kernels"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the plan in plain torch, or by kernels."""
    monkeypatch.setattr(segments, "PIECE", 4)  # rows have more occurrences than a piece
    monkeypatch.setattr("nestpipe.embedding.fused.PIECE", 4)
    if request.param == "kernels" and DEVICE.type == "cpu":
        pytest.importorskip("triton", reason="the kernels need Triton, which the dev extra has on Linux")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(segments, "runs_triton", lambda *arrays: False)  # slow, and tested elsewhere
    if request.param == "torch" and DEVICE.type == "cuda":
        monkeypatch.setattr("nestpipe.kernels.keys.runs.runs_triton", lambda *arrays: False)
    return str(request.param)


def make_features(dims: tuple[int, int] = (2, 3)) -> FeatureGroups:
    """Two groups: tables a, b and c, and table d, which is frozen."""
    a, b, c = (Table(name, dims[0], optimizer=SGD(0.1), dtype=torch.float64) for name in "abc")
    d = Table("d", dims[1], frozen=True, dtype=torch.float64)
    return group_features(
        {
            "d": Pooled(d),
            "b_twice": Pooled(b, "mean", padding_key=PADDING),
            "a": Sequence(a, padding_key=PADDING),
            "c": Pooled(c),
            "b": Pooled(b),
            "a_again": Sequence(a),
            "negatives": Sequence(a, by_index=True),
        }
    )


FEATURES = make_features()


@dataclass(frozen=True)
class Case:
    """A batch and how it is split."""

    lists: dict[str, list[list[int]]]
    num_micro_batches: int
    world_size: int
    clustering: Clustering
    is_weighted: bool
    is_copied: bool

    @property
    def batch(self) -> Batch:
        keys = {name: Jagged.from_lists(lists) for name, lists in self.lists.items()}
        if self.is_weighted:  # so that sums are exact in any order
            keys["b"] = _weighted(keys["b"], torch.arange(len(keys["b"].values)) % 5 / 4)
            keys["b_twice"] = _weighted(keys["b_twice"], torch.full((len(keys["b_twice"].values),), 0.5))
        return Batch(keys, {"number": torch.arange(len(next(iter(self.lists.values()))))})


def _weighted(jagged: Jagged, weights: Tensor) -> Jagged:
    return Jagged(jagged.values, jagged.offsets, weights)


def _with_exact_mean(keys: list[int]) -> list[int]:
    """Leaves out keys until a mean divides by a power of two."""
    while (number := sum(key != PADDING for key in keys)) & (number - 1):
        keys = keys[1:]
    return keys


@st.composite
def cases(draw: Any) -> Case:
    num_samples = draw(st.integers(0, 7))
    pool = draw(st.sampled_from([[5], [3, 4], EXTREMES, list(range(-20, 20)), [2**40, 2**40 + 1]]))
    most = draw(st.sampled_from([1, 6]))
    least = draw(st.sampled_from([0, 1]))
    sample = st.lists(st.sampled_from(pool), min_size=least, max_size=most)
    lists = {name: draw(st.lists(sample, min_size=num_samples, max_size=num_samples)) for name in FEATURES.features}
    lists["b_twice"] = [_with_exact_mean(keys) for keys in lists["b_twice"]]
    return Case(
        lists,
        num_micro_batches=draw(st.sampled_from([1, 1, 2, 3, 9])),
        world_size=draw(st.sampled_from([1, 2, 3, 1536])),
        clustering=draw(st.sampled_from([GIVEN_ORDER, Clustering("spectral"), Clustering("minhash")])),
        is_weighted=draw(st.booleans()),
        is_copied=draw(st.booleans()),
    )


def planned_on_device(features: FeatureGroups, case: Case, is_copied: bool) -> BatchDedup:
    """is_copied: the batch was copied as a pipeline copies it."""
    split = case.num_micro_batches, case.world_size, 1, case.clustering
    batch = case.batch
    if is_copied:
        batch = next(copied_source(iter([batch]), None, features.features, DEVICE, 1))
        assert len(batch.group_keys) == len(features.groups)
    return dedup_on_device(pack_batch(features, batch, *split, host_bytes(DEVICE)), DEVICE)


SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture], "derandomize": True}


@settings(max_examples=40, **SETTINGS)
@given(case=cases())
def test_as_in_host_memory(implementation: str, case: Case) -> None:
    check(FEATURES, case)


@pytest.mark.slow
@settings(max_examples=400, **SETTINGS)
@given(case=cases())
def test_many_batches_as_in_host_memory(implementation: str, case: Case) -> None:
    check(FEATURES, case)


def check(features: FeatureGroups, case: Case) -> None:
    split = case.num_micro_batches, case.world_size, 1, case.clustering
    on_host = dedup_batch(features, case.batch, *split)
    on_device = planned_on_device(features, case, case.is_copied)
    assert on_device.num_samples == on_host.num_samples
    assert on_device.weights == on_host.weights
    for ours, theirs in zip(on_device.inputs, on_host.inputs, strict=True):
        assert torch.equal(ours["number"].cpu(), theirs["number"])
    for ours, theirs in zip(on_device.groups, on_host.groups, strict=True):
        check_group(ours, theirs)
    for i in range(case.num_micro_batches):
        check_embeddings(features, on_device, on_host, i)


def check_group(ours: RequesterDedup, theirs: RequesterDedup) -> None:
    for name in ("keys", "counts", "uses", "row_positions", "is_first"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype, name
    assert ours.row_counts.tolist() == theirs.row_counts.tolist()
    assert ours.row_offsets == theirs.row_offsets
    assert ours.num_samples == theirs.num_samples


def check_embeddings(features: FeatureGroups, ours: BatchDedup, theirs: BatchDedup, micro_batch: int) -> None:
    """Compares embeddings, and the gradients of a loss that uses them all. Sums of these values are exact."""
    generator = torch.Generator().manual_seed(0)
    host_rows = []
    for group in theirs.groups:
        shape = group.num_rows(micro_batch), group.group.dim
        rows = torch.randint(-8, 9, shape, generator=generator).to(torch.float64)
        host_rows.append(rows.requires_grad_(not group.group.frozen))
    device_rows = [stored_in_disorder(rows.detach().to(DEVICE), micro_batch + i) for i, rows in enumerate(host_rows)]
    for ours_rows, their_rows in zip(device_rows, host_rows, strict=True):
        ours_rows.variable.requires_grad_(their_rows.requires_grad)
    expected = Embeddings(features, theirs.groups, micro_batch, [ModelRows(rows) for rows in host_rows])
    got = Embeddings(features, ours.groups, micro_batch, device_rows)
    losses = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64, device=DEVICE)]
    for number, name in enumerate(features.features):
        for which, value in enumerate((expected[name], got[name])):
            tensor = value.values if isinstance(value, SequenceEmbedding) else value
            factors = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) % 7 + number
            losses[which] = losses[which] + (tensor * factors).sum()
        check_value(got[name], expected[name])
    assert got.side_by_side(["c", "d"]).cpu().equal(expected.side_by_side(["c", "d"]))
    if losses[0].requires_grad:
        losses[0].backward()
        losses[1].backward()
        for ours_rows, their_rows in zip(device_rows, host_rows, strict=True):
            if their_rows.grad is not None:
                assert torch.equal(ours_rows.take_gradient().cpu(), their_rows.grad)


def stored_in_disorder(rows: Tensor, number: int) -> ModelRows:
    """Returns rows that lie in a larger array, as in a pool, or in one of their own."""
    if number % 3 == 0:
        return ModelRows(rows)
    array = torch.full((2 * len(rows) + 1, rows.shape[1] + 3), torch.nan, dtype=rows.dtype, device=rows.device)
    if number % 3 == 1:
        array[: len(rows), : rows.shape[1]] = rows
        return ModelRows.read_at(StoredRows(array[:, : rows.shape[1]], None), len(rows))
    places = torch.randperm(len(array), device=rows.device)[: len(rows)]
    array[places, : rows.shape[1]] = rows
    return ModelRows.read_at(StoredRows(array[:, : rows.shape[1]], places), len(rows))


def check_value(got: SequenceEmbedding | Tensor, expected: SequenceEmbedding | Tensor) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert torch.equal(got.cpu(), expected)
        return
    assert isinstance(got, SequenceEmbedding)
    for name in ("rows", "index", "offsets", "host_offsets", "values", "lengths"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    assert got.host_lengths == expected.host_lengths
    for length in (1, 3):
        assert torch.equal(got.padded(length).cpu(), expected.padded(length))
