"""Criteo: prepare makes the same rows as the plain preparation, in the order of the lines, cut into splits.

Fails if greatest() is left out in clicks.py, if keys are read as INTEGER, or if the engine does not
`preserve_insertion_order`.
"""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data.files.manifest import read_manifest
from nestpipe.datasets import engine
from nestpipe.datasets.generate import generate
from nestpipe.datasets.prepare import prepare
from nestpipe.datasets.samples import clicks, parquet_out
from tests.datasets.plain import lines_of, plain_click, read_clicks

SPLITS = ("train", "validation", "test")


def line(label: int = 0, dense: tuple[str, ...] = ("",) * 13, keys: tuple[str, ...] = ("",) * 26) -> str:
    return "\t".join([str(label), *dense, *keys])


def test_generated_kaggle(tmp_path: Path) -> None:
    files = generate("criteo", tmp_path / "src", 3_003)
    manifest = prepare("criteo", tmp_path / "src", tmp_path / "dst")
    assert read_manifest(tmp_path / "dst") == manifest
    rows = [plain_click(text) for text in lines_of(files)]
    assert manifest.source == "criteo-kaggle"
    assert manifest.counts == {"rows": 3_003, "train": 2_574, "validation": 215, "test": 214, "bad_lines": 0}
    parts = [read_clicks(tmp_path / "dst", manifest, split) for split in SPLITS]
    assert parts == [rows[:2_574], rows[2_574:2_789], rows[2_789:]]
    assert any(row["key_2"] is None for row in rows)


def test_generated_terabyte_with_packed_days(tmp_path: Path) -> None:
    files = generate("criteo", tmp_path / "src", 24 * 40 + 5, variant="terabyte")
    for number in (1, 23):
        packed = files[number].with_suffix(".gz")
        packed.write_bytes(gzip.compress(files[number].read_bytes(), mtime=0))
        files[number].unlink()
        files[number] = packed
    manifest = prepare("criteo", tmp_path / "src", tmp_path / "dst")
    last_day = [plain_click(text) for text in lines_of(files[23:])]
    half = (len(last_day) + 1) // 2
    parts = [read_clicks(tmp_path / "dst", manifest, split) for split in SPLITS]
    assert parts == [[plain_click(text) for text in lines_of(files[:23])], last_day[:half], last_day[half:]]
    assert manifest.source == "criteo-terabyte"


def test_hand_written_clicks(tmp_path: Path) -> None:
    """Missing, negative and large numbers, the smallest and the largest key, capital digits."""
    first = line(
        1, ("", "-2", "0", "1", "9223372036854775807", *("",) * 8), ("00000000", "ffffffff", "DEADbeef", *("",) * 23)
    )
    (tmp_path / "train.txt").write_text("\n".join([first] + [line()] * 13) + "\n")
    manifest = prepare("criteo", tmp_path, tmp_path / "dst")
    row = read_clicks(tmp_path / "dst", manifest, "train")[0]
    dense = [0.0, 0.0, 0.0, 0.6931471824645996, 43.66827392578125, *[0.0] * 8]
    assert list(row.values()) == [1, *dense, 0, 4294967295, 3735928559, *[None] * 23]
    assert [manifest.counts[split] for split in SPLITS] == [12, 1, 1]
    schema = pq.read_schema(tmp_path / "dst" / "train-00000.parquet")
    assert (schema.field("label").type, schema.field("dense_12").type) == (pa.int64(), pa.float32())
    assert (schema.field("key_25").type, schema.field("key_25").nullable) == (pa.int64(), True)


@pytest.mark.parametrize("num_rows", [140, 70, 63, 14])
def test_files_and_row_groups_have_fixed_sizes(num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The splits are cut within a file, within a row group, and between two files."""
    monkeypatch.setattr(clicks, "ROWS_A_GROUP", 10)
    monkeypatch.setattr(clicks, "ROWS_A_FILE", 20)
    files = generate("criteo", tmp_path / "src", num_rows)
    manifest = prepare("criteo", tmp_path / "src", tmp_path / "dst")
    rows = [row for split in SPLITS for row in read_clicks(tmp_path / "dst", manifest, split)]
    assert rows == [plain_click(text) for text in lines_of(files)]
    for file in manifest.files:
        metadata = pq.read_metadata(tmp_path / "dst" / file.name)
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        assert all(size == 10 for size in groups[:-1])
        assert sum(groups) == file.num_rows <= 20
    assert sorted(path.name for path in (tmp_path / "dst").iterdir()) == sorted(
        ["manifest.json", *(file.name for file in manifest.files)]
    )


def test_order_of_lines_is_kept_by_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has several of the engine's blocks, and fewer of them than there are threads."""
    numbers = range(90_000)
    padding = ("12345678",) * 25
    text = "".join(line(0, keys=(f"{number:08x}", *padding)) + "\n" for number in numbers)
    (tmp_path / "train.txt").write_text(text)
    monkeypatch.setattr(engine, "num_threads", lambda: 5)
    manifest = prepare("criteo", tmp_path, tmp_path / "dst")
    tables = [pq.read_table(tmp_path / "dst" / file.name, columns=["key_0"]) for file in manifest.files]
    assert pa.concat_tables(tables)["key_0"].to_pylist() == list(numbers)


def test_bytes_depend_on_the_input_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not depend on the number of threads or the size of the engine's batches."""
    generate("criteo", tmp_path / "src", 9_000)
    first = prepare("criteo", tmp_path / "src", tmp_path / "dst")
    for threads, rows in ((1, 2048), (4, 3000)):
        monkeypatch.setattr(engine, "num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(engine, "ROWS_A_BATCH", rows)
        assert prepare("criteo", tmp_path / "src", tmp_path / "dst", force=True).checksum() == first.checksum()


def test_bytes_do_not_depend_on_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if write_group does not combine the chunks of a group: a page would end with a chunk."""
    monkeypatch.setattr(parquet_out, "PAGE_BYTES", 4096)
    schema = pa.schema([pa.field("key", pa.int64())])
    whole = pa.table({"key": [number * number for number in range(9_000)]}, schema=schema)
    for name, size in (("one", 9_000), ("other", 777)):
        (tmp_path / name).mkdir()
        with clicks.ClickFiles(tmp_path / name, "train", schema) as files:
            for batch in whole.to_batches(max_chunksize=size):
                files.write(batch)
    one, other = ((tmp_path / name / "train-00000.parquet").read_bytes() for name in ("one", "other"))
    assert one == other


def test_too_few_lines_for_the_splits(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text((line() + "\n") * 6)
    with pytest.raises(ValueError, match=r"train\.txt: too few good lines"):
        prepare("criteo", tmp_path, tmp_path / "dst")
