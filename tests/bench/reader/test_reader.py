"""`bench reader` reads prepared data, on one core.

Fails, for example, if on_one_core binds the whole process, or loses an error of its thread.
"""

import os
from pathlib import Path

import pytest

from nestpipe.bench.reader.data import write_clicks, write_histories
from nestpipe.bench.reader.run import on_one_core
from nestpipe.data.files.prepared import read_prepared


def test_folders_are_prepared_data(tmp_path: Path) -> None:
    clicks, histories = tmp_path / "clicks", tmp_path / "histories"
    for folder in (clicks, histories):
        folder.mkdir()
    write_clicks(clicks, 2, 100)
    write_histories(histories, 300)
    batch = read_prepared(clicks).clicks("train").samples(0, 200)
    assert 0 < int((batch.keys["key_2"].lengths == 0).sum()) < 30
    assert bool((batch.keys["key_0"].lengths == 1).all())
    lengths = read_prepared(histories).users().samples(0, 300).keys["item"].lengths.double()
    assert 130 < float(lengths.mean()) < 200  # 165 in MovieLens-1M
    assert float(lengths.min()) == 20


def test_one_core() -> None:
    before, seen = os.sched_getaffinity(0), []
    core = max(before)
    on_one_core(core, lambda: seen.append(os.sched_getaffinity(0)))
    assert (seen, os.sched_getaffinity(0)) == ([{core}], before)
    with pytest.raises(ZeroDivisionError):
        on_one_core(core, lambda: 1 // 0)
