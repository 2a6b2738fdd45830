"""A short set of faults, and that the benchmark finds what a run has lost.

Fails, for example, if Saver begins an incremental save without `_usable_base`, if `load` leaves out
`load_random_state`, if ShardReader does not compare checksums, or if `folder.publish` does not sync.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from nestpipe.bench.faults import measure
from nestpipe.bench.faults.disk import can_mount
from nestpipe.bench.faults.faults import DISK_KINDS, KINDS, MOMENTS_OF, WEIGHTS, Fault, deal
from nestpipe.bench.faults.measure import FaultError, check_possible, play_all
from nestpipe.bench.faults.recipe import NUM_STEPS, Setting
from nestpipe.bench.faults.trial import Reference, Trial, WrongError

ALONE = Setting("nested", 1, "minimum")
TWO_RANKS = Setting("inter", 2, "minimum")


def play(folder: Path, setting: Setting, *faults: Fault) -> None:
    folder = folder / "work"
    folder.mkdir()
    outcomes = list(play_all(faults, [setting], folder, keep_going=False))
    assert [outcome.fault for outcome in outcomes] == list(faults)
    assert all(outcome.is_good for outcome in outcomes)
    assert list(folder.parent.iterdir()) == [folder]  # nothing was kept


@pytest.mark.slow
def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    play(tmp_path, ALONE, Fault("damage-records", 0))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [ALONE, TWO_RANKS], ids=["1", "2"])
def test_a_killed_rank(setting: Setting, tmp_path: Path) -> None:
    """tests/recipe/test_killed.py kills one of two ranks in every run of the tests."""
    play(tmp_path, setting, Fault("kill-save", 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tmp_path: Path) -> None:
    if kind in DISK_KINDS and not can_mount():
        pytest.skip("mounts a small disk: needs root")
    play(tmp_path, Setting("nested", 2, "12000"), Fault(kind, 1))


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_loss_is_told(
    keep_going: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(trial: Trial, reference: Reference) -> None:
        if trial.fault.seed == 7:
            raise WrongError("the run has failed")

    monkeypatch.setattr(measure, "refer", lambda *arguments: Reference("", 0.0, 0.0, []))
    monkeypatch.setattr(measure, "play", lose)
    folder = tmp_path / "work"
    folder.mkdir()
    outcomes, texts = [], []
    try:
        outcomes.extend(play_all(deal(3, 6, ["kill-save"]), [ALONE], folder, keep_going))
    except FaultError as error:
        texts.append(str(error))
    assert [outcome.is_good for outcome in outcomes] == ([True, False, True] if keep_going else [True])
    told = capsys.readouterr().out + "".join(texts)
    assert "the run has failed" in told
    assert "repeat it alone: nestpipe bench faults --kind kill-save --seed 7 --count 1 --json PATH" in told
    assert (tmp_path / "work-kill-save-7").is_dir()


def test_a_wrong_digest_is_found(tmp_path: Path) -> None:
    trial = Trial(Fault("kill-clock", 0), ALONE, tmp_path / "trial", tmp_path / "recipe.toml")
    (tmp_path / "trial" / "summary.json").write_text(f'{{"steps": {NUM_STEPS}, "digest": "one"}}')
    trial.check_digest("one")
    assert trial.outcome.is_good
    trial.check_digest("another")
    assert not trial.outcome.is_good


def test_a_fault_can_be_repeated_alone() -> None:
    faults = deal(60, 5)
    assert [fault.kind for fault in faults[: len(KINDS)]] == list(KINDS)
    assert faults[0] == deal(1, 5, ["kill-clock"])[0] == Fault("kill-clock", 5)
    assert [fault.random().random() for fault in faults] == [fault.random().random() for fault in deal(60, 5)]
    seeds = Counter((fault.kind, fault.seed) for fault in deal(sum(WEIGHTS.values()), 0))
    assert set(seeds.values()) == {1}
    assert set(seeds) == {(kind, seed) for kind in KINDS for seed in range(WEIGHTS[kind])}


@pytest.mark.parametrize("kind", MOMENTS_OF)
def test_two_hundred_faults_hit_every_moment(kind: str) -> None:
    moments = [fault.moment() for fault in deal(200, 0) if fault.kind == kind]
    assert {moment for moment, _ in moments} == set(MOMENTS_OF[kind])
    assert {is_after for _, is_after in moments} == {False, True}


def test_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match="there are kill-clock"):
        check_possible("kill")
    check_possible(None)


@pytest.mark.slow
def test_all_processes_die_with_the_benchmark(tmp_path: Path) -> None:
    """Fails, for example, if a launcher or a rank does not call die_with_parent."""
    command = ["bench", "faults", "--kind", "kill-overlap", "--count", "1", "--dir", str(tmp_path)]
    bench = subprocess.Popen([sys.executable, "-m", "nestpipe", *command, "--json", str(tmp_path / "faults.json")])
    deadline = time.monotonic() + 60
    while len(processes_in(tmp_path)) < 3 and time.monotonic() < deadline:  # a launcher and its ranks
        time.sleep(0.05)
    started = processes_in(tmp_path)
    bench.kill()
    bench.wait()
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes_in(tmp_path)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert len(started) >= 3
    assert left == []


def processes_in(folder: Path) -> list[int]:
    """Returns the processes whose output goes to a file in the folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            output = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if output.is_relative_to(folder):
            found.append(int(process.name))
    return found
