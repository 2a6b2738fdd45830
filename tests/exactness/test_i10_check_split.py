"""I10: a model that mixes samples is refused, with the likely cause, before anything is trained; no other model is.

Fails, for example, if check_split compares nothing (`tolerance = 1e9`), or if it leaves Dropout in training mode.
"""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestpipe import DenseReducer, World
from nestpipe.pipelining import NonFiniteError
from tests.exactness.cases import GLOBAL_BATCH, Case, SmallModel, global_batches, make_trainer
from tests.ranks import run_ranks

CASE = Case("sgd", "pooled_sum", 2, steps=3)


class Mean(SmallModel):
    def forward(self, embeddings, inputs) -> Tensor:
        return super().forward(embeddings, inputs) / len(inputs["label"])


class BatchNorm(SmallModel):
    def __init__(self, dims) -> None:
        super().__init__(dims)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def dense(self, parts, label) -> Tensor:
        return super().dense([self.norm(torch.cat(parts, dim=1))], label)


class BatchCentred(SmallModel):
    def dense(self, parts, label) -> Tensor:
        return super().dense([part - part.mean(0) for part in parts], label)


class Neighbours(SmallModel):
    """Compares each sample with the previous one, but not across the middle of a batch: halves do not show it."""

    def dense(self, parts, label) -> Tensor:
        half = len(label) // 2 if len(label) == GLOBAL_BATCH else len(label)
        same = [(labels == labels.roll(1)).sum() for labels in label.split(half)]
        return super().dense(parts, label) + sum(same)


class Dropout(SmallModel):
    def __init__(self, dims) -> None:
        super().__init__(dims)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def dense(self, parts, label) -> Tensor:
        self.seen += len(label)
        return super().dense([self.dropout(part) for part in parts], label)


def trainer_of(world: World, model_class: type[SmallModel], check_split: bool = True, case: Case = CASE):
    trainer = make_trainer(world, case)
    trainer.model = model_class({name: feature.table.dim for name, feature in trainer.features.items()})
    trainer._forward = trainer.model
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 0.1)
    trainer.reducer = DenseReducer(trainer.model, world)
    trainer.check_split = check_split
    return trainer


def refusal(world: World, model_class: type[SmallModel]) -> tuple[str, int]:
    trainer = trainer_of(world, model_class)
    try:
        trainer.fit(global_batches(CASE.steps))
    except (ValueError, RuntimeError) as error:
        return str(error), trainer.store.size("item")
    return "", trainer.store.size("item")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("model_class", "text"),
    [
        (Mean, "the model returns a mean instead of a sum"),
        (BatchNorm, "BatchNorm1d mixes the samples of a batch"),
        (BatchCentred, "it uses the other samples of the batch"),
    ],
)
def test_refused(size: int, model_class: type[SmallModel], text: str) -> None:
    results = [refusal(World(), model_class)] if size == 1 else run_ranks(size, refusal, model_class)
    for message, num_rows in results:
        assert "when the batch is cut in two: this model cannot be trained in micro-batches" in message
        assert text in message
        assert num_rows == 0


def test_the_clustered_partition_is_tried_too() -> None:
    """Fails if SplitCheck tries the halves alone, or micro-batches in the given order."""
    trainer = make_trainer(World(), replace(CASE, num_micro_batches=2, method="none"))
    trainer.model = Neighbours({name: feature.table.dim for name, feature in trainer.features.items()})
    trainer.fit(global_batches(1))
    trainer = make_trainer(World(), replace(CASE, num_micro_batches=2))
    trainer.model = Neighbours({name: feature.table.dim for name, feature in trainer.features.items()})
    with pytest.raises(ValueError, match=r"cut into 2 micro-batches, cluster\.method = 'spectral': this model cannot"):
        trainer.fit(global_batches(1))


