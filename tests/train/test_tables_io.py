"""Exports rows to nn.Embedding, and imports pretrained rows.

Fails, for example, if export_embedding returns the rows of its own rank, or import_rows keeps the state a row had.
"""

import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Batch, Jagged, World
from tests.exactness.cases import Case, global_batches, make_trainer, share_of
from tests.ranks import run_ranks

CASE = Case("adagrad", "pooled_sum", steps=4)
OPEN, BOUNDED = "item", "tag"


def export(world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    trainer = make_trainer(world, CASE)
    trainer.fit(share_of(global_batches(CASE.steps), world))
    keys, embedding = trainer.export_embedding(OPEN)
    all_keys, bounded = trainer.export_embedding(BOUNDED)
    return keys, embedding.weight.data, all_keys, bounded.weight.data


def test_all_ranks_get_all_rows() -> None:
    keys, rows, all_keys, bounded = export(World())
    assert torch.equal(keys, keys.sort().values)
    assert len(keys) > 20
    assert torch.equal(all_keys, torch.arange(60))
    for result in run_ranks(3, export):
        assert torch.equal(result[0], keys)
        assert torch.equal(result[2], all_keys)
        torch.testing.assert_close(result[1], rows, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(result[3], bounded, rtol=1e-10, atol=1e-12)


def test_a_key_never_trained_is_exported_with_its_initial_row() -> None:
    trainer = make_trainer(World(), CASE)
    keys, embedding = trainer.export_embedding(BOUNDED)
    initial = trainer.store.gather(BOUNDED, keys, rows_only=True).records
    assert torch.equal(embedding(torch.tensor([3, 59])), initial[[3, 59]])
    assert trainer.store.size(BOUNDED) == 0
    assert len(trainer.export_embedding(OPEN)[0]) == 0


def import_and_digest(world: World) -> tuple[str, str, int]:
    """Imports the rows that another trainer learnt, with initial row state."""
    first = make_trainer(world, CASE)
    first.fit(share_of(global_batches(CASE.steps), world))
    keys, embedding = first.export_embedding(OPEN)
    second = make_trainer(world, CASE)
    second.fit(share_of(global_batches(1), world))
    second.import_rows(OPEN, keys, embedding.weight.data)
    again, rows = second.export_embedding(OPEN)
    assert torch.equal(again, keys)
    assert torch.equal(rows.weight, embedding.weight)
    piece = second.store.export_piece(OPEN, 0, 65536)
    assert bool((piece.records[:, 5:] == 0.1).all())  # Adagrad's initial accumulator
    return first.digest(), second.digest(), second.store.size(OPEN)


def test_import() -> None:
    sizes = [size for _, _, size in run_ranks(2, import_and_digest)]
    assert sum(sizes) == import_and_digest(World())[2]


def test_a_frozen_table_keeps_imported_rows() -> None:
    """Fails if write_back does not skip frozen tables."""
    table = nestpipe.Table("word", 2, frozen=True)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, embeddings, inputs) -> Tensor:
            return self.scale * embeddings["word"].sum()

    trainer = nestpipe.Trainer(
        Total(), {"word": nestpipe.Pooled(table)}, dense_optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    trainer.import_rows("word", torch.tensor([7, -3]), rows)
    trainer.fit([Batch({"word": Jagged.from_lists([[7], [-3, 8]])})] * 3)
    keys, embedding = trainer.export_embedding("word")
    assert keys.tolist() == [-3, 7]
    assert torch.equal(embedding.weight.data, rows.flip(0))
    assert float(trainer.model.scale.detach()) != 1.0


@pytest.mark.parametrize(
    ("table", "keys", "rows", "text"),
    [
        ("items", torch.arange(2), torch.zeros(2, 5), "there is no table 'items'; there are"),
        (OPEN, torch.arange(2), torch.zeros(2, 4), "must be floats of shape"),
        (OPEN, torch.tensor([4, 4]), torch.zeros(2, 5), "are not distinct"),
        (OPEN, torch.arange(2), torch.full((2, 5), float("nan")), "are not all finite"),
        (BOUNDED, torch.tensor([0, 60]), torch.zeros(2, 3), "must be 0 .. 59"),
    ],
)
def test_refusals(table: str, keys: Tensor, rows: Tensor, text: str) -> None:
    trainer = make_trainer(World(), CASE)
    with pytest.raises(ValueError, match=text):
        trainer.import_rows(table, keys, rows)
    assert trainer.store.size(OPEN) == 0
