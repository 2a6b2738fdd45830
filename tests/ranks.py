"""Runs a function on several ranks, which are processes. Returns each rank's result, or raises its traceback."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "rich.console",
    "nestpipe",
    "nestpipe.recipe.run",
    "tests.exactness.cases",
]
_CONTEXT.set_forkserver_preload(_PRELOAD)  # a start takes 0.1 s instead of 5 s


class RankFailedError(AssertionError):
    """A rank raised an error. The text is its traceback."""


limit_seconds = 50.0
"""Time in which ranks must give a result. conftest.py sets it for each test: slow ones have more."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float | None = None,
    device: str = "cpu",
    **options: Any,
) -> list[Any]:
    """Returns function(world, *arguments) of each rank. The function must be at module level. options: those of
    World.from_environment."""
    ranks, results = _start(size, function, arguments, {"device": device, **options})
    try:
        pickled = dict(results.get(timeout=timeout or limit_seconds) for _ in ranks)
    except BaseException:  # a rank hangs: do not wait for it again
        for rank in ranks:
            rank.kill()
        raise
    finally:
        for rank in ranks:
            rank.join(timeout=5)
            rank.kill()
    returned = {rank: pickle.loads(data) for rank, data in pickled.items()}
    failures = [text for ok, text in returned.values() if not ok]
    if failures:
        raise RankFailedError("\n".join(failures))
    return [returned[rank][1] for rank in range(size)]


def run_fragile_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    num_results: int,
    timeout: float | None = None,
    **options: Any,
) -> dict[int, Any]:
    """Returns the results, or tracebacks, of the first num_results ranks that give one. The others may die. options:
    those of World.from_environment."""
    ranks, results = _start(size, function, arguments, options)
    try:
        pickled = dict(results.get(timeout=timeout or limit_seconds) for _ in range(num_results))
    finally:
        for rank in ranks:
            rank.kill()
    return {rank: pickle.loads(data)[1] for rank, data in pickled.items()}


def _start(
    size: int, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any] | None = None
) -> tuple[list[Any], Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = _CONTEXT.Queue()
    ranks = [
        _CONTEXT.Process(
            target=_run, args=(rank, size, port, results, function, arguments, options or {"device": "cpu"})
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks, results


def _run(
    rank: int,
    size: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    import torch

    from nestpipe.distributed import World
    from nestpipe.pipelining import light

    torch.set_num_threads(1)
    light.LIGHT_SECONDS = 0.0  # batches are small, but most tests are about lanes
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    try:
        world = World.from_environment(**options)
        results.put((rank, pickle.dumps((True, function(world, *arguments)))))  # by value: this process ends
        world.close()
    except BaseException:
        results.put((rank, pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}"))))
