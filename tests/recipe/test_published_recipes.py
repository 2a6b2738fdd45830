"""From files in the published formats to a trained model: generate, prepare, train as the recipe says, evaluate.

Fails, for example, if the loader looks for columns that prepare does not write, or counts items that are none.
"""

from pathlib import Path

import pytest

from nestpipe.data.dataset import Batches
from nestpipe.data.files.prepared import read_prepared
from nestpipe.datasets.generate import generate
from nestpipe.datasets.prepare import prepare
from nestpipe.distributed import World
from nestpipe.recipe.run import run
from nestpipe.recipe.text import load_config

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
FILES = {
    "movielens-1m": ("movielens", "1m"),
    "movielens-20m": ("movielens", "20m"),
    "kuairand-27k": ("kuairand", "27k"),
    "kuairand-pure": ("kuairand", "pure"),
    "criteo-kaggle": ("criteo", "kaggle"),
    "criteo-terabyte": ("criteo", "terabyte"),
}
"""name and variant of published files"""
FAST = {"hstu-ml-1m", "fuxi-kuairand-27k", "dlrm-criteo-kaggle", "dlrm-criteo-terabyte"}
KINDS = {path.stem: load_config(path).data.kind for path in sorted(RECIPES.glob("*.toml"))}
CASES = [
    pytest.param(recipe, source, marks=[] if recipe in FAST else pytest.mark.slow, id=f"{recipe}-{source}")
    for recipe, source in [*KINDS.items(), ("hstu-kuairand-27k", "kuairand-pure")]
    if source in FILES
]


@pytest.mark.parametrize(("recipe", "source"), CASES)
def test_from_published_files_to_a_metric(recipe: str, source: str, tmp_path: Path) -> None:
    """Every recipe that says which data it is for."""
    name, variant = FILES[source]
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
    settings = (*SMALL, f"data.path={folder}", f"data.kind={source}")
    config = load_config(RECIPES / f"{recipe}.toml", settings).resolved(1, 1)
    summary = run(config, World())
    assert summary["steps"] == 3
    metrics = summary["metrics"]
    assert metrics["num_samples"] > 0
    assert ("hr_at_10" if found.manifest.kind == "histories" else "auc") in metrics
    assert summary["published"].keys() <= metrics.keys()