def test_dropout_is_accepted_and_nothing_is_left_behind() -> None:
    """The run is the same with and without the check, dropout and buffers included."""
    digests = []
    for check_split in (True, False):
        trainer = trainer_of(World(), Dropout, check_split)
        torch.manual_seed(1)
        trainer.fit(global_batches(CASE.steps))
        digests.append((trainer.digest(), torch.rand(1).item(), trainer.model.dropout.training))
    assert digests[0] == digests[1]


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_split() -> None:
    trainer = trainer_of(World(), SmallModel)
    batch = global_batches(1)[0]
    with pytest.raises(NonFiniteError, match="step 0"):
        trainer.fit([replace(batch, inputs={"label": batch.inputs["label"] * float("nan")})])


def test_can_be_switched_off() -> None:
    trainer = trainer_of(World(), BatchCentred, check_split=False)
    assert len(trainer.fit(global_batches(CASE.steps)).losses) == CASE.steps


def test_batch_norm_in_eval_mode_is_refused_too() -> None:
    """fit trains in training mode, whatever the mode was before. Fails if SplitCheck keeps the mode."""
    trainer = trainer_of(World(), BatchNorm)
    trainer.model.eval()
    with pytest.raises(ValueError, match="BatchNorm1d mixes"):
        trainer.fit(global_batches(CASE.steps))


class Lazy(SmallModel):
    """Registers a buffer in its first forward, and replaces it in later ones."""

    def dense(self, parts, label) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(len(label)))
        self.mask = torch.ones(len(label))
        return super().dense(parts, label)


def test_buffers_made_in_forward() -> None:
    trainer = trainer_of(World(), Lazy)
    assert len(trainer.fit(global_batches(CASE.steps)).losses) == CASE.steps


class Transformer(SmallModel):
    """Layers with dropout that is not a Dropout module."""

    def __init__(self, dims) -> None:
        super().__init__(dims)
        torch.manual_seed(0)
        options = {"dropout": 0.1, "batch_first": True, "dtype": torch.float64}
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, **options)
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.gru = nn.GRU(8, 8, num_layers=2, **options)

    def dense(self, parts, label) -> Tensor:
        x = self.encoder(torch.cat(parts, dim=1)[:, None])
        x = self.gru(self.attention(x, x, x)[0])[0]
        return super().dense([F.dropout(x[:, 0], 0.1, self.training)], label)


def test_dropout_of_any_kind_is_accepted() -> None:
    """Fails if SplitCheck._sums only puts Dropout modules into eval mode, instead of fixing the noise."""
    trainer = trainer_of(World(), Transformer)
    assert len(trainer.fit(global_batches(CASE.steps)).losses) == CASE.steps
    assert trainer.model.encoder.training


def train_unsplit(world: World, model_class: type[SmallModel]) -> tuple[int, list[str]]:
    """Returns the steps trained with one micro-batch in two calls of fit, and the warnings."""
    trainer = trainer_of(world, model_class, case=replace(CASE, num_micro_batches=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for batches in (global_batches(CASE.steps), global_batches(1)):
            trainer.fit(batches)
    return trainer.num_steps, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("size", [1, 2])
def test_one_micro_batch_may_mix_samples(size: int) -> None:
    """Fails if SplitCheck._object refuses whatever the number of micro-batches, or warns on every rank."""
    results = [train_unsplit(World(), BatchNorm)] if size == 1 else run_ranks(size, train_unsplit, BatchNorm)
    assert [num_steps for num_steps, _ in results] == [CASE.steps + 1] * size
    assert "Likely: BatchNorm1d mixes the samples" in results[0][1][0]
    assert "results depend on the batch size per rank and on the number of ranks" in results[0][1][0]
    assert [len(texts) for _, texts in results] == [1, 0][:size]


def test_a_mean_is_refused_with_one_micro_batch_too() -> None:
    """Fails if SplitCheck._object only warns with one micro-batch."""
    trainer = trainer_of(World(), Mean, case=replace(CASE, num_micro_batches=1))
    with pytest.raises(
        ValueError, match=r"the gradient of a mean would be too small\. Likely: the model returns a mean"
    ):
        trainer.fit(global_batches(CASE.steps))
    assert trainer.store.size("item") == 0
