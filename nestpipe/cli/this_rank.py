"""Runs a command on one rank: makes its world, prints errors as one line, and sets the exit code."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import typer

from nestpipe.checkpoint import CheckpointError
from nestpipe.cli.sigterm import Sigterm
from nestpipe.distributed import Notice, RankError, World
from nestpipe.pipelining.commit import NonFiniteError
from nestpipe.recipe.config import Config
from nestpipe.recipe.run import Summary
from nestpipe.recipe.value import ConfigError
from nestpipe.store.cores import usable_cores

EXPECTED = (ConfigError, CheckpointError, NonFiniteError, RankError, ValueError, OSError, MemoryError)
"""Errors whose text is enough. Any other is shown with its traceback."""


def on_this_rank(config: Config, work: Callable[[Config, World], Summary], trains: bool = False) -> Summary | None:
    """Calls `work` with the resolved config and the world. Returns its result on rank 0, None on the others.

    trains: a SIGTERM asks all ranks to stop training, from before the world exists until the work is done. Otherwise it
    ends this process.
    """
    notice = Notice()
    text = f"nestpipe: rank {os.environ.get('RANK', '0')}: SIGTERM received; stopping at the next step"
    sigterm: AbstractContextManager[object] = Sigterm(notice, text) if trains else nullcontext()
    with sigterm:
        return _on_this_rank(config, work, notice, trains)


def _on_this_rank(
    config: Config, work: Callable[[Config, World], Summary], notice: Notice, trains: bool
) -> Summary | None:
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    config = config.resolved(num_local_ranks, usable_cores())
    assert config.runtime.device is not None
    section = config.distributed
    try:
        world = World.from_environment(
            section.timeout_seconds,
            config.runtime.device,
            section.backend,
            section.stall_seconds,
            section.shared_memory,
            replicas=config.exchange.replicas if trains else 1,
            hosts=config.exchange.hosts if trains else None,
        )
    except ValueError as error:
        raise failed(error, 2) from None
    except (RankError, OSError) as error:  # the ranks could not connect
        raise failed(RuntimeError(f"rank {os.environ.get('RANK', '0')}: {error}"), 1) from None
    except KeyboardInterrupt:
        raise failed(RuntimeError("interrupted (Ctrl-C) at the start"), 130) from None
    world.notice = notice
    try:
        with world.watch.reporting():
            summary = work(config, world)
        world.close()
    except KeyboardInterrupt:
        raise _ended(failed(RuntimeError("interrupted (Ctrl-C)"), 130, world), world) from None
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        raise _ended(failed(error, 1, world), world) from None
    return summary if world.rank == 0 else None


def _ended(code: typer.Exit, world: World) -> typer.Exit:
    """Ends the process at once if ranks were lost: threads or kernels that wait for them must not keep it alive."""
    if world.watch.failure is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code.exit_code)
    return code


def failed(error: Exception, code: int, world: World | None = None) -> typer.Exit:
    """Prints the error with rank and stage. Returns the exception that exits with the code."""
    rank = f"rank {world.rank}: " if world is not None and world.size > 1 else ""
    says_where = isinstance(error, RankError | NonFiniteError)
    where = f"{world.watch.where}: " if world is not None and not says_where else ""
    text = str(error) or type(error).__name__
    print(f"nestpipe: {rank}{'' if text.startswith(where) else where}{text}", file=sys.stderr, flush=True)
    for note in getattr(error, "__notes__", ()):
        print(f"nestpipe: {rank}{note}", file=sys.stderr, flush=True)
    return typer.Exit(code)


def check_writable(option: str, path: Path | None) -> None:
    """Raises ConfigError for a path that cannot be written: before the run, not after it."""
    if path is not None and (not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path} of {option} cannot be written; give a file in a folder that exists")
