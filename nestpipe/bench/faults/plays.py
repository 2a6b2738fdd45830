"""What happens in a trial, by kind of fault."""

import signal
import time
from collections.abc import Callable

from nestpipe.bench.faults import damage
from nestpipe.bench.faults.disk import mend, small_disk
from nestpipe.bench.faults.faults import DAMAGES, MOMENTS_OF, trouble_of
from nestpipe.bench.faults.moments import SAVE_MOMENTS, STAGE_MOMENTS, STEP, Hit
from nestpipe.bench.faults.recipe import EVERY, NUM_STEPS
from nestpipe.bench.faults.saved import saved_in
from nestpipe.bench.faults.trial import Reference, Trial, WrongError

Play = Callable[[Trial, Reference], None]
UNKNOWN_COUNT = 6
"""Calls among which a moment is chosen that a run without a fault does not reach."""
CHECKPOINT_BYTES = 100_000
"""About the size of a checkpoint on disk. A full disk leaves less."""


def play(trial: Trial, reference: Reference) -> None:
    """Plays a trial to its end. Its outcome says what became of it; raises if a run did not do what it must do."""
    kind = trial.fault.kind
    if kind in MOMENTS_OF and kind != "kill-load":
        _kill_at_moment(trial, reference)
    elif kind in DAMAGES:
        _damage(trial, reference)
    elif trouble_of(kind) is not None:
        _disk(trial, reference)
    else:
        _PLAYS[kind](trial, reference)


def _end(trial: Trial, reference: Reference, expected: int) -> None:
    """Has the run completed. Some runs are killed once more before that, and some are started once more after it, to
    see that their last checkpoint is right."""
    if trial.random.random() < 0.2:
        code = _kill_after_seconds(trial, reference)
        if trial.last.events(0, "load"):
            trial.check_load(expected)
        expected = NUM_STEPS if code == 0 else trial.newest()
    trial.complete(expected, reference.digest)
    if trial.random.random() < 0.3:
        trial.complete(NUM_STEPS, reference.digest)


def _kill_by_clock(trial: Trial, reference: Reference) -> None:
    """Kills a rank, or the launcher, after a random time."""
    code = _kill_after_seconds(trial, reference)
    _end(trial, reference, NUM_STEPS if code == 0 else trial.newest())


def _kill_after_seconds(trial: Trial, reference: Reference) -> int:
    rank = trial.random.randrange(trial.setting.num_ranks)
    does_kill_launcher = trial.fault.kind == "kill-launcher"
    run = trial.start()
    when = trial.sleep(run, reference)
    (run.launcher if does_kill_launcher else run.ranks[rank]).kill()
    code = trial.wait(run)
    trial.say(f"kill {'the launcher' if does_kill_launcher else f'rank {rank}'} {when}")
    if code == 0:
        trial.say("it was complete")
    return code


def _overlap(trial: Trial, reference: Reference) -> None:
    """Kills rank 0, and starts the run again at once, while its other ranks are still alive."""
    run = trial.start()
    when = trial.sleep(run, reference)
    run.ranks[0].kill()
    trial.say(f"kill rank 0 {when}")
    expected, next_run = trial.newest(), trial.start()
    trial.wait(run)
    if trial.wait(next_run) != 0:
        raise WrongError("the run failed when it was started again while ranks were still alive")
    trial.check_load(expected)
    trial.check_digest(reference.digest)


def _kill_at_moment(trial: Trial, reference: Reference) -> None:
    """Kills a rank at a named moment."""
    _hit_at_moment(trial, reference)
    _end(trial, reference, trial.newest())


