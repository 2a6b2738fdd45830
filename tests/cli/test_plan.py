"""`nestpipe plan`, as a user calls it."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from nestpipe.cli.main import app

RECIPE = """
[model]
dim = 16
[train]
steps = 4
batch_size = 64
[pipeline]
num_micro_batches = "auto"
[evaluate]
num_samples = 64
[[tables]]
name = "c10"
max_rows = 100
"""


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_recipe_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    recipe, file = tmp_path / "recipe.toml", tmp_path / "plan.json"
    recipe.write_text(RECIPE)
    result = plan(recipe, "--workers", 4, "--host-memory", 16, "--network", 2, "--rows", "c11=5000", "--json", file)
    assert result.exit_code == 0, result.output
    made = json.loads(file.read_text())
    named = {part["name"] for part in made["parts"]}
    assert named == {"program", "store", "overhead", "dense", "pool", "lists", "messages", "activations"}
    assert made["host_bytes"] == sum(part["num_bytes"] for part in made["parts"])
    # Activations raise the peak of a new process; this one may have had a higher one in an earlier test.
    assert all(part["num_bytes"] > 0 for part in made["parts"] if part["name"] != "activations")
    tables = {table["name"]: (table["num_rows"], table["origin"]) for table in made["tables"]}
    assert tables["c10"] == (400, "max_rows of 4 workers")
    assert tables["c11"] == (5000, "--rows")
    assert tables["c12"][1] == "counted in 1,024 samples of training"
    assert made["fits"]
    for text in ("of 16.000 GB: fits", "limited by", "busiest lane", "largest table that fits", "no accelerator"):
        assert text in " ".join(result.output.split()), result.output
    # A table that is too large is refused, and the first remedy helps.
    rows = ("--rows", "c11=200000000", "--json", file)
    refused = plan(recipe, "--workers", 4, "--host-memory", 5, *rows)
    assert refused.exit_code == 1
    assert "does not fit: a worker needs" in refused.output
    made = json.loads(file.read_text())
    assert made["largest_table"] == "c11"
    assert 0 < made["most_rows"] < 200_000_000
    option, workers = made["remedies"][0].split(" ")
    assert plan(recipe, option, int(workers) + 1, "--host-memory", 5, *rows).exit_code == 0


def test_what_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    for arguments, text in (
        ((tmp_path / "none.toml", "--workers", 1, "--host-memory", 1), "there is no recipe"),
        ((recipe, "--workers", 1, "--host-memory", 0), "--host-memory is 0.0, must be above 0"),
        ((recipe, "--workers", 1, "--host-memory", 1, "--rows", "c11"), "must be TABLE=N"),
        ((recipe, "--workers", 1, "--host-memory", 1, "--rows", "d=3"), "no table of the recipe"),
        ((recipe, "--workers", 1, "--host-memory", 1, "--set", "train.batch_size=1"), "at least 2 samples"),
    ):
        result = plan(*arguments)
        assert result.exit_code == 2, arguments
        assert text in " ".join(result.output.split()), result.output
