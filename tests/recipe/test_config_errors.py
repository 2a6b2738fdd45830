"""Recipes and settings that are refused, and the words in which they are."""

import re
import tomllib
from pathlib import Path

import pytest

from nestpipe.embedding.plan import WINDOWS
from nestpipe.recipe.text import load_config
from nestpipe.recipe.value import ConfigError

RECIPE = Path("recipe.toml")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that errors name recipe.toml alone


def refusal(text: str | None, *settings: str) -> str:
    if text is not None:
        RECIPE.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(None if text is None else RECIPE, settings)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


SECTIONS = (
    "data, schema, histories, model, tables, row_optimizer, dense_optimizer, train, pipeline, exchange, cluster, "
    "store, runtime, distributed, memory, evaluate, published, logging, checkpoint"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1", "unknown section trian in recipe.toml; did you mean train?"),
        ("[zzz]", f"unknown section zzz in recipe.toml; the sections are {SECTIONS}"),
        ('"a\\nb" = 1', f'unknown section "a\\nb" in recipe.toml; the sections are {SECTIONS}'),
        ("train = 3", "train in recipe.toml is 3 (an integer), must be a section: write [train]"),
        ("[[train]]", "train in recipe.toml is [{}] (a list), must be a section: write [train]"),
        ("[tables]", "tables in recipe.toml is a section, must be a list of sections: write [[tables]]"),
        ("tables = [7]", "tables[0] in recipe.toml is 7 (an integer), must be a section: write [[tables]]"),
        ("[train]\nstep = 1", "unknown key train.step in recipe.toml; did you mean train.steps?"),
        (
            "[exchange]\nzzz = 1",
            "unknown key exchange.zzz in recipe.toml; the keys of exchange are window, cross_batch, row_dtype, "
            "gradient_dtype, replicas, check_replicas, hosts",
        ),
        (
            "[checkpoint]\n'a\tb' = 1",
            'unknown key checkpoint."a\\tb" in recipe.toml; the keys of checkpoint are dir, every, keep, '
            "complete_every, on_error, best, load, strict",
        ),
        ("[[tables]]\nnam = 1", "unknown key tables[0].nam in recipe.toml; did you mean tables[0].name?"),
        ("[[tables]]\nname = 'a'\n[[tables]]\ndim = 1", "tables[1] in recipe.toml has no name; add name = ..."),
        (
            "[[tables]]\nname = 'a'\n[[tables]]\nname = 'b'\n[[tables]]\nname = 'a'",
            'two tables in recipe.toml have the name "a"; make them one, or rename one',
        ),
    ],
)
def test_unknown_and_misplaced(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('train.steps = "many"', 'train.steps in recipe.toml is "many" (a string), must be an integer'),
        ("train.steps = true", "train.steps in recipe.toml is true (a boolean), must be an integer"),
        ("train.steps = 3.0", "train.steps in recipe.toml is 3.0 (a number), must be an integer"),
        ("train.steps = {a = 1}", "train.steps in recipe.toml is a section, must be an integer"),
        ("train.steps = 1979-05-27", "train.steps in recipe.toml is 1979-05-27 (a date or time), must be an integer"),
        (f"train.steps = {2**63}", "train.steps in recipe.toml is too large, must fit in 64 bits"),
        (f"data.skew = {10**400}", "data.skew in recipe.toml is too large, must fit in 64 bits"),
        ("data.skew = false", "data.skew in recipe.toml is false (a boolean), must be a number"),
        ("data.kind = 5", "data.kind in recipe.toml is 5 (an integer), must be a string in quotes"),
        ("train.deterministic = 1", "train.deterministic in recipe.toml is 1 (an integer), must be true or false"),
        ("store.num_threads = 'x'", 'store.num_threads in recipe.toml is "x" (a string), must be an integer'),
        ("model.top = 5", "model.top in recipe.toml is 5 (an integer), must be a list of integers"),
        ("model.top = [8, 'a']", 'model.top[1] in recipe.toml is "a" (a string), must be an integer'),
        (
            "row_optimizer.betas = [0.9]",
            "row_optimizer.betas in recipe.toml is [0.9] (a list), must be a list of 2 numbers",
        ),
        (
            f"train.seed = '{'x' * 100}'",
            f'train.seed in recipe.toml is "{"x" * 56}... (a string), must be an integer',
        ),
    ],
)
def test_wrong_types(line: str, message: str) -> None:
    assert refusal(line) == message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train.steps = -1", "is -1, must be at least 0"),
        ("train.seed = -1", "is -1, must be at least 0"),
        ("train.batch_size = 0", "is 0, must be at least 1"),
        ("pipeline.num_micro_batches = 0", "is 0, must be at least 1"),
        ("distributed.timeout_seconds = 0", "is 0.0, must be above 0"),
        ("distributed.timeout_seconds = inf", "is inf, must be finite"),
        ("row_optimizer.lr = 0", "is 0.0, must be above 0"),
        ("row_optimizer.lr = nan", "is nan, must be finite"),
        ("dense_optimizer.lr = -1e-3", "is -0.001, must be above 0"),
        ("dense_optimizer.weight_decay = -1", "is -1.0, must be at least 0"),
        ("dense_optimizer.clip_norm = 0", "is 0.0, must be above 0"),
        ("dense_optimizer.warmup_steps = -1", "is -1, must be at least 0"),
        ("data.skew = -0.5", "is -0.5, must be at least 0"),
        ("data.num_samples = 0", "is 0, must be at least 1"),
        ("model.dim = 1048577", "is 1048577, must be at least 1 and at most 1048576"),
        ("store.num_threads = 0", "is 0, must be at least 1 and at most 1024"),
        ("runtime.dense_threads = 1025", "is 1025, must be at least 1 and at most 1024"),
        ("evaluate.num_samples = -1", "is -1, must be at least 0"),
        ("evaluate.batch_size = 0", "is 0, must be at least 1"),
        ("logging.every = 0", "is 0, must be at least 1"),
        ("checkpoint.every = -1", "is -1, must be at least 0"),
        ("checkpoint.dir = ''", "is empty; give it a value, or leave it out"),
        ('checkpoint.dir = "a\\u0000"', 'is "a\\u0000", must have no NUL and be UTF-8'),
    ],
)
def test_out_of_range(line: str, problem: str) -> None:
    assert refusal(line) == f"{line.split()[0]} in recipe.toml {problem}"


