"""`bench schedules` with small batches: inter is compared with serial."""

import pytest

from nestpipe.bench.schedules import small
from nestpipe.bench.schedules.small import Turns, small_batch_records
from nestpipe.train.trainer import Trainer


def test_inter_is_compared_with_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: the k-th turn of serial takes k ms a step, that of inter 3 k.

    Fails if the ratio is the inverse, if the first round counts, or if every round begins with the same schedule.
    """
    turns: list[str] = []

    def turn(trainer: Trainer, batches: list, size: Turns) -> float:
        assert len(batches) == 12
        assert {len(batch) for batch in batches} == {16}
        schedule = trainer.options.schedule
        turns.append(schedule)
        return turns.count(schedule) * {"serial": 1.0, "inter": 3.0}[schedule]

    monkeypatch.setattr(small, "_turn", turn)
    monkeypatch.setattr(small, "BATCH_SIZES", (16,))
    (record,) = small_batch_records(quick=True)
    assert turns == ["inter", "serial", "serial", "inter", "inter", "serial"]
    names = ("schedule", "threads", "ranks", "num_micro_batches", "num_tables", "batch_size")
    assert [record[name] for name in names] == ["inter", 1, 1, 1, 26, 16]
    assert (record["serial_step_ms"], record["step_ms"], record["small_batch_overhead"]) == (2.5, 7.5, 3.0)
