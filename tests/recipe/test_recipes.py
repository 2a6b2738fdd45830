"""The recipes of the repository: they parse, resolve, say what was published, and train on prepared data.

Fails, for example, if build_model mixes up dim_qk and dim_v, or if table_sections leaves out num_keys.
"""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nestpipe.cli.show import show_summary
from nestpipe.data.synthetic.histories import HistoryShape
from nestpipe.distributed import World
from nestpipe.embedding.optim import Adam
from nestpipe.models import DLRM, HSTU, FuXi
from nestpipe.recipe.build import build, build_source
from nestpipe.recipe.config import Config, HistoriesSection, TableSection
from nestpipe.recipe.run import evaluate_saved, run
from nestpipe.recipe.sources.synthetic import SyntheticHistories
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError
from nestpipe.store.init import TruncatedNormal
from tests.files import write_clicks, write_histories

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TO_TRAIN = [path for path in RECIPES if path.stem.endswith(("-histories", "-consistency"))]

PREPARED_HISTORIES = ("movielens-1m", "movielens-20m", "kuairand-27k", "kuairand-1k", "kuairand-pure")
PREPARED_CLICKS = ("criteo-kaggle", "criteo-terabyte")

# max_length, batch, dim, layers, heads, dim_qk, dim_v, dropout, ffn
PUBLISHED = {
    "hstu-ml-1m": (200, 128, 50, 2, 1, 50, 50, 0.2, None),
    "hstu-ml-1m-large": (200, 128, 50, 8, 2, 25, 25, 0.2, None),
    "hstu-ml-20m": (200, 128, 256, 4, 4, 64, 64, 0.2, None),
    "hstu-ml-20m-large": (200, 128, 256, 16, 8, 32, 32, 0.2, None),
    "fuxi-ml-1m": (200, 128, 50, 2, 1, 50, 50, 0.2, 1),
    "fuxi-ml-1m-large": (200, 128, 50, 8, 2, 25, 25, 0.2, 1),
    "fuxi-ml-20m": (200, 128, 256, 2, 4, 64, 64, 0.2, 4),
    "fuxi-ml-20m-large": (200, 128, 256, 8, 8, 32, 32, 0.2, 4),
    "hstu-kuairand-27k": (1024, 64, 128, 4, 4, 32, 128, 0.5, None),
    "fuxi-kuairand-27k": (1024, 64, 128, 4, 4, 32, 32, 0.5, 2),
}


PUBLISHED_NUMBERS = {
    "hstu-ml-1m": (0.3097, 0.1720),
    "hstu-ml-1m-large": (0.3294, 0.1893),
    "hstu-ml-20m": (0.3273, 0.1895),
    "hstu-ml-20m-large": (0.3556, 0.2098),
    "hstu-kuairand-27k": (0.0994, 0.0534),
    "fuxi-kuairand-27k": (0.1005, 0.0543),
}
"""HR@10 and NDCG@10"""


def recipe(name: str, *settings: str) -> Config:
    (path,) = [path for path in RECIPES if path.stem == name]
    return load_config(path, settings).resolved(1, 2)


