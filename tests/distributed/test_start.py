"""If a rank never starts, the others' error names it."""

import os
import socket

from tests.ranks import _CONTEXT


def start_alone(port: int, results) -> None:
    from nestpipe import World
    from nestpipe.distributed import watch

    watch.START_SECONDS = 2.0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="3")
    try:
        World.from_environment(timeout_seconds=5.0)
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")


def test_ranks_that_do_not_start() -> None:
    """Fails if Watch._wait does not check that all ranks have started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = _CONTEXT.Queue()
    rank = _CONTEXT.Process(target=start_alone, args=(port, results))
    rank.start()
    try:
        text = results.get(timeout=30)
    finally:
        rank.kill()
    missing = "; ".join(f"rank {r} failed: it has not started within 2 s" for r in (1, 2))
    assert text == f"RankError: at the start, in connecting: {missing}"
