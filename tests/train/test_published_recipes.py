"""From files in the published formats to a trained model: generate, prepare, train as the recipe says, evaluate.

Fails, for example, if the loader looks for columns that prepare does not write, or counts items that are none.
"""

from pathlib import Path

import pytest
import torch

from nestpipe.data.dataset import Batches
from nestpipe.data.prepared import read_prepared
from nestpipe.data.published.generate import generate
from nestpipe.data.published.prepare import prepare
from nestpipe.distributed import World
from nestpipe.train.config_text import load_config
from nestpipe.train.run import run

RECIPES = Path(__file__).parents[2] / "recipes"
MODEL = ("model.dim=8", "model.num_layers=1", "model.dim_qk=4", "model.dim_v=4", "model.num_negatives=4")
SMALL = (
    *MODEL,
    "model.bottom=[8]",
    "model.top=[8]",
    "train.batch_size=16",
    "train.steps=3",
    "evaluate.num_samples=100",
)
CASES = [
    ("movielens", "1m", "movielens-1m", ("hstu-ml-1m",)),
    pytest.param("movielens", "20m", "movielens-20m", ("hstu-ml-20m-large",), marks=pytest.mark.slow),
    ("kuairand", "27k", "kuairand-27k", ("fuxi-kuairand-27k",)),
    pytest.param("kuairand", "pure", "kuairand-pure", ("hstu-kuairand-27k",), marks=pytest.mark.slow),
    ("criteo", "kaggle", "criteo-kaggle", ("dlrm-criteo-kaggle",)),
    ("criteo", "terabyte", "criteo-terabyte", ("dlrm-criteo-terabyte",)),
]


@pytest.fixture(autouse=True)
def _torch_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "variant", "source", "recipes"), CASES)
def test_from_published_files_to_a_metric(
    name: str, variant: str, source: str, recipes: tuple[str, ...], tmp_path: Path
) -> None:
    generate(name, tmp_path / "published", 20_000 if name == "kuairand" else 3_000, seed=3, variant=variant)
    folder = tmp_path / "prepared"
    prepare(name, tmp_path / "published", folder, skip_bad=False, force=False, progress=lambda stage, done: None)
    found = read_prepared(folder)
    assert found.manifest.source == source
    if found.manifest.kind == "histories":
        batches = list(Batches(found.users(num_epochs=1), 64))
        assert sum(map(len, batches)) == found.manifest.counts["users"]
        items = {item for batch in batches for item in batch.keys["item"].values.tolist()}
        assert items == set(range(found.num_items))
    for recipe in recipes:
        settings = (*SMALL, f"data.path={folder}", f"data.kind={source}")
        config = load_config(RECIPES / f"{recipe}.toml", settings).resolved(1, 1)
        metrics = run(config, World())["metrics"]
        assert metrics["num_samples"] > 0
        assert ("hr_at_10" if found.manifest.kind == "histories" else "auc") in metrics
