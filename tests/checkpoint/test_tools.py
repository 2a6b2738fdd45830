"""What inspect, verify and diff say about checkpoints.

Fails, for example, if _entry does not pass the problem on, if verify stops at the first file that is wrong, or if
_compare leaves out the row state.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nestpipe import Table
from nestpipe.checkpoint import CheckpointError
from nestpipe.checkpoint.manifest import sealed
from nestpipe.checkpoint.shards import ShardReader
from nestpipe.checkpoint.tools import diff as diffing
from nestpipe.checkpoint.tools.diff import CheckpointDifference, diff
from nestpipe.checkpoint.tools.inspect import CheckpointInfo, FolderInfo, inspect
from nestpipe.checkpoint.tools.saved import newest, parse_init
from nestpipe.checkpoint.tools.verify import Verification, verify
from nestpipe.store import init
from tests.checkpoint import made
from tests.checkpoint.made import RECIPE, Content, Program, content_of, saved_chain, write_as_ranks

OLD = Path(__file__).parent.parent / "old_checkpoints" / "v0.1"


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)


def look(path: Path) -> CheckpointInfo:
    info = inspect(path)
    assert isinstance(info, CheckpointInfo)
    return info


def look_at_folder(path: Path) -> FolderInfo:
    info = inspect(path)
    assert isinstance(info, FolderInfo)
    return info


def test_inspect_a_checkpoint(tmp_path: Path) -> None:
    _, paths = saved_chain(tmp_path / "run")
    complete, last = look(paths[0]), look(paths[-1])
    assert [(table.name, table.num_rows, table.num_erased) for table in complete.tables] == [
        ("item", 300, 0),
        ("user/id", 100, 0),
    ]
    assert (complete.bases, complete.num_bytes) == ([], complete.num_chain_bytes)
    assert [(table.num_rows, table.num_erased) for table in last.tables] == [(22, 3), (2, 0)]
    item = last.tables[0]
    assert (item.dim, item.state_width, item.dtype, item.optimizer) == (3, 3, "float32", "adagrad")
    assert (item.init, item.num_bytes) == ("Normal(std=0.5, mean=0.0)", 22 * (6 * 4 + 16))
    assert (last.num_steps, last.num_ranks, last.num_micro_batches, last.seed) == (3, 1, 2, 3)
    assert last.bases == ["step-00000001", "step-00000002"]
    assert last.num_files == len(list(paths[-1].iterdir()))
    assert last.num_bytes == sum(file.stat().st_size for file in paths[-1].iterdir())
    assert last.num_chain_bytes == sum(file.stat().st_size for path in paths for file in path.iterdir())
    assert last.dense is not None
    assert (last.dense.num_entries, last.dense.num_values, last.dense.num_bytes) == (2, 10, 40)
    assert (last.dense.optimizer, last.dense.lr_schedule, last.dense.extra) == ("Adam", None, ["epoch"])
    assert last.dense.optimizer_bytes == 2 * 40 + 2 * 4
    assert (last.data, last.data_is_equal, last.recipe, last.problem) == ({"position": 36}, True, RECIPE, None)


def test_inspect_reads_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if inspect opens a shard, or reads all of a state file."""
    _, paths = saved_chain(tmp_path / "run")

    def refuse(reader: ShardReader) -> None:
        raise AssertionError(reader.path)

    monkeypatch.setattr(ShardReader, "blocks", refuse)
    monkeypatch.setattr("nestpipe.checkpoint.tools.state_view.check_file", refuse)
    look(paths[-1])
    look_at_folder(tmp_path / "run")


def test_inspect_a_folder(tmp_path: Path) -> None:
    """The newest good one is marked; others come with what is wrong."""
    _, paths = saved_chain(tmp_path / "run")
    (tmp_path / "run" / "step-00000009.partial-1f").mkdir()
    (tmp_path / "run" / "step-00000001.damaged").mkdir()
    (tmp_path / "run" / "notes").mkdir()
    info = look_at_folder(tmp_path / "run")
    assert [(one.name, one.num_steps, one.base) for one in info.checkpoints] == [
        ("step-00000001", 1, None),
        ("step-00000002", 2, "step-00000001"),
        ("step-00000003", 3, "step-00000002"),
    ]
    assert [(one.num_rows, one.is_newest_good, one.problem) for one in info.checkpoints] == [
        (400, False, None),
        (33, False, None),
        (24, True, None),
    ]
    assert info.unfinished == ["step-00000001.damaged", "step-00000009.partial-1f"]
    assert look_at_folder(tmp_path) == info  # a folder that holds one folder of checkpoints

    (paths[2] / "manifest.json").write_text("{}")
    (paths[1] / "rank00000-shard002.rows").unlink()
    first, second, third = look_at_folder(tmp_path / "run").checkpoints
    assert (first.is_newest_good, second.is_newest_good, third.is_newest_good) == (True, False, False)
    assert "is not the manifest of a checkpoint" in str(third.problem)
    assert (third.num_steps, third.num_rows) == (None, None)
    assert str(second.problem).endswith("rank00000-shard002.rows is missing")
    assert newest(tmp_path / "run") == (paths[0], [third.problem, second.problem])
    shutil.rmtree(paths[0])
    assert "step-00000001" in str(look(paths[1]).problem)
    assert look(paths[1]).bases == ["step-00000001"]


