"""An exported model scores without nestpipe as the package's own Scorer does, to the bit.

Fails, for example, if the export has rows of a base instead of the newest ones, if it rounds them, or if the example
takes the row next to a key's own.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import World
from nestpipe.checkpoint.tools.export import export
from nestpipe.checkpoint.tools.saved import newest
from nestpipe.evaluation import Scorer
from tests.clicks import DATA, batches, features, make_trainer, model
from tests.examples.test_own_model import run
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"
TRAINED = 4 * 64


def serve() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        return importlib.import_module("serve")


def train_and_save(world: World, path: Path) -> None:
    """Saves after each of four steps: one complete checkpoint, and three with what has changed."""
    trainer = make_trainer(world)
    data = batches(world)
    for _ in range(4):
        trainer.fit(data, steps=1)
        trainer.save(path, keep=1, complete_every=10)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "run"
    train_and_save(World(), folder)
    export(newest(folder)[0], folder.parent / "exported")
    return folder


def scores_of(server: Any, first: int, count: int) -> torch.Tensor:
    batch = DATA.samples(first, count)
    keys = {name: jagged.values for name, jagged in batch.keys.items()}
    return server.score(keys, batch.inputs["dense"])


def server_of(folder: Path) -> Any:
    example = serve()
    return example.Server(folder, example.DLRM(example.load_file(folder / "dense.safetensors")))


def test_equals_the_scorer(run_folder: Path) -> None:
    assert len(list(run_folder.glob("step-*"))) == 4  # the bases of the last one
    scorer = Scorer(model(), features(), run_folder)
    expected = scorer(DATA.samples(0, TRAINED))
    assert torch.equal(scores_of(server_of(run_folder.parent / "exported"), 0, TRAINED), expected)
    assert expected.std() > 0


@pytest.mark.slow
def test_a_model_of_three_ranks(tmp_path: Path) -> None:
    run_ranks(3, train_and_save, tmp_path / "run")
    export(newest(tmp_path / "run")[0], tmp_path / "exported")
    expected = Scorer(model(), features(), tmp_path / "run")(DATA.samples(0, 100))
    assert torch.equal(scores_of(server_of(tmp_path / "exported"), 0, 100), expected)


def test_unknown_keys(run_folder: Path) -> None:
    """They have the mean of initial rows, which is 0 here. Fails if Rows returns the row at the place of the search."""
    server = server_of(run_folder.parent / "exported")
    rows = server.rows["c00"]
    known = rows.keys[:3]
    unknown = torch.tensor([-(2**63), 2**62, 10**15])
    found = rows(torch.cat([known, unknown]))
    assert torch.equal(found[:3], rows.rows[:3])
    assert torch.equal(found[3:], torch.zeros(3, 8))


def test_tables_without_rows(tmp_path: Path) -> None:
    """Fails if the example concatenates no arrays."""
    trainer = make_trainer(World())
    trainer.save(tmp_path / "run")
    export(newest(tmp_path / "run")[0], tmp_path / "exported")
    scores = scores_of(server_of(tmp_path / "exported"), 0, 5)
    assert scores.shape == (5,)


@pytest.mark.slow
def test_runs_without_nestpipe(run_folder: Path) -> None:
    """As its docstring says. Fails if the example imports the package."""
    folder = run_folder.parent / "exported"
    code = f"import sys, runpy; sys.modules['nestpipe'] = None; sys.argv = ['serve.py', {str(folder)!r}]; "
    output = run(sys.executable, "-c", f"{code}runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    assert output.startswith("probability of a click for 8 made-up samples: 0.")


def test_the_loader_is_short() -> None:
    """A loader is about 40 lines: its two classes."""
    tree = ast.parse(EXAMPLE.read_text())
    classes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1 for node in tree.body if isinstance(node, ast.ClassDef)
    }
    assert classes["Rows"] + classes["Server"] <= 45
