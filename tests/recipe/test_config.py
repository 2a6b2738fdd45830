"""Recipes: defaults, what they read as, the way back to text, the list of keys."""

import math
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.device.streams import default_device
from nestpipe.pipelining.schedule import SCHEDULES
from nestpipe.recipe.config import (
    CheckpointSection,
    Config,
    DataSection,
    DenseOptimizerSection,
    Key,
    ModelSection,
    RowOptimizerSection,
    RuntimeSection,
    StoreSection,
    TableSection,
    TrainSection,
)
from nestpipe.recipe.text import describe, load_config, to_toml

RECIPE = Path("recipe.toml")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *sets: str) -> Config:
    RECIPE.write_text(text, encoding="utf-8")
    return load_config(RECIPE, sets)


def test_no_recipe_is_the_defaults() -> None:
    config = load_config(None, [])
    assert config == Config() == read("")
    assert (config.train.steps, config.train.batch_size, config.train.deterministic) == (300, 2048, True)
    assert (config.data.kind, config.data.skew, config.data.num_samples) == ("clicks", 1.05, None)
    assert (config.model.dim, config.model.bottom, config.model.top) == (64, (128,), (256, 128))
    rows = config.resolved(1, 1).row_optimizer
    assert (rows.kind, rows.lr, rows.betas) == ("adagrad", 0.05, (0.9, 0.999))
    assert (config.dense_optimizer.kind, config.dense_optimizer.clip_norm) == ("adam", None)
    assert (config.tables, config.checkpoint, config.evaluate.num_samples) == ((), CheckpointSection(None, 0), 65536)


def test_a_recipe_changes_what_it_names() -> None:
    config = read(
        """
        [data]
        skew = 1  # an integer is fine where a number is wanted
        [model]
        bottom = []
        top = [8, 4]
        [[tables]]
        name = "item"
        lr = 1
        [[tables]]
        name = "user é"
        dim = 16
        init = "uniform"
        optimizer = "adam"
        frozen = true
        [dense_optimizer]
        betas = [0, 0.5]
        clip_norm = 1e3
        """
    )
    assert config == Config(
        data=DataSection(skew=1.0),
        model=ModelSection(bottom=(), top=(8, 4)),
        tables=(
            TableSection("item", lr=1.0),
            TableSection("user é", dim=16, init="uniform", optimizer="adam", frozen=True),
        ),
        dense_optimizer=DenseOptimizerSection(betas=(0.0, 0.5), clip_norm=1000.0),
    )
    assert type(config.data.skew) is type(config.tables[0].lr) is type(config.dense_optimizer.betas[0]) is float


def test_defaults_of_a_table() -> None:
    assert read('[[tables]]\nname = "a"').tables == (
        TableSection("a", None, "normal", 0.02, None, None, None, None, False),
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.steps=60", 60),
        (" train.steps = 1_000 ", 1000),
        ("data.skew=2", 2.0),
        ("data.skew=1.5", 1.5),
        ("row_optimizer.lr=1e-3", 1e-3),
        ("train.deterministic=false", False),
        ("exchange.window=resend", "resend"),
        ('exchange.window="resend"', "resend"),
        ("exchange.window='resend'", "resend"),
        ("checkpoint.dir=runs/a=b #1", "runs/a=b #1"),
        ('checkpoint.dir="2026"', "2026"),
        ("checkpoint.dir=5\nevery = 3", "5\nevery = 3"),
        ("model.top=[8, 4]", (8, 4)),
        ("model.bottom=[]", ()),
        ("row_optimizer.betas=[0.5, 0]", (0.5, 0.0)),
        ("store.num_threads=3", 3),
    ],
)
def test_settings(setting: str, expected: object) -> None:
    section, _, key = setting.partition("=")[0].strip().partition(".")
    value = getattr(getattr(load_config(None, [setting]), section), key)
    assert (value, type(value)) == (expected, type(expected))


