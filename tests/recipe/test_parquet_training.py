"""Training by a recipe on Parquet files of a user: equal bits in every schedule, resuming, bad rows.

Fails, for example, if run() goes on at a position counted in batches, or if training_files leaves out the seed.
"""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nestpipe.checkpoint import CheckpointError, find_checkpoint
from nestpipe.checkpoint.state_file import read_state
from nestpipe.distributed import RankError, World
from nestpipe.recipe.config import Config
from nestpipe.recipe.run import Summary, evaluate_saved, run
from nestpipe.recipe.text import parse_config
from nestpipe.recipe.value import ConfigError
from tests.files import click_columns, write_parquet
from tests.ranks import run_ranks

KEYS = [f"key_{number}" for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    for number in range(2):
        write_parquet(root / f"train-{number}.parquet", click_columns(150, number), 16)
    write_parquet(root / "held-out.parquet", click_columns(70, 9), 16)
    return root


def recipe(folder: Path, *lines: str, data: str = "", schema: str = "", batch_size: int = 20) -> Config:
    text = f"""
        [data]
        kind = "parquet"
        paths = ["{folder}/train-*.parquet"]
        window = 3
        seed = 4
        {data}
        [schema]
        keys = {KEYS}
        dense = ["dense_0", "dense_1"]
        {schema}
        [model]
        dim = 4
        bottom = [4]
        top = [4]
        [train]
        steps = 12
        batch_size = {batch_size}
        [pipeline]
        num_micro_batches = 2
    """
    return parse_config("\n".join([text, *lines]), "the test").resolved(1, 1)


def held_out(folder: Path) -> str:
    return f'held_out = ["{folder}/held-out.parquet"]'


def with_schedule(config: Config, schedule: str) -> Config:
    return replace(config, pipeline=replace(config.pipeline, schedule=schedule))


def test_nested_has_the_digest_of_serial(folder: Path) -> None:
    serial, nested = (
        run(with_schedule(recipe(folder, data=held_out(folder)), name), World()) for name in ("serial", "nested")
    )
    assert serial["digest"] == nested["digest"]
    assert serial["metrics"] == nested["metrics"]
    assert serial["metrics"]["num_samples"] == 70
    other = run(with_schedule(recipe(folder, data="num_threads = 2"), "nested"), World())
    assert (other["digest"], other["metrics"]) == (serial["digest"], {})
    seeded = recipe(folder)
    assert run(replace(seeded, data=replace(seeded.data, seed=5)), World())["digest"] != serial["digest"]


def test_goes_on_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    def trained(steps: int, *lines: str) -> Summary:
        config = recipe(folder, "[checkpoint]", *lines, data=held_out(folder))
        return run(replace(config, train=replace(config.train, steps=steps)), World())

    whole = trained(24)  # 15 steps are an epoch
    first = trained(11, f'dir = "{tmp_path}/model"')
    assert trained(24, f'load = "{tmp_path}/model"')["digest"] == whole["digest"] != first["digest"]
    config = recipe(folder, data=held_out(folder))
    assert evaluate_saved(config, World(), tmp_path / "model")["metrics"] == first["metrics"]
    with pytest.raises(ConfigError, match=r"nothing to evaluate on; --set data.held_out="):
        evaluate_saved(recipe(folder), World(), tmp_path / "model")


def test_goes_on_with_another_order(folder: Path, tmp_path: Path) -> None:
    """Another order is refused. Another batch size goes on after the last sample.

    Fails if run multiplies num_steps by the batch size.
    """

    def trained(steps: int, batch_size: int, *lines: str, **data: int) -> Summary:
        config = recipe(folder, "[checkpoint]", *lines, batch_size=batch_size)
        return run(
            replace(config, train=replace(config.train, steps=steps), data=replace(config.data, **data)), World()
        )

    trained(3, 20, f'dir = "{tmp_path}/model"')
    load = f'load = "{tmp_path}/model"'
    with pytest.raises(CheckpointError, match=r"going on .* another order of samples: seed was 4, is 5\. Going on"):
        trained(4, 20, load, seed=5)
    with pytest.raises(CheckpointError, match="another order of samples: window was 3, is 2"):
        trained(4, 20, load, window=2)
    trained(5, 10, load, f'dir = "{tmp_path}/other"', num_threads=2)
    own = read_state(find_checkpoint(tmp_path / "other") / "rank00000.safetensors", expected=None)
    assert own["data"]["position"] == 80


def test_the_data_ends(folder: Path) -> None:
    """2 epochs of 300 rows are 18 whole batches of 32 and a rest."""
    summary = run(recipe(folder, data="num_epochs = 2", batch_size=32), World())
    assert summary["steps"] == 12
    config = recipe(folder, data="num_epochs = 1", batch_size=32)
    assert run(config, World())["steps"] == 10
    assert run(recipe(folder, data="num_samples = 64", batch_size=32), World())["steps"] == 2


def test_weights(folder: Path) -> None:
    """Weights from dense_2 change the loss, and with it the rows."""
    weighted, plain = (run(recipe(folder, schema=schema), World()) for schema in ('weight = "dense_2"', ""))
    assert weighted["digest"] != plain["digest"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"schema": 'label = "lable"'}, r"train-0.parquet has no column 'lable'; its columns are label, dense_0, "),
        ({"schema": 'weight = "price"'}, "has no column 'price'"),
        ({"data": 'held_out = ["nowhere.parquet"]'}, r"there is no file nowhere.parquet"),
        ({"data": 'path = "x"'}, "data.path is set, but data.kind = 'parquet' is not prepared data"),
    ],
)
def test_mistakes_in_the_recipe(folder: Path, config: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(recipe(folder, **config), World())


def test_lists_that_are_missing(folder: Path) -> None:
    text = f'[data]\nkind = "parquet"\npaths = ["{folder}"]\n[schema]\nkeys = ["key_0"]'
    with pytest.raises(ConfigError, match=r"data.kind = 'parquet' needs schema.dense, a list of at least one"):
        run(parse_config(text, "the test").resolved(1, 2), World())


def train_on_a_bad_row(world: World, folder: Path) -> str:
    config = recipe(folder, batch_size=16).resolved(2, 2)
    with pytest.raises((RankError, ValueError)) as caught:
        run(config, world)
    return str(caught.value)


def test_a_bad_row_of_one_rank_stops_all(folder: Path, tmp_path: Path) -> None:
    columns = click_columns(160)
    path = write_parquet(tmp_path / "train-0.parquet", columns, 16)
    table = pq.read_table(path)
    dense = table.column("dense_0").to_pylist()
    dense[77] = None
    pq.write_table(table.set_column(1, "dense_0", [dense]), path, row_group_size=16)
    texts = run_ranks(2, train_on_a_bad_row, tmp_path)
    assert all("train-0.parquet, row group 4, row 13: column 'dense_0' is null" in text for text in texts), texts
