"""The recipes of the repository: they parse, resolve and say what was published; what has no reader yet is refused.

Fails, for example, if check_data lets data through that has no reader, or if build_model mixes up dim_qk and dim_v.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nestpipe.data.histories import HistoryShape
from nestpipe.distributed import World
from nestpipe.embedding.row_optimizer import Adam
from nestpipe.models import DLRM, HSTU, FuXi
from nestpipe.store.init import TruncatedNormal
from nestpipe.train.build import build
from nestpipe.train.build_data import build_histories
from nestpipe.train.config import Config, HistoriesSection, TableSection
from nestpipe.train.config_text import load_config
from nestpipe.train.config_value import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TO_TRAIN = [path for path in RECIPES if path.stem.endswith(("-histories", "-consistency"))]

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


@pytest.mark.parametrize("path", [path for path in RECIPES if path not in TO_TRAIN], ids=lambda path: path.stem)
def test_data_without_a_reader_is_refused(path: Path) -> None:
    config = load_config(path).resolved(1, 2)
    text = f"data.kind = '{config.data.kind}' needs prepared data; its reader is not part of this version"
    with pytest.raises(ConfigError, match=text):
        build(config, World())


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
    batch, held_out = next(this_run.batches), next(this_run.held_out)
    assert len(batch) == config.train.batch_size
    assert len(batch.keys["negatives"].values) == config.model.num_negatives * len(batch.keys["history"].values)
    assert not torch.equal(batch.inputs["times"][:100], held_out.inputs["times"][:100])


def test_defaults_of_histories_are_those_of_the_generator() -> None:
    config = replace(recipe("hstu-histories"), histories=HistoriesSection())
    assert build_histories(config, None).shape == HistoryShape(max_length=config.model.max_length)


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
