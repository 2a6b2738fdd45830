"""The prepared folder: runs that are killed and started over, replacements, refusals; nothing is left behind.

Fails if the manifest is moved before the files (a killed run would leave a folder that only looks finished), or if
`_undo_moves` does nothing.
"""

import fcntl
import gzip
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pyarrow.parquet as pq
import pytest

from nestpipe.data.files.manifest import Manifest, read_manifest
from nestpipe.data.files.row_files import open_file, read_group
from nestpipe.datasets import engine, target_folder
from nestpipe.datasets.generate import generate
from nestpipe.datasets.prepare import prepare
from nestpipe.datasets.target_folder import MARK, UNFINISHED
from nestpipe.datasets.text_files import estimate_lines

MOMENTS = ("reading", "filtering", "writing", "checksums", "moving", "manifest")

KILLED = """
import os, signal, sys
from pathlib import Path
from nestpipe.datasets import prepare as module

data_format, source, folder, *moments = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
for moment in moments:
    child = os.fork()
    if child == 0:
        def progress(stage, done):
            if stage == moment:
                die()
        real = Path.replace
        def replace(path, target):
            if path.name == {"moving": "items.parquet", "manifest": "manifest.json"}.get(moment) and (
                path.parent.name == "unfinished"
            ):
                die()
            return real(path, target)
        Path.replace = replace
        module.prepare(data_format, Path(source), Path(folder) / moment, force=True, progress=progress)
        os._exit(0)
    print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def small(tmp_path: Path) -> Path:
    source = tmp_path / "src"
    generate("movielens", source, 500)
    return source


@pytest.mark.slow
def test_killed_at_any_moment_and_started_over(tmp_path: Path) -> None:
    source = tmp_path / "src"
    generate("kuairand", source, 20_000)
    whole = prepare("kuairand", source, tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, "kuairand", str(source), str(tmp_path), *MOMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [text for moment in MOMENTS for text in (moment, str(-signal.SIGKILL))]
    for moment in MOMENTS:
        target = tmp_path / moment
        assert (target / UNFINISHED).exists()
        with pytest.raises(ValueError, match="not finished"):
            read_manifest(target)
        assert prepare("kuairand", source, target).checksum() == whole.checksum()
        assert files_of(target) == files_of(tmp_path / "whole")


def test_a_killed_run_with_other_input_leaves_nothing(tmp_path: Path) -> None:
    """The killed run had moved files that this one does not make."""
    target = tmp_path / "dst"
    (target / UNFINISHED / "spill").mkdir(parents=True)
    (target / UNFINISHED / "replaced").mkdir()
    (target / UNFINISHED / "lock").write_text(MARK)
    moves = ["train-00000.parquet", "test-00000.parquet", "manifest.json"]
    (target / UNFINISHED / "moves.json").write_text(json.dumps(moves))
    for name in ("train-00000.parquet", *(f"{UNFINISHED}/{name}" for name in ("spool-00000.parquet", *moves[1:]))):
        (target / name).write_text("old")
    (target / "README").write_text("mine")
    manifest = prepare("movielens", small(tmp_path), target)
    assert set(files_of(target)) == {"README", "manifest.json", *(file.name for file in manifest.files)}


def test_a_run_that_replaces_is_killed_at_any_moment(tmp_path: Path) -> None:
    """The next run puts the older files back, and then refuses or replaces them."""
    source = tmp_path / "src"
    generate("movielens", source, 500, seed=1)
    before = prepare("movielens", source, tmp_path / "moving")
    shutil.copytree(tmp_path / "moving", tmp_path / "manifest")
    shutil.copytree(tmp_path / "moving", tmp_path / "whole")
    shutil.rmtree(source)
    generate("movielens", source, 500)
    command = [sys.executable, "-c", KILLED, "movielens", str(source), str(tmp_path), "moving", "manifest"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    for moment in ("moving", "manifest"):
        target = tmp_path / moment
        assert (target / UNFINISHED).exists()
        with pytest.raises(ValueError, match="not finished"):
            read_manifest(target)
        with pytest.raises(ValueError, match="is prepared already"):
            prepare("movielens", source, target)
        assert files_of(target) == files_of(tmp_path / "whole")
    assert prepare("movielens", source, target, force=True).checksum() != before.checksum()


def test_a_failed_replacement_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = small(tmp_path), tmp_path / "dst"
    prepare("movielens", source, target)
    before = files_of(target)
    (file,) = source.rglob("ratings.dat")
    good = file.read_text()
    file.write_text(good + "x\n")
    with pytest.raises(ValueError, match="has 1 fields"):
        prepare("movielens", source, target, force=True)
    assert files_of(target) == before
    file.write_text(good + "1::2::3::4\n")
    real = Path.replace

    def replace(path: Path, to: Path) -> Path:
        if path == target / UNFINISHED / "manifest.json":
            raise OSError("no")
        return real(path, to)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="no"):
        prepare("movielens", source, target, force=True)
    assert files_of(target) == before


def test_files_of_others_are_never_deleted(tmp_path: Path) -> None:
    """Fails if any folder with an entry `unfinished`, or with any `manifest.json`, counts as a prepared one."""
    source = small(tmp_path)
    for number, manifest in enumerate((None, '{"name": "my page"}', '{"format": "nestpipe-data", "files": []}')):
        target = tmp_path / f"mine{number}"
        (target / UNFINISHED / "thesis").mkdir(parents=True)
        for name in (f"{UNFINISHED}/thesis/a.txt", "train-00000.parquet", f"{UNFINISHED}/lock"):
            (target / name).write_text("mine")
        if manifest is not None:
            (target / "manifest.json").write_text(manifest)
        before = sorted(target.rglob("*"))
        with pytest.raises(ValueError, match="was not made by `nestpipe data prepare`"):
            prepare("movielens", source, target, force=True)
        assert sorted(target.rglob("*")) == before


def test_files_of_others_next_to_ours_stay(tmp_path: Path) -> None:
    source, target = small(tmp_path), tmp_path / "dst"
    prepare("movielens", source, target)
    (target / UNFINISHED).mkdir()
    (target / UNFINISHED / "lock").write_text(MARK)
    mine = [target / "train-00000.parquet", target / UNFINISHED / "a.txt", target / "users-00001.parquet"]
    for path in mine:
        path.write_text("mine")
    prepare("movielens", source, target, force=True)
    (target / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"users-00000\.parquet was not made by `nestpipe data prepare`; move it away"):
        prepare("movielens", source, target)
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_the_lock_is_removed_while_another_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B has opened the lock file when A ends and removes it. Fails if B does not check it again after locking it."""
    source, target = small(tmp_path), tmp_path / "dst"
    real, prepared = fcntl.flock, []

    def flock(lock: TextIO, operation: int) -> None:
        if not prepared:
            prepared.append(None)
            with monkeypatch.context() as undone:
                undone.setattr(target_folder.fcntl, "flock", real)
                prepared[0] = prepare("movielens", source, target)
        real(lock, operation)

    monkeypatch.setattr(target_folder.fcntl, "flock", flock)
    with pytest.raises(ValueError, match="is prepared already"):
        prepare("movielens", source, target)
    assert read_manifest(target) == prepared[0]
    assert not (target / UNFINISHED).exists()


