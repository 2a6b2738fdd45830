"""A model that has changed since it was saved: what fits is taken, the rest is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nestpipe
from nestpipe import Trainer, World
from nestpipe.checkpoint import CheckpointError
from nestpipe.optim import SGD, Adagrad

Features = dict[str, nestpipe.Pooled]


class Model(nn.Module):
    def __init__(self, widths: dict[str, int], hidden: int = 4, has_bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(sum(widths.values()), hidden)
        self.out = nn.Linear(hidden, 1)
        self.bias = nn.Parameter(torch.zeros(())) if has_bias else None
        self.names = list(widths)

    def forward(self, embeddings: Any, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.hidden(torch.cat([embeddings[name] for name in self.names], dim=1))
        return self.out(hidden).square().sum() + (0.0 if self.bias is None else self.bias.square())


def make(dims: dict[str, int], optimizers: dict[str, Any] | None = None, dense: Any = None, **model: Any) -> Trainer:
    features: Features = {
        name: nestpipe.Pooled(nestpipe.Table(name, dim, optimizer=(optimizers or {}).get(name, Adagrad(0.1))))
        for name, dim in dims.items()
    }
    make_dense = dense or (lambda parameters: torch.optim.Adam(parameters, 1e-2))
    return Trainer(Model(dims, **model), features, dense_optimizer=make_dense, world=World(), check_split=False)


def batches(names: list[str]) -> list[nestpipe.Batch]:
    keys = torch.arange(8)
    return [
        nestpipe.Batch({name: nestpipe.Jagged.one_each(keys + 3 * step) for name in names}, {}) for step in range(3)
    ]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Trainer, Path]:
    trainer = make({"a": 4, "b": 4})
    trainer.fit(batches(["a", "b"]))
    trainer.save(tmp_path / "save", extra={"note": 1})
    return trainer, tmp_path / "save"


def rows(trainer: Trainer, table: str) -> tuple[Tensor, Tensor]:
    piece = trainer.store.export_piece(table, 0, 65536)
    order = piece.keys.argsort()
    return piece.keys[order], piece.records[order]


def same_rows(a: Trainer, b: Trainer, table: str, columns: int | None = None) -> bool:
    (keys, records), (other_keys, others) = rows(a, table), rows(b, table)
    return torch.equal(keys, other_keys) and torch.equal(records[:, :columns], others[:, :columns])


CHANGES = [
    (lambda: make({"a": 4, "b": 4, "c": 4}), ["a", "b"], "made new: table c", "tables are ['a', 'b']"),
    (lambda: make({"a": 4}), ["a"], "dropped: table b", "tables are ['a', 'b']"),
    (lambda: make({"a": 4, "b": 6}), ["a"], "table b (other rows)", "table 'b': dim is 4"),
    (
        lambda: make({"a": 4, "b": 4}, dense=lambda parameters: torch.optim.SGD(parameters, 0.1)),
        ["a", "b"],
        "made new: state of the dense optimizer",
        "the dense optimizer is Adam",
    ),
    (lambda: make({"a": 4, "b": 4}, has_bias=True), ["a", "b"], "made new: dense bias", "the dense optimizer's param"),
    (lambda: make({"a": 4, "b": 4}, hidden=5), ["a", "b"], "dropped: dense hidden.weight", "hidden.weight"),
]


@pytest.mark.parametrize(("change", "tables", "text", "refusal"), CHANGES)
def test_what_fits_is_taken(change, tables: list[str], text: str, refusal: str, saved: tuple[Trainer, Path]) -> None:
    """Fails if fitting_columns takes tables by their number, or fitting_dense by the order of parameters."""
    old, path = saved
    trainer = change()
    before = trainer.digest()
    with pytest.raises(CheckpointError) as raised:
        trainer.load(path)
    assert refusal in str(raised.value)
    assert trainer.digest() == before
    assert trainer.load(path, strict=False) == {"note": 1}
    assert text in str(trainer.load_report)
    assert trainer.num_steps == 3
    assert all(same_rows(trainer, old, table) for table in tables)
    trainer.fit(batches(list(trainer.features)))
    trainer.save(path)


def test_another_row_optimizer_keeps_the_rows(saved: tuple[Trainer, Path]) -> None:
    """Fails if _with_new_state keeps the old state's columns."""
    old, path = saved
    trainer = make({"a": 4, "b": 4}, {"b": SGD(0.1)})
    with pytest.raises(CheckpointError, match="table 'b': state_width is 4 in the checkpoint, 0 here"):
        trainer.load(path)
    trainer.load(path, strict=False)
    assert same_rows(trainer, old, "a")
    assert same_rows(trainer, old, "b", columns=4)
    assert trainer.load_report.taken[:2] == ["table a", "rows of table b"]
    assert "row state of table b" in trainer.load_report.new
    other = make({"a": 4, "b": 4}, {"b": Adagrad(0.1, initial_accumulator=0.5)})
    trainer.save(path)
    other.load(path, strict=False)
    assert torch.equal(rows(other, "b")[1][:, 4:], torch.full((14, 4), 0.5))


def test_state_of_dense_parameters_by_name(saved: tuple[Trainer, Path]) -> None:
    """Fails if _fitting_optimizer numbers the saved state as the present parameters are numbered."""
    old, path = saved
    trainer = make({"a": 4, "b": 4}, has_bias=True)  # the new parameter comes first
    trainer.load(path, strict=False)
    for name in ("hidden.weight", "out.bias"):
        mine, theirs = (dict(t.model.named_parameters())[name] for t in (trainer, old))
        assert torch.equal(mine, theirs)
        assert torch.equal(trainer.optimizer.state[mine]["exp_avg"], old.optimizer.state[theirs]["exp_avg"])
    assert trainer.model.bias not in trainer.optimizer.state
