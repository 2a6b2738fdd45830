"""What the benchmark of faults knows of a folder of checkpoints, by itself."""

import json
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from nestpipe.bench.faults.damage import CLASSES, FILES, SHARD_PARTS, cut, flip_byte, remove
from nestpipe.bench.faults.power import unsynced
from nestpipe.bench.faults.saved import newest_good, saved_in
from nestpipe.checkpoint.errors import DamagedError
from nestpipe.checkpoint.shards import ShardFile, ShardReader
from nestpipe.store import Piece

SAVE_ID = b"0123456789abcdef"


def make_saved(folder: Path, step: int, base: int | None = None, mark: str = "") -> Path:
    path = folder / f"step-{step:08d}{mark}"
    path.mkdir(parents=True)
    content = {"save_id": f"id {step}", "base": None}
    if base is not None:
        content["base"] = {"name": f"step-{base:08d}", "save_id": f"id {base}"}
    (path / "manifest.json").write_text(json.dumps(content))
    return path


def test_newest_good(tmp_path: Path) -> None:
    for step, base in ((3, None), (6, 3), (9, None), (12, 9), (15, 12)):
        make_saved(tmp_path, step, base)
    make_saved(tmp_path, 18, 15, ".partial-1f")
    (tmp_path / "step-00000021").mkdir()
    saved = saved_in(tmp_path)
    assert [one.num_steps for one in saved] == [3, 6, 9, 12, 15]
    inodes = {one.num_steps: one.inode for one in saved}
    assert newest_good(saved, torn=[]) == 15
    assert newest_good(saved, torn=[inodes[15]]) == 12
    assert newest_good(saved, torn=[inodes[9]]) == 6
    assert newest_good(saved, torn=[], spoilt=[inodes[15]]) == 12
    assert newest_good(saved, torn=[], spoilt=[inodes[9]]) == 15
    assert newest_good(saved, torn=[inodes[9]], spoilt=[inodes[6]]) == 3
    assert newest_good(saved, torn=[inodes[9], inodes[3]]) is None
    (tmp_path / "step-00000009" / "manifest.json").write_text('{"save_id": "another", "base": null}')
    assert newest_good(saved_in(tmp_path), torn=[]) == 9  # the others were based on the one that had its name
    (tmp_path / "step-00000009" / "manifest.json").write_text("{")
    assert newest_good(saved_in(tmp_path), torn=[inodes[9]]) == 6


def make_shard(folder: Path) -> Path:
    file = ShardFile(folder / "rank00000-shard000.rows", range(0, 16), SAVE_ID)
    for count in (3, 5):
        steps = torch.arange(count)
        file.append_rows(0, Piece(steps + 100, torch.rand(count, 6), steps))
    file.append_erased(0, torch.arange(2))
    file.finish()
    return file.path


@pytest.mark.parametrize("kind", SHARD_PARTS)
@pytest.mark.parametrize("seed", range(5))
def test_one_bit_of_a_shard_is_flipped_where_it_should_be(kind: str, seed: int, tmp_path: Path) -> None:
    path = make_shard(tmp_path)
    before = path.read_bytes()
    done = flip_byte(tmp_path, kind, Random(seed))
    after = path.read_bytes()
    places = [place for place in range(len(before)) if before[place] != after[place]]
    assert len(places) == 1
    assert (before[places[0]] ^ after[places[0]]).bit_count() == 1
    assert done.spoils_rows
    with pytest.raises(DamagedError) as raised:
        list(ShardReader(path, range(0, 16), SAVE_ID, len(before)).blocks())
    where = {"shard-header": "its header", "end": "block 3"}.get(kind, "block ")
    assert where in str(raised.value)


def test_a_change_of_a_manifest_is_one_of_its_content(tmp_path: Path) -> None:
    path = make_saved(tmp_path, 3) / "manifest.json"
    text = json.dumps({"a": [1, 2.5e3], "b": "c"}, indent=8)  # mostly spaces
    for seed in range(50):
        path.write_text(text)
        flip_byte(path.parent, "manifest", Random(seed))
        with suppress(ValueError):
            assert json.loads(path.read_bytes()) != json.loads(text)


def test_files_are_cut_and_removed(tmp_path: Path) -> None:
    for step in (3, 6):
        folder = make_saved(tmp_path, step)
        (folder / "dense.safetensors").write_bytes(bytes(100))
    assert not cut(tmp_path / "step-00000003", Random(3)).spoils_rows
    assert (tmp_path / "step-00000003" / "dense.safetensors").stat().st_size < 100
    assert remove(tmp_path / "step-00000006", Random(0)).spoils_rows
    assert not (tmp_path / "step-00000006" / "manifest.json").exists()
    assert set(CLASSES) == {*FILES, *SHARD_PARTS}


def test_what_a_power_failure_would_have_lost() -> None:
    file, folder, parent = [1, 10, 100], [2, 0, 101], 3
    visible = (5.0, ["step-00000003.partial-1f", {".": folder, "dense.safetensors": file}, parent])
    synced = {"sync": [(4.0, folder), (6.0, [parent, 0, 102])], "visible": [visible], "publish": [(7.0, "step")]}
    assert list(unsynced([synced, {"sync": [(3.0, file)]}])) == []
    assert "dense.safetensors" in next(unsynced([synced, {"sync": [(5.5, file)]}]))
    assert "dense.safetensors" in next(unsynced([synced, {"sync": [(3.0, [1, 10, 99])]}]))  # changed since then
    late = {**synced, "sync": [(4.0, folder), (8.0, [parent, 0, 102])]}
    assert "the name of" in next(unsynced([late, {"sync": [(3.0, file)]}]))
    killed = {name: events for name, events in late.items() if name != "publish"}
    assert list(unsynced([killed, {"sync": [(3.0, file)]}])) == []