def test_inspect_a_checkpoint_without_its_dense_part(tmp_path: Path) -> None:
    _, paths = saved_chain(tmp_path / "run")
    flip(paths[0] / "dense.safetensors", 9)
    info = look(paths[0])
    assert (info.dense, info.num_steps) == (None, 1)
    assert "dense.safetensors is not a state file of nestpipe, or it is damaged" in str(info.problem)


def test_old_formats(tmp_path: Path) -> None:
    """Version 0.1 can be inspected and verified; its rows are in pickles, which these tools do not read."""
    info = look(OLD / "trainer-2")
    assert (info.format, info.num_steps, info.num_ranks, info.dense) == (1, 4, 2, None)
    assert [(table.name, table.dim, table.state_width, table.dtype) for table in info.tables] == [
        ("item", 5, 10, "float64"),
        ("tag", 3, 6, "float64"),
    ]
    assert info.tables[1].init == "Uniform(low=-1, high=1)"
    shutil.copytree(OLD / "trainer-2", tmp_path / "old")
    result = verify(tmp_path / "old")
    assert (result.num_files, result.problems) == (4, [])
    flip(tmp_path / "old" / "rank1.pt", 1000)
    assert texts(verify(tmp_path / "old")) == {"rank1.pt": "is damaged or of another save: its checksum is wrong"}
    with pytest.raises(CheckpointError, match=r"has format 1, but this needs format 3\. Resume its run once"):
        diff(OLD / "trainer-1", OLD / "trainer-1")


def texts(result: Verification) -> dict[str, str]:
    return {problem.file.name: problem.text for problem in result.problems}


def test_verify(tmp_path: Path) -> None:
    """Every byte is read: files, and shards behind their first block."""
    saved_chain(tmp_path / "run")
    shares: list[float] = []
    result = verify(tmp_path / "run", lambda what, share: shares.append(share))
    assert ([path.name[-1] for path in result.checkpoints], result.problems) == (["1", "2", "3"], [])
    files = [file for path in result.checkpoints for file in path.iterdir()]
    assert result.num_files == len(files)
    assert shares == sorted(shares)
    assert (len(shares) > 20, shares[-1]) == (True, 1.0)
    alone = verify(result.checkpoints[1])
    assert [path.name for path in alone.checkpoints] == ["step-00000001", "step-00000002"]


SHARD = "rank00000-shard001.rows"


@pytest.mark.parametrize(
    ("spoil", "file", "text"),
    [
        (lambda path: flip(path / "dense.safetensors", -1), "dense.safetensors", "its checksum is wrong"),
        (lambda path: flip(path / "rank00000.safetensors", -1), "rank00000.safetensors", "its checksum is wrong"),
        (lambda path: flip(path / SHARD, -100), SHARD, "is damaged: its checksum is wrong"),
        (lambda path: flip(path / SHARD, 20), SHARD, "its header is damaged"),
        (lambda path: (path / SHARD).unlink(), SHARD, "cannot be read: No such file"),
        (lambda path: (path / "dense.safetensors").write_bytes(b""), "dense.safetensors", "has 0 bytes instead of"),
        (lambda path: flip(path / "rank00000.json", 40), "rank00000.json", "is damaged: "),
        (lambda path: flip(path / "manifest.json", 40), "manifest.json", "is damaged: "),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json", "is missing"),
        (lambda path: shutil.rmtree(path), "manifest.json", "does not exist"),
    ],
)
def test_verify_names_what_is_wrong(spoil: Callable[[Path], None], file: str, text: str, tmp_path: Path) -> None:
    """Fails if check_file compares sizes only, or if _read_shard stops after the first block."""
    _, paths = saved_chain(tmp_path / "run")
    spoil(paths[0])
    problems = verify(tmp_path / "run").problems
    assert any(problem.file.name == file and text in problem.text for problem in problems), problems
    if file != "manifest.json":  # without it, the checkpoints that are based on this one are wrong, too
        assert [problem.file for problem in problems] == [paths[0] / file]