def _hit_at_moment(trial: Trial, reference: Reference, prepare: Callable[[], None] = lambda: None) -> None:
    moment, is_after = trial.fault.moment()
    rank = trial.random.randrange(trial.setting.num_ranks) if moment.only_rank is None else moment.only_rank
    number = 1 + trial.random.randrange(reference.counts[rank].get(moment.name, 0) or UNKNOWN_COUNT)
    while True:
        prepare()
        hit = Hit(moment.name, number, is_after)
        code = trial.run({rank: (hit,)})
        if trial.was_hit(rank):
            break
        if code != 0:
            raise WrongError(f"the run failed with exit code {code}, though nothing had hit it")
        if number == 1 and not moment.is_rare:
            raise WrongError(f"rank {rank} never reaches {moment.name!r}")
        if number == 1:
            trial.say(f"rank {rank} did not reach {moment.name!r}")
            return
        number //= 2
        trial.begin_anew()
    trial.say(f"rank {rank}: {hit}")
    trial.check_failed(code)


def _kill_load(trial: Trial, reference: Reference) -> None:
    """Stops a run, and kills it again while it loads."""
    _hit_at_moment(trial, reference, lambda: _stop_midway(trial))
    _end(trial, reference, trial.newest())


def _stop_midway(trial: Trial) -> None:
    """Stops the run in the middle, with a checkpoint."""
    rank = trial.random.randrange(trial.setting.num_ranks)
    hit = Hit(STEP.name, trial.random.randrange(2, NUM_STEPS - 2), action="terminate")
    code = trial.run({rank: (hit,)})
    if code != 0 or trial.newest() == 0:
        raise WrongError(f"rank {rank}: {hit}: exit code {code}, {trial.newest()} steps were saved")
    trial.say(f"rank {rank}: {hit}")


def _sigterm(trial: Trial, reference: Reference) -> None:
    """Sends SIGTERM to one or two ranks at named moments, or to the launcher at a random one."""
    code = _terminate_launcher(trial, reference) if trial.random.random() < 0.3 else _terminate_ranks(trial, reference)
    if code != 0:
        raise WrongError(f"the run ended with exit code {code} after a SIGTERM, must be 0")
    expected = NUM_STEPS if trial.has_summary else trial.steps_trained()
    if trial.newest() != expected:
        trial.outcome.lost_steps += abs(expected - trial.newest())
        trial.say(f"{expected} steps were trained, {trial.newest()} were saved")
    _end(trial, reference, expected)


def _terminate_launcher(trial: Trial, reference: Reference) -> int:
    run = trial.start()
    when = trial.sleep(run, reference)
    run.launcher.send(signal.SIGTERM)
    code = trial.wait(run)
    trial.say(f"SIGTERM to the launcher {when}")
    is_idle = trial.has_summary or not run.command.events(0, "open the folders")  # it need not handle it
    return 0 if is_idle and code in (-signal.SIGTERM, 128 + signal.SIGTERM) else code


def _terminate_ranks(trial: Trial, reference: Reference) -> int:
    hits = {}
    for _ in range(trial.random.choice((1, 1, 2))):
        moment = trial.random.choice((STEP, *STAGE_MOMENTS, *SAVE_MOMENTS))
        rank = trial.random.randrange(trial.setting.num_ranks) if moment.only_rank is None else moment.only_rank
        most = reference.counts[rank].get(moment.name, 0) or 1
        hits[rank] = Hit(moment.name, 1 + trial.random.randrange(most), trial.random.random() < 0.5, "terminate")
    code = trial.run({rank: (hit,) for rank, hit in hits.items()})
    trial.say(", ".join(f"rank {rank}: {hit}" for rank, hit in hits.items()))
    return code


def _sigterm_and_kill(trial: Trial, reference: Reference) -> None:
    """Kills a rank soon after the launcher got a SIGTERM, as a job scheduler whose patience ends."""
    run = trial.start()
    when = trial.sleep(run, reference)
    run.launcher.send(signal.SIGTERM)
    rank, seconds = trial.random.randrange(trial.setting.num_ranks), trial.random.uniform(0, 5 * reference.step_seconds)
    time.sleep(seconds)
    run.ranks[rank].kill()
    trial.wait(run)
    trial.say(f"SIGTERM to the launcher {when}, kill rank {rank} {seconds:.3f} s after it")
    _end(trial, reference, trial.newest())


