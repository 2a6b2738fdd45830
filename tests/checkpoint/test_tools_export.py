"""An exported checkpoint holds the newest record of each key and the dense weights, bit for bit, in bounded memory.

Fails, for example, if RowStream does not leave out rows of newer keys, if _columns takes the first `dim - 1` columns,
or if _write_dense writes the state of the optimizer instead of the model's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nestpipe import Table, World, optim
from nestpipe.checkpoint import CheckpointError, DamagedError, SaveOptions, Saver, Subject
from nestpipe.checkpoint.tools import diff, export
from nestpipe.embedding.table import make_store
from tests.checkpoint.made import ITEM, TABLES, Content, content_of, saved_chain, write_as_ranks


def exported(folder: Path, with_state: bool) -> Content:
    """Returns what another program reads. Without the state, records are rows and steps are 0."""
    content: Content = {}
    for name, table in json.loads((folder / "model.json").read_text())["tables"].items():
        content[name] = {}
        for file in table["files"]:
            columns = pq.read_table(folder / file).to_pydict()
            assert list(columns) == table["columns"]
            states = columns.get("state", [[]] * len(columns["key"]))
            records = [row + state for row, state in zip(columns["row"], states, strict=True)]
            steps = columns["step"] if with_state else [0] * len(records)
            content[name] |= dict(zip(columns["key"], zip(records, steps, strict=True), strict=True))
        assert len(content[name]) == table["rows"]
    return content


def rows_of(content: Content) -> Content:
    dims = {table.name: table.dim for table in TABLES}
    return {
        name: {key: (record[: dims[name]], 0) for key, (record, _) in rows.items()} for name, rows in content.items()
    }


@pytest.mark.parametrize("with_state", [False, True])
def test_a_chain(with_state: bool, tmp_path: Path) -> None:
    program, paths = saved_chain(tmp_path / "run")
    settings = export.export(paths[-1], tmp_path / "out", with_state)
    expected = content_of(program.store)
    assert exported(tmp_path / "out", with_state) == (expected if with_state else rows_of(expected))
    weights = load_file(tmp_path / "out" / "dense.safetensors")
    assert weights.keys() == program.model.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in program.model.state_dict().items())
    assert settings == json.loads((tmp_path / "out" / "model.json").read_text())
    assert (settings["version"], settings["steps"], settings["checkpoint"]) == (1, 3, "step-00000003")
    item, user = settings["tables"]["item"], settings["tables"]["user/id"]
    assert (item["dim"], item["dtype"], item["seed"], item["initial_mean"]) == (3, "float32", 3, 0.0)
    assert item["init"] == {"kind": "Normal", "std": 0.5, "mean": 0.0}
    assert (user["dtype"], user["init"], user["initial_mean"]) == (
        "float64",
        {"kind": "Uniform", "low": -1, "high": 3},
        1,
    )
    schema = pq.read_schema(tmp_path / "out" / item["files"][0])
    assert str(schema.field("key").type) == "int64"
    row = schema.field("row").type
    assert (str(row.value_type), row.list_size) == ("float", 3)


def test_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows wait until the end (`if False` before write), or if a table's next file never begins."""
    program, paths = saved_chain(tmp_path / "run")
    monkeypatch.setattr(export, "PIECE_BYTES", 600)
    monkeypatch.setattr(export, "FILE_BYTES", 2000)
    most = 0
    add = export._TableFiles.add

    def add_and_watch(table: Any, rows: Any) -> None:
        nonlocal most
        add(table, rows)
        most = max(most, table.num_waiting_bytes)

    monkeypatch.setattr(export._TableFiles, "add", add_and_watch)
    num_ranges = 0
    split = export.split_buckets

    def split_and_count(*arguments: Any) -> list[range]:
        nonlocal num_ranges
        ranges = split(*arguments)
        num_ranges = len(ranges)
        return ranges

    monkeypatch.setattr(export, "split_buckets", split_and_count)
    settings = export.export(paths[-1], tmp_path / "out", True)
    assert exported(tmp_path / "out", True) == content_of(program.store)
    assert num_ranges > 4  # 8 bytes for each of about 450 keys
    largest_block = 100 * 40
    assert most < 600 + largest_block
    files = settings["tables"]["item"]["files"]
    assert len(files) > 3
    assert all((tmp_path / "out" / file).stat().st_size < 20_000 for file in files)


