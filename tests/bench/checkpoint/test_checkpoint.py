"""`bench checkpoint`: how the stall is computed from the times of the steps, and plain writes and reads."""

from pathlib import Path

import pytest

from nestpipe.bench.checkpoint.behind import Behind, Timeline
from nestpipe.bench.checkpoint.files import BUFFER_BYTES, drop_caches, folder_bytes, read_plainly, write_plainly
from nestpipe.bench.checkpoint.training import QUICK, TABLE, Size, fill, make_trainer, touching_batches, zipf_batches


def timeline_of(durations: list[float], saves: list[Behind], size: Size) -> Timeline:
    ends, moment = [], 0.0
    for seconds in durations:
        moment += seconds
        ends.append(moment)
    return Timeline(None, Path(), size, every=1, ends=ends, saves=saves)  # type: ignore[arg-type]


def test_stall_by_hand() -> None:
    size = Size(counted_between=3)
    # Steps of 1 s. The save begins 1 s into step 5, and is visible at the end of step 8; they take 0.4 s more in total.
    durations = [1.0] * 5 + [1.2, 1.1, 1.0, 1.1] + [9.0] * 2 + [1.0] * 4
    timeline = timeline_of(durations, [], size)
    timeline.saves = [Behind(timeline.ends[4] + 1.0, 5, 0, 0, end_seconds=timeline.ends[8], last_step=8)]
    assert timeline.stall_fractions() == [pytest.approx(0.4 / 3.4)]
    assert timeline.step_seconds() == pytest.approx(1.0)


def test_plain_files(tmp_path: Path) -> None:
    write_plainly(tmp_path / "plain", 2 * BUFFER_BYTES + 5)
    assert folder_bytes(tmp_path) == 2 * BUFFER_BYTES + 5
    assert read_plainly(tmp_path) > 0


def test_caches_are_dropped_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestpipe.bench.checkpoint.files._DROP_CACHES", tmp_path / "missing" / "drop_caches")
    (tmp_path / "file").write_bytes(bytes(10))
    assert drop_caches(tmp_path) == "posix_fadvise"


def test_batches_have_keys_of_the_table() -> None:
    trainer = make_trainer(QUICK)
    fill(trainer, QUICK)
    assert trainer.store.size(TABLE) == QUICK.num_rows
    touched = [key for batch in touching_batches(QUICK, 0.05) for key in batch.keys[TABLE].values.tolist()]
    assert len(set(touched)) == len(touched) == QUICK.num_rows // 20
    trainer.fit(zipf_batches(QUICK), steps=1)
    assert trainer.store.size(TABLE) == QUICK.num_rows