def _disk(trial: Trial, reference: Reference) -> None:
    """Makes trouble with the disk for some steps."""
    with small_disk(trial.disk):
        last, code = _run_in_trouble(trial)
        if trial.fault.kind.endswith("-stop"):
            trial.check_failed(code, "saving to")
            _start_in_trouble(trial)
            _end(trial, reference, trial.newest())
            return
        if code != 0:
            raise WrongError(f"the run ended with exit code {code}, though it was told to continue")
        trial.say(f"it ended after step {last}")
        trial.check_digest(reference.digest)
        trial.complete(NUM_STEPS, reference.digest)


def _run_in_trouble(trial: Trial) -> tuple[int, int]:
    """Runs until a save has failed, or if it is told to continue, to the end. Returns the last step with trouble and
    the exit code."""
    trouble = trouble_of(trial.fault.kind)
    assert trouble is not None
    leave_bytes = trial.random.randrange(CHECKPOINT_BYTES)
    first = trial.random.randrange(1, NUM_STEPS - 2 * EVERY)
    last = trial.random.randrange(first + EVERY, NUM_STEPS - 1)
    does_stop = trial.fault.kind.endswith("-stop")
    while True:
        hits = [Hit(STEP.name, first, action=trouble, leave_bytes=leave_bytes)]
        hits += [] if does_stop else [Hit(STEP.name, last, action="mend")]
        code = trial.run({0: hits})
        if "saving to" in trial.output():
            break
        if leave_bytes == 0:
            raise WrongError(f"the disk was {trouble}, but no save failed")
        leave_bytes //= 4
        mend(trial.disk)
        trial.begin_anew()
    left = f" but for {leave_bytes} bytes" if trouble == "full" else ""
    trial.say(f"the disk was {trouble}{left} after step {first}")
    return last, code


def _start_in_trouble(trial: Trial) -> None:
    """Mends the disk; in some trials, only after another start."""
    if trial.random.random() < 0.5:
        trial.check_failed(trial.run())
        trial.say("it was started again meanwhile")
    mend(trial.disk)


def _damage(trial: Trial, reference: Reference) -> None:
    """Damages a file of a checkpoint of a run that was killed, or is complete."""
    number = trial.random.randrange(3 * EVERY, NUM_STEPS + 5)
    rank = trial.random.randrange(trial.setting.num_ranks)
    code = trial.run({rank: (Hit(STEP.name, number),)})
    if (code != 0) != trial.was_hit(rank):
        raise WrongError(f"the run ended with exit code {code}; it was to be killed after step {number}")
    trial.say(f"rank {rank} was killed after step {number}" if code != 0 else "the run was complete")
    checkpoints = saved_in(trial.checkpoints)
    if not checkpoints:
        raise WrongError(f"there is no checkpoint after step {number}")
    victim = checkpoints[-1] if trial.random.random() < 0.5 else trial.random.choice(checkpoints)
    kind = trial.fault.kind
    if kind == "missing-file":
        done = damage.remove(victim.path, trial.random)
    elif kind == "cut-file":
        done = damage.cut(victim.path, trial.random)
    else:
        done = damage.flip_byte(victim.path, kind.removeprefix("damage-"), trial.random)
    trial.say(done.text)
    expected = trial.note_damage(victim, done.spoils_rows)
    if expected is None:
        _refuse(trial, reference)
    else:
        _end(trial, reference, expected)


def _refuse(trial: Trial, reference: Reference) -> None:
    """Without a good checkpoint a run must refuse to start, and leave what is there. --fresh begins anew."""
    trial.outcome.was_refused = True
    trial.check_failed(trial.run(), "damaged")
    trial.say("it was refused")
    if trial.run(None, "--fresh") != 0:
        raise WrongError("the run failed with --fresh")
    trial.check_digest(reference.digest)


_PLAYS: dict[str, Play] = {
    "kill-clock": _kill_by_clock,
    "kill-launcher": _kill_by_clock,
    "kill-load": _kill_load,
    "kill-overlap": _overlap,
    "sigterm": _sigterm,
    "sigterm-kill": _sigterm_and_kill,
}
