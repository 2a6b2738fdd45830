"""A recipe names models, data sets, row optimizers and metrics: ours, those of an installed package, and any class.

Fails, for example, if Registry.find does not look at entry points, if build_model leaves out model.args, or if
to_toml does not write [model.args].
"""

import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe import World, optim
from nestpipe.checkpoint import CheckpointError
from nestpipe.cli.main import app
from nestpipe.embedding.optim import group_key
from nestpipe.recipe.build import build
from nestpipe.recipe.config import Config
from nestpipe.recipe.run import Summary, run
from nestpipe.recipe.text import load_config, parse_config, to_toml
from nestpipe.recipe.value import ConfigError
from nestpipe.registry import Registry, RegistryError, datasets, metrics, models, optimizers

PACKAGE = Path(__file__).with_name("tiny_package")
NAMED = ("model.kind=tiny-ranker", "data.kind=tiny-clicks", "row_optimizer.kind=sign-sgd")
PLACED = (
    "model.kind=tiny_ranker:TinyRanker",
    "data.kind=tiny_ranker:TinyClicks",
    "row_optimizer.kind=tiny_ranker:SignSGD",
)
SMALL = (
    *("data.args.held_out=1000", "model.args.hidden=3", "model.dim=4", "row_optimizer.lr=0.01", "train.batch_size=32"),
    *("evaluate.num_samples=64", "pipeline.num_micro_batches=2", "train.steps=6"),
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the tiny package into a folder of its own."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for file in PACKAGE.iterdir():
        if file.is_file():
            (copy / file.name).write_text(file.read_text())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], check=True, timeout=50)
    return target


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(package)
    invalidate_caches()
    yield
    sys.modules.pop("tiny_ranker", None)


def train(*settings: str, trace: Path | None = None) -> Summary:
    return run(load_config(None, [*SMALL, *settings]).resolved(1, 1), World(), trace_path=trace)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("models", ["dlrm", "fuxi", "hstu", "tiny-ranker"]),
        (
            "datasets",
            ["clicks", "histories", "parquet", "kuairand-27k", "movielens-1m", "criteo-kaggle", "tiny-clicks"],
        ),
        ("optimizers", ["sgd", "adagrad", "rowwise_adagrad", "adam", "sign-sgd"]),
        ("metrics", ["clicks", "ranking", "mean-prediction"]),
    ],
)
@pytest.mark.usefixtures("installed")
def test_list(kind: str, names: list[str]) -> None:
    result = CliRunner().invoke(app, ["list", kind])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert set(names) <= lines.keys()
    assert all(len(line) > 10 for line in lines.values())


@pytest.mark.usefixtures("installed")
def test_all_that_shipped_models_have(tmp_path: Path) -> None:
    """Trace, summary, validation, evaluation with metrics, and resuming: by name as by place, to the bit."""
    folder, every = f"checkpoint.dir={tmp_path / 'run'}", ("checkpoint.every=2", "evaluate.every=3")
    metrics = "evaluate.metrics=['clicks', 'mean-prediction']"
    whole = train(*NAMED, metrics, "evaluate.every=3", trace=tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert {"auc", "auc_ceiling", "mean_prediction"} <= whole["metrics"].keys()
    assert [validation["step"] for validation in whole["validations"]] == [3, 6]
    assert {table["name"] for table in whole["tables"]} == {"c00", "c01", "c02"}
    train(*PLACED, metrics, folder, *every, "train.steps=4")
    resumed = train(*PLACED, metrics, folder, *every)
    assert (resumed["resumed_from_step"], resumed["steps"]) == (4, 6)
    assert resumed["digest"] == whole["digest"]
    with pytest.raises(CheckpointError, match=r"model.args was \{hidden = 3\}, is \{hidden = 2\}"):
        train(*PLACED, metrics, folder, *every, "model.args.hidden=2")


@pytest.mark.usefixtures("installed")
def test_a_recipe_of_ones_own_reads_back() -> None:
    config = load_config(None, [*SMALL, *PLACED, "model.args.list=[1, 'x']", "data.args.nested={'a b' = {c = true}}"])
    assert parse_config(to_toml(config), "the text") == config
    assert config.model.args == {"hidden": 3, "list": [1, "x"]}
    assert config.data.args["nested"] == {"a b": {"c": True}}
    run = build(load_config(None, [*SMALL, *NAMED]).resolved(1, 1), World())
    optimizers = {feature.table.optimizer for feature in run.trainer.features.values()}
    assert len(optimizers) == 1  # so all tables are one group
    assert run.trainer.model.hidden.shape == (12, 3)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.kind=tiny-rankr",), "there is no model 'tiny-rankr'; there are dlrm, .*did you mean tiny-ranker"),
        (("model.kind=tiny_ranker:Nothing",), "the model 'tiny_ranker:Nothing' cannot be imported from .*Nothing"),
        (("model.kind=no_such_module:Model",), "cannot be imported from no_such_module:Model: ModuleNotFoundError"),
        (("model.kind=tiny_ranker:SignSGD", "model.args={lr = 0.1}"), "gives a SignSGD, must be a torch.nn.Module"),
        (
            ("model.args.hiden=3",),
            "model.args.hiden is set, but tiny-ranker has no.*did you mean model.args.hidden",
        ),
        (("model.args.when=2026-11-16",), "model.args.when of --set is 2026-11-16 .a date or time., must be"),
        (("data.kind=histories",), "model.kind = 'tiny-ranker' cannot learn from data.kind = 'histories'; take"),
        (("row_optimizer.kind=tiny_ranker:TinyRanker",), "TinyRanker cannot be built: missing .*feature_names"),
        (("evaluate.metrics=['auc']",), "there is no metric 'auc'; there are .*clicks.*ranking.*mean-prediction"),
        (("train.steps.x=3",), "unknown key train.steps.x of --set"),
    ],
)
def test_mistakes(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(load_config(None, [*SMALL, *NAMED, *settings]).resolved(1, 1), World())


def test_a_broken_package_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Registry._load lets an error of the module through."""
    (tmp_path / "broken_models.py").write_text("raise RuntimeError('no such device')\n")
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[nestpipe.models]\nbroken = broken_models:Model\n")
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    result = CliRunner().invoke(app, ["list", "models"])
    assert result.exit_code == 0
    assert "dlrm " in result.output
    assert (
        "broken  the model 'broken' cannot be imported from broken_models:Model: RuntimeError: no such" in result.output
    )
    with pytest.raises(ConfigError, match=r"model.kind of --set: the model 'broken' cannot be imported"):
        load_config(None, ["model.kind=broken"])


def test_two_entries_of_one_name() -> None:
    registry = Registry("thing", "things")
    registry.register("a")(int)
    with pytest.raises(RegistryError, match="two things are called 'a'"):
        registry.register("a")(float)


def test_the_defaults_are_shipped() -> None:
    config = Config()
    for registry, name in ((models, config.model.kind), (datasets, config.data.kind), (optimizers, "adagrad")):
        assert registry.find(name).is_shipped
    assert metrics.find("clicks").is_shipped


def test_equal_shipped_optimizers_are_one_group() -> None:
    assert group_key(optim.Adagrad(0.1)) == group_key(optim.Adagrad(0.1))
    assert group_key(optim.Adagrad(0.1)) != group_key(optim.RowWiseAdagrad(0.1))

    class Own(optim.Adagrad):
        pass

    assert group_key(Own(0.1)) != group_key(Own(0.1))