def test_another_number_of_ranks_gives_the_same(tmp_path: Path) -> None:
    program, paths = saved_chain(tmp_path / "run")
    content = content_of(program.store)
    four = write_as_ranks(tmp_path / "four", 3, content, {}, 4, 2, None)
    export.export(four, tmp_path / "out", True)
    assert exported(tmp_path / "out", True) == content
    result = diff.diff(paths[-1], four)
    assert all(table.is_equal for table in result.tables)
    assert [(one.what, one.is_content) for one in result.settings] == [("world_size", False)]


def test_the_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    """Fails if export writes into DIR itself, or does not remove what it had begun."""
    _, paths = saved_chain(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder; nothing in it was touched"):
        export.export(paths[-1], tmp_path / "taken")
    assert [child.name for child in (tmp_path / "taken").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export.export(paths[-1], tmp_path / "empty")
    shard = paths[0] / "rank00000-shard003.rows"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError, match=r"shard003.rows: block \d+ is damaged"):
        export.export(paths[-1], tmp_path / "out")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["empty", "run", "taken"]


class WithExtras(nn.Module):
    """Tied weights, a buffer, and extra state, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([1.5], dtype=torch.bfloat16))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


def save_with(folder: Path, model: nn.Module | None, tables: list[Table]) -> tuple[Path, Subject]:
    store = make_store(tables, 0, 1)
    subject = Subject(World(), tables, store, 0, 4, 0, 1, None, model, None, None, None)
    saver = Saver()
    saver.begin(subject, folder, {}, SaveOptions())
    saver.finish(waits_for_removal=True)
    return folder / "step-00000004", subject


def test_models_of_all_kinds(tmp_path: Path) -> None:
    """Tied weights are there under both names; extra state is left out. Fails without `clone` in _write_dense."""
    model = WithExtras()
    path, _ = save_with(tmp_path / "run", model, [ITEM])
    settings = export.export(path, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "dense.safetensors")
    assert weights.keys() == {"first.weight", "second.weight", "scale"}
    assert torch.equal(weights["first.weight"], weights["second.weight"])
    assert weights["scale"].dtype == torch.bfloat16
    assert settings["left_out_of_dense"] == ["_extra_state/calls"]
    assert (settings["tables"]["item"]["rows"], len(settings["tables"]["item"]["files"])) == (0, 1)
    assert pq.read_table(tmp_path / "out" / "item" / "part-00000.parquet").num_rows == 0
    path, _ = save_with(tmp_path / "rows only", None, [ITEM])
    export.export(path, tmp_path / "without dense")
    assert load_file(tmp_path / "without dense" / "dense.safetensors") == {}


def test_names_of_folders(tmp_path: Path) -> None:
    """A table's name may be anything. Fails if _folder_names returns the names as they are."""
    names = ["item", "ITEM", "..", "a/b", "x" * 300, "ü", "table~0"]
    path, _ = save_with(tmp_path / "run", None, [Table(name, 2) for name in sorted(names)])
    settings = export.export(path, tmp_path / "out")
    folders = {table["files"][0].split("/")[0] for table in settings["tables"].values()}
    assert len({folder.lower() for folder in folders}) == len(names)
    assert all((tmp_path / "out" / folder).is_dir() for folder in folders)
    assert settings["tables"].keys() == set(names)


MEASURE = """
import re, sys
from pathlib import Path
from nestpipe.checkpoint.tools.diff import diff
from nestpipe.checkpoint.tools.export import export

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

run, out, small = map(Path, sys.argv[1:])
export(small, out / "small")  # loads all libraries
diff(small, small)
before = peak()
export(run, out / "large", with_state=True)
after_export = peak()
assert diff(run, run).is_equal
print(after_export - before, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_memory(tmp_path: Path) -> None:
    """A chain of 0.9 GB is exported and compared. Fails if PIECE_BYTES is 2 GB in either module."""
    table = Table("item", 64, optimizer=optim.Adagrad(0.1))
    small, _ = save_with(tmp_path / "small", None, [ITEM])
    store, saver = make_store([table], 0, 2), Saver()
    for step in range(3):
        keys = torch.arange(step * 400_000, step * 400_000 + 600_000)
        store.scatter("item", keys, torch.full((len(keys), 128), float(step)), step)
        subject = Subject(World(), [table], store, 0, step, 0, 1, None, None, None, None, None)
        saver.begin(subject, tmp_path / "run", {}, SaveOptions(keep=3, complete_every=3))
        saver.finish(waits_for_removal=True)
    del store
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, tmp_path / "run" / "step-00000002", tmp_path / "out", small]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    of_export, of_both = (int(text) * 1024 for text in done.stdout.split())
    assert of_export < 256 << 20
    assert of_both < 256 << 20