def test_verify_goes_on_behind_a_problem(tmp_path: Path) -> None:
    _, paths = saved_chain(tmp_path / "run")
    for path in paths:
        flip(path / "dense.safetensors", -1)
        flip(path / "rank00000-shard000.rows", 100)
    flip(paths[2] / "rank00000.json", 40)
    found = {str(problem.file.relative_to(tmp_path / "run")) for problem in verify(tmp_path / "run").problems}
    wrong = {f"{path.name}/{name}" for path in paths for name in ("dense.safetensors", "rank00000-shard000.rows")}
    assert found == wrong - {"step-00000003/rank00000-shard000.rows"} | {"step-00000003/rank00000.json"}


def test_verify_compares_shards_with_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is whole, but with other keys or other numbers of rows than the part says, is wrong."""
    content: Content = {"item": {key: ([1.0] * 6, 0) for key in range(40)}}
    path = write_as_ranks(tmp_path / "a", 1, content, {}, 1, 2, None)
    assert verify(path).problems == []
    manifest, part = (json.loads((path / name).read_text()) for name in ("manifest.json", "rank00000.json"))
    part["shards"]["rank00000-shard001.rows"]["rows"]["0"] += 1
    del part["checksum"], manifest["checksum"]
    (path / "rank00000.json").write_text(sealed(part))
    manifest["checksums"]["rank00000.json"] = json.loads(sealed(part))["checksum"]
    (path / "manifest.json").write_text(sealed(manifest))
    assert texts(verify(path)) == {"rank00000-shard001.rows": "has other numbers of rows than its rank's part says"}

    own = made._own
    monkeypatch.setattr(made, "_own", lambda table, keys, shard, num_shards: own(table, keys, 1 - shard, num_shards))
    path = write_as_ranks(tmp_path / "b", 1, content, {}, 1, 2, None)
    assert texts(verify(path)) == {
        "rank00000-shard000.rows": "has keys of other buckets than 0 .. 32767",
        "rank00000-shard001.rows": "has keys of other buckets than 32768 .. 65535",
    }


def table(result: CheckpointDifference, name: str) -> tuple[int, ...]:
    (found,) = (one for one in result.tables if one.name == name)
    return (*found.num_rows, found.num_added, found.num_removed, found.num_changed, found.num_state_changed)


@pytest.mark.parametrize("piece_bytes", [1 << 30, 500])
def test_diff_of_two_steps(piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have bases; small pieces give the same. Fails if _match returns before it has counted added keys."""
    monkeypatch.setattr(diffing, "PIECE_BYTES", piece_bytes)
    _, paths = saved_chain(tmp_path / "run")
    result = diff(paths[1], paths[2])
    assert not result.is_equal
    assert table(result, "item") == (292, 291, 1, 2, 21, 0)
    assert table(result, "user/id") == (100, 102, 2, 0, 0, 0)
    assert [(one.what, one.first, one.second) for one in result.settings] == [
        ("num_steps", "2", "3"),
        ("data/position", "24", "36"),
    ]
    assert {one.what for one in result.dense} >= {"model/weight", "model/bias", "optimizer/state/0/exp_avg"}
    back = diff(paths[2], paths[1])
    assert table(back, "item") == (291, 292, 2, 1, 21, 0)
    equal = diff(paths[2], paths[2])
    assert equal.is_equal
    assert all(one.is_equal for one in equal.tables)