def test_limits_hold_for_elements_of_lists_and_for_tables() -> None:
    betas = "must be at least 0 and below 1"
    assert refusal("row_optimizer.betas = [0.9, 1]") == f"row_optimizer.betas[1] in recipe.toml is 1.0, {betas}"
    assert refusal("model.bottom = [0]") == "model.bottom[0] in recipe.toml is 0, must be at least 1"
    table = "[[tables]]\nname = 'a'\n"
    assert refusal(f"{table}lr = 0") == "tables[0].lr in recipe.toml is 0.0, must be above 0"
    assert refusal(f"{table}num_keys = 0") == "tables[0].num_keys in recipe.toml is 0, must be at least 1"
    most = "must be at least 1 and at most 4294967294"
    assert refusal(f"{table}max_rows = {2**32}") == f"tables[0].max_rows in recipe.toml is {2**32}, {most}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("dense_optimizer.kind = 'zzz'", '"zzz", must be one of sgd, adagrad, adam, adamw'),
        ("model.kind = ''", "empty; give it a value, or leave it out"),
        ("exchange.window = 'twice'", f'"twice", must be one of {", ".join(WINDOWS)}'),
    ],
)
def test_choices(line: str, problem: str) -> None:
    assert refusal(line) == f"{line.split()[0]} in recipe.toml is {problem}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("row_optimizer.kind = 'adagrd'", "no row optimizer 'adagrd'; there are .*adagrad.*did you mean adagrad"),
        ("data.kind = 'click'", "no data set 'click'; there are .*clicks.*criteo-kaggle.*; did you mean clicks"),
        ("model.kind = 'dlmr'", "no model 'dlmr'; there are .*dlrm.*, as in 'package.module:Class'; did you mean dlrm"),
    ],
)
def test_names_of_registries(line: str, problem: str) -> None:
    assert re.fullmatch(rf"{line.split()[0]} in recipe.toml: there is {problem}\?", refusal(line))


