"""Keys of [[tables]] that say where rows are and where they are added up.

Fails if build_features leaves out `where`, or takes it for sequences.
"""

from pathlib import Path

import pytest

from nestpipe import Pooled
from nestpipe.recipe.build import build_features, build_source
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError


def config_of(folder: Path, tables: str, *settings: str):
    recipe = folder / "recipe.toml"
    recipe.write_text(tables)
    return load_config(recipe, settings)


def test_where_and_placement_reach_the_features(tmp_path: Path) -> None:
    tables = '[[tables]]\nname = "c10"\nwhere = "owner"\n[[tables]]\nname = "c11"\nplacement = "auto"\nwhere = "auto"\n'
    config = config_of(tmp_path, tables).resolved(1, 1)
    features = build_features(config, build_source(config))
    assert isinstance(features["c10"], Pooled)
    places = {name: (features[name].where, features[name].table.placement) for name in ("c10", "c11", "c12")}
    assert places == {"c10": ("owner", "sharded"), "c11": ("auto", "auto"), "c12": ("requester", "sharded")}


def test_rows_of_a_sequence_reach_the_model(tmp_path: Path) -> None:
    tables = '[[tables]]\nname = "item"\nwhere = "owner"\n'
    config = config_of(tmp_path, tables, 'data.kind="histories"', 'model.kind="hstu"').resolved(1, 1)
    with pytest.raises(ConfigError, match=r"tables\.item\.where is 'owner', but a feature of the table is a sequence"):
        build_features(config, build_source(config))


def test_other_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="where"):
        config_of(tmp_path, '[[tables]]\nname = "c10"\nwhere = "here"\n')