def test_a_finished_folder_is_only_replaced_when_told_to(tmp_path: Path) -> None:
    source, target = small(tmp_path), tmp_path / "dst"
    first = prepare("movielens", source, target)
    before = files_of(target)
    with pytest.raises(ValueError, match="is prepared already; use it, or replace it with --force"):
        prepare("movielens", source, target)
    assert files_of(target) == before
    assert prepare("movielens", source, target, force=True) == first
    assert files_of(target) == before


def test_other_folders_are_refused(tmp_path: Path) -> None:
    source, target = small(tmp_path), tmp_path / "dst"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not made by `nestpipe data prepare`; give another folder"):
        prepare("movielens", source, target, force=True)
    with pytest.raises(ValueError, match="was not made by"):
        prepare("movielens", source, target / "thesis.txt")
    assert list(files_of(target)) == ["thesis.txt"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source, target = small(tmp_path), tmp_path / "dst"
    (target / UNFINISHED).mkdir(parents=True)
    with (target / UNFINISHED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being prepared by another process"):
            prepare("movielens", source, target)
    prepare("movielens", source, target)


def test_clicks_report_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROWS_A_BATCH", 2048)
    (file,) = generate("criteo", tmp_path / "src", 10_000)
    assert estimate_lines(file, 100_000) == pytest.approx(10_000, rel=0.05)
    seen: list[float] = []
    prepare("criteo", tmp_path / "src", tmp_path / "dst", progress=lambda stage, done: seen.append(done))
    assert seen == sorted(seen)
    assert len([done for done in seen if 0.1 < done < 0.9]) >= 3
    packed = tmp_path / "train.txt.gz"
    packed.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    assert estimate_lines(packed) == pytest.approx(10_000, rel=0.2)


def test_progress_goes_from_0_to_1(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    prepare("movielens", small(tmp_path), tmp_path / "dst", progress=lambda stage, done: seen.append((stage, done)))
    assert list(dict(seen)) == ["reading", "filtering", "sorting", "writing", "checksums", "done"]
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert (seen[0], seen[-1]) == (("reading", 0.0), ("done", 1.0))


def test_manifest(tmp_path: Path) -> None:
    manifest = prepare("movielens", small(tmp_path), tmp_path / "dst")
    for file in manifest.files:
        content = (tmp_path / "dst" / file.name).read_bytes()
        assert (file.num_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    content = json.loads((tmp_path / "dst" / "manifest.json").read_text())
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert manifest.checksum() == hashlib.sha256(canonical.encode()).hexdigest()
    assert (content["format"], content["version"], content["kind"]) == ("nestpipe-data", 1, "histories")
    assert set(content["files"][0]) == {"name", "split", "rows", "bytes", "sha256"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        ('{"format": "nestpipe-data", "version": 2}', "of version 2"),
    ],
)
def test_other_manifests_are_refused(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_manifest(tmp_path)


def test_manifests_differ_if_anything_does() -> None:
    one = Manifest("clicks", "criteo-kaggle", {"label": "int64"}, {"rows": 3}, [], {"train.txt": 5}, ["nestpipe"])
    other = Manifest("clicks", "criteo-kaggle", {"label": "int64"}, {"rows": 4}, [], {"train.txt": 5}, ["nestpipe"])
    assert one.checksum() != other.checksum()


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    """It may be in any page of any column. Fails if `write_page_checksum` is off in parquet_out.py."""
    manifest = prepare("movielens", small(tmp_path), tmp_path / "dst")
    for prepared_file in manifest.files:
        path = tmp_path / "dst" / prepared_file.name
        whole = path.read_bytes()
        group = pq.read_metadata(path).row_group(0)
        for column in (group.column(number) for number in range(group.num_columns)):
            end = column.dictionary_page_offset + column.total_compressed_size
            for place in (*range(column.data_page_offset - 20, column.data_page_offset), *range(end - 8, end)):
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
                file, schema = open_file(path)
                with pytest.raises(ValueError, match=rf"{prepared_file.name}, row group 0: cannot be read: .*CRC"):
                    read_group(file, 0, schema.names)
        path.write_bytes(whole)
