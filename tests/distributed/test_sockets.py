"""The number of sockets of a rank, and the error if it exceeds the limit."""

import os
import resource
import socket
import time

import pytest

from nestpipe import World
from nestpipe.distributed.sockets import Sockets, _open_sockets, check_open_files
from nestpipe.distributed.world import NUM_GROUPS
from tests.ranks import _CONTEXT, run_ranks


def num_connections(world: World, shared_memory: bool) -> int:
    """Counts the connections of a world to other ranks, without those to the store and to the test."""
    before = set(_open_sockets())
    world = World(world.rank, world.size, shared_memory=shared_memory)
    port, num = int(os.environ["MASTER_PORT"]), 0
    for descriptor, _ in set(_open_sockets()) - before:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                ends = connection.getsockname(), connection.getpeername()
            except OSError:  # a listener
                continue
            num += connection.family == socket.AF_UNIX or port not in (end[1] for end in ends)
    world.control.share_text("")  # no rank closes connections before all have counted
    return num


@pytest.mark.parametrize(("size", "shared_memory", "num_each"), [(2, False, 5), (3, False, 5), (3, True, 2)])
def test_sockets_of_a_peer(size: int, shared_memory: bool, num_each: int) -> None:
    """docs/distributed.md states the numbers. Fails if evaluation gets its own group."""
    assert NUM_GROUPS == 5
    assert run_ranks(size, num_connections, shared_memory) == [num_each * (size - 1)] * size


def start_with_few_files(results) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="0", WORLD_SIZE="100")
    started = time.monotonic()
    try:
        World.from_environment()
    except OSError as error:
        results.put((str(error), time.monotonic() - started))


def test_too_few_open_files() -> None:
    """Fails if from_environment does not check: the ranks then wait for each other."""
    results = _CONTEXT.Queue()
    rank = _CONTEXT.Process(target=start_with_few_files, args=(results,))
    rank.start()
    try:
        text, seconds = results.get(timeout=30)
    finally:
        rank.kill()
    assert "a rank among 100 keeps 5 connections to each of the others" in text
    assert "may have only 90; allow more before the start: `ulimit -n " in text
    assert seconds < 10


def test_the_soft_limit_is_raised() -> None:
    """Fails if check_open_files refuses what the hard limit allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        check_open_files(60, NUM_GROUPS, holds_store=True)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 5 * 59
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_only_own_connections_are_shut_down() -> None:
    """Earlier connections and listeners stay open. Fails if Sockets.shut_down shuts down every socket."""
    earlier, earlier_peer = socket.socketpair()
    sockets = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        sockets.settle()
        later, later_peer = socket.socketpair()
        sockets.shut_down()
        assert own.recv(1) == b""
        for one, other in ((earlier, earlier_peer), (later, later_peer)):
            one.send(b"x")
            assert other.recv(1) == b"x"
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
    for connection in (earlier, earlier_peer, own, accepted, later, later_peer):
        connection.close()
