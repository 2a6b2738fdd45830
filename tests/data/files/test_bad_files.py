"""Files that do not fit the schema, are damaged, or change: an error that says where, or data left out and counted.

Fails, for example, if _check_unchanged looks at the size alone, if Schema.check lets floats be keys, or if Rows.take
keeps the keys of bad rows.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe.data import ParquetData, Schema
from nestpipe.data.dataset import Batches
from nestpipe.data.files.row_files import BadDataError
from tests.files import write_arrow, write_numbers, write_parquet

SCHEMA = Schema(keys=["number", "tags"], inputs={"x": "x"}, labels=["y"])


def numbers(data: ParquetData) -> list[int]:
    return [key for batch in Batches(data, 7) for key in batch.keys["number"].values.tolist()]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (Schema(keys=["number", "tag", "age"]), r"part-0.parquet has no column 'tag', 'age'; its columns are number, "),
        (
            Schema(keys=["x"]),
            r"part-0.parquet: column 'x' is declared as keys of 'x', which must be integers .* double",
        ),
        (Schema(keys=["text"]), "column 'text' is declared as keys .* but it has type string; hash or number"),
        (Schema(keys=["words"]), "column 'words' is declared as keys .* type list<"),
        (
            Schema(keys=["number"], inputs={"i": ["x", "text"]}),
            "column 'text' is declared as an input, .* but is string",
        ),
        (Schema(keys=["number"], labels=["tags"]), "column 'tags' is declared as a label, which must be numbers"),
        (Schema(keys=["number"], weight="text"), "column 'text' is declared as a weight"),
    ],
)
def test_columns_that_are_not_what_was_declared(schema: Schema, text: str, tmp_path: Path) -> None:
    """They are refused when the files are opened, with skip_bad too, because the schema is wrong and not a row."""
    (path,) = write_numbers(tmp_path, (20,))
    table = pq.read_table(path)
    words = pa.array([["a"]] * 20)
    pq.write_table(table.append_column("text", pa.array(["a"] * 20)).append_column("words", words), path)
    for skip_bad in (False, True):
        with pytest.raises(BadDataError, match=text):
            ParquetData(path, schema, skip_bad=skip_bad)


ROWS = {
    "key": (
        Schema(keys=["v"], num_keys={"v": 10}),
        pa.array([3, 9, None, 10, -1]),
        [3, 4],
        r"'v' has a key outside 0 \.\. 9",
    ),
    "list": (
        Schema(keys=["v"], num_keys={"v": 10}),
        pa.array([[1], [2, 11], [], [-1, 5], [3]]),
        [1, 3],
        r"'v' has a key outside 0 \.\. 9",
    ),
    "null": (Schema(keys=["k"], inputs={"v": "v"}), pa.array([1.0, None, 2.0, 3.0, 4.0]), [1], "'v' is null"),
    "nan": (
        Schema(keys=["k"], inputs={"v": "v"}),
        pa.array([1.0, 2.0, np.nan, np.inf, 4.0]),
        [2, 3],
        "'v' is not finite",
    ),
    "length": (
        Schema(keys=["k"], inputs={"v": "v"}),
        pa.array([[1, 2], [3], [4, 5], None, [6, 7]]),
        [1, 3],
        "'v' is a list of another length than 2",
    ),
    "longer": (
        Schema(keys=["k"], inputs={"v": "v"}),
        pa.array([[1, 2], [3, 4], [4, 5, 6, 7], [1, 1], [6, None]]),
        [2, 4],
        "'v' is a list of another length than 2",
    ),
    "unsigned": (
        Schema(keys=["k"], inputs={"v": "v"}),
        pa.array([1, 2**63 - 1, 2**63, 2**64 - 1, 0], pa.uint64()),
        [2, 3],
        r"'v' is above 2\^63 - 1, which only keys may be",
    ),
    "unsigned label": (
        Schema(keys=["k"], labels=["v"]),
        pa.array([1, 0, 1, 2**63, 0], pa.uint64()),
        [3],
        r"'v' is above 2\^63 - 1, which only keys may be",
    ),
    "label": (Schema(keys=["k"], labels=["v"]), pa.array([1, 0, None, 1, 0]), [2], "'v' is null"),
    "weight": (Schema(keys=["k"], weight="v"), pa.array([1, 0, 1, -1, 2]), [3], "'v' is below 0"),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_rows(case: str, tmp_path: Path) -> None:
    schema, values, bad, text = ROWS[case]
    good = write_parquet(tmp_path / "a.parquet", {"v": values.take([0, 0]), "k": [0, 1]})
    path = write_parquet(tmp_path / "b.parquet", {"v": values, "k": [2, 3, 4, 5, 6]})
    data = ParquetData([good, path], schema, shuffle=False, num_epochs=1, window=1)
    with pytest.raises(BadDataError, match=rf"b.parquet, row group 0, row {bad[0]}: column {text}"):
        data.samples(0, 7)
    data.samples(0, 2)  # the other file is good
    data = ParquetData([good, path], schema, shuffle=False, num_epochs=1, skip_bad=True)
    assert (data.num_samples, data.skipped.num_rows, data.skipped.num_groups) == (7 - len(bad), len(bad), 0)
    assert f"row {bad[0]}: column '" in data.skipped.examples[0]
    batch = data.samples(0, 7 - len(bad))
    good_rows = [row for row in range(5) if row not in bad]
    if "k" in batch.keys:
        assert batch.keys["k"].values.tolist() == [0, 1, *(2 + row for row in good_rows)]
    else:
        kept = [key for row in [0, 0, *good_rows] for key in _as_list(values[row].as_py())]
        assert batch.keys["v"].values.tolist() == kept


INPUTS = Schema(keys=["k"], inputs={"v": "v", "both": ["v", "w"]}, labels=["w"])


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]]])
def test_files_without_rows(values: list[object], tmp_path: Path) -> None:
    """Fails if _note or _side_by_side reshapes to (0, -1)."""
    some = {"k": [1, 2], "v": pa.array(values), "w": [0, 1]}
    none = {"k": pa.array([], pa.int64()), "v": pa.array([], some["v"].type), "w": pa.array([], pa.int64())}
    paths = [write_parquet(tmp_path / "a.parquet", none), write_parquet(tmp_path / "b.parquet", some)]
    schema = replace(INPUTS, weight="w")
    for skip_bad in (False, True):
        data = ParquetData(paths, schema, num_epochs=1, skip_bad=skip_bad)
        assert (data.num_rows, data.skipped.num_rows) == (2, 0)


def test_the_form_of_an_input_is_that_of_all_files(tmp_path: Path) -> None:
    """It holds in any window, and in an empty batch. Fails if decode keeps the dtype of a row group."""
    integers = write_parquet(tmp_path / "a.parquet", {"k": [1, 2], "v": [[1, 2], [3, 4]], "w": [0, 1]})
    floats = write_parquet(tmp_path / "b.parquet", {"k": [3], "v": [[0.5, 1.0]], "w": [1]})
    for paths, dtype in (([integers], torch.int64), ([integers, floats], torch.float32)):
        for window, count in ((1, 2), (2, 2), (1, 0)):
            batch = ParquetData(paths, INPUTS, shuffle=False, num_epochs=1, window=window).samples(0, count)
            assert {name: (x.dtype, x.shape) for name, x in batch.inputs.items()} == {
                "v": (dtype, (count, 2)),
                "both": (dtype, (count, 3)),
                "w": (torch.float32, (count,)),
            }


def test_one_list_that_is_too_long(tmp_path: Path) -> None:
    """That list is the bad one. Fails if _width returns the largest length."""
    values = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0], None]
    path = write_parquet(tmp_path / "a.parquet", {"k": [0, 1, 2, 3], "v": values, "w": [1] * 4})
    data = ParquetData(path, INPUTS, shuffle=False, num_epochs=1, skip_bad=True)
    assert data.samples(0, 2).inputs["v"].tolist() == values[:2]
    assert (data.num_rows, data.skipped.num_rows) == (2, 2)
    with pytest.raises(BadDataError, match=r"a.parquet, row group 0, row 2: column 'v' is a list of another length"):
        ParquetData(path, INPUTS).samples(0, 1)


def test_lists_that_differ_between_files(tmp_path: Path) -> None:
    first = write_parquet(tmp_path / "a.parquet", {"k": [1, 2], "v": [[1.0, 2.0], [1.0, 2.0]], "w": [0, 1]})
    wider = write_parquet(tmp_path / "b.parquet", {"k": [3], "v": [[1.0, 2.0, 3.0]], "w": [1]})
    plain = write_parquet(tmp_path / "c.parquet", {"k": [3], "v": [1.0], "w": [1]})
    with pytest.raises(BadDataError, match=r"b.parquet, row group 0, row 0: column 'v' is a list of another length"):
        ParquetData([first, wider], INPUTS, shuffle=False).samples(0, 3)
    assert ParquetData([first, wider], INPUTS, skip_bad=True).skipped.num_rows == 1
    with pytest.raises(BadDataError, match=r"'v' is declared .* has lists in .*a.parquet and numbers in .*c.parquet"):
        ParquetData([first, plain], INPUTS)
    fixed = pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float32(), 3))  # the type gives the length
    declared = write_parquet(tmp_path / "d.parquet", {"k": [3], "v": fixed, "w": [1]})
    data = ParquetData([first, declared], INPUTS, skip_bad=True, num_epochs=1)
    assert data.samples(0, 1).inputs["v"].tolist() == [[1.0, 2.0, 3.0]]


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def half_written(path: Path) -> None:
    """Cuts a file as if its writer was killed before it wrote the footer."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def garbage(path: Path) -> None:
    path.write_text("user,item\n1,2\n")