def test_there_is_a_recipe_for_everything() -> None:
    own = {"hstu-histories", "hstu-consistency", "fuxi-histories", "dlrm-criteo-kaggle", "dlrm-criteo-terabyte"}
    assert {path.stem for path in RECIPES} == PUBLISHED.keys() | own


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    config = recipe(name)
    model = config.model
    sizes = (model.max_length, config.train.batch_size, model.dim, model.num_layers, model.num_heads)
    expected = PUBLISHED[name]
    assert (*sizes, model.dim_qk, model.dim_v, model.dropout) == expected[:-1]
    assert expected[-1] in (None, model.ffn_multiply)
    assert (model.num_negatives, model.negatives_per, model.temperature) == (128, "position", 0.05)
    rows, dense = config.row_optimizer, config.dense_optimizer
    assert (dense.kind, dense.lr, dense.betas, dense.weight_decay) == ("adamw", 1e-3, (0.9, 0.98), 0.0)
    assert (rows.kind, rows.lr, rows.betas) == ("adam", 1e-3, (0.9, 0.98))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of each kind of data."""
    root = tmp_path_factory.mktemp("prepared")
    for kind in PREPARED_HISTORIES:
        write_histories(root / kind, kind)
    for kind in PREPARED_CLICKS:
        write_clicks(root / kind, kind)
    return root


@pytest.mark.parametrize("path", [path for path in RECIPES if path not in TO_TRAIN], ids=lambda path: path.stem)
def test_recipes_train_on_prepared_data(path: Path, folders: Path) -> None:
    """As they are, but smaller."""
    kind = load_config(path).data.kind
    model = ("model.num_layers=1", "model.num_negatives=4", "model.dim=8", "model.dim_qk=4", "model.dim_v=4")
    small = (*model, "model.bottom=[8]", "model.top=[8]", "train.batch_size=16", "train.steps=3")
    config = load_config(path, [*small, f"data.path={folders / kind}"]).resolved(1, 1)
    summary = run(config, World())
    assert summary["steps"] == 3
    metrics = summary["metrics"]
    if kind in PREPARED_CLICKS:
        assert (metrics["num_samples"], summary["published"]) == (50, {})
        assert metrics.keys() >= {"auc", "log_loss", "normalised_entropy"}
        assert "auc_ceiling" not in metrics
        return
    assert (metrics["num_samples"], metrics["num_items"]) == (60, 50)
    hr_at_10, ndcg_at_10 = PUBLISHED_NUMBERS.get(path.stem, (None, None))
    expected = {} if hr_at_10 is None else {"hr_at_10": hr_at_10, "ndcg_at_10": ndcg_at_10}
    assert summary["published"] == expected
    assert metrics.keys() >= expected.keys()
    assert config.data.crop == ("random" if "kuairand" in kind else "last")


def test_what_is_built_of_prepared_histories(folders: Path) -> None:
    config = recipe("hstu-ml-1m", f"data.path={folders / 'movielens-1m'}", "evaluate.split=validation")
    this_run = build(config, World())
    (table,) = this_run.trainer.tables
    assert (table.name, table.num_keys, table.init) == ("item", 50, TruncatedNormal(0.02))
    assert this_run.held_out is not None
    batch, held_out = next(this_run.batches), next(this_run.held_out)
    assert int(batch.keys["negatives"].values.max()) == 49
    assert len(batch.keys["negatives"].values) == 128 * len(batch.keys["history"].values)
    assert len(held_out) == 60  # users of 5 items and more: all have something to be asked for


def test_prepared_data_that_is_not_there_or_of_another_kind(folders: Path, tmp_path: Path) -> None:
    for settings, text in (
        ((), "data.kind = 'movielens-1m' needs prepared data: `nestpipe data prepare movielens SRC DST`, then"),
        (
            (f"data.path={folders / 'movielens-20m'}",),
            "was prepared from 'movielens-20m'; --set data.kind=movielens-20m",
        ),
        ((f"data.path={tmp_path}",), "has no manifest.json"),
        (
            (f"data.path={tmp_path}", "data.kind=histories"),
            "data.path is set, but data.kind = 'histories' is not prepared",
        ),
        (("data.kind=histories", "data.paths=['x']"), "data.paths is set, but data.kind is 'histories'"),
    ):
        with pytest.raises(ValueError, match=text):
            build(recipe("hstu-ml-1m", *settings), World())


@pytest.mark.parametrize(("kind", "data"), [("dlrm", "histories"), ("hstu", "clicks"), ("fuxi", "clicks")])
def test_models_and_data_that_do_not_fit(kind: str, data: str) -> None:
    config = load_config(None, [f"model.kind={kind}", f"data.kind={data}"]).resolved(1, 2)
    with pytest.raises(ConfigError, match=f"model.kind = '{kind}' cannot learn from data.kind = '{data}'; take"):
        build(config, World())


@pytest.mark.parametrize("path", [p for p in TO_TRAIN if "consistency" not in p.stem], ids=lambda path: path.stem)
def test_what_is_built(path: Path) -> None:
    config = load_config(path, ["model.dim=8", "model.dim_qk=5", "model.dim_v=3", "model.num_heads=2"]).resolved(1, 2)
    this_run = build(config, World())
    model = this_run.trainer.model
    assert isinstance(model, HSTU if config.model.kind == "hstu" else FuXi)
    (table,) = this_run.trainer.tables
    assert (table.name, table.dim, table.init) == ("item", 8, TruncatedNormal(0.02))
    assert isinstance(table.optimizer, Adam)
    num_values = 2 if config.model.kind == "hstu" else 4
    assert [p.shape for n, p in model.named_parameters() if "w_uvqk" in n] == [(8, num_values * 6 + 20)] * 2
    assert this_run.held_out is not None
    batch, held_out = next(this_run.batches), next(this_run.held_out)
    assert len(batch) == config.train.batch_size
    assert len(batch.keys["negatives"].values) == config.model.num_negatives * len(batch.keys["history"].values)
    assert not torch.equal(batch.inputs["times"][:100], held_out.inputs["times"][:100])


def test_defaults_of_histories_are_those_of_the_generator() -> None:
    config = replace(recipe("hstu-histories"), histories=HistoriesSection())
    assert SyntheticHistories(config).histories(None).shape == HistoryShape(max_length=config.model.max_length)


def test_dlrm_recipes() -> None:
    """13-512-256-64-16 and 13-512-256-64 below, 512-256-1 and 512-512-256-1 above; the first and last are implied."""
    for name, widths in (("kaggle", (13, 512, 256, 64, 16)), ("terabyte", (13, 512, 256, 64))):
        config = recipe(f"dlrm-criteo-{name}")
        model = DLRM(13, ["a"], config.model.dim, config.model.bottom, config.model.top)
        layers = [layer for layer in model.bottom.modules() if isinstance(layer, torch.nn.Linear)]
        assert (layers[0].in_features, *(layer.out_features for layer in layers)) == widths
        assert (config.row_optimizer.kind, config.row_optimizer.lr) == ("sgd", 0.1)
    assert (recipe("dlrm-criteo-kaggle").model.top, config.model.top) == ((512, 256), (512, 512, 256))


def test_tables_of_histories() -> None:
    config = replace(recipe("hstu-histories"), tables=(TableSection("items"),))
    with pytest.raises(ConfigError, match="'items', which is no table of the data 'histories'; did you mean item"):
        build(config, World())


def test_a_model_is_not_chosen_by_the_test(folders: Path, tmp_path: Path) -> None:
    """Fails if PreparedHistories does not ask whether the run chooses; the saved model can be evaluated on either."""
    path = f"data.path={folders / 'movielens-1m'}"
    every, best = "evaluate.every=1", f"checkpoint.best={tmp_path / 'best'}"
    for settings in ((every, "evaluate.patience=1"), (every, best)):
        with pytest.raises(ConfigError, match=r"choose a model, but evaluate.split is 'test'.* Leave"):
            run(small_recipe(path, *settings, "evaluate.split=test"), World())
    chosen = run(small_recipe(path, every, best), World())
    assert chosen["split"] == "validation"
    validation, test = (
        evaluate_saved(small_recipe(path, every, best, *split), World(), tmp_path / "best")
        for split in ((), ("evaluate.split=test",))
    )
    assert (validation["split"], test["split"]) == ("validation", "test")
    assert validation["metrics"]["loss"] == chosen["validations"][0]["loss"]
    assert validation["metrics"] != test["metrics"]
    assert build_source(small_recipe(path, every)).split == "test"
    shown = io.StringIO()
    show_summary(chosen, Console(file=shown, width=120))
    assert "evaluated on the validation, not the test: nestpipe evaluate FOLDER" in shown.getvalue()


def small_recipe(*settings: str) -> Config:
    model = ("model.num_layers=1", "model.num_negatives=4", "model.dim=8", "model.dim_qk=4", "model.dim_v=4")
    small = ("model.max_length=8", "train.batch_size=16", "train.steps=1", "store.num_threads=1")
    return recipe("hstu-ml-1m", *model, *small, "runtime.dense_threads=1", *settings)