def test_choices_of_tables() -> None:
    table = "[[tables]]\nname = 'a'\n"
    assert refusal(f"{table}init = 'norml'") == (
        'tables[0].init in recipe.toml is "norml", must be one of normal, truncated_normal, uniform, constant; '
        "did you mean normal?"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps", '--set "train.steps" is not section.key=value; write it like train.steps=300'),
        ("steps=3", '--set "steps=3" is not section.key=value; write it like train.steps=300'),
        ("train.=3", '--set "train.=3" is not section.key=value; write it like train.steps=300'),
        (".steps=3", '--set ".steps=3" is not section.key=value; write it like train.steps=300'),
        ("=3", '--set "=3" is not section.key=value; write it like train.steps=300'),
        ("", '--set "" is not section.key=value; write it like train.steps=300'),
        ("tables.item.lr=1", '--set "tables.item.lr=1": tables cannot be set here; write [[tables]] in a recipe'),
        ("tables=[]", '--set "tables=[]": tables cannot be set here; write [[tables]] in a recipe'),
        ("trian.steps=3", "unknown section trian of --set; did you mean train?"),
        ("table.lr=3", f"unknown section table of --set; the sections are {SECTIONS.replace('tables, ', '')}"),
        ("train.step=3", "unknown key train.step of --set; did you mean train.steps?"),
        (
            "train.a.b=3",
            "unknown key train.a.b of --set; the keys of train are steps, seed, batch_size, deterministic, precision, "
            "compiled",
        ),
        ("train.steps=many", 'train.steps of --set is "many" (a string), must be an integer'),
        ("train.steps=", 'train.steps of --set is "" (a string), must be an integer'),
        ("train.steps=-1", "train.steps of --set is -1, must be at least 0"),
        ("row_optimizer.lr=-1e-3", "row_optimizer.lr of --set is -0.001, must be above 0"),
        ("train.deterministic=True", 'train.deterministic of --set is "True" (a string), must be true or false'),
        ("checkpoint.dir=2026", "checkpoint.dir of --set is 2026 (an integer), must be a string in quotes"),
        ("checkpoint.dir=\udcff", 'checkpoint.dir of --set is "\udcff", must have no NUL and be UTF-8'),
    ],
)
def test_settings_that_are_refused(setting: str, message: str) -> None:
    assert refusal(None, setting) == message


def test_files_that_cannot_be_read() -> None:
    def message(path: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(Path(path), [])
        return str(caught.value)

    assert message("none.toml") == "there is no recipe none.toml; give the path of a TOML file"
    Path("folder").mkdir()
    assert message("folder") == "cannot read folder: Is a directory; give the path of a TOML file"
    RECIPE.write_bytes(b'[data]\nkind = "\xff"')
    assert message("recipe.toml") == "recipe.toml is not UTF-8 at byte 15; save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[train]\nsteps 3", "line 2"),
        ("[train]\nsteps = 1\nsteps = 2\n", "line 3"),
        ("[train]\nsteps =", "end of document"),
        ("[train", "end of document"),
        ("[model]\ntop = [8,", "end of document"),
    ],
)
def test_broken_toml(text: str, place: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError, match=place) as caught:
        tomllib.loads(text)
    remedy = "correct it, or restore the file if it is cut off"
    assert refusal(text) == f"recipe.toml is not valid TOML: {caught.value}; {remedy}"


def test_toml_too_deep_to_parse() -> None:
    assert refusal("a = " + "[" * 100_000).startswith("recipe.toml is not valid TOML: ")