def bad_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60:-10] = bytes(50)
    path.write_bytes(content)


@pytest.mark.parametrize("number", [0, 1], ids=["parquet", "arrow"])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_bytes(b""), r"is empty \(0 bytes\)"),
        (cut, "is cut off or not written to its end"),
        (half_written, "is cut off or not written to its end"),
        (garbage, "is neither Parquet nor an Arrow file"),
        (bad_footer, "cannot be opened|cut off"),
    ],
)
def test_damaged_files(number: int, damage: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    paths = write_numbers(tmp_path, (20, 20))
    damage(paths[number])
    with pytest.raises(BadDataError, match=f"{paths[number].name}.*({text})"):
        ParquetData(paths, SCHEMA)
    data = ParquetData(paths, SCHEMA, skip_bad=True, num_epochs=1)
    assert (data.num_rows, data.skipped.num_files, data.skipped.num_rows) == (20, 1, 0)
    assert sorted(numbers(data)) == list(range(20 - 20 * number, 40 - 20 * number))


def damage_group(path: Path, group: int) -> None:
    column = pq.read_metadata(path).row_group(group).column(0)
    content = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    content[first : first + column.total_compressed_size] = os.urandom(column.total_compressed_size)
    path.write_bytes(content)


def test_a_damaged_row_group(tmp_path: Path) -> None:
    (path,) = write_numbers(tmp_path, (45,))
    damage_group(path, 2)
    data = ParquetData(path, SCHEMA, num_epochs=1, shuffle=False, window=1)
    assert len(data.samples(0, 20)) == 20
    for _ in range(2):  # it stays an error
        with pytest.raises(BadDataError, match=r"part-0.parquet, row group 2: cannot be read: "):
            data.samples(15, 10)
    assert len(data.samples(30, 15)) == 15
    data = ParquetData(path, SCHEMA, num_epochs=1, skip_bad=True)
    assert (data.num_rows, data.skipped.num_groups, data.skipped.num_rows) == (35, 1, 10)
    assert sorted(numbers(data)) == [*range(20), *range(30, 45)]


def test_pages_with_a_checksum_that_is_wrong(tmp_path: Path) -> None:
    """Without the checksum, the flipped bit would give another key."""
    table = pa.table({"number": np.arange(100)})
    path = tmp_path / "sums.parquet"
    pq.write_table(table, path, use_dictionary=False, compression="none", write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(40, 50).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadDataError, match=r"sums.parquet, row group 0: cannot be read: .*(CRC|checksum)"):
        ParquetData(path, Schema(keys=["number"])).samples(0, 5)


def rewrite(path: Path) -> None:
    """Changes the footer, but neither the size nor the time of change."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [Path.unlink, cut, lambda path: os.utime(path, (1, 1)), rewrite])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_that_changes_while_it_is_read(change: Callable[[Path], object], skip_bad: bool, tmp_path: Path) -> None:
    """It cannot be skipped, because it is no longer known which rows were seen."""
    (path,) = write_numbers(tmp_path, (45,))
    data = ParquetData(path, SCHEMA, num_epochs=1, shuffle=False, window=1, skip_bad=skip_bad)
    data.samples(0, 5)
    change(path)
    with pytest.raises(BadDataError, match=r"part-0.parquet has changed or gone since it was opened"):
        data.samples(20, 5)


def test_nothing_to_read(tmp_path: Path) -> None:
    empty = write_parquet(tmp_path / "none.parquet", {"number": pa.array([], pa.int64())})
    schema = Schema(keys=["number"])
    with pytest.raises(BadDataError, match=r"there are no rows in .*none.parquet"):
        ParquetData(empty, schema)
    with pytest.raises(BadDataError, match=r"there are no files .*/\*.arrow"):
        ParquetData(f"{tmp_path}/*.arrow", schema)
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        BadDataError, match=r"there are no files .*folder; a folder must have some that end in .parquet"
    ):
        ParquetData(tmp_path / "folder", schema)
    with pytest.raises(BadDataError, match=r"there is no file .*gone.parquet"):
        ParquetData(tmp_path / "gone.parquet", schema, skip_bad=True)
    with pytest.raises(BadDataError, match="no paths of data were given"):
        ParquetData([], schema)
    some = write_arrow(tmp_path / "some.arrow", {"number": [1, 2]})
    assert ParquetData([empty, some], schema).num_rows == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keys": []}, "at least one column of keys"),
        ({"keys": ["a"], "labels": ["a"]}, "two things of the name a"),
        ({"keys": ["a"], "num_keys": {"b": 3}}, "num_keys names b, but the keys are a"),
        ({"keys": ["a"], "inputs": {"x": []}}, "each input needs at least one column"),
    ],
)
def test_schemas_that_cannot_be(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schema(**arguments)
