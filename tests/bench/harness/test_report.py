"""Result files: the machine's description, and records made before a failure."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nestpipe.bench.harness.report import load_records, run_bench


def environment_of(path: Path) -> dict[str, object]:
    run_bench("some", iter([{"dim": 4, "speed": 1.0}]), path, Console(quiet=True), quick=True)
    assert load_records(path, "some") == [{"dim": 4, "speed": 1.0}]
    return json.loads(path.read_text())["environment"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator, as CI has")
def test_no_accelerator(tmp_path: Path) -> None:
    environment = environment_of(tmp_path / "some.json")
    assert [environment[name] for name in ("accelerator", "driver", "cuda")] == [None] * 3


def test_the_accelerator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if run_bench leaves out the fields of _accelerator."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr("nestpipe.device.machine._driver_version", lambda: "550.1")
    environment = environment_of(tmp_path / "some.json")
    assert (environment["accelerator"], environment["driver"]) == ("2 x Some GPU", "550.1")


def test_records_made_before_a_failure_are_kept(tmp_path: Path) -> None:
    """Fails if run_bench writes records only after the last one."""
    path = tmp_path / "some.json"

    def failing() -> Iterator[dict[str, float]]:
        yield {"speed": 1.0}
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        run_bench("some", failing(), path, Console(quiet=True), quick=True)
    assert not path.exists()
    assert json.loads((tmp_path / "some.json.partial").read_text()) == [{"speed": 1.0}]
    run_bench("some", iter([{"speed": 2.0}]), path, Console(quiet=True), quick=True)
    assert [file.name for file in tmp_path.iterdir()] == ["some.json"]