def test_settings_come_after_the_recipe_and_the_last_one_wins() -> None:
    config = read("[train]\nsteps = 1\nseed = 7", "train.steps=2", "data.seed=4", "train.steps=3")
    assert config == Config(train=TrainSection(steps=3, seed=7), data=DataSection(seed=4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_pipeline_is_a_choice(name: str) -> None:
    assert load_config(None, [f"pipeline.schedule={name}"]).pipeline.schedule == name


def test_resolved_fills_threads_the_device_and_the_row_optimizer_and_nothing_else() -> None:
    config = Config(train=TrainSection(steps=5))
    filled = config.resolved(ranks_on_host=2, cores=7)
    rows = RowOptimizerSection("adagrad", 0.05, betas=(0.9, 0.999))
    runtime = RuntimeSection(3, default_device())
    assert filled == replace(config, store=StoreSection(3), runtime=runtime, row_optimizer=rows)
    assert config.resolved(ranks_on_host=4, cores=2).store.num_threads == 1
    own = Config(
        store=StoreSection(5), runtime=RuntimeSection(6, "cpu"), row_optimizer=replace(rows, kind="sgd", lr=1.0)
    )
    assert own.resolved(ranks_on_host=1, cores=2) == own


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_rows_of_histories_change_as_the_dense_part_does(kind: str) -> None:
    """Fails if resolved leaves out the betas."""
    dense = ("dense_optimizer.lr=0.003", "dense_optimizer.betas=[0.9, 0.98]", f"model.kind={kind}")
    rows = load_config(None, dense).resolved(1, 1).row_optimizer
    assert (rows.kind, rows.lr, rows.betas) == ("adam", 0.003, (0.9, 0.98))
    rows = load_config(None, [*dense, "row_optimizer.kind=sgd", "row_optimizer.lr=1"]).resolved(1, 1).row_optimizer
    assert (rows.kind, rows.lr) == ("sgd", 1.0)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def values_of(hint: Any, key: Key) -> st.SearchStrategy[Any]:
    """Any value that the limits of a key permit."""
    names = key.choices if key.registry is None else key.registry.names()
    if "Mapping" in str(hint):
        plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
        return st.dictionaries(TEXT, st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
    if "tuple" not in str(hint) and names:
        values: st.SearchStrategy[Any] = st.sampled_from(names)
    elif "tuple" in str(hint):
        element, *others = get_args(get_args(hint)[0] if "None" in str(hint) else hint)
        length = None if others == [...] else 1 + len(others)
        values = st.lists(values_of(element, key), min_size=length or 0, max_size=length or 3).map(tuple)
    elif "int" in str(hint):
        values = st.integers(int(key.at_least or 0), int(key.at_most or (key.below or 2**63) - 1))
    elif "float" in str(hint):
        low, high = key.at_least if key.above is None else key.above, key.below or key.at_most
        values = st.floats(low, high, exclude_min=key.above is not None, exclude_max=key.below is not None)
        values = values.filter(math.isfinite)
    elif "bool" in str(hint):
        values = st.booleans()
    else:
        values = TEXT
    return st.none() | values if "None" in str(hint) else values


def sections_of(section: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(section)
    return st.builds(section, **{f.name: values_of(hints[f.name], f.metadata["key"]) for f in fields(section)})


def configs() -> st.SearchStrategy[Config]:
    sections = {name: sections_of(hint) for name, hint in get_type_hints(Config).items() if name != "tables"}
    tables = st.lists(sections_of(TableSection), max_size=3, unique_by=lambda table: table.name).map(tuple)
    return st.builds(Config, tables=tables, **sections)


@given(configs())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))  # a config is large
def test_every_config_reads_back_from_its_text(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert load_config(path) == config


def test_text_of_a_config() -> None:
    text = to_toml(Config(tables=(TableSection('a "b"\n\x7f', lr=1e-5),), model=ModelSection(bottom=(8, 4))))
    assert '[data]\nkind = "clicks"\nseed = 0\nskew = 1.05\npaths = []\n' in text  # num_samples is None: left out
    assert "\n[published]\n\n" in text
    assert "\nbottom = [8, 4]\n" in text
    assert (
        '\n[[tables]]\nname = "a \\"b\\"\\n\\u007f"\ninit = "normal"\ninit_scale = 0.02\nlr = 1e-05\nfrozen = false\n'
        in text
    )
    kept = 'keep = 2\ncomplete_every = 10\non_error = "stop"\nstrict = true\n'
    assert text.endswith(f"[checkpoint]\nevery = 0\n{kept}")


def test_describe_lists_every_key() -> None:
    lines = {name: rest for name, *rest in describe()}
    assert len(lines) == len(describe())
    expected = {
        f"{section.name}.{field.name}"
        for section in fields(Config)
        for field in fields(TableSection if section.name == "tables" else getattr(Config(), section.name))
    }
    assert set(lines) == expected
    assert all(text for rest in lines.values() for text in rest)
    assert lines["train.steps"] == ["integer, at least 0", "300", "steps to train"]
    assert lines["data.num_samples"] == ["integer, at least 1", "not set", "number of samples; not set: endless"]
    assert lines["tables.name"] == ["string", "required", "name of a table of the data"]
    assert lines["exchange.window"][:2] == ['"once" | "resend"', '"once"']
    assert lines["row_optimizer.betas"][:2] == ["list of 2 numbers, at least 0 and below 1", "not set"]
    assert lines["train.deterministic"][:2] == ["true or false", "true"]
