"""What a user installs: the dependencies of the package and its extras, the wheel, the source distribution."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nestpipe import __version__
from nestpipe.datasets.generate import generate

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"
WITHOUT_DUCKDB = """
import sys
sys.modules["duckdb"] = None
from nestpipe.cli.main import app
app(sys.argv[1:])
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;]", requirement)[0] for requirement in requirements}


def test_base_install_is_small() -> None:
    """Fails if a package that only an extra needs becomes a dependency of all users."""
    assert names(PROJECT["dependencies"]) == {"torch", "numpy", "pyarrow", "rich", "safetensors", "typer"}
    extras = PROJECT["optional-dependencies"]
    assert names(extras["datasets"]) == {"duckdb"}
    assert names(extras["cuda"]) == {"triton"}
    assert names(extras["report"]) == {"plotly"}
    assert names(extras["tensorboard"]) == {"tensorboard"}
    assert "nestpipe[cuda,datasets,report]" in extras["dev"]
    assert "nestpipe[docs,tensorboard]" in extras["slow"]


def test_constraints_pin_every_dependency() -> None:
    """Fails without `torch==...` in constraints.txt: pip would then take the newest build, with all CUDA packages."""
    pinned = {line.split("==")[0].lower() for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    extras = PROJECT["optional-dependencies"].values()
    assert names([*PROJECT["dependencies"], *(one for extra in extras for one in extra)]) - {"nestpipe"} <= pinned


def test_preparing_data_without_duckdb_names_the_extra(tmp_path: Path) -> None:
    """Fails if a module of the command line imports DuckDB, or if the message does not say how to install it."""
    generate("movielens", tmp_path / "raw", 1000)
    command = [sys.executable, "-c", WITHOUT_DUCKDB, "data", "prepare", "movielens", "raw", "prepared"]
    prepared = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert prepared.returncode == 2
    assert "pip install 'nestpipe[datasets]'" in prepared.stderr
    assert "Traceback" not in prepared.stderr


IMPORTS = """
import sys
sys.modules.update(dict.fromkeys(("safetensors", "triton", "torch._dynamo")))
import nestpipe, nestpipe.cli.main
print(*{name.split(".")[0] for name in sys.modules} & {"pyarrow", "duckdb"})
import nestpipe.checkpoint.tools.export, nestpipe.bench.h200.run
"""


def test_what_is_imported_late() -> None:
    """Only checkpoints, kernels and compiled models need safetensors, Triton and the compiler; help and the list of
    data sets need neither PyArrow nor DuckDB. Fails if a module of nestpipe/checkpoint imports safetensors at its top,
    if the Trainer's module imports nestpipe.embedding.traceable, or if a published data set imports DuckDB at its
    top."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob(".github/**/*.yml")), ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name
)
def test_yaml_files_parse(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_hooks_run_the_tools_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"].split()[0] for repository in config["repos"] for hook in repository["hooks"]}
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    assert hooks == {f".venv/bin/{tool}" for tool in re.findall(r"^\t\$\(BIN\)/([\w-]+)", lint.group(1), re.MULTILINE)}


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]


def run(command: list[str | Path], folder: Path, exit_code: int = 0, **changes: str) -> str:
    """Runs a command with these changes of the environment; returns what it printed."""
    environment = {**os.environ, **changes}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


@pytest.fixture
def clean_venv(tmp_path: Path) -> Iterator[Path]:
    """A virtual environment with pip only. It is deleted, since torch takes most of a gigabyte."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_trains_in_a_clean_environment(tmp_path: Path, clean_venv: Path) -> None:
    """Builds as `make wheel` does: the source distribution, and the wheel from it.

    Fails if `include` of the source distribution in pyproject.toml lacks a file of the repository, if the wheel lacks
    the native library, or if training reads a file that only the source tree has.
    """
    dist, work = tmp_path / "dist", tmp_path / "work"
    work.mkdir()
    run([sys.executable, "-m", "build", "--outdir", dist, ROOT], tmp_path, PIP_CONSTRAINT=str(CONSTRAINTS))
    (wheel,) = dist.glob(f"nestpipe-{__version__}-py3-none-*.whl")
    with tarfile.open(dist / f"nestpipe-{__version__}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert set(run(["git", "ls-files"], ROOT).splitlines()) <= packed
    assert not [name for name in packed if name.endswith(".so")]

    bin_only = {"PATH": str(clean_venv / "bin"), "PYTHONPATH": ""}  # neither a compiler nor cmake
    python, nestpipe = clean_venv / "bin" / "python", clean_venv / "bin" / "nestpipe"
    run([python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel], work, **bin_only)
    installed = run([python, "-m", "pip", "list", "--format", "freeze"], work, **bin_only).lower()
    assert f"nestpipe=={__version__}" in installed
    assert "duckdb" not in installed
    assert "triton" not in installed
    trained = run([nestpipe, "train", "--set", "train.steps=5", "--set", "evaluate.num_samples=0"], work, **bin_only)
    assert re.search(r"^digest [0-9a-f]{64}$", trained, re.MULTILINE), trained
    assert "dlrm" in run([nestpipe, "list", "models"], work, **bin_only)
    refused = run([nestpipe, "bench", "learning", "--quick", "--json", "result.json"], work, exit_code=2, **bin_only)
    assert "Traceback" not in refused