def test_diff_of_values(tmp_path: Path) -> None:
    """Fails if _compare looks at rows only, or if _largest takes differences without their sign."""
    rows: Content = {"item": {key: ([1.0, 2.0, 3.0, 0.5, 0.5, 0.5], 4) for key in range(8)}, "user/id": {}}
    other = {"item": dict(rows["item"]), "user/id": {5: ([1.0, 1.0], 0)}}
    other["item"][0] = ([1.0, 2.0, -4.0, 0.5, 0.5, 0.5], 4)
    other["item"][1] = ([1.0, 2.25, 3.0, 9.5, 0.5, 0.5], 4)
    other["item"][2] = ([1.0, 2.0, 3.0, 0.5, 0.5, 0.75], 4)
    other["item"][3] = ([1.0, 2.0, 3.0, 0.5, 0.5, 0.5], 5)
    dense = {
        "model": {"a": torch.tensor([1.0, -0.0, math.nan]), "b": torch.ones(2), "c": torch.ones(1)},
        "extra": {"x": 1},
    }
    changed = {
        "model": {"a": torch.tensor([1.5, -0.0, math.nan]), "b": torch.ones(3), "d": torch.ones(1)},
        "extra": {"x": 1.0},
    }
    first = write_as_ranks(tmp_path / "a", 1, rows, {}, 2, 2, None, dense)
    second = write_as_ranks(tmp_path / "b", 1, other, {}, 3, 1, None, changed)
    result = diff(first, second)
    assert table(result, "item") == (8, 8, 0, 0, 2, 2)
    assert [one.largest for one in result.tables] == [7.0, 0.0]
    assert table(result, "user/id") == (0, 1, 1, 0, 0, 0)
    assert {one.what: (one.first, one.second, one.largest) for one in result.dense} == {
        "model/a": ("float32 [3]", "float32 [3]", 0.5),
        "model/b": ("float32 [2]", "float32 [3]", None),
        "model/c": ("float32 [1]", "not there", None),
        "model/d": ("not there", "float32 [1]", None),
        "extra/x": ("1", "1.0", None),
    }
    same = write_as_ranks(tmp_path / "c", 1, rows, {}, 5, 1, None, dense)
    assert diff(first, same).is_equal
    other["item"][0] = ([1.0, 2.0, math.nan, 0.5, 0.5, 0.5], 4)
    assert diff(first, write_as_ranks(tmp_path / "d", 1, other, {}, 1, 1, None)).tables[0].largest == math.inf


def test_diff_of_recipes(tmp_path: Path) -> None:
    """Keys that may change are shown, but do not count. Fails without is_free in _recipes."""
    recipes = RECIPE, RECIPE.replace('"out"', '"other"'), RECIPE.replace("steps = 5", "steps = 5\nseed = 1"), None
    paths = []
    for number, recipe in enumerate(recipes):
        program = Program(tmp_path / str(number), recipe)
        program.train({"item": [1, 2]})
        paths.append(program.save())

    def compare(second: int) -> tuple[list[tuple[str, str, str]], bool]:
        result = diff(paths[0], paths[second], lambda key: key.startswith("checkpoint."))
        return [(one.what, one.first, one.second) for one in result.recipe], result.is_equal

    assert compare(0) == ([], True)
    assert compare(1) == ([("checkpoint.dir", "out", "other")], True)
    assert compare(2) == ([("train.seed", "not set", "1")], False)
    assert compare(3) == ([("recipe", "saved", "none")], True)


def test_diff_of_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that only one has are named, and rows of another dim are compared by their keys alone."""
    rows: Content = {"item": {1: ([1.0] * 6, 0), 2: ([1.0] * 6, 0)}, "user/id": {1: ([1.0, 1.0], 0)}}
    first = write_as_ranks(tmp_path / "a", 1, rows, {}, 1, 1, None)
    monkeypatch.setattr(made, "TABLES", [Table("item", 2), Table("new", 2)])
    changed: Content = {"item": {2: ([1.0, 1.0], 0), 3: ([1.0, 1.0], 0)}, "new": {1: ([1.0, 1.0], 0)}}
    second = write_as_ranks(tmp_path / "b", 1, changed, {}, 1, 1, None)
    result = diff(first, second)
    assert (result.tables_added, result.tables_removed) == (["new"], ["user/id"])
    assert table(result, "item") == (2, 2, 1, 1, 1, 0)
    assert result.tables[0].largest is None
    assert {one.what for one in result.settings} >= {"table item: dim", "table item: row_optimizer"}
    assert not result.is_equal


def test_content_of_the_chain_is_what_was_saved(tmp_path: Path) -> None:
    """A complete save of the same rows has the content of the chain. Fails if erased keys of a base are kept."""
    program, paths = saved_chain(tmp_path / "run")
    whole = write_as_ranks(tmp_path / "whole", 3, content_of(program.store), {}, 3, 2, None)
    assert all(one.is_equal for one in diff(paths[-1], whole).tables)


@pytest.mark.parametrize(
    "distribution",
    [init.Normal(0.02), init.Uniform(-1, 2.5), init.Constant(-3.0), init.TruncatedNormal(1e-3, mean=-0.5)],
)
def test_distributions_are_read_back(distribution: init.Distribution) -> None:
    assert parse_init(repr(distribution)) == distribution


@pytest.mark.parametrize("text", ["__import__('os').abort()", "Normal(0.02)", "Normal(std=abort())", "x", "Normal("])
def test_nothing_else_is_run(text: str) -> None:
    """Fails if parse_init evaluates the text."""
    with pytest.raises(CheckpointError, match="is not a distribution of initial rows"):
        parse_init(text)
